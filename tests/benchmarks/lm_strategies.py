"""Speed, memory and traffic of lm_multinode.py's five strategies, as a table and as the picture docs/strategies.svg.

    pip install matplotlib
    python tests/benchmarks/lm_strategies.py [--turns 3] [--processes 4]

Runs `lm_multinode.py --compare-strategies --shards-per-replica 2` some times, each through all strategies, with a Llama
of 34 million parameters, and draws the medians of what these runs wrote to their metrics.jsonl. State is parameters,
gradients and AdamW's moments in fp32, exact; on a CPU the peak is resident memory, Python and its libraries with it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import matplotlib
import transformers
from matplotlib import pyplot
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import common

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
VOCABULARY = 8192
PICTURE = ROOT / "docs" / "strategies.svg"


def run_script(*arguments: str, processes: int, output: Path) -> list[dict]:
    """Run lm_multinode.py under torchrun; the reports in its metrics.jsonl."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [*torchrun, str(ROOT / "lm_multinode.py"), *arguments, "--output-dir", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def write_model(folder: Path) -> str:
    """A Llama with random weights and lm_multinode.py's own tokenizer."""
    run_script("--max-steps", "1", processes=1, output=folder / "first")
    [exported] = (folder / "first").glob("lm-*")
    AutoTokenizer.from_pretrained(exported).save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=1, **SHAPE)).save_pretrained(folder / "model")
    return str(folder / "model")


def measure(options: argparse.Namespace) -> tuple[list[dict], dict]:
    """Medians over the turns for each strategy, with all its speeds; and the settings of the runs."""
    rows: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", write_model(Path(folder)), "--compare-strategies", "--shards-per-replica", "2"]
        flags += ["--seq-length", "128", "--micro-batch-size", "2", "--global-batch-size", str(4 * options.processes)]
        flags += ["--num-validation-texts", "20"]
        for turn in range(options.turns):
            settings, *reports = run_script(*flags, processes=options.processes, output=Path(folder) / str(turn))
            for report in reports:
                rows.setdefault(report["strategy"], []).append(report)
    medians = []
    for strategy, some in rows.items():
        row = {"strategy": strategy, "replicas x shards": some[0]["replicas_x_shards"]}
        for name in ("tokens_per_second", "state_gb", "peak_memory_gb", "sent_gb_per_step"):
            row[name] = statistics.median(report[name] for report in some)
        medians.append(row | {"turns": " ".join(f"{report['tokens_per_second']:.0f}" for report in some)})
    return medians, settings


def draw(rows: list[dict], caption: str) -> None:
    """Two panels of bars with one bar a strategy: memory of a process, and speed."""
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "strategies", "font.size": 10}
    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    names = [f"{row['strategy']}\n{row['replicas x shards']}" for row in rows]
    memory.barh(names, [row["peak_memory_gb"] for row in rows], color="#c9d7e8", label="peak")
    memory.barh(names, [row["state_gb"] for row in rows], color="#1f4e8c", label="state: parameters, gradients, AdamW")
    for place, row in enumerate(rows):
        memory.text(row["peak_memory_gb"], place, f" {row['peak_memory_gb']:.2f}", va="center")
        memory.text(row["state_gb"], place, f" {row['state_gb']:.2f}", va="center")
    memory.set(xlabel="GB in each process", title="Memory", xlim=(0, 1.15 * max(row["peak_memory_gb"] for row in rows)))
    memory.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    speed.barh(names, [row["tokens_per_second"] for row in rows], color="#d98c3f")
    for place, row in enumerate(rows):
        speed.text(row["tokens_per_second"], place, f" {row['tokens_per_second']:,.0f}", va="center")
    speed.set(xlabel="tokens/s, median", title="Speed", xlim=(0, 1.2 * max(row["tokens_per_second"] for row in rows)))
    for panel in (memory, speed):
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="runs through all strategies")
    parser.add_argument("--processes", type=int, default=4)
    parsed = parser.parse_args()
    transformers.logging.set_verbosity_error()
    medians, settings = measure(parsed)
    where = f"{common.date_of_run()[:10]}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
    where += f"transformers {transformers.__version__}, {parsed.processes} processes, FSDP2, {settings['precision']}"
    print(f"{where}\n\n{common.format_table(medians)}")
    draw(medians, where)
    print(f"\n{PICTURE}")
