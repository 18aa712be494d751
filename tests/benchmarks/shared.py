"""What the benchmarks share: launches, metrics, tables, made-up texts and models, copies with a recipe."""

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}


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


class Words:
    """Texts of random words as often as natural language has them, the same on every machine."""

    def __init__(self, count: int) -> None:
        self.random = random.Random(0)
        syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "ay", "er", "in")]
        self.words = ["".join(self.random.choices(syllables, k=self.random.choice((1, 2, 2, 3)))) for _ in range(count)]
        self.weights = list(itertools.accumulate(1 / rank for rank in range(1, count + 1)))  # Zipf

    def text(self, mean: float, sigma: float) -> str:
        """A text whose number of words is log-normal."""
        length = max(1, round(self.random.lognormvariate(-(sigma**2) / 2, sigma) * mean))
        return " ".join(self.random.choices(self.words, cum_weights=self.weights, k=length))


def write_llama(folder: Path, texts: list[str], vocabulary: int = 8192, layers: int = 8) -> Path:
    """A Llama of random weights, 34 million with these words and layers, and a tokenizer, as `--model` takes them."""
    import torch

    from transformers import LlamaConfig, LlamaForCausalLM

    from inside import train_tokenizer

    shape = LLAMA | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=1, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(texts, vocabulary, append_eos=False).save_pretrained(folder)
    return folder
