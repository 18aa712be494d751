"""What DILOCO loses in perplexity for the same tokens, and gains in time on a slow network; draws docs/diloco.svg.

    pip install matplotlib
    python tests/benchmarks/lm_diloco.py [--steps 300] [--link 100mbit]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), joined by a slow cable. The tiny Llama
of lm_multinode.py learns the built-in texts under NO_SHARD, _HYBRID_SHARD_ZERO2 and DILOCO, with the same tokens in a
step and the same steps; DILOCO with the paper's outer optimizer, and with one that only averages. The table has the
validation perplexity at the end, and how long the run took from its first step; the picture both at every validation.
"""

import argparse
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

import matplotlib
from matplotlib import pyplot
from shared import ROOT, print_table, read_metrics, save_picture
from two_nodes import two_nodes

TWO, FOUR = (("--sharding-strategy", "DILOCO", "--shards-per-replica", shards) for shards in (2, 1))
AVERAGING = (*TWO, "--outer-lr", 1, "--outer-momentum", 0)  # all go on from the mean of their weights
RUNS = {
    "NO_SHARD": ("--sharding-strategy", "NO_SHARD"),
    "_HYBRID_SHARD_ZERO2": ("--sharding-strategy", "_HYBRID_SHARD_ZERO2", "--shards-per-replica", 2),
    "DILOCO, 2 replicas, H = 50": (*TWO, "--local-steps", 50),
    "DILOCO, 4 replicas, H = 50": (*FOUR, "--local-steps", 50),
    "DILOCO, 2 replicas, averaging, H = 50": (*AVERAGING, "--local-steps", 50),
    "DILOCO, 2 replicas, averaging, H = 10": (*AVERAGING, "--local-steps", 10),
    "DILOCO, 2 replicas, averaging, H = 100": (*AVERAGING, "--local-steps", 100),
    "DILOCO, 2 replicas, H = 10": (*TWO, "--local-steps", 10),
    "DILOCO, 2 replicas, H = 100": (*TWO, "--local-steps", 100),
}
DRAWN = 5  # of them


def measure(nodes, folder: Path, name: str, options: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Tokens, seconds since validation of the first weights, and perplexity, at every validation of a run."""
    every = 100 if "100" in name else 50
    flags = ["--max-steps", options.steps, "--validate-every", every, "--log-every", every, "--precision", "fp32"]
    flags += ["--device", "cpu", "--no-save-model", "--output-dir", folder, *RUNS[name]]
    finished = nodes.torchrun("lm_multinode.py", *flags, timeout=3600)
    if any(one.returncode for one in finished):
        sys.exit("".join(one.stderr for one in finished))
    rows = [row for row in read_metrics(folder) if "perplexity" in row]
    return [(row["step"] * 16 * 128, row["seconds"] - rows[0]["seconds"], row["perplexity"]) for row in rows]


def draw(curves: dict[str, list], caption: str, picture: Path) -> None:
    """Perplexity over tokens, and over seconds."""
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "diloco", "font.size": 10}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for column, (panel, unit) in enumerate(zip(panels, ("tokens", "seconds"), strict=True)):
        for name in list(curves)[:DRAWN]:
            label = f" {name}"  # matplotlib leaves out what begins with an underscore
            panel.plot([point[column] for point in curves[name]], [point[2] for point in curves[name]], label=label)
        panel.set(xlabel=unit, yscale="log")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_minor_formatter("{x:,.0f}")
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("validation perplexity")
    panels[0].legend(frameon=False)
    figure.suptitle(caption, fontsize=9)
    figure.patch.set_facecolor("white")  # readable on a dark page, too
    save_picture(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--link", default="100mbit", help="as tc takes it, in both directions")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "diloco.svg")
    parsed = parser.parse_args()
    versions = f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.system()}, {date.today()}"
    caption = f"2 nodes of 2 processes, {parsed.link} between them, {parsed.steps} steps of 2,048 tokens, {versions}"
    print(f"{caption}\n")
    found = {}

    def rows(nodes, folder: Path):
        for name in RUNS:
            found[name] = measure(nodes, folder / name.replace(" ", ""), name, parsed)
            yield {"run": name, "perplexity": found[name][-1][2], "seconds": found[name][-1][1]}

    with tempfile.TemporaryDirectory() as scratch, two_nodes() as two:
        two.limit(parsed.link)
        print_table(rows(two, Path(scratch)))
    draw(found, caption, parsed.picture)
