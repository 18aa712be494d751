"""Whole runs on real text: do they keep the speed of their steps, and does a stopped run continue its curve?

    python tests/benchmarks/whole_run.py                     # tiny models on a CPU: 16 minutes on two cores
    python tests/benchmarks/whole_run.py --device cuda       # the 150m and a T5 in t5-small's shape, on one GPU
    python tests/benchmarks/whole_run.py --steps 60          # try it

Texts are the Python files of the installed packages, so it needs no network. T5 learns to write the first sentence of a
function's docstring. The LM trains twice. The second run is stopped by SIGTERM in the middle and resumed: on a CPU by
two processes, so that rounding differs from there on.

`step alone` is the speed of the same steps without a loader, on 100 batches in memory, before and after the others. All
speeds are those of the printed lines, but for the first one after a start. The LM's curves are added to the records in
`--keep`, and all curves in this file are drawn beside it.
"""

import argparse
import ast
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import made_up
import pandas
import shared
from matplotlib import pyplot

# The flags on a CPU, and on a GPU
LM = {
    "cpu": ("--num-validation-texts", 20),
    "cuda": (
        *("--model", "150m", "--compile", "--seq-length", 1024, "--micro-batch-size", 64, "--global-batch-size", 64),
        *("--lr", 1e-3, "--warmup-steps", 100, "--num-validation-texts", 200),
    ),
}
T5 = {"cpu": ("--max-source-length", 128), "cuda": ("--global-batch-size", 64, "--micro-batch-size", 64)}
T5_DATA = ("--text-column", "code", "--summary-column", "doc", "--num-train-samples", 16_000, "--max-target-length", 48)
ALONE = ("--max-steps", 200, "--no-save-model")


