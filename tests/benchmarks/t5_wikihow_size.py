"""Seconds and memory that t5_fsdp.py needs to load, split and tokenize a file of WikiHow's size and start training.

    python tests/benchmarks/t5_wikihow_size.py

Writes 215,000 rows (0.85 GB) in wikihowAll.csv's format and lengths, trains the built-in model on all of them
for five steps on two processes, once with empty caches and once more. Memory is sampled from /proc: what a
process holds for itself (RssAnon), and with it the pages of memory-mapped files, which the system may drop (VmRSS).
"""

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_rows(path: Path, count: int) -> None:
    """Random words, numbered methods of articles, quoted newlines, stray commas, and a few empty fields."""
    choose = random.Random(0)
    words = ["".join(choose.choices("aeinorstlmdcu", k=choose.randint(2, 9))) for _ in range(30000)]
    pool = [" ".join(choose.choices(words, k=20)) + "." for _ in range(20000)]  # sentences, or writing takes minutes

    def sentences(mean: float) -> list[str]:
        return choose.choices(pool, k=max(1, round(choose.lognormvariate(-0.25, 0.7) * mean / 20)))

    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["headline", "title", "text"])
        for index in range(count):
            headline = "" if index % 200 == 0 else "\n" + ",\n".join(sentences(60))
            title = f"How to {words[index // 3 % 30000]} {index // 90000} {words[index // 3 % 7919]}{index % 3 + 1}"
            writer.writerow([headline, title, "\n\n\n".join(sentences(580))])


def memory_of(pid: int) -> dict[str, int]:
    """RssAnon and VmRSS of a process, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS") if name in fields}


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [below for child in children for below in descendants(child)]


def train(path: Path, output: Path) -> str:
    """Train for five steps; how long the first took to come, and the largest process's memory."""
    command = [sys.executable, ROOT / "t5_fsdp.py", "--num-processes", "2", "--dataset", path, "--output-dir", output]
    command += ["--num-train-samples", "0", "--max-steps", "5", "--log-every", "1"]
    command += ["--no-run-validation", "--no-save-model"]
    began, first_step, peaks = time.perf_counter(), None, {"RssAnon": 0, "VmRSS": 0}
    running = subprocess.Popen(command, env={**os.environ, "HF_HOME": str(path.parent)})
    while running.poll() is None:
        for pid in descendants(running.pid):
            for name, value in memory_of(pid).items():
                peaks[name] = max(peaks[name], value)
        metrics = output / "metrics.jsonl"  # empty until the first step, as nothing is validated
        if first_step is None and metrics.exists() and metrics.stat().st_size:
            first_step = time.perf_counter() - began
        time.sleep(0.2)
    if running.returncode:
        sys.exit("t5_fsdp.py failed")
    own, mapped = peaks["RssAnon"] / 2**30, peaks["VmRSS"] / 2**30
    return f"first step after {first_step:.0f} s, largest process {own:.2f} GB, {mapped:.2f} GB with mapped files"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=215_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "wikihowAll.csv"
        write_rows(path, options.rows)
        print(f"{options.rows:,} rows, {path.stat().st_size / 2**30:.2f} GB", flush=True)
        for caches in ("empty", "filled"):
            print(f"caches {caches}: {train(path, Path(scratch) / caches)}\n", flush=True)
