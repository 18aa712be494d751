"""How much lm_multinode.py's strategies send between two nodes, and how long their steps take on a slow link, next to
what will_it_fit.py predicts of both.

    python tests/benchmarks/lm_communication.py [--links 1000 100] [--micro-batches 1 4] [--turns 3]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), train a Llama of 15 million parameters.
Under each strategy the same processes take steps in turns: with a limit of some Mbit/s in both directions, and at full
speed. The network interface counts the MB that leave a node; seconds are medians. The bounds come from will_it_fit.py,
with a step at full speed as the time to compute. The strategy with the least upper bound should be the fastest.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import made_up
import shared
import transformers
import will_it_fit
from two_nodes import CABLE, two_nodes

from inside import LM_STRATEGIES, lm_trainer, parse, set_up

FLAGS = ["--seq-length", 64, "--micro-batch-size", 1, "--precision", "fp32", "--device", "cpu"]


def flags_of(model: str, strategy: str, micro_batches: int) -> list:
    return [*FLAGS, "--model", model, "--sharding-strategy", strategy, "--global-batch-size", 4 * micro_batches]


def count(function) -> torch.Tensor:
    """The bytes that leave this node during a call, and its seconds. Only the barriers add a few bytes."""
    counter = Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    seconds = time.perf_counter() - start
    return torch.tensor([int(counter.read_text()) - before, seconds], dtype=torch.float64)


def measure(options) -> None:
    """Run one of four processes. For each link, rank 0 prints what a node sends in a step, and the seconds."""
    world = None
    for strategy, micro_batches in itertools.product(LM_STRATEGIES, options.micro_batches):
        args = parse("lm_multinode.py", *flags_of(options.model, strategy, micro_batches))
        world = world or set_up(args)
        config = transformers.AutoConfig.from_pretrained(args.model)
        tokens = torch.full((micro_batches, args.seq_length + 1), world.rank)
        model, step = lm_trainer(args, world, config, itertools.repeat((tokens, None)))
        for _ in range(2):  # the first steps connect the processes
            count(step)
        turns = {link: [] for link in (*options.links, None)}  # what this node sends, in Mbit/s; None: no limit
        for link in [*turns] * options.turns:
            if world.local_rank == 0:
                subprocess.run(shared.limit_command(link and f"{link:g}mbit"), check=True)
            turns[link].append(count(step))

        for link, steps in turns.items():
            medians = torch.stack(steps).median(dim=0).values
            dist.all_reduce(medians)
            sent, seconds = (medians / world.size).tolist()
            if world.rank == 0:
                print(json.dumps([strategy, micro_batches, link, sent, seconds]), flush=True)
        del model, step
        gc.collect()
    dist.destroy_process_group()


def predicted_bytes(*case) -> float:
    """The bytes that leave a node in a step, by will_it_fit.py."""
    will_it_fit.ROUNDS["reduce_scatter"] = 2  # gloo runs an all-reduce, and drops the other shards
    processes = ("--num-processes", 4, "--processes-per-node", 2, "--attention", "cpu")
    with will_it_fit.traced("lm_multinode.py", *flags_of(*case), *processes) as run:
        return 2 * run.cost()["between"]


def rows(measured: list[list], model: Path):
    """Yield a row for each strategy and number of micro-batches."""
    for (strategy, micro_batches), steps in itertools.groupby(measured, lambda step: step[:2]):
        *limited, (*_, sent, full_speed) = steps
        predicted = predicted_bytes(model, strategy, micro_batches)
        row = {"strategy": strategy, "micro-batches": micro_batches, "MB": sent / 1e6}
        row |= {"predicted": predicted / 1e6, "full speed, s": full_speed}
        for *_, link, _, seconds in limited:
            sending = predicted * 8 / (link * 1e6)
            row |= {f"{link:g} Mbit/s, s": seconds, f"least, {link:g}": max(full_speed, sending)}
            row[f"most, {link:g}"] = full_speed + sending
        yield row


def main(folder: Path, options) -> None:
    model = made_up.write_llama(folder, layers=2)
    with two_nodes() as nodes:
        finished = nodes.torchrun(Path(__file__), *sys.argv[1:], "--model", model, timeout=3600)
    output = "".join(node.stdout for node in finished)
    if any(node.returncode for node in finished):
        sys.exit(output + finished[0].stderr[-5000:])
    print(f"{shared.MACHINE}, 2 nodes of 2 processes, fp32\n")
    shared.print_table(rows([json.loads(line) for line in output.splitlines() if line.startswith('["')], model))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", type=float, default=[1000, 100], help="Mbit/s in each direction")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4], help="of each process in a step")
    parser.add_argument("--turns", type=int, default=3, help="steps with each link; the table has medians")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # for the processes on the nodes
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch), options)
