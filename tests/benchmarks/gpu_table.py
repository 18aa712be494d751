"""What the scripts do on one GPU: speed, MFU and memory of a Llama and a T5, next to the predicted memory.

    python tests/benchmarks/gpu_table.py --peak-tflops 989              # all rows; 989 is an H100's peak in bf16
    python tests/benchmarks/gpu_table.py --parts lm --batch-sizes 16    # only some of the LM's rows, without MFU
    python tests/benchmarks/gpu_table.py --device cpu --tiny            # try it on a CPU, with tiny shapes

It needs one GPU and no network: weights are random, in the shapes of the real models, and texts of random words fill
every sequence. Each row is a run of the script's command line: 20 steps warm up and compile, then `--steps` count. A
step is one micro-batch. MFU is over the bf16 peak. will_it_fit.py traces neither FSDP1 nor `--compile`.
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import made_up
import shared
import will_it_fit

SOURCE = 512
TARGET = 152
VARIANTS = {
    "bf16": ("--precision", "bf16"),
    "bf16, compile": ("--precision", "bf16", "--compile"),
    "bf16, compile, units of 4": ("--precision", "bf16", "--compile", "--layers-per-unit", "4"),
    "bf16, recomputing": ("--precision", "bf16", "--activation-checkpointing"),
    "bf16, FSDP1": ("--precision", "bf16", "--fsdp-version", "1"),
    "tf32": ("--precision", "fp32"),
}
WARM_UP = 20  # steps


def prepare_lm(folder: Path, options) -> list:
    """Write texts and a tokenizer. Returns the flags of a run."""
    made_up.write_texts(folder, texts=25 if options.tiny else 100)
    flags = ["--model", "tiny" if options.tiny else options.lm, "--seq-length", 128 if options.tiny else 1024]
    flags += ["--dataset", f"{folder}/*.json.gz", "--tokenizer", folder]
    return [*flags, "--num-validation-texts", 20, "--validate-every", 0]


def prepare_t5(folder: Path, options) -> list:
    shape = "tiny" if options.tiny else "t5-base"
    count = int(1.2 * max(options.batch_sizes) * (WARM_UP + options.steps)) + 50
    made_up.write_articles(folder, count, shape, mean=2500, sigma=0.05)  # longer than a source
    flags = ["--model", folder, "--max-source-length", SOURCE, "--max-target-length", TARGET]
    return [*flags, "--dataset", folder / "articles.csv", "--num-train-samples", 0, "--no-run-validation"]


def measure(script: str, flags: list, output: Path) -> dict:
    """Speed and memory after the warm-up, or a note why there are none."""
    command = [sys.executable, shared.ROOT / script, *map(str, flags), "--output-dir", output]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode == 0:
        _, *records = [record for record in shared.read_metrics(output) if "tokens/s" in record]
        speed = statistics.harmonic_mean([record["tokens/s"] for record in records])
        return {"peak GiB": max(record["peak_gib"] for record in records), "tokens/s": speed}
    is_memory = re.search("OutOfMemoryError|out of memory", finished.stderr)
    return {"note": "out of memory" if is_memory else finished.stderr.strip().splitlines()[-1]}


def predict(script: str, flags: list, device: str) -> dict:
    attention = "cpu" if device == "cpu" else "gpu"
    with will_it_fit.traced(script, *flags, "--num-processes", 1, "--attention", attention) as run:
        return run.cost()


def rows(part: str, folder: Path, options):
    script = {"lm": "lm_multinode.py", "t5": "t5_fsdp.py"}[part]
    flags = {"lm": prepare_lm, "t5": prepare_t5}[part](folder, options)
    flags += ["--device", options.device, "--no-save-model"]
    flags += ["--max-steps", WARM_UP + options.steps, "--log-every", WARM_UP]
    one = predict(script, [*flags, "--micro-batch-size", 1, "--global-batch-size", 1], "cuda")
    flops = one["kernels"].model_flops / one["tokens"]
    for size, (name, extra_flags) in itertools.product(options.batch_sizes, VARIANTS.items()):
        if part == "lm" and "--fsdp-version" in extra_flags:
            continue
        run_flags = [*flags, "--micro-batch-size", size, "--global-batch-size", size, *extra_flags]
        result = measure(script, run_flags, folder / f"output-{size}-{name}")
        row = {part: name, "batch": size, "tokens/s": "-", "mfu": "-"}
        if "tokens/s" in result:
            row["tokens/s"] = speed = result["tokens/s"]
            if options.peak_tflops:
                row["mfu"] = speed * flops / (options.peak_tflops * 1e12)
        row["predicted GiB"] = "-"
        if "--compile" not in extra_flags and "--fsdp-version" not in extra_flags:
            row["predicted GiB"] = predict(script, run_flags, options.device)["peak"] / will_it_fit.GIB
        row |= {"peak GiB": result.get("peak GiB", "-"), "note": result.get("note", "")}
        print(row, file=sys.stderr)  # the table comes at the end
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["lm", "t5"], choices=("lm", "t5"))
    parser.add_argument("--lm", default="150m", help="the size of the Llama")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--steps", type=int, default=100, help="steps that count, a multiple of 20")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 64], help="micro-batches")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="the GPU's peak in bf16, for MFU")
    options = parser.parse_args()
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{shared.MACHINE}, one process, {device_name}\n", flush=True)
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            shared.print_table(rows(part, Path(folder), options))
            print()


if __name__ == "__main__":
    main()
