"""Samples per second of t5_fsdp.py against the training loop of the document it follows.

    python tests/benchmarks/t5_throughput.py
    python tests/benchmarks/t5_throughput.py --processes 1 --shape t5-base --batch-size 16    # on one GPU
    python tests/benchmarks/t5_throughput.py --against FOLDER    # tokens/s of the script in another checkout instead

Both train the same T5 (random weights) on the same articles of WikiHow's lengths (texts of 580 words on average,
summaries of 60), with FSDP1, FULL_SHARD and the same number of processes and samples a step. They take turns in one
run; medians over the turns are printed. Only the loop differs:

    document     texts padded to 512 and summaries to 150 tokens, tokenized one by one in __getitem__ by two workers,
                 AdamW without fusion, `.item()` in every step
    t5_fsdp.py   its own train_step and loader

--against runs both checkouts' t5_fsdp.py by the command line, with their defaults.
"""

import argparse
import csv
import functools
import gc
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

from shared import Words, compare_checkouts, print_table
from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import common
import t5_fsdp

SHAPES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
}


def write_wikihow_like(folder: Path, count: int, shape: str) -> None:
    """A CSV with log-normal lengths around WikiHow's averages, a tokenizer for it, and the model."""
    words = Words(20_000)
    with open(folder / "articles.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["headline", "title", "text"])
        rows = [[words.text(60, 0.6), f"How to {number}x", words.text(580, 0.7)] for number in range(count)]
        writer.writerows(rows)
    common.train_tokenizer([row[2] for row in rows[:300]], 8192, append_eos=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SHAPES[shape])
    T5ForConditionalGeneration(config).save_pretrained(folder)


class DocumentDataset(Dataset):
    """Tokenizes a row whenever it is asked for it, to full length, like the document's `wikihow` class."""

    def __init__(self, rows, tokenizer):
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        source = self.tokenizer([row["text"]], max_length=512, **options)
        target = self.tokenizer([row["summary"]], max_length=150, **options)
        return {
            "source_ids": source["input_ids"].squeeze(),
            "source_mask": source["attention_mask"].squeeze(),
            "target_ids": target["input_ids"].squeeze(),
        }


def make_document(args, world, articles, tokenizer, config):
    """The body of the document's train(), for a number of steps."""
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), t5_fsdp.PRECISIONS[args.precision][0])
    model = FSDP(
        t5_fsdp.load_model(args, config),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=MixedPrecision(**dtypes),
        device_id=world.device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataset = DocumentDataset(articles, tokenizer)
    sampler = DistributedSampler(dataset, rank=world.rank, num_replicas=world.size, shuffle=True)
    batches = iter(DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=2))

    def train(steps: int) -> None:
        model.train()
        fsdp_loss = torch.zeros(2, device=world.device)
        for batch in itertools.islice(batches, steps):
            ids, mask, labels = (batch[name].to(world.device) for name in ("source_ids", "source_mask", "target_ids"))
            optimizer.zero_grad()
            loss = model(input_ids=ids, attention_mask=mask, labels=labels)["loss"]
            loss.backward()
            optimizer.step()
            fsdp_loss[0] += loss.item()
            fsdp_loss[1] += len(batch)
        dist.all_reduce(fsdp_loss)

    return train


