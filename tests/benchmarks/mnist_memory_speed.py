"""Samples per second and peak memory of both digit networks: local training, FSDP2 and FSDP1 in alternating turns.

    python tests/benchmarks/mnist_memory_speed.py [--turns 3] [--processes 2]

Every turn is a run of mnist_fsdp.py in new processes. A second table has what each process of the deep network holds on
1, 2 and 4 processes.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import reports, write_mnist

ROOT = Path(__file__).parent.parent.parent
IMAGES = {"shallow": 6400, "deep": 1280}
VARIANTS = {
    "local": ("--mode", "local"),
    "FSDP2": ("--mode", "fsdp", "--fsdp-version", 2),
    "FSDP1": ("--mode", "fsdp", "--fsdp-version", 1),
}


def measure(data_dir, network, images, variant, processes):
    """The result that mnist_fsdp.py reports of one epoch."""
    with tempfile.TemporaryDirectory() as output:
        flags = ["--model", network, "--num-train-samples", images, *VARIANTS[variant], "--num-processes", processes]
        flags += ["--dataset", "mnist", "--data-dir", data_dir, "--batch-size", 128, "--num-workers", 0, "--epochs", 1]
        command = [sys.executable, ROOT / "mnist_fsdp.py", *flags, "--output-dir", output]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        [result] = reports(output, "result")
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = write_mnist(Path(folder), num_train=max(IMAGES.values()), num_test=100)
        print(
            "| network | mode | processes | samples/s | ratio to local | peak GB per process | all turns, samples/s |"
        )
        print("|---|---|---|---|---|---|---|")
        for network, images in IMAGES.items():
            turns = [
                {name: measure(data_dir, network, images, name, args.processes) for name in VARIANTS}
                for _ in range(args.turns)
            ]
            speeds = {name: [turn[name]["samples_per_second"] for turn in turns] for name in VARIANTS}
            local = statistics.median(speeds["local"])
            for name, all_speeds in speeds.items():
                speed = statistics.median(all_speeds)
                peak = statistics.median(turn[name]["peak_memory_gb"] for turn in turns)
                shown = " ".join(f"{value:.0f}" for value in all_speeds)
                processes = turns[0][name]["processes"]
                cells = f"{speed:.0f} | {speed / local:.2f} | {peak:.2f} | {shown}"
                print(f"| {network} | {name} | {processes} | {cells} |", flush=True)
        print("\n| processes | parameters | state bytes | of one process | peak GB |\n|---|---|---|---|---|")
        whole = None
        for processes in (1, 2, 4):
            result = measure(data_dir, "deep", 128 * 4, "FSDP2", processes)
            state = result["state_bytes"]
            whole = whole or state
            share = f"{state / whole:.4f}"
            print(
                f"| {processes} | {result['parameters']:,} | {state:,} | {share} | {result['peak_memory_gb']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
