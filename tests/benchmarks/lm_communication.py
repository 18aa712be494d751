"""What lm_multinode.py's strategies send between two nodes, and what a slow network makes of it.

    python tests/benchmarks/lm_communication.py [--turns 3] [--fsdp-version 2]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), train a Llama of 34 million parameters.
The first table compares the bytes that cross from one node to the other in an optimizer step, by the network
interface's counter, with the formula, and the command fails if they differ by more than 5%. The second has the seconds
of a step that `--compare-strategies` reports at the full speed of the cable and at 1 Gbit/s in both directions: medians
over interleaved turns.
"""

import argparse
import gc
import itertools
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist

import transformers
from shared import cell, print_table, read_metrics, write_llama
from two_nodes import CABLE, two_nodes

import common
import lm_multinode

LINKS = {"full speed": None, "1 Gbit/s": "1gbit"}
TOLERANCE = 0.05
FLAGS = ["--seq-length", 64, "--micro-batch-size", 1, "--num-validation-texts", 20, "--precision", "fp32"]
FLAGS += ["--device", "cpu"]


def bytes_sent(config, strategy: str, micro_batches: int, processes: int, on_node: int) -> tuple[float, float]:
    """Bytes that a process sends in a step in fp32, and that leave its node; a hybrid's replica is of two processes.

    The comments at lm_multinode.RESHARD, exactly. A ring leaves a node once, so a node sends for each ring what one of
    its processes does.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers, whole = (4 * sum(p.numel() for p in part.parameters()) for part in (model.model.layers, model))
    shards = 1 if strategy == "NO_SHARD" else 2 if "HYBRID" in strategy else processes
    replicas = processes // shards
    # After its forward FULL_SHARD frees the layers but not the root, with which backward begins.
    gathered = micro_batches * (whole + layers) if lm_multinode.RESHARD[strategy] else whole
    # gloo has no reduce-scatter: PyTorch all-reduces and drops the rest, which is twice as much.
    in_replica = (shards - 1) / shards * (gathered + 2 * whole)
    between = 2 * (replicas - 1) / replicas * whole / shards
    return in_replica + between, (in_replica if shards > on_node else 0) + between * min(shards, on_node)


def count_bytes(options: argparse.Namespace, world: common.World) -> None:
    """Print the first table. One of four processes."""
    rows = []
    for strategy, micro_batches in itertools.product(lm_multinode.RESHARD, (1, 4)):
        flags = ["--model", options.model, "--fsdp-version", options.fsdp_version, "--sharding-strategy", strategy]
        sys.argv = ["", *map(str, [*FLAGS, *flags, "--global-batch-size", world.size * micro_batches])]
        args = lm_multinode.parse_args()
        config = transformers.AutoConfig.from_pretrained(args.model)
        model, optimizer = lm_multinode.build(args, world, config)
        tokens = torch.full((1, args.seq_length), world.rank)
        batches = itertools.repeat(({"input_ids": tokens, "labels": tokens}, None))
        counts = []
        for _ in range(4):  # the first step is not counted: it connects
            dist.barrier()  # nobody sends while the counters are read, but for the barrier's few bytes
            counts.append(int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text()))
            dist.barrier()
            lm_multinode.train_step(args, world, model, optimizer, batches)
        del model, optimizer
        gc.collect()
        crossed = common.sum_over_ranks(torch.tensor((counts[3] - counts[1]) / 2)) / world.size / 1e6
        formula = bytes_sent(config, strategy, micro_batches, world.size, world.local_size)[1] / 1e6
        rows.append({"strategy": strategy, "micro-batches": micro_batches, "MB that crossed": crossed})
        rows[-1] |= {"MB by the formula": formula, "ratio": crossed / formula}
    if world.rank == 0:
        print_table(rows)
    dist.destroy_process_group()
    sys.exit(3 if any(abs(row["ratio"] - 1) > TOLERANCE for row in rows) else 0)


def launch(nodes, script: str, *flags) -> str:
    """Run a script on both nodes; what it prints."""
    finished = nodes.torchrun(script, *flags, timeout=3600)
    if any(one.returncode for one in finished):
        print("".join(one.stdout for one in finished), finished[0].stderr[-5000:])
        sys.exit(f"{script} failed, or the formula is off by more than {TOLERANCE:.0%}")
    return "".join(one.stdout for one in finished)


def main(nodes, folder: Path, options: argparse.Namespace) -> None:
    flags = ["--model", write_llama(folder, list(topics.values())), "--fsdp-version", options.fsdp_version]
    versions = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{versions}, 2 nodes of 2 processes, FSDP{options.fsdp_version}, fp32\n", flush=True)
    print(launch(nodes, "tests/benchmarks/lm_communication.py", *flags), flush=True)
    seconds: dict[str, dict[str, list[float]]] = {}
    for turn, (link, rate) in itertools.product(range(options.turns), LINKS.items()):
        nodes.limit(rate)
        output = folder / f"{turn} {rate}"
        compare = ["--compare-strategies", "--global-batch-size", 4, "--output-dir", output]
        launch(nodes, "lm_multinode.py", *FLAGS, *flags, *compare)
        for row in read_metrics(output):
            seconds.setdefault(row["strategy"], {}).setdefault(link, []).append(row["step_seconds"])
    rows = []
    for strategy, links in seconds.items():
        rows.append({"strategy": strategy})
        for link, times in links.items():
            rows[-1][f"seconds per step, {link}"] = statistics.median(times)
            rows[-1][f"range, {link}"] = f"{cell(min(times))} to {cell(max(times))}"
    print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each speed, 0 for bytes only")
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--model", help=argparse.SUPPRESS)  # for the processes on the nodes
    parsed = parser.parse_args()
    if "RANK" in os.environ:
        count_bytes(parsed, common.setup(None))
    with tempfile.TemporaryDirectory() as scratch, two_nodes() as two:
        main(two, Path(scratch), parsed)
