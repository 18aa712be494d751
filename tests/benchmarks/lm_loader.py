"""How many tokens a second one process of lm_multinode.py gets from its workers, beside what a GPU trains on.

    python tests/benchmarks/lm_loader.py [--workers 1 2 4 8]

The texts are paragraphs of Python's reference in random order, with lengths as in C4, in gzipped files of C4's format;
the tokenizer is trained on them. Each row reads until all queues have been emptied several times. A worker needs a core
of its own, and so does the process that trains. What a GPU needs is at 50% MFU, by the formula of the script.
"""

import argparse
import gzip
import json
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch

import transformers
from shared import print_table

import common
import lm_multinode

BATCHES = 64  # of a worker: its queue holds 8


def write_texts(folder: Path, texts: int = 8000) -> None:
    """A tokenizer, and eight files of so many texts, with 480 tokens on average, half of them below 260."""
    paragraphs = [part for topic in topics.values() for part in topic.split("\n\n")]
    tokenizer = common.train_tokenizer(paragraphs, 32_000, append_eos=False)
    tokenizer.save_pretrained(folder)
    tokens_each = len(tokenizer(" ".join(paragraphs))["input_ids"]) / len(paragraphs)
    choose = random.Random(0)
    for shard in range(8):
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            for _ in range(texts):
                count = round(choose.lognormvariate(-0.6, 1.1) * 480 / tokens_each)
                text = " ".join(choose.choices(paragraphs, k=max(1, count)))
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")


def parse(folder: Path, model: str, workers: int) -> argparse.Namespace:
    flags = ["--model", model, "--dataset", f"{folder}/*.json.gz", "--tokenizer", folder, "--seq-length", 1024]
    flags += ["--micro-batch-size", 8, "--num-workers", workers, "--peak-tflops", lm_multinode.PEAK_TFLOPS["H100"]]
    sys.argv = ["lm_multinode.py", *map(str, flags)]
    return lm_multinode.parse_args()


def measure(folder: Path, world: common.World, workers: int) -> float:
    """Tokens per second."""
    args = parse(folder, "150m", workers)
    source, _ = lm_multinode.load_texts(args)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batches = lm_multinode.batches_on_device(args, world, source, tokenizer, {})
    for _ in range(16 * workers):  # start, and fill and empty the queues
        next(batches)
    began = time.perf_counter()
    for _ in range(BATCHES * workers):
        next(batches)
    return BATCHES * workers * args.micro_batch_size * args.seq_length / (time.perf_counter() - began)


def needed(folder: Path, world: common.World, model: str) -> float:
    """Tokens per second of one H100 or H200, which compute bf16 equally fast, at 50% MFU."""
    args = parse(folder, model, 1)
    config, _ = lm_multinode.load_config_and_tokenizer(args, world, lm_multinode.load_texts(args)[0])
    config.vocab_size = 32_000
    return 0.5 / lm_multinode.mfu_per_token_per_second(args, world, config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
    alone = common.setup(None)
    with tempfile.TemporaryDirectory() as scratch:
        write_texts(Path(scratch))
        print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
        needs = {f"{name} needs": needed(Path(scratch), alone, name) for name in ("150m", "1b")}
        rates = ((workers, measure(Path(scratch), alone, workers)) for workers in options.workers)
        print_table({"workers": workers, "tokens/s": rate} | needs for workers, rate in rates)
    torch.distributed.destroy_process_group()
