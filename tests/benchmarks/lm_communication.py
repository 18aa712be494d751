"""What lm_multinode.py's strategies send between two nodes, and what a slow network makes of it.

    python tests/benchmarks/lm_communication.py [--turns 3] [--fsdp-version 2] [--links "full speed" "1 Gbit/s"]
        [--strategies DILOCO] [--against FOLDER]        # an older checkout beside this one

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), train a Llama of 34 million parameters.
The first table compares the bytes that cross from one node to the other in an optimizer step, by the network
interface's counter, with the formula, and the command fails if they differ by more than 5%. The second has the seconds
of a step that `--compare-strategies` reports at the full speed of the cable, at 1 Gbit/s and at 100 Mbit/s in both
directions, and where each packet takes 50 ms: medians over interleaved turns. DILOCO synchronizes every 50 steps, which
all share its bytes and its time.
"""

import argparse
import gc
import importlib
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
from shared import ROOT, cell, print_table, read_metrics, write_llama
from two_nodes import CABLE, two_nodes

import common
import lm_multinode

LINKS = {"full speed": {}, "1 Gbit/s": {"rate": "1gbit"}, "100 Mbit/s": {"rate": "100mbit"}, "50 ms": {"delay": 0.05}}
TOLERANCE = 0.05
LOCAL_STEPS = 50
FLAGS = ["--seq-length", 64, "--micro-batch-size", 1, "--num-validation-texts", 20, "--precision", "fp32"]
FLAGS += ["--device", "cpu", "--local-steps", LOCAL_STEPS]


def bytes_sent(config, strategy: str, micro_batches: int, processes: int, on_node: int) -> tuple[float, float]:
    """Bytes that a process sends in a step in fp32, and that leave its node; a hybrid's replica is of two processes.

    The comments at lm_multinode.RESHARD, exactly. A ring leaves a node once, so a node sends for each ring what one of
    its processes does.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers, whole = (4 * sum(p.numel() for p in part.parameters()) for part in (model.model.layers, model))
    shards = 1 if strategy == "NO_SHARD" else 2 if strategy in lm_multinode.HYBRIDS else processes
    replicas = processes // shards
    # After its forward FULL_SHARD frees the layers but not what is before and after them.
    gathered = micro_batches * (whole + layers) if lm_multinode.RESHARD[strategy] else whole
    # gloo has no reduce-scatter: PyTorch all-reduces and drops the rest, which is twice as much.
    in_replica = (shards - 1) / shards * (gathered + 2 * whole)
    between = 2 * (replicas - 1) / replicas * whole / shards / (LOCAL_STEPS if strategy == "DILOCO" else 1)
    return in_replica + between, (in_replica if shards > on_node else 0) + between * min(shards, on_node)


def count_bytes(options: argparse.Namespace, world: common.World) -> None:
    """Print the first table. One of four processes."""
    rows, counter = [], Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")
    strategies = [name for name in lm_multinode.RESHARD if name != "DILOCO" or options.fsdp_version == 2]
    for strategy, micro_batches in itertools.product(strategies, (1, 4)):
        flags = ["--model", options.model, "--fsdp-version", options.fsdp_version, "--sharding-strategy", strategy]
        sys.argv = ["", *map(str, [*FLAGS, *flags, "--global-batch-size", world.size * micro_batches])]
        args = lm_multinode.parse_args()
        config = transformers.AutoConfig.from_pretrained(args.model)
        model, optimizer = lm_multinode.build(args, world, config)
        tokens = torch.full((1, args.seq_length), world.rank)
        batches = itertools.repeat(({"input_ids": tokens, "labels": tokens}, None))
        outer = lm_multinode.OuterOptimizer(args, world, model) if strategy == "DILOCO" else None

        def count(function, *arguments) -> float:
            """Bytes that leave this node in a call. Nobody else sends meanwhile, but for the barriers' few bytes."""
            dist.barrier()
            before = int(counter.read_text())
            dist.barrier()
            function(*arguments)
            dist.barrier()
            return int(counter.read_text()) - before

        step = (lm_multinode.train_step, args, world, model, optimizer, batches)
        crossed = [count(*step) for _ in range(3)]  # the first step is not counted: it connects
        crossed = (crossed[1] + crossed[2]) / 2
        if outer:
            _, *synchronizations = (count(outer.step) for _ in range(3))  # the first one connects
            crossed += sum(synchronizations) / 2 / LOCAL_STEPS
        del model, optimizer, outer, step
        gc.collect()
        crossed = common.sum_over_ranks(torch.tensor(crossed)) / world.size / 1e6
        formula = bytes_sent(config, strategy, micro_batches, world.size, world.local_size)[1] / 1e6
        rows.append({"strategy": strategy, "micro-batches": micro_batches, "MB that crossed": crossed})
        rows[-1] |= {"MB by the formula": formula, "ratio": crossed / formula}
    if world.rank == 0:
        print_table(rows)
    dist.destroy_process_group()
    sys.exit(3 if any(abs(row["ratio"] - 1) > TOLERANCE for row in rows) else 0)


