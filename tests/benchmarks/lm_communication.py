"""What lm_multinode.py's strategies send between two nodes, and how long a slow link makes their steps, beside what
will_it_fit.py says of both.

    python tests/benchmarks/lm_communication.py [--links 1000 100] [--micro-batches 1 4] [--turns 3]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), train a Llama of 15 million parameters.
Under each strategy the same processes make steps in turns: at the full speed of the cable, and with the link held at
some Mbit/s in both directions. The MB that leave a node are the network interface's; seconds are medians. The bounds
are those of will_it_fit.py, with a step at full speed as the time to compute. DILOCO synchronizes every 50 steps, which
all share its bytes and its time. The strategy with the least upper bound is marked, DILOCO aside. The command fails
where bytes are off by more than 1% and 20 kB, where a step is more than 10% outside its bounds, and where another one
than the marked is the fastest.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist

import shared
import transformers
import will_it_fit
from two_nodes import CABLE, limit_command, two_nodes

from inside import LM_STRATEGIES, LmOuterOptimizer, lm_trainer, parse, set_up

LOCAL_STEPS = 50
FLAGS = ["--seq-length", 64, "--micro-batch-size", 1, "--precision", "fp32", "--device", "cpu"]
FLAGS += ["--local-steps", LOCAL_STEPS]


def flags_of(model: str, strategy: str, micro_batches: int) -> list:
    return [*FLAGS, "--model", model, "--sharding-strategy", strategy, "--global-batch-size", 4 * micro_batches]


def limit(world, link: float | None) -> None:
    """Hold this node's end of the cable at so many Mbit/s."""
    if world.local_rank == 0:
        subprocess.run(limit_command(link and f"{link:g}mbit"), check=True)


def count(function) -> torch.Tensor:
    """Bytes that leave this node in a call, and its seconds. Nobody else sends, but for the barriers' few bytes."""
    counter = Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    seconds = time.perf_counter() - start
    return torch.tensor([int(counter.read_text()) - before, seconds], dtype=torch.float64)


def count_with_outer(step, outer) -> torch.Tensor:
    """With the share that a step has in DILOCO's synchronization."""
    found = count(step)
    if outer:
        found += count(outer.step) / LOCAL_STEPS
    return found


def measure(options) -> None:
    """One of four processes. Rank 0 prints what a node sends in a step, and its seconds, for each link."""
    world = None
    for strategy, micro_batches in itertools.product(options.strategies, options.micro_batches):
        args = parse("lm_multinode.py", *flags_of(options.model, strategy, micro_batches))
        world = world or set_up(args)
        config = transformers.AutoConfig.from_pretrained(args.model)
        tokens = torch.full((1, args.seq_length), world.rank)
        batches = itertools.repeat(({"input_ids": tokens, "labels": tokens}, None))
        model, step = lm_trainer(args, world, config, batches)
        outer = LmOuterOptimizer(args, world, model) if strategy == "DILOCO" else None
        for _ in range(2):  # connect
            count_with_outer(step, outer)
        turns = {link: [] for link in (None, *options.links)}
        for link in [*turns] * options.turns:
            limit(world, link)
            turns[link].append(count_with_outer(step, outer))
        limit(world, None)

        for link, steps in turns.items():
            found = torch.stack(steps).median(dim=0).values
            dist.all_reduce(found)
            sent, seconds = (found / world.size).tolist()
            row = {"strategy": strategy, "micro-batches": micro_batches, "link": link, "sent": sent, "seconds": seconds}
            if world.rank == 0:
                print(json.dumps(row), flush=True)
        del model, step, outer
        gc.collect()
    dist.destroy_process_group()


def predicted_bytes(*case) -> float:
    """That leave a node in a step."""
    will_it_fit.ROUNDS["reduce_scatter"] = 2  # gloo makes an all-reduce of it, and drops the rest
    options = argparse.Namespace(vocabulary=0, per_node=2, attention="cpu")
    with will_it_fit.traced("lm_multinode.py", [*flags_of(*case), "--num-processes", 4], options) as run:
        return 2 * run.cost()["between"]


def compare(measured: list[dict], model: Path) -> tuple[list[dict], list[str]]:
    """A row for each strategy and number of micro-batches, and what is not as predicted."""
    rows = []
    wrong = []
    bounds, seconds = {}, {}  # by micro-batches and link, then by strategy
    for (strategy, micro_batches), found in itertools.groupby(measured, lambda row: list(row.values())[:2]):
        full, *slow = found
        predicted = predicted_bytes(model, strategy, micro_batches)
        row = {"strategy": strategy, "micro-batches": micro_batches, "MB": full["sent"] / 1e6}
        row |= {"predicted": predicted / 1e6, "ratio": f"{full['sent'] / predicted:.4f}"}
        row["full speed, s"] = full["seconds"]
        rows.append(row)
        if abs(full["sent"] - predicted) > 0.01 * predicted + 20_000:  # barriers, and the launcher's heartbeats
            wrong.append(f"bytes of {strategy}, {micro_batches} micro-batches")
        for limited in slow:
            sending = predicted * 8 / (limited["link"] * 1e6)
            least = max(full["seconds"], sending)
            most = full["seconds"] + sending
            case = (micro_batches, limited["link"])
            if strategy != "DILOCO":  # as will_it_fit.py
                bounds.setdefault(case, {})[strategy] = most
                seconds.setdefault(case, {})[strategy] = limited["seconds"]
            row[f"{limited['link']:g} Mbit/s, s"] = limited["seconds"]
            row[f"bounds at {limited['link']:g}"] = f"{least:.2f} to {most:.2f}"
            if not 0.9 * least < limited["seconds"] < 1.1 * most:
                wrong.append(f"seconds of {strategy}, {micro_batches} micro-batches, {limited['link']:g} Mbit/s")

    for (micro_batches, link), most in bounds.items():
        marked = min(most, key=most.get)
        fastest = min(most, key=seconds[micro_batches, link].get)
        for row in rows:
            if row["strategy"] == marked and row["micro-batches"] == micro_batches:
                row[f"bounds at {link:g}"] += " <-"
        if marked != fastest:
            wrong.append(f"{fastest} is faster than {marked}, {micro_batches} micro-batches, {link:g} Mbit/s")
    return rows, wrong


def main(folder: Path, options) -> None:
    model = shared.write_llama(folder, list(topics.values()), layers=2)
    with two_nodes() as nodes:
        finished = nodes.torchrun(Path(__file__), *sys.argv[1:], "--model", model, timeout=3600)
    if any(one.returncode for one in finished):
        sys.exit("".join(one.stdout for one in finished) + finished[0].stderr[-5000:])
    lines = "".join(one.stdout for one in finished).splitlines()
    rows, wrong = compare([json.loads(line) for line in lines if line.startswith("{")], model)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, 2 nodes of 2 processes, fp32\n")
    shared.print_table(rows)
    if wrong:
        sys.exit(f"not as predicted: {'; '.join(wrong)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=LM_STRATEGIES, default=LM_STRATEGIES)
    parser.add_argument("--links", nargs="*", type=float, default=[1000, 100], help="Mbit/s in each direction")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4], help="of a process in a step")
    parser.add_argument("--turns", type=int, default=3, help="steps with each link, whose medians count")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # for the processes on the nodes
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch), options)
