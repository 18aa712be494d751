"""Is the peak that will_it_fit.py predicts the one that real steps on this CPU have? Every combination.

    python tests/benchmarks/will_it_fit_exactness.py [--models tiny 150m t5-small] [--processes 1 2 4]

Each strategy of the LM and T5 scripts, fp32 and bf16, alone and with accumulation, recomputing, offload and, in T5,
without prefetching; on 1, 2 and 4 processes. The models: `tiny`, `150m` with two layers, and a T5 of t5-small's shape
with two layers in encoder and decoder. A row for each number of processes and strategy has the most that a prediction
is off, and the command fails if that is more than 1%.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import shared
from transformers import T5Config, T5ForConditionalGeneration
from will_it_fit import traced

from inside import LM_STRATEGIES, T5_STRATEGIES, builtin_article, train_tokenizer

MODELS = ("tiny", "150m", "t5-small")
STEPS = ("--max-steps", 4, "--no-save-model", "--device", "cpu")
LM = (*STEPS, "--seq-length", 128, "--num-validation-texts", 20, "--local-steps", 2, "--validate-every", 2)
LM = (*LM, "--micro-batch-size", 4)
T5 = (*STEPS, "--no-run-validation", "--num-train-samples", 64, "--max-source-length", 16, "--max-target-length", 8)
T5 = (*T5, "--batch-size", 2)


def cases_of(is_t5: bool, processes: int) -> dict[str, tuple]:
    """The flags of each addition; the LM script accumulates when its global batch is larger."""
    if is_t5:
        plain, twice = T5, (*T5, "--accumulation-steps", 2)
    else:
        shards = ("--shards-per-replica", min(2, processes))
        plain = (*LM, *shards, "--global-batch-size", 4 * processes)
        twice = (*LM, *shards, "--global-batch-size", 8 * processes)
    cases = {"plain": plain, "accumulation": twice}
    cases["recomputing"] = (*plain, "--activation-checkpointing")
    cases["offload"] = (*plain, "--cpu-offload")
    if is_t5:
        cases["no prefetching"] = (*plain, "--backward-prefetch", "none")
    return cases


def write_models(folder: Path) -> dict[str, tuple]:
    """The script and `--model` of each: a copy of the LM script whose 150m has two layers, and a T5 of random weights
    with a small tokenizer."""
    for name in ("common.py", "lm_multinode.py"):
        text = (shared.ROOT / name).read_text()
        (folder / name).write_text(text.replace('"num_hidden_layers": 12', '"num_hidden_layers": 2'))
    texts = [builtin_article(number)["text"] for number in range(100)]
    train_tokenizer(texts, 1000, append_eos=True).save_pretrained(folder / "t5-small")
    config = T5Config(num_layers=2, decoder_start_token_id=0, pad_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5-small")
    copy = folder / "lm_multinode.py"
    return {"tiny": (copy, "tiny"), "150m": (copy, "150m"), "t5-small": (shared.ROOT / "t5_fsdp.py", "t5-small")}


def compare(script: Path, model: str, strategy: str, processes: int, folder: Path) -> dict:
    """A row."""
    is_t5 = model == "t5-small"
    cases = {}
    for precision, (name, flags) in itertools.product(("fp32", "bf16"), cases_of(is_t5, processes).items()):
        own = ("--model", folder / model if is_t5 else model, "--sharding-strategy", strategy)
        cases[f"{precision}, {name}"] = [*own, "--precision", precision, *flags]
    output = Path(tempfile.mkdtemp(dir=folder))
    settings = [[*map(str, flags), "--output-dir", str(output / name)] for name, flags in cases.items()]
    forked = [str(shared.ROOT / "tests" / "forked.py"), str(script), json.dumps(settings), json.dumps(["record_peak"])]
    subprocess.run([*shared.torchrun(processes), *forked], check=True, stdout=subprocess.DEVNULL)

    off = {}
    peaks = []
    for name, flags in cases.items():
        held = json.loads((output / name / "peak-0.json").read_text())
        options = Namespace(vocabulary=held["vocabulary"], per_node=processes, attention="cpu")
        with traced(script, [*flags, "--num-processes", processes], options) as run:
            off[name] = run.peak() / held["peak"] - 1
        peaks.append(held["peak"] / 2**30)
    worst = max(off, key=lambda name: abs(off[name]))
    row = {"model": model, "strategy": strategy, "processes": processes, "combinations": len(cases)}
    return row | {"peaks, GB": f"{min(peaks):.4f} to {max(peaks):.4f}", "off": off[worst], "in": worst}


def rows(options, folder: Path):
    models = write_models(folder)
    for name, processes in itertools.product(options.models, options.processes):
        for strategy in T5_STRATEGIES if name == "t5-small" else LM_STRATEGIES:
            row = compare(*models[name], strategy, processes, folder)
            options.found.append(row["off"])
            yield row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    options = parser.parse_args()
    options.found = []
    with tempfile.TemporaryDirectory() as folder:
        shared.print_table(rows(options, Path(folder)))
    worst = max(abs(off) for off in options.found)
    print(f"off by {worst:.3%} at most")
    sys.exit(3 if worst > 0.01 else 0)
