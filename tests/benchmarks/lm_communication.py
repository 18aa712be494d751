"""What lm_multinode.py's strategies send between two nodes, and what a slow network makes of it.

    python tests/benchmarks/lm_communication.py [--turns 3] [--fsdp-version 2]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root). The first table compares the bytes that
cross from one node to the other in an optimizer step, by the network interface's counter, with the formula in the
script, and fails if they differ by more than 5%. The second has the seconds of a step at the full speed of the cable
and at 1 Gbit/s in both directions: medians over interleaved turns.
"""

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from transformers import LlamaConfig
from two_nodes import CABLE, limit_command, two_nodes

import common
import lm_multinode

# 34 million parameters: large enough that a step sends hundreds of MB.
SHAPE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
LINKS = {"full speed": None, "1 Gbit/s": "1gbit"}
TOLERANCE = 0.05


def sent_bytes() -> int:
    """Bytes that this node has sent to the other."""
    return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())


def measure(world, strategy, accumulation, extra, options) -> tuple[list[float], float, float]:
    """Seconds of each step, bytes that left a node in a step on average, and those of the formula."""
    sys.argv = ["lm_multinode.py", "--sharding-strategy", strategy, "--fsdp-version", str(options.fsdp_version), *extra]
    sys.argv += ["--micro-batch-size", "1", "--seq-length", "64", "--precision", "fp32", "--device", "cpu"]
    args = lm_multinode.parse_args()
    args.accumulation = accumulation
    args.global_batch_size = accumulation * world.world_size
    config = LlamaConfig(**SHAPE)
    model, optimizer = lm_multinode.build(args, world, config)
    tokens = torch.randint(config.vocab_size, (1, args.seq_length), generator=torch.Generator().manual_seed(world.rank))
    batches = repeat({"input_ids": tokens, "labels": tokens})
    times, counters = [], []
    for _ in range(options.steps + 1):  # the first one connects and allocates
        dist.barrier()  # nobody sends while the counters are read, but for the barrier's few bytes
        counters.append(sent_bytes())
        dist.barrier()
        began = time.perf_counter()
        lm_multinode.train_step(args, world, model, optimizer, batches)
        dist.barrier()
        times.append(time.perf_counter() - began)
    [sent] = common.sum_over_ranks(torch.tensor([float(sent_bytes() - counters[1])]))
    del model, optimizer
    gc.collect()
    formula = lm_multinode.bytes_sent_per_step(args, world, config)[1]
    return times[1:], sent / world.world_size / options.steps, formula  # a node's count came from each of its processes


def compare_bytes(world, options) -> bool:
    """Print the first table. Whether the formula holds everywhere."""
    say = print if world.rank == 0 else lambda *_, **__: None
    say("| strategy | micro-batches | MB that crossed | MB by the formula | ratio |\n|---|---|---|---|---|")
    holds = True
    for strategy, about in lm_multinode.STRATEGIES.items():
        variants = [(1, []), (4, [])]
        if about.hybrid and options.fsdp_version == 2:
            variants.append((4, ["--accumulate-sharded"]))
        for accumulation, extra in variants:
            _, sent, formula = measure(world, strategy, accumulation, extra, options)
            name = f"{strategy} {' '.join(extra)}".strip()
            cells = f"{sent / 1e6:.1f} | {formula / 1e6:.1f} | {sent / formula:.3f}"
            say(f"| {name} | {accumulation} | {cells} |", flush=True)
            holds = holds and abs(sent / formula - 1) <= TOLERANCE
    return holds


def compare_links(world, options) -> None:
    """Print the second table."""
    seconds = {(strategy, link): [] for strategy in lm_multinode.STRATEGIES for link in LINKS}
    for _ in range(options.turns):
        for link, rate in LINKS.items():
            if world.local_rank == 0:  # each node limits what it sends
                subprocess.run(limit_command(rate), check=True)
            for strategy in lm_multinode.STRATEGIES:
                seconds[strategy, link] += measure(world, strategy, 1, [], options)[0]
    if world.rank == 0:
        heads = [f"{text} {link}" for link in LINKS for text in ("seconds per step,", "range,")]
        print(f"\n| strategy | {' | '.join(heads)} |\n|---|" + "---|" * len(heads))
        for strategy in lm_multinode.STRATEGIES:
            cells = []
            for link in LINKS:
                times = seconds[strategy, link]
                cells += [f"{statistics.median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}"]
            print(f"| {strategy} | {' | '.join(cells)} |")


def worker(options) -> None:
    """One process on one node. Ends with exit code 1 if the formula is off."""
    world = common.setup_distributed("cpu")
    if world.rank == 0:
        print(
            f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, 2 nodes of 2 processes, "
            f"FSDP{options.fsdp_version}, fp32\n"
        )
    holds = compare_bytes(world, options)
    if options.turns:
        compare_links(world, options)
    if world.rank == 0 and not holds:
        print(f"\nThe formula is off by more than {TOLERANCE:.0%}.")
    dist.destroy_process_group()
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each strategy and speed, 0 for bytes only")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn, after one to warm up")
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parsed = parser.parse_args()
    if "RANK" in os.environ:
        worker(parsed)
    else:
        with two_nodes() as nodes:
            torchruns = nodes.torchrun("tests/benchmarks/lm_communication.py", *sys.argv[1:], timeout=3600)
        first, second = torchruns
        print(first.stdout + second.stdout, end="")
        code = first.returncode or second.returncode
        if code and "The formula" not in first.stdout:
            print(first.stderr[-3000:], second.stderr[-3000:], file=sys.stderr)
        sys.exit(min(abs(code), 1))
