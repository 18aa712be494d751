"""Samples per second and peak memory of the digit networks: local training, FSDP2 and FSDP1 in alternating turns.

    python tests/benchmarks/mnist_memory_speed.py [--turns 3] [--processes 2]

Every turn is a run of mnist_fsdp.py in new processes, one epoch of 6,400 images (layers, deep: 1,280). A second table
has what each process of the deep network holds on 1, 2 and 4 processes.
"""

import argparse
import statistics

from shared import print_table, run_script

VARIANTS = {
    "local": ["--mode", "local"],
    "FSDP2": ["--mode", "fsdp", "--fsdp-version", 2],
    "FSDP1": ["--mode", "fsdp", "--fsdp-version", 1],
}


def measure(network: str, variant: str, processes: int, *flags) -> dict:
    """What mnist_fsdp.py reports of one epoch."""
    flags = ["--model", network, *VARIANTS[variant], "--num-processes", processes, "--epochs", 1, *flags]
    [row] = run_script("mnist_fsdp.py", *flags)
    return row


def compare(processes: int, number: int):
    """Yield the rows of the first table."""
    for network in ("layers", "deep", "shallow"):
        turns = [{name: measure(network, name, processes) for name in VARIANTS} for _ in range(number)]
        for name in VARIANTS:
            speed, local = (statistics.median(turn[mode]["samples/s"] for turn in turns) for mode in (name, "local"))
            row = {"network": network, "mode": name, "processes": turns[0][name]["processes"], "samples/s": speed}
            row |= {"ratio to local": speed / local}
            row["peak GB per process"] = statistics.median(turn[name]["peak_gb"] for turn in turns)
            yield row | {"all turns, samples/s": " ".join(f"{turn[name]['samples/s']:.0f}" for turn in turns)}


def divide():
    """Yield the rows of the second."""
    whole = None
    for processes in (1, 2, 4):
        row = measure("deep", "FSDP2", processes, "--num-train-samples", 512)
        state = round(row["state_gb"] * 2**30)
        whole = whole or state
        yield {"processes": processes, "state bytes": state, "of one process": state / whole, "peak GB": row["peak_gb"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print_table(compare(options.processes, options.turns))
    print()
    print_table(divide())