def make_ours(args, world, articles, tokenizer, config):
    """The loop of t5_fsdp.py's main()."""
    model = t5_fsdp.shard_with_fsdp1(args, world, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    with common.first_on_node(world):
        lengths = {"tokenizer": tokenizer, "source_length": 512, "target_length": 150}
        train_set = articles.map(t5_fsdp.tokenize, batched=True, fn_kwargs=lengths)
    lengths = torch.tensor([len(ids) for ids in train_set["input_ids"]])
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    batches = t5_fsdp.batches_on_device(train_set, t5_fsdp.split_epoch(args, world, lengths, 1), collate, world)
    stop = common.StopRequest()

    def train(steps: int) -> None:
        model.train()
        window = torch.zeros(3, device=world.device)
        for batch in itertools.islice(batches, steps):
            window += t5_fsdp.train_step(args, world, model, optimizer, scaler, batch)[0]
            stop.answered()
            stop.ask()
        common.sum_over_ranks(window)

    return train


def take_turns(world, options: argparse.Namespace, folder: Path, precision: str) -> dict[str, list[float]]:
    """Samples per second of every turn of both loops."""
    sys.argv = ["t5_fsdp.py", "--model", str(folder), "--precision", precision, "--fsdp-version", "1"]
    sys.argv += ["--batch-size", str(options.batch_size)]
    args = t5_fsdp.parse_args()
    with common.first_on_node(world):
        articles, _ = common.load_articles(str(folder / "articles.csv"), "text", "headline", 0.75)
    config, tokenizer = t5_fsdp.load_config_and_tokenizer(args, world, articles)
    makers = {"document": make_document, "t5_fsdp.py": make_ours}
    loops = {name: make(args, world, articles, tokenizer, config) for name, make in makers.items()}
    rates = {name: [] for name in loops}
    for turn, (name, train) in itertools.product(range(options.turns + 1), loops.items()):
        dist.barrier()
        began = time.perf_counter()
        train(options.steps if turn else 1)
        dist.barrier()
        if turn:  # the first one warms up
            samples = options.steps * args.batch_size * world.size
            rates[name].append(samples / (time.perf_counter() - began))
    return rates


def worker(options: argparse.Namespace, world: common.World) -> None:
    """One process: let the loops take turns in each precision, print rank 0's table."""
    rows = []
    for precision in options.precisions:
        rates = take_turns(world, options, options.folder, precision)
        gc.collect()
        theirs, ours = (statistics.median(some) for some in rates.values())
        row = {
            "precision": precision,
            "document samples/s": theirs,
            "t5_fsdp.py samples/s": ours,
            "ratio": ours / theirs,
        }
        pairs = zip(*rates.values(), strict=True)
        rows.append(row | {"all turns": " ".join(f"{one:.2f}/{other:.2f}" for one, other in pairs)})
    if world.rank == 0:
        print(
            f"torch {torch.__version__}, {world.device.type}, {platform.machine()}, {os.cpu_count()} cores, "
            f"{world.size} processes, {options.shape}, batch {options.batch_size} per process"
        )
        print_table(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="turns of each loop and precision, after one to warm up")
    parser.add_argument("--steps", type=int, default=7, help="steps in a turn")
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--batch-size", type=int, default=4, help="articles per process and step")
    parser.add_argument("--precisions", default=["fp32", "bf16"], type=lambda text: text.split(","))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", type=Path, help="another checkout, to compare its t5_fsdp.py with this one")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the processes
    options = parser.parse_args()
    if options.folder:
        options.fsdp_version, options.save_model, options.num_processes = 1, False, 0
        common.run(worker, options)
        sys.exit()
    with tempfile.TemporaryDirectory() as scratch:
        steps = 2 * options.steps if options.against else 1 + options.turns * options.steps
        count = int(1.2 * options.batch_size * options.processes * (steps + 1))  # some are held out
        write_wikihow_like(Path(scratch), max(100, count), options.shape)
        if options.against:
            flags = ["--model", scratch, "--dataset", f"{scratch}/articles.csv", "--num-train-samples", 0]
            flags += ["--batch-size", options.batch_size, "--device", options.device, "--no-run-validation"]
            for precision in options.precisions:
                print(f"\n{precision}")
                flags = [*flags, "--precision", precision]
                turns = {"processes": options.processes, "turns": options.turns, "steps": options.steps}
                compare_checkouts(options.against, "t5_fsdp.py", *flags, **turns)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc_per_node", str(options.processes), *sys.argv, "--folder", scratch]
            sys.exit(subprocess.run(command).returncode)
