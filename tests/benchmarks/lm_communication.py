"""What lm_multinode.py's strategies send between two nodes, and what a slow network makes of it, beside the prediction.

    python tests/benchmarks/lm_communication.py [--turns 3] [--links 1 0.1]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), train a Llama of 15 million parameters.
The first table compares the bytes that leave a node in an optimizer step, by the network interface's counter, with
those that will_it_fit.py counts. The second has the seconds of a step that `--compare-strategies` reports at the full
speed of the cable and with links of some Gbit/s, medians over interleaved turns, beside the bounds that will_it_fit.py
would print: the computing is a step at full speed. DILOCO synchronizes every 50 steps, which all share its bytes and
its time. The command fails where bytes differ by more than 1%.
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
import will_it_fit
from two_nodes import CABLE, two_nodes

from inside import LM_STRATEGIES, LmOuterOptimizer, lm_trainer, parse, set_up

TOLERANCE = 0.01
LOCAL_STEPS = 50
FLAGS = ["--seq-length", 64, "--micro-batch-size", 1, "--num-validation-texts", 20, "--precision", "fp32"]
FLAGS += ["--device", "cpu", "--local-steps", LOCAL_STEPS]


def predicted_bytes(model: Path, strategy: str, micro_batches: int) -> float:
    """That leave a node in a step, from the collectives of a trace."""
    will_it_fit.ROUNDS["_reduce_scatter_base_"] = 2  # gloo makes an all-reduce of it, and drops the rest
    flags = [*FLAGS, "--model", model, "--sharding-strategy", strategy]
    flags += ["--num-processes", 4, "--global-batch-size", 4 * micro_batches]
    options = argparse.Namespace(vocabulary=0, per_node=2, attention="cpu")
    with will_it_fit.traced("lm_multinode.py", flags, options) as run:
        return 2 * run.cost()["between"]


def count_bytes(options) -> None:
    """Measure one strategy; one of four processes. Rank 0 prints the bytes that leave a node."""
    counter = Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")

    def count(function, *arguments) -> float:
        """Bytes that leave this node in a call. Nobody else sends meanwhile, but for the barriers' few bytes."""
        dist.barrier()
        before = int(counter.read_text())
        dist.barrier()
        function(*arguments)
        dist.barrier()
        return int(counter.read_text()) - before

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
        if world.rank == 0:
            print("bytes", strategy, micro_batches, crossed.item() / world.size, flush=True)
    dist.destroy_process_group()


def launch(nodes, script: str, *flags) -> str:
    """Run a script on both nodes; what it prints."""
    finished = nodes.torchrun(script, *flags, timeout=3600)
    if any(one.returncode for one in finished):
        sys.exit("".join(one.stdout for one in finished) + finished[0].stderr[-5000:])
    return "".join(one.stdout for one in finished)


def compare_bytes(nodes, model: Path) -> dict[str, float]:
    """Print the first table. Returns the predicted bytes of a step of one micro-batch."""
    predictions = {}
    rows = []
    for line in launch(nodes, "tests/benchmarks/lm_communication.py", "--model", model).splitlines():
        if not line.startswith("bytes "):
            continue
        _, strategy, micro_batches, measured = line.split()
        predicted = predicted_bytes(model, strategy, int(micro_batches))
        predictions.setdefault(strategy, predicted)
        row = {"strategy": strategy, "micro-batches": micro_batches, "MB": float(measured) / 1e6}
        rows.append(row | {"predicted": predicted / 1e6, "ratio": float(measured) / predicted})
    shared.print_table(rows)
    if any(abs(row["ratio"] - 1) > TOLERANCE for row in rows):
        sys.exit(f"off by more than {TOLERANCE:.0%}")
    return predictions


def compare_times(model: Path, predictions: dict, folder: Path, options) -> None:
    """Print the second table."""
    seconds = {}
    for turn, gbits in itertools.product(range(options.turns), (None, *options.links)):
        output = folder / f"{turn}-{gbits}"
        compare = ["--model", model, "--compare-strategies", "--global-batch-size", 4, "--output-dir", output]
        with two_nodes() as nodes:
            nodes.limit(f"{gbits * 1000:.0f}mbit" if gbits else None)
            launch(nodes, "lm_multinode.py", *FLAGS, *compare)
        for row in shared.read_metrics(output):
            seconds.setdefault(row["strategy"], {}).setdefault(gbits, []).append(row["step_seconds"])

    rows = []
    for strategy, times in seconds.items():
        computing = statistics.median(times[None])
        row = {"strategy": strategy, "full speed": computing}
        for gbits in options.links:
            sending = predictions[strategy] * 8 / (gbits * 1e9)
            row[f"{gbits} Gbit/s"] = statistics.median(times[gbits])
            row[f"bounds, {gbits} Gbit/s"] = f"{max(computing, sending):.2f} to {computing + sending:.2f}"
            row[f"all turns, {gbits} Gbit/s"] = " ".join(f"{some:.2f}" for some in times[gbits])
        rows.append(row)
    shared.print_table(rows)


def main(folder: Path, options) -> None:
    model = shared.write_llama(folder, list(topics.values()), layers=2)
    versions = f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{versions}, 2 nodes of 2 processes, fp32\n", flush=True)
    with two_nodes() as nodes:
        predictions = compare_bytes(nodes, model)
    print(flush=True)
    compare_times(model, predictions, folder, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns of each link")
    parser.add_argument("--links", nargs="+", type=float, default=[1, 0.1], help="Gbit/s in each direction")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # for the processes on the nodes
    options = parser.parse_args()
    if "RANK" in os.environ:
        count_bytes(options)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch), options)
