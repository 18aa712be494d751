"""Helpers of the benchmarks: launches, metrics, tables, and copies with a recipe."""

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
MACHINE = f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} cores of {platform.machine()}"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def torchrun(processes: int) -> list:
    """The command that starts a script in this number of processes on one node."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]


def read_metrics(output: Path) -> list[dict]:
    """The records that a run wrote to metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def patched(folder: Path, *names: str) -> Path:
    """Copy the scripts to `folder` as a user would, and apply these recipes from docs/recipes. A single one must have
    the right context."""
    folder.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    fuzz = 0 if len(names) == 1 else 2  # 2 is the default
    for name in names:
        diff = ROOT / "docs" / "recipes" / f"{name}.diff"
        command = ["patch", "-p1", f"--fuzz={fuzz}", "--no-backup-if-mismatch", "-i", diff]
        finished = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert finished.returncode == 0, f"{name}\n{finished.stdout}"
    return folder


def limit_command(rate: str | None) -> list[str]:
    """The command that limits how fast a node of two_nodes.py sends. `burst` must hold the kernel's largest packet."""
    if rate is None:
        return ["tc", "qdisc", "replace", "dev", "eth0", "root", "noqueue"]
    return ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mbit", "latency", "50ms"]


def print_table(rows) -> None:
    """Print dictionaries with the same keys as a Markdown table. The first column is aligned to the left."""
    rows = list(rows)
    table = [list(rows[0]), *(list(map(cell, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    for row in table:
        first, *others = map(str.rjust, row, widths)
        print(f"| {' | '.join([first.strip().ljust(widths[0]), *others])} |")


def cell(value) -> str:
    """Four significant digits, or all digits with separators for a number of 1,000 or more."""
    if not isinstance(value, float):
        return f"{value:,}" if type(value) is int else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