def time_strategies(options: argparse.Namespace) -> None:
    """`--compare-strategies` of a checkout, for some strategies. One of four processes."""
    for name in ("common", "lm_multinode"):
        del sys.modules[name]
    sys.path.insert(0, options.time)
    script = importlib.import_module("lm_multinode")
    script.RESHARD = {name: script.RESHARD[name] for name in options.strategies}
    sys.argv = [f"{options.time}/lm_multinode.py", *options.flags]
    script.common.run(script.main, script.parse_args())


def launch(nodes, script: str, *flags) -> str:
    """Run a script on both nodes; what it prints."""
    finished = nodes.torchrun(script, *flags, timeout=3600)
    if any(one.returncode for one in finished):
        print("".join(one.stdout for one in finished), finished[0].stderr[-5000:])
        sys.exit(f"{script} failed, or the formula is off by more than {TOLERANCE:.0%}")
    return "".join(one.stdout for one in finished)


def main(folder: Path, options: argparse.Namespace) -> None:
    flags = ["--model", write_llama(folder, list(topics.values())), "--fsdp-version", options.fsdp_version]
    versions = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{versions}, 2 nodes of 2 processes, FSDP{options.fsdp_version}, fp32\n", flush=True)
    if options.bytes:
        with two_nodes() as nodes:
            print(launch(nodes, "tests/benchmarks/lm_communication.py", *flags), flush=True)
    seconds: dict[str, dict[str, list[float]]] = {}
    checkouts = [ROOT, *options.against]
    for turn, link, root in itertools.product(range(options.turns), options.links, checkouts):
        output = folder / f"{turn} {link} {root}".replace("/", "-")
        compare = ["--compare-strategies", "--global-batch-size", 4, "--output-dir", output]
        with two_nodes(LINKS[link].get("delay", 0)) as nodes:
            nodes.limit(LINKS[link].get("rate"))
            which = ["--time", root, "--strategies", *options.strategies, "--", *FLAGS, *flags, *compare]
            launch(nodes, "tests/benchmarks/lm_communication.py", *which)
        for row in read_metrics(output):
            name = row["strategy"] if root == ROOT else f"{row['strategy']}, {root}"
            seconds.setdefault(name, {}).setdefault(link, []).append(row["step_seconds"])
    rows = []
    for strategy, links in seconds.items():
        rows.append({"strategy": strategy})
        for link, times in links.items():
            rows[-1][f"seconds per step, {link}"] = statistics.median(times)
            rows[-1][f"range, {link}"] = f"{cell(min(times))} to {cell(max(times))}"
    print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each link, 0 for bytes only")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--fsdp-version", type=int, choices=(1, 2), default=2)
    parser.add_argument("--strategies", nargs="+", default=list(lm_multinode.RESHARD), help="to time")
    parser.add_argument("--against", nargs="*", default=[], help="other checkouts, timed in turn with this one")
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="without the first table")
    for_the_nodes = {"help": argparse.SUPPRESS}  # what the processes on the nodes are started with
    parser.add_argument("--model", **for_the_nodes)
    parser.add_argument("--time", **for_the_nodes)
    parser.add_argument("flags", nargs="*", **for_the_nodes)
    parsed = parser.parse_args()
    if parsed.time:
        time_strategies(parsed)
        sys.exit()
    if "RANK" in os.environ:
        count_bytes(parsed, common.setup(None))
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), parsed)