def functions_of(text: str):
    """Yield the public functions of a program, and what their docstrings say first."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and len(node.body) > 2:
            sentence = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            del node.body[0]
            code = ast.unparse(node)
            if 20 < len(sentence) < 200 and len(code) < 4000:
                yield {"code": code, "doc": sentence}


def write_data(folder: Path, num_functions: int = 20_000) -> None:
    folder.mkdir(parents=True)
    files = Path(torch.__file__).parents[1].rglob("*.py")
    texts = sorted({path.read_text(errors="ignore") for path in files})
    random.Random(0).shuffle(texts)
    (folder / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    functions = {}  # with different sentences
    for text in texts:
        if len(functions) > num_functions:
            break
        try:
            functions |= {row["doc"]: row for row in functions_of(text)}
        except (SyntaxError, ValueError, RecursionError):  # a template, or a test of parsers
            continue
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in functions.values()))
    characters = sum(map(len, texts)) / 1e6
    print(f"{len(texts):,} files, {characters:,.0f} million characters; {len(functions):,} functions", flush=True)


def run(script: str, flags, output: Path, processes: int = 1, change=()) -> list[dict]:
    """Run a script. Returns its records. `change`: see inside.py."""
    launcher = shared.torchrun(processes) if processes > 1 else [sys.executable]
    flags = json.dumps([[*map(str, flags), "--output-dir", str(output)]])
    command = [*launcher, shared.ROOT / "tests" / "forked.py", shared.ROOT / script, flags, json.dumps(change)]
    output.mkdir(exist_ok=True)
    with (output / "printed.txt").open("a") as printed:
        subprocess.run(command, stdout=printed, stderr=printed, check=True)
    return shared.read_metrics(output)


def values(records: list[dict], name: str) -> list:
    return [record[name] for record in records if name in record]


def later(records: list[dict], name: str) -> list:
    """Values of the printed lines, but for the first one after each start."""
    lines = [record for record in records if "loss" in record]
    return [line[name] for before, line in itertools.pairwise(lines) if line["run"] == before["run"]]


def row_of(name: str, records: list[dict], alone: float) -> dict:
    median = statistics.median(later(records, "tokens/s"))
    row = {"run": name, "tokens/s": median, "lowest": min(later(records, "tokens/s")), "step alone": alone}
    row |= {"share, %": 100 * median / alone, "waited, %": 100 * statistics.mean(later(records, "waited"))}
    for key in ("loss", "val_loss", "rouge1"):
        shown = values(records, key)
        row[key] = f"{shown[0]:.3f} to {shown[-1]:.3f}" if shown else ""
    return row


def differences(one: list[dict], other: list[dict]) -> tuple[float, float]:
    """The largest difference of the losses of the same steps, and that of the last validation losses."""
    spans = []
    for records in (one, other):
        steps = [0, *(record["step"] for record in records if "loss" in record)]
        spans.append(dict(zip(itertools.pairwise(steps), values(records, "loss"), strict=True)))
    largest = max(abs(loss - spans[1][span]) for span, loss in spans[0].items() if span in spans[1])
    return largest, abs(values(one, "val_loss")[-1] - values(other, "val_loss")[-1])


def keep(path: Path, machine: str, curves: dict[str, list[dict]], step_tokens: int) -> None:
    """Replace the curves of this machine in the file, and draw all that are in it."""
    rows = pandas.concat(
        pandas.DataFrame(records).assign(machine=machine, curve=name) for name, records in curves.items()
    )
    rows["tokens"] = rows["step"] * step_tokens
    rows = rows[["machine", "curve", "step", "tokens", "loss", "val_loss", "waited"]]
    if path.exists():
        kept = pandas.read_json(path, lines=True)
        rows = pandas.concat([kept[kept["machine"] != machine], rows])
    path.write_text(rows.to_json(orient="records", lines=True, double_precision=4).replace("\\/", "/"))
    draw(rows, path.with_suffix(".svg"))


def draw(rows: pandas.DataFrame, path: Path) -> None:
    """Draw, for each machine, losses against tokens, and the share of time in which steps waited for data below."""
    machines = rows.dropna(subset="loss").groupby("machine", sort=False)
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 8})
    figure, axes = pyplot.subplots(2, len(machines), figsize=(5 * len(machines), 3.5), sharex="col", squeeze=False)
    for (machine, rows), (above, below) in zip(machines, axes.T, strict=True):
        for width, (name, curve) in zip((3, 1), rows.groupby("curve", sort=False), strict=True):
            above.plot(curve["tokens"] / 1e6, curve["loss"], linewidth=width, label=name)
            below.plot(curve["tokens"] / 1e6, 100 * curve["waited"], linewidth=width)
        above.set(title=machine, ylabel="loss")
        above.legend(frameon=False)
        below.set(xlabel="million tokens", ylabel="waiting, %", ylim=(0, 100))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("output/whole_run"), help="a new folder")
    parser.add_argument("--keep", type=Path, default=Path("output/whole_run/curves.jsonl"), help="file of curves")
    options = parser.parse_args()
    folder, device = options.output, options.device
    machine = f"150m, {torch.cuda.get_device_name()}" if device == "cuda" else f"tiny, {os.cpu_count()} CPU cores"
    print(f"{shared.MACHINE}, {machine}", flush=True)
    write_data(folder / "data")
    flags = ("--device", device, "--max-steps", options.steps)
    t5 = (*T5[device], *T5_DATA, "--dataset", folder / "data/docs.jsonl", *flags)
    if device == "cuda":
        made_up.write_articles(folder / "data", 1, "t5-small")
        t5 += ("--model", folder / "data")
    lm = (*LM[device], "--dataset", folder / "data/code.jsonl", "--validate-every", 250, *flags)
    alone = {"lm_multinode.py": [], "t5_fsdp.py": []}

    def measure_steps(turn):
        for (script, speeds), flags in zip(alone.items(), (lm, t5), strict=True):
            records = run(script, (*flags, *ALONE), folder / f"alone-{turn}-{script}", change=("without_loader", 100))
            speeds += later(records, "tokens/s")

    measure_steps(1)
    whole = run("lm_multinode.py", lm, folder / "lm")
    of_t5 = run("t5_fsdp.py", t5, folder / "t5")
    stop = ("signal_in_step", 0, options.steps // 2, "SIGTERM")
    run("lm_multinode.py", lm, folder / "lm-stopped", change=stop)
    processes = 1 if device == "cuda" else 2
    resumed = run("lm_multinode.py", (*lm, "--resume"), folder / "lm-stopped", processes)
    measure_steps(2)

    of_lm, of_t5_alone = map(statistics.median, alone.values())
    curves = {"uninterrupted": whole, "stopped and resumed": resumed}
    rows = [row_of(f"LM, {name}", records, of_lm) for name, records in curves.items()]
    shared.print_table([*rows, row_of("T5", of_t5, of_t5_alone)])
    loss, val_loss = differences(whole, resumed)
    print(f"\nThe LM's losses differ by {loss:.1e} at most, and its last val_loss by {val_loss:.1e}")
    keep(options.keep, machine, curves, 65_536 if device == "cuda" else 2_048)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of old programs in the packages
    main()
