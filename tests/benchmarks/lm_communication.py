"""What lm_multinode.py's strategies send between two nodes, and what a slow network makes of it.

    python tests/benchmarks/lm_communication.py [--turns 3] [--links "full speed" "1 Gbit/s"]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), train a Llama of 34 million parameters.
The first table compares the bytes that cross from one node to the other in an optimizer step, by the network
interface's counter, with the formula, and the command fails if they differ by more than 5%. The second has the seconds
of a step that `--compare-strategies` reports at the full speed of the cable, at 1 Gbit/s and at 100 Mbit/s in both
directions, and where each packet takes 50 ms: medians over interleaved turns. DILOCO synchronizes every 50 steps, which
all share its bytes and its time.
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

import shared
import transformers
from two_nodes import CABLE, two_nodes

from inside import LM_STRATEGIES, LmOuterOptimizer, lm_trainer, parse, set_up

LINKS = {"full speed": {}, "1 Gbit/s": {"rate": "1gbit"}, "100 Mbit/s": {"rate": "100mbit"}, "50 ms": {"delay": 0.05}}
TOLERANCE = 0.05
LOCAL_STEPS = 50
FLAGS = ["--seq-length", 64, "--micro-batch-size", 1, "--num-validation-texts", 20, "--precision", "fp32"]
FLAGS += ["--device", "cpu", "--local-steps", LOCAL_STEPS]


def bytes_that_leave(config, strategy: str, micro_batches: int) -> float:
    """Of one of two processes on a node, in a step in fp32: the comments at lm_multinode.py's RESHARD, exactly.

    A hybrid's replica is a node. A ring leaves a node once, so a node sends for each ring what one process does.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers, whole = (4 * sum(p.numel() for p in part.parameters()) for part in (model.model.layers, model))
    if strategy == "NO_SHARD":  # one ring of all processes
        return 2 * 3 / 4 * whole
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        # After its forward FULL_SHARD frees the layers but not what is before and after them.
        gathered = micro_batches * (whole + layers) if strategy == "FULL_SHARD" else whole
        # gloo has no reduce-scatter: PyTorch all-reduces and drops the rest, which is twice as much.
        return 3 / 4 * (gathered + 2 * whole)
    # Each of the two shards has a ring of two replicas.
    every = LOCAL_STEPS if strategy == "DILOCO" else 1
    return 2 * (2 * 1 / 2 * whole / 2) / every


def count_bytes(options) -> None:
    """Print the first table. One of four processes."""
    counter = Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")

    def count(function, *arguments) -> float:
        """Bytes that leave this node in a call. Nobody else sends meanwhile, but for the barriers' few bytes."""
        dist.barrier()
        before = int(counter.read_text())
        dist.barrier()
        function(*arguments)
        dist.barrier()
        return int(counter.read_text()) - before

    rows = []
    world = None
    for strategy, micro_batches in itertools.product(LM_STRATEGIES, (1, 4)):
        flags = ["--model", options.model, "--sharding-strategy", strategy]
        args = parse("lm_multinode.py", *FLAGS, *flags, "--global-batch-size", 4 * micro_batches)
        world = world or set_up(args)
        config = transformers.AutoConfig.from_pretrained(args.model)
        tokens = torch.full((1, args.seq_length), world.rank)
        batches = itertools.repeat(({"input_ids": tokens, "labels": tokens}, None))
        model, step = lm_trainer(args, world, config, batches)
        _, *crossed = (count(step) for _ in range(3))  # the first step connects
        crossed = torch.tensor(sum(crossed) / 2)
        if strategy == "DILOCO":
            outer = LmOuterOptimizer(args, world, model)
            _, *synchronizations = (count(outer.step) for _ in range(3))
            crossed += sum(synchronizations) / 2 / LOCAL_STEPS
            del outer
        del model, step
        gc.collect()
        dist.all_reduce(crossed)
        measured = crossed.item() / world.size / 1e6
        formula = bytes_that_leave(config, strategy, micro_batches) / 1e6
        row = {"strategy": strategy, "micro-batches": micro_batches, "MB that crossed": measured}
        rows.append(row | {"MB by the formula": formula, "ratio": measured / formula})
    if world.rank == 0:
        shared.print_table(rows)
    dist.destroy_process_group()
    sys.exit(3 if any(abs(row["ratio"] - 1) > TOLERANCE for row in rows) else 0)


def launch(nodes, script: str, *flags) -> str:
    """Run a script on both nodes; what it prints."""
    finished = nodes.torchrun(script, *flags, timeout=3600)
    if any(one.returncode for one in finished):
        print("".join(one.stdout for one in finished), finished[0].stderr[-5000:])
        sys.exit(f"{script} failed, or the formula is off by more than {TOLERANCE:.0%}")
    return "".join(one.stdout for one in finished)


def main(folder: Path, options) -> None:
    flags = ["--model", shared.write_llama(folder, list(topics.values()))]
    versions = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{versions}, 2 nodes of 2 processes, fp32\n", flush=True)
    if options.bytes:
        with two_nodes() as nodes:
            print(launch(nodes, "tests/benchmarks/lm_communication.py", *flags), flush=True)

    seconds: dict[str, dict[str, list[float]]] = {}
    for turn, link in itertools.product(range(options.turns), options.links):
        output = folder / f"{turn} {link}".replace("/", "-")
        compare = ["--compare-strategies", "--global-batch-size", 4, "--output-dir", output]
        with two_nodes(LINKS[link].get("delay", 0)) as nodes:
            nodes.limit(LINKS[link].get("rate"))
            launch(nodes, "lm_multinode.py", *FLAGS, *flags, *compare)
        for row in shared.read_metrics(output):
            seconds.setdefault(row["strategy"], {}).setdefault(link, []).append(row["step_seconds"])
    rows = []
    for strategy, links in seconds.items():
        row = {"strategy": strategy}
        for link, times in links.items():
            row[f"seconds per step, {link}"] = statistics.median(times)
            row[f"range, {link}"] = f"{shared.cell(min(times))} to {shared.cell(max(times))}"
        rows.append(row)
    shared.print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each link, 0 for bytes only")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="without the first table")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # for the processes on the nodes
    options = parser.parse_args()
    if "RANK" in os.environ:
        count_bytes(options)
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), options)
