"""Speed, memory and traffic of lm_multinode.py's strategies, as a table and as the picture docs/strategies.svg.

    pip install matplotlib
    python tests/benchmarks/lm_strategies.py [--turns 3] [--processes 4]

Runs `lm_multinode.py --compare-strategies --shards-per-replica 2` some times, each through all strategies, with a Llama
of 34 million parameters, and draws the medians of what these runs wrote to their metrics.jsonl. State is parameters,
gradients and AdamW's moments in fp32, exact; on a CPU the peak is resident memory, Python and its libraries with it.
What a process sends in a step of fp32 is lm_communication.py's formula.
"""

import argparse
import os
import platform
import statistics
import tempfile
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

import torch

import matplotlib
import transformers
from lm_communication import bytes_sent
from matplotlib import pyplot
from shared import ROOT, print_table, run_script, save_picture, write_llama


def measure(options: argparse.Namespace) -> list[dict]:
    """Medians over the turns for each strategy, with all its speeds."""
    rows: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", write_llama(Path(folder), list(topics.values())), "--compare-strategies"]
        flags += ["--shards-per-replica", 2, "--seq-length", 128, "--num-validation-texts", 20, "--precision", "fp32"]
        flags += ["--micro-batch-size", 2, "--global-batch-size", 4 * options.processes]
        for _ in range(options.turns):
            for row in run_script("lm_multinode.py", *flags, processes=options.processes):
                rows.setdefault(row["strategy"], []).append(row)
        config = transformers.AutoConfig.from_pretrained(folder)
    medians = []
    for strategy, some in rows.items():
        row = {"strategy": strategy, "replicas x shards": f"{some[0]['replicas']} x {some[0]['shards']}"}
        row |= {name: statistics.median(one[name] for one in some) for name in ("tokens/s", "state_gb", "peak_gb")}
        row["sent GB per step"] = bytes_sent(config, strategy, 2, options.processes, options.processes)[0] / 2**30
        medians.append(row | {"turns": " ".join(f"{one['tokens/s']:.0f}" for one in some)})
    return medians


def draw(rows: list[dict], caption: str, picture: Path) -> None:
    """Two panels of bars with one bar a strategy: memory of a process, and speed."""
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "strategies", "font.size": 10}
    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    names = [f"{row['strategy']}\n{row['replicas x shards']}" for row in rows]
    bars = (
        (memory, "peak_gb", "#c9d7e8", "peak", ".2f"),
        (memory, "state_gb", "#1f4e8c", "state: parameters, gradients, AdamW", ".2f"),
        (speed, "tokens/s", "#d98c3f", None, ",.0f"),
    )
    for panel, name, color, label, form in bars:
        panel.barh(names, [row[name] for row in rows], color=color, label=label)
        for place, row in enumerate(rows):
            panel.text(row[name], place, f" {row[name]:{form}}", va="center")
    memory.set(xlabel="GB in each process", title="Memory", xlim=(0, 1.15 * max(row["peak_gb"] for row in rows)))
    speed.set(xlabel="tokens/s, median", title="Speed", xlim=(0, 1.2 * max(row["tokens/s"] for row in rows)))
    memory.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    for panel in (memory, speed):
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8)
    save_picture(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="runs through all strategies")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "strategies.svg")
    options = parser.parse_args()
    medians = measure(options)
    where = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
    where += f"transformers {transformers.__version__}, {options.processes} processes, FSDP2, fp32"
    print(f"{where}\n")
    print_table(medians)
    draw(medians, where, options.picture)
    print(f"\n{options.picture}")
