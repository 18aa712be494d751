"""What the benchmarks share: launches, metrics, tables, copies with a recipe."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def torchrun(processes: int) -> list:
    """The command that starts a script in so many processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def read_metrics(output: Path) -> list[dict]:
    """The records of a run."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def patched(folder: Path, *names: str) -> Path:
    """A user's copy of the scripts, with these diffs of docs/recipes."""
    folder.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in names:
        diff = ROOT / "docs" / "recipes" / f"{name}.diff"
        command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-i", diff]
        finished = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert finished.returncode == 0, f"{name}\n{finished.stdout}"
    return folder


def limit_command(rate: str | None) -> list[str]:
    """What limits what a node of two_nodes.py sends: a token bucket, with room for a large packet of the kernel."""
    if rate is None:
        return ["tc", "qdisc", "replace", "dev", "eth0", "root", "noqueue"]
    return ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mbit", "latency", "50ms"]


def print_table(rows) -> None:
    """Print dictionaries with the same keys as a table in Markdown, each as soon as it is there."""
    for number, row in enumerate(rows):
        if number == 0:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(map(cell, row.values()))} |", flush=True)


def cell(value) -> str:
    """Four digits of a small number, thousands apart in a large one."""
    if not isinstance(value, float):
        return f"{value:,}" if type(value) is int else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
