"""How many tokens a second one process of lm_multinode.py gets from its worker, beside what a GPU trains on.

    python tests/benchmarks/lm_loader.py

The texts are excerpts of Python's reference, with lengths as in C4, in gzipped files of C4's format;
the tokenizer is trained on them. A step has 16 micro-batches, each from a stream of its own with eight files: one
process has all 16 streams, and one of eight has two. Many micro-batches are read, so that each stream packs several
blocks of texts. The worker needs a core of its own, and so does the process that trains. What a GPU needs is at 50%
MFU, by the formula of the script.
"""

import argparse
import gzip
import itertools
import json
import math
import os
import platform
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

import shared

from inside import (
    MODULES,
    PEAK_TFLOPS,
    lm_config,
    lm_loader,
    lm_mfu_per_token_per_second,
    lm_texts,
    parse,
    train_tokenizer,
    world_of,
)


def write_texts(folder: Path, texts: int) -> None:
    """A tokenizer, and 128 files of so many texts, with 480 tokens on average, half of them below 260."""
    tokenizer = train_tokenizer(topics.values(), 32_000, append_eos=False)
    tokenizer.save_pretrained(folder)
    sample = " ".join(topics.values())
    mean = 480 * len(sample.split()) / len(tokenizer(sample, verbose=False)["input_ids"])
    made_up = shared.made_up_texts(128 * texts, mean, sigma=1.1)
    for shard in range(128):
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            for text in itertools.islice(made_up, texts):
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")


def args_of(folder: Path, model: str):
    flags = ["--model", model, "--dataset", f"{folder}/*.json.gz", "--tokenizer", folder, "--seq-length", 1024]
    flags += ["--global-batch-size", 128, "--micro-batch-size", 8, "--peak-tflops", PEAK_TFLOPS["H100"]]
    return parse("lm_multinode.py", *flags, "--num-validation-texts", 1)


def rows(folder: Path, micro_batches: int):
    needs = {}
    for model in ("150m", "1b"):  # of one H100 or H200, which compute bf16 equally fast
        args = args_of(folder, model)
        config, tokenizer = lm_config(args)
        config.vocab_size = 32_000
        empty = MODULES["lm_multinode.py"].make_meta_model(config)
        needs[f"{model} needs"] = 0.5 / lm_mfu_per_token_per_second(args, world_of(), empty)

    files, _ = lm_texts(args)
    for size in (1, 8):
        steps = lm_loader(args, tokenizer, rank=0, size=size, positions=None, files=files)
        for _ in range(4):  # start, and fill and empty the queue, which holds two
            next(steps)
        step_size = args.global_batch_size // size
        num_steps = math.ceil(micro_batches * args.micro_batch_size / step_size)
        began = time.perf_counter()
        for _ in range(num_steps):
            next(steps)
        speed = num_steps * step_size * args.seq_length / (time.perf_counter() - began)
        yield {"processes": size, "tokens/s of one": speed} | needs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=800, help="to read, of 8 sequences")
    parser.add_argument("--texts", type=int, default=500, help="in each of 128 files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        write_texts(Path(scratch), options.texts)
        print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
        shared.print_table(rows(Path(scratch), options.micro_batches))
