"""Samples per second of t5_fsdp.py against the training loop of the document it follows.

    python tests/benchmarks/t5_throughput.py
    python tests/benchmarks/t5_throughput.py --processes 1 --shape t5-base --batch-size 16    # on one GPU

Both train the same T5 (random weights) on the same articles of WikiHow's lengths (texts of 580 words on average,
summaries of 60), with FSDP1, FULL_SHARD and the same number of processes and samples a step. They take turns in one
run; medians over the turns are printed. Only the loop differs:

    document     texts padded to 512 and summaries to 150 tokens, tokenized one by one in __getitem__ by two workers,
                 AdamW without fusion, `.item()` in every step
    t5_fsdp.py   its own train_step and loader
"""

import argparse
import csv
import functools
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shared
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from inside import parse, set_up, t5_trainer, train_tokenizer

SHAPES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "tiny": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


def write_articles(folder: Path, count: int, shape: str, mean: int = 580, sigma: float = 0.7) -> None:
    """A CSV with texts of a log-normal length, summaries a tenth as long, a tokenizer for it, and the model."""
    words = shared.Words(20_000)
    texts = [words.text(mean, sigma) for _ in range(count)]
    with open(folder / "articles.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["headline", "title", "text"])
        for number, text in enumerate(texts):
            writer.writerow([words.text(mean / 10, sigma), f"How to {number}x", text])
    train_tokenizer(texts[:300], 8192, append_eos=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SHAPES[shape])
    T5ForConditionalGeneration(config).save_pretrained(folder)


class DocumentDataset(Dataset):
    """Tokenizes a row whenever it is asked for it, to full length, like the document's `wikihow` class."""

    def __init__(self, path: Path, tokenizer) -> None:
        with open(path, newline="") as file:
            self.rows = list(csv.DictReader(file))
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        source = self.tokenizer([row["text"]], max_length=512, **options)
        target = self.tokenizer([row["headline"]], max_length=150, **options)
        return {
            "source_ids": source["input_ids"].squeeze(),
            "source_mask": source["attention_mask"].squeeze(),
            "target_ids": target["input_ids"].squeeze(),
        }


def document_step(args, world, tokenizer):
    """A function that makes a step of the document's train()."""
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = FSDP(
        AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype=torch.float32).train(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        device_id=world.device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataset = DocumentDataset(args.dataset, tokenizer)
    sampler = DistributedSampler(dataset, rank=world.rank, num_replicas=world.size, shuffle=True)
    batches = iter(DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=2))

    def step() -> None:
        batch = {name: tensor.to(world.device) for name, tensor in next(batches).items()}
        optimizer.zero_grad()
        output = model(input_ids=batch["source_ids"], attention_mask=batch["source_mask"], labels=batch["target_ids"])
        output["loss"].backward()
        optimizer.step()
        output["loss"].item()

    return step


def worker(options, flags: list) -> None:
    """One process: let the loops take turns in each precision, print rank 0's table."""
    rows = []
    world = None
    for precision in options.precisions:
        args = parse("t5_fsdp.py", *flags, "--precision", precision, "--fsdp-version", 1)
        world = world or set_up(args)
        tokenizer, our_step = t5_trainer(args, world)
        loops = {"document": document_step(args, world, tokenizer), "t5_fsdp.py": our_step}
        rates = {name: [] for name in loops}
        for _, (name, step) in itertools.product(range(options.turns + 1), loops.items()):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(options.steps):
                step()
            dist.barrier()
            rates[name].append(options.steps * args.batch_size * world.size / (time.perf_counter() - began))

        row = {"precision": precision}
        for name, some in rates.items():
            row[f"{name} samples/s"] = statistics.median(some[1:])  # the first turn warms up
        row["ratio"] = row["t5_fsdp.py samples/s"] / row["document samples/s"]
        row["all turns"] = ", ".join(" ".join(f"{rate:.2f}" for rate in some[1:]) for some in rates.values())
        rows.append(row)

    if world.rank == 0:
        where = f"torch {torch.__version__}, {world.device.type}, {platform.machine()}, {os.cpu_count()} cores"
        print(f"{where}, {world.size} processes, {options.shape}, batch {options.batch_size} per process")
        shared.print_table(rows)
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # not a tidy end: the models would be freed after the process group, which aborts


def flags_of(options, folder: Path) -> list:
    flags = ["--model", folder, "--dataset", folder / "articles.csv", "--num-train-samples", 0]
    return [*flags, "--batch-size", options.batch_size, "--device", options.device, "--no-run-validation"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="turns of each loop and precision, after one to warm up")
    parser.add_argument("--steps", type=int, default=7, help="steps in a turn")
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--batch-size", type=int, default=4, help="articles per process and step")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the processes
    options = parser.parse_args()
    if options.folder:
        worker(options, flags_of(options, options.folder))
    with tempfile.TemporaryDirectory() as scratch:
        steps = (options.turns + 1) * options.steps
        write_articles(Path(scratch), int(1.2 * options.batch_size * options.processes * steps) + 100, options.shape)
        command = [*shared.torchrun(options.processes), *sys.argv, "--folder", scratch]
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
