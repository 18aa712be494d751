"""What the benchmarks share: launches, metrics, tables, made-up texts and models, copies with a recipe."""

import csv
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from inside import train_tokenizer

LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
T5_SHAPES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "tiny": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


def torchrun(processes: int) -> list:
    """The command that starts a script in so many processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def read_metrics(output: Path) -> list[dict]:
    """The records of a run."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def patched(folder: Path, *names: str) -> Path:
    """A user's copy of the scripts, with these diffs of docs/recipes."""
    folder.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in names:
        diff = ROOT / "docs" / "recipes" / f"{name}.diff"
        files = [folder / file for file in re.findall(r"^\+\+\+ b/(.+)", diff.read_text(), re.M)]
        before = [file.read_text() for file in files]
        finished = subprocess.run(["git", "apply", diff], capture_output=True, text=True, cwd=folder)
        assert finished.returncode == 0, f"{name}\n{finished.stderr}"
        for file, text in zip(files, before, strict=True):
            assert file.read_text() != text  # git skips what is not below its folder, in silence
    return folder


def print_table(rows) -> None:
    """Print dictionaries with the same keys as a table in Markdown, each as soon as it is there."""
    for number, row in enumerate(rows):
        if number == 0:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(map(cell, row.values()))} |", flush=True)


def cell(value) -> str:
    """Four digits of a small number, thousands apart in a large one."""
    if not isinstance(value, float):
        return f"{value:,}" if type(value) is int else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def made_up_texts(count: int, mean: float, sigma: float):
    """Yield so many excerpts of Python's reference. Their numbers of words are log-normal, as those of C4 are."""
    words = 2 * " ".join(topics.values()).split()
    choose = random.Random(0)
    for _ in range(count):
        length = max(1, round(choose.lognormvariate(-(sigma**2) / 2, sigma) * mean))
        start = choose.randrange(len(words) // 2)
        yield " ".join(words[start : start + length])


def write_llama(folder: Path, layers: int) -> Path:
    """A Llama of random weights, 17 million with four layers, and a tokenizer, as `--model` takes them."""
    shape = LLAMA | {"num_hidden_layers": layers, "vocab_size": 8192}
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=1, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(topics.values(), 8192, append_eos=False).save_pretrained(folder)
    return folder


def write_articles(folder: Path, count: int, shape: str, mean: float = 580, sigma: float = 0.7) -> None:
    """A CSV with texts and summaries a tenth as long, a T5 of random weights, and a tokenizer."""
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
