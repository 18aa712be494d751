"""Helpers: run the scripts as users do, and read what they report."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
import t5_fsdp  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def offline_and_clean(tmp_path_factory):
    """No test reaches the network, and none finds what another run left in the caches."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hf"))


def run(script, *arguments, processes=None, timeout=300, **environment):
    """Run a script, under torchrun when `processes` is given. Returns the finished process, output as text."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    start = torchrun if processes else [sys.executable]
    return subprocess.run(
        [*start, str(ROOT / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def succeed(*arguments, **options):
    """`run`, and fail the test with the output when the script fails."""
    finished = run(*arguments, **options)
    assert finished.returncode == 0, f"{arguments[:2]}\n{finished.stdout[-2000:]}\n{finished.stderr[-9000:]}"
    return finished


def run_many(script, settings, processes, **options):
    """Run `script`'s main() once for each list of arguments, in one launch."""
    texts = [[str(argument) for argument in arguments] for arguments in settings]
    return succeed("tests/run_many.py", script, json.dumps(texts), processes=processes, **options)


def reports(output_dir, kind):
    """The reports of one kind ("step", "epoch" or "settings") in `metrics.jsonl`."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [report for report in map(json.loads, lines) if report["report"] == kind]


def write_csv(path, rows):
    """Write dictionaries as a CSV file the way WikiHow's was: quoted where needed, Unix newlines."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="session")
def articles_csv(tmp_path_factory):
    """200 of the built-in articles in WikiHow's format."""
    return write_csv(tmp_path_factory.mktemp("data") / "articles.csv", [common.builtin_article(i) for i in range(200)])


def make_model(folder, dropout, num_layers=2):
    """Write a tiny T5 with random weights and a tokenizer, as `from_pretrained` reads them."""
    articles = [common.builtin_article(index) for index in range(100)]
    spec = t5_fsdp.train_builtin_tokenizer(text for a in articles for text in (a["text"], a["headline"]))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(spec), **special).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": num_layers, "dropout_rate": dropout}
    config = T5Config(vocab_size=1024, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **shape)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), dropout=0.0)
