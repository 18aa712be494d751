"""Samples per second of t5_fsdp.py against the training loop of the document it follows.

    python tests/benchmarks/t5_throughput.py
    python tests/benchmarks/t5_throughput.py --processes 1 --shape t5-base --batch-size 16    # on one GPU

Both train the same T5 (random weights) on the same articles of WikiHow's lengths (texts of 580 words on average,
summaries of 60), with FSDP1, FULL_SHARD and the same number of processes and samples a step. They take turns in one
run; medians over the turns are printed. Only the loop differs:

    document     texts padded to 512 and summaries to 150 tokens, tokenized one by one in __getitem__ by two workers,
                 AdamW without fusion, `.item()` in every step
    t5_fsdp.py   its own train_one_epoch
"""

import argparse
import csv
import functools
import gc
import os
import platform
import random
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

sys.path.insert(0, str(Path(__file__).parents[2]))
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration, logging

import common
import t5_fsdp

VOCABULARY = 32128
SHAPES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
}


def write_wikihow_like(folder: Path, count: int, shape: str) -> Path:
    """A CSV of random words with log-normal lengths around WikiHow's averages, and a T5 tokenizer-like BPE for it."""
    choose = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "ay", "er", "in")]
    words = ["".join(choose.choices(syllables, k=choose.choice((1, 2, 2, 3)))) for _ in range(20000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]  # Zipf, as in natural language

    def text(mean: float, sigma: float) -> str:
        length = max(5, int(choose.lognormvariate(0, sigma) * mean / 2.718 ** (sigma**2 / 2)))
        return " ".join(choose.choices(words, weights, k=length))

    rows = [{"headline": text(60, 0.6), "title": f"How to {i}x", "text": text(580, 0.7)} for i in range(count)]
    with open(folder / "articles.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["headline", "title", "text"])
        writer.writeheader()
        writer.writerows(rows)
    world = common.setup_distributed("cpu")
    common.train_tokenizer(world, (row["text"] for row in rows[:300]), vocab_size=8192).save_pretrained(folder)
    dist.destroy_process_group()
    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SHAPES[shape])
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder / "articles.csv"


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


def document_steps(model, optimizer, batches, device: torch.device, steps: int) -> None:
    """The body of the document's train()."""
    model.train()
    fsdp_loss = torch.zeros(2, device=device)
    for _ in range(steps):
        batch = {name: tensor.to(fsdp_loss.device) for name, tensor in next(batches).items()}
        optimizer.zero_grad()
        output = model(input_ids=batch["source_ids"], attention_mask=batch["source_mask"], labels=batch["target_ids"])
        loss = output["loss"]
        loss.backward()
        optimizer.step()
        fsdp_loss[0] += loss.item()
        fsdp_loss[1] += len(batch)
    dist.all_reduce(fsdp_loss)


def allocate_like(name: str) -> None:
    """t5_fsdp.py tells glibc to keep freed memory. The document's turns get what glibc itself adapts to."""
    ours = name == "t5_fsdp"
    common.tune_malloc({common.M_MMAP_MAX: 0 if ours else 65536, common.M_TRIM_THRESHOLD: 2**31 - 1 if ours else 2**26})


def take_turns(
    world: common.World, options: argparse.Namespace, folder: Path, precision: str
) -> dict[str, list[float]]:
    """Samples per second of every turn of both loops."""
    sys.argv = [
        "t5_fsdp.py",
        "--model",
        str(folder),
        "--dataset",
        str(folder / "articles.csv"),
        "--precision",
        precision,
    ]
    sys.argv += ["--fsdp-version", "1", "--num-train-samples", "0", "--log-every", "1000"]
    sys.argv += ["--batch-size", str(options.batch_size)]
    args = t5_fsdp.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = T5Config.from_pretrained(folder)
    data = common.first_process_first(
        world, lambda: common.load_summarization_data(args.dataset, "text", "headline", 0, 8, folder)
    )

    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), t5_fsdp.PRECISIONS[precision][0])
    theirs = FSDP(
        T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={t5_fsdp.T5Block}),
        mixed_precision=MixedPrecision(**dtypes),
        device_id=world.device,
    )
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=args.lr)
    dataset = DocumentDataset(data.train, tokenizer)
    sampler = DistributedSampler(dataset, rank=world.rank, num_replicas=world.world_size, shuffle=True)
    batches = iter(DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=2))

    ours, our_optimizer = t5_fsdp.build(args, world, t5_fsdp.load_model(args, config, world))
    rows = common.first_process_first(world, lambda: common.tokenize(data.train, tokenizer, "", 512, 150))
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)
    progress, window = t5_fsdp.Progress(run_date=""), torch.tensor(t5_fsdp.EMPTY_WINDOW, device=world.device)
    silent = argparse.Namespace(report=lambda *_, **__: None)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    stop_requests = common.StopRequests(world)

    def our_steps(steps: int) -> None:
        args.max_steps = progress.step + steps
        training = (our_optimizer, scaler, rows, collate, progress, window, silent, stop_requests, None)
        t5_fsdp.train_one_epoch(args, world, ours, *training)

    loops = {
        "document": lambda steps: document_steps(theirs, their_optimizer, batches, world.device, steps),
        "t5_fsdp": our_steps,
    }
    rates = {name: [] for name in loops}
    for turn in range(options.turns + 1):
        for name, loop in loops.items():
            dist.barrier()
            began = time.perf_counter()
            allocate_like(name)
            loop(options.steps if turn else 1)
            dist.barrier()
            if turn:  # the first one warms up
                samples = options.steps * args.batch_size * world.world_size
                rates[name].append(samples / (time.perf_counter() - began))
    return rates


def worker(options: argparse.Namespace, folder: Path) -> None:
    """One process: let the loops take turns in each precision, print rank 0's table."""
    world = common.setup_distributed(options.device)
    results = {}
    for precision in options.precisions.split(","):
        results[precision] = take_turns(world, options, folder, precision)
        gc.collect()
    if world.rank == 0:
        print(
            f"torch {torch.__version__}, {world.device.type}, {platform.machine()}, {os.cpu_count()} cores, "
            f"{world.world_size} processes, {options.shape}, batch {options.batch_size} per process"
        )
        print("| precision | document samples/s | t5_fsdp.py samples/s | ratio | all turns |\n|---|---|---|---|---|")
        for precision, rates in results.items():
            theirs, ours = statistics.median(rates["document"]), statistics.median(rates["t5_fsdp"])
            turns = " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(rates["document"], rates["t5_fsdp"], strict=True))
            print(f"| {precision} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} | {turns} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="turns of each loop and precision, after one to warm up")
    parser.add_argument("--steps", type=int, default=7, help="steps in a turn")
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--batch-size", type=int, default=4, help="articles per process and step")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--device", default="auto")
    parsed = parser.parse_args()
    logging.set_verbosity_error()
    if "RANK" in os.environ:
        worker(parsed, Path(os.environ["BENCHMARK_FOLDER"]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            write_wikihow_like(Path(scratch), 100 * parsed.batch_size, parsed.shape)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(parsed.processes)]
            environment = {**os.environ, "BENCHMARK_FOLDER": scratch}
            sys.exit(subprocess.run([*torchrun, *sys.argv], env=environment).returncode)
