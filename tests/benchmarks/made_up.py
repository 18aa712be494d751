"""Made-up data for the benchmarks: excerpts of Python's reference, and models with random weights in known shapes."""

import csv
import gzip
import itertools
import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import torch

import shared  # noqa: F401  (it makes inside.py importable)
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from inside import train_tokenizer

LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
T5_SHAPES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "tiny": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


def made_up_texts(count: int, mean: float, sigma: float):
    """Yield `count` excerpts of Python's reference. Their lengths are log-normal, as C4's are."""
    words = 2 * " ".join(topics.values()).split()
    choose = random.Random(0)
    for _ in range(count):
        length = max(1, round(choose.lognormvariate(-(sigma**2) / 2, sigma) * mean))
        start = choose.randrange(len(words) // 2)
        yield " ".join(words[start : start + length])


def write_texts(folder: Path, texts: int) -> None:
    """Write a tokenizer, and 512 files of `texts` texts. They have 480 tokens on average; half have fewer than 260."""
    tokenizer = train_tokenizer(topics.values(), 32_000, append_eos=False)
    tokenizer.save_pretrained(folder)
    sample = " ".join(topics.values())
    mean = 480 * len(sample.split()) / len(tokenizer(sample, verbose=False)["input_ids"])
    made_up = made_up_texts(512 * texts, mean, sigma=1.1)
    for shard in range(512):
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            for text in itertools.islice(made_up, texts):
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")


def write_llama(folder: Path, layers: int) -> Path:
    """Write a Llama with random weights (34 million with eight layers) and a tokenizer, for `--model`."""
    shape = LLAMA | {"num_hidden_layers": layers, "vocab_size": 8192}
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=1, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(topics.values(), 8192, append_eos=False).save_pretrained(folder)
    return folder


def write_articles(folder: Path, count: int, shape: str, mean: float = 580, sigma: float = 0.7) -> None:
    """Write a CSV of texts and summaries, which are a tenth as long; a T5 with random weights; and a tokenizer."""
    texts = made_up_texts(count, mean, sigma)
    summaries = made_up_texts(count, mean / 10, sigma)
    with open(folder / "articles.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["headline", "text"])
        writer.writerows(zip(summaries, texts, strict=True))
    train_tokenizer(topics.values(), 8192, append_eos=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **T5_SHAPES[shape])
    T5ForConditionalGeneration(config).save_pretrained(folder)
