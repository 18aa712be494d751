"""Is the peak that will_it_fit.py predicts the one that real steps on this CPU have? Every combination.

    python tests/benchmarks/will_it_fit_exactness.py [--models tiny,150m,t5-small] [--processes 1,2,4]

Each strategy of the LM and T5 scripts, fp32 and bf16, alone and with accumulation, recomputing, offload and, in T5,
without prefetching; on 1, 2 and 4 processes. The models: `tiny`, `150m` with two layers, and a T5 of t5-small's shape
with two layers in encoder and decoder. A row for each number of processes and strategy has the most that a prediction
is off, and the command fails if that is more than 1%.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import transformers
from shared import ROOT, print_table
from transformers import T5Config, T5ForConditionalGeneration
from will_it_fit import load_script, traced

import common

TOLERANCE = 0.01
STEPS = ("--max-steps", 4, "--no-save-model", "--device", "cpu")
LM = ("--seq-length", 128, "--num-validation-texts", 20, "--local-steps", 2, "--validate-every", 2)
T5 = ("--no-run-validation", "--num-train-samples", 64, "--max-source-length", 16, "--max-target-length", 8)
ADDITIONS = {
    "plain": (),
    "accumulation": ("--accumulation-steps", 2),
    "recomputing": ("--activation-checkpointing",),
    "offload": ("--cpu-offload",),
}


def combinations(model: str, strategy: str, processes: int):
    """Yield a name and the flags of each."""
    is_t5 = model.endswith("t5-small")
    additions = ADDITIONS | ({"no prefetching": ("--backward-prefetch", "none")} if is_t5 else {})
    for precision, name in itertools.product(("fp32", "bf16"), additions):
        flags = ["--model", model, "--sharding-strategy", strategy, "--precision", precision, *STEPS]
        if is_t5:
            flags += [*T5, "--batch-size", 2, *additions[name]]
        elif name == "accumulation":  # the LM script has another flag for it
            flags += [*LM, "--global-batch-size", 8 * processes]
        else:
            flags += [*LM, "--global-batch-size", 4 * processes, *additions[name]]
        if not is_t5:
            flags += ["--micro-batch-size", 4, "--shards-per-replica", min(2, processes)]
        yield f"{precision}, {name}", list(map(str, flags))


def write_models(folder: Path) -> dict[str, tuple[Path, str]]:
    """The script and `--model` of each: a copy of the LM script whose 150m has two layers, and a T5 of random weights
    with a small tokenizer."""
    for name in ("common.py", "lm_multinode.py"):
        text = (ROOT / name).read_text()
        (folder / name).write_text(text.replace('"num_hidden_layers": 12', '"num_hidden_layers": 2'))
    texts = [common.builtin_article(number)["text"] for number in range(100)]
    common.train_tokenizer(texts, 1000, append_eos=True).save_pretrained(folder / "t5-small")
    config = T5Config(num_layers=2, decoder_start_token_id=0, pad_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5-small")
    copy = folder / "lm_multinode.py"
    return {"tiny": (copy, "tiny"), "150m": (copy, "150m"), "t5-small": (ROOT / "t5_fsdp.py", str(folder / "t5-small"))}


def compare(name: str, script: Path, model: str, strategy: str, processes: int, folder: Path) -> dict:
    """A row."""
    cases = dict(combinations(model, strategy, processes))
    settings = [[*flags, "--output-dir", str(folder / case)] for case, flags in cases.items()]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [ROOT / "tests" / "forked.py", script, json.dumps(settings), "memory_tracker:record_peak"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment)

    off, peaks = {}, []
    for case, flags in cases.items():
        held = json.loads((folder / case / "peak-0.json").read_text())
        options = Namespace(vocabulary=held["vocabulary"], per_node=processes, attention="cpu")
        with traced(script, [*flags, "--num-processes", processes], options) as run:
            off[case] = run.peak() / held["peak"] - 1
        peaks.append(held["peak"] / 2**30)
    worst = max(off, key=lambda case: abs(off[case]))
    return {
        "model": name,
        "strategy": strategy,
        "processes": processes,
        "combinations": len(cases),
        "peaks, GB": f"{min(peaks):.4f} to {max(peaks):.4f}",
        "off": off[worst],
        "in": worst,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,150m,t5-small")
    parser.add_argument("--processes", default="1,2,4")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = []

    def compare_all(folder: Path):
        models = write_models(folder)
        for name, processes in itertools.product(options.models.split(","), map(int, options.processes.split(","))):
            script, model = models[name]
            for strategy in load_script(script).RESHARD:
                rows.append(compare(name, script, model, strategy, processes, Path(tempfile.mkdtemp(dir=folder))))
                yield rows[-1]

    with tempfile.TemporaryDirectory() as folder:
        print_table(compare_all(Path(folder)))
    worst = max(abs(row["off"]) for row in rows)
    print(f"{sum(row['combinations'] for row in rows)} combinations, off by {worst:.3%} at most")
    sys.exit(3 if worst > TOLERANCE else 0)
