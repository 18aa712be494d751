"""Bad input ends with code 2 and one sentence on stderr, which names the flag and the cure; nothing is saved."""

import gzip
import json
import os
import shlex
import shutil
from pathlib import Path

import torch

import datasets
import pytest
from conftest import make_model, run, write_mnist
from transformers import AutoConfig, LlamaConfig, T5Config

from inside import train_tokenizer

T5 = "t5_fsdp.py --model t5 --dataset articles.csv"
HYBRID = "lm_multinode.py --sharding-strategy HYBRID_SHARD"
MNIST = "mnist_fsdp.py --dataset mnist --data-dir"

# A user's command, its processes, and what the sentence names: the flag and the cure, or the library's cause.
# What all scripts share is tested with t5_fsdp.py.
USUAL = [
    ("t5_fsdp.py --epoch 1", 1, "--epoch 1", "--help"),
    ("t5_fsdp.py --batch-size 0", 2, "--batch-size", "1 or more"),  # of two processes one speaks
    ("t5_fsdp.py --num-processes 4", 2, "--num-processes 4", "torchrun"),
    ("t5_fsdp.py --device tpu", 2, "--device tpu", "--device cpu"),
    ("t5_fsdp.py --output-dir file", 1, "file"),
    ("t5_fsdp.py --model t5 --output-dir linked", 2, "--model t5", "--output-dir"),
    ("lm_multinode.py --model linked/model --output-dir t5/../linked", 1, "--model linked/model", "--output-dir"),
    ("t5_fsdp.py --output-dir trained", 1, "trained", "--resume", "--output-dir"),
    ("t5_fsdp.py --dataset absent.csv", 2, "absent.csv"),
    ("t5_fsdp.py --dataset columns.csv", 1, "--dataset columns.csv", "text", "body", "abstract"),
    ("t5_fsdp.py --dataset utf16.csv", 2, "--dataset utf16.csv", "UTF-8", "iconv"),
    ("t5_fsdp.py --dataset articles.xlsx", 1, "--dataset articles.xlsx", ".csv"),
    ("t5_fsdp.py --text-column body", 1, "--dataset builtin", "body"),
    (f"{T5} --batch-size 500", 2, "1000", "--batch-size"),
    (f"{T5} --model bert", 1, "--model bert", "docs/your-model-and-data.md"),
    (f"{T5} --model some/absent", 1, "some/absent is no folder here"),
    (f"{T5} --model t5-bare", 2, "t5-bare has no tokenizer"),
    (f"{T5} --model t5-cut", 2, "t5-cut has no weights"),
    ("t5_fsdp.py --backward-prefetch post", 1, "--backward-prefetch", "--fsdp-version 1"),
    ("lm_multinode.py --dataset absent*.jsonl", 1, "absent*.jsonl"),
    ("lm_multinode.py --dataset columns.jsonl", 2, "columns.jsonl", "text", "body"),
    ("lm_multinode.py --dataset cut.jsonl", 2, "cut.jsonl", "JSON"),
    ("lm_multinode.py --dataset empty.jsonl", 2, "empty.jsonl: it is empty"),
    ("lm_multinode.py --dataset few.jsonl", 1, "--dataset few.jsonl", "too few texts"),
    *((f"lm_multinode.py --dataset later-{kind}", 2, f"wrong.{kind}") for kind in ("jsonl", "json.gz", "parquet")),
    ("lm_multinode.py --tokenizer endless", 1, "EOS"),
    ("lm_multinode.py --global-batch-size 20", 2, "--global-batch-size", "--micro-batch-size"),
    ("lm_multinode.py --model short --seq-length 65", 1, "--model short", "--seq-length of 64"),
    (f"{HYBRID} --shards-per-replica 2", 3, "--shards-per-replica"),
    ("mnist_fsdp.py --batch-size 9999", 2, "--batch-size of 9999"),
    ("mnist_fsdp.py --mode local", 2, "--mode local", "python", "torchrun"),
    ("mnist_fsdp_xpu.py --device cpu --batch-size 9999", 2, "--batch-size of 9999"),
]
RARE = [
    ("t5_fsdp.py --lr nan", 1, "--lr", "nan"),
    ("t5_fsdp.py --fsdp-version 1 --cpu-offload", 1, "--fsdp-version 2"),
    ("lm_multinode.py --dataset texts.tsv", 1, "texts.tsv", ".jsonl"),
    (f"{T5} --lr 1e30 --precision fp32 --no-run-validation --batch-size 2 --checkpoint-every 4", 1, "finite", "--lr"),
    ("t5_fsdp.py --dataset someone/absent", 1, "someone/absent"),
    ("lm_multinode.py --model small --seq-length 64", 1, "--model small knows 9 tokens", "--tokenizer"),
    ("lm_multinode.py --model added", 1, "--model added", "--tokenizer"),
    ("lm_multinode.py --model llama-bare", 2, "llama-bare has no tokenizer"),
    ("lm_multinode.py --dataset c4", 1, "c4"),
    (f"{MNIST} mnist --lr 1e30 --epochs 1 --model shallow --batch-size 16", 2, "finite", "--lr"),
    ("lm_multinode.py --dataset short.jsonl --seq-length 2048", 1, "texts", "--seq-length"),
    ("lm_multinode.py --dataset some.jsonl --global-batch-size 512 --seq-length 8", 1, "texts"),  # in a worker
    ("t5_fsdp.py --dataset ragged.csv", 1, "line 3"),
    ("t5_fsdp.py --dataset quote.csv", 1, "--dataset quote.csv"),
    ("t5_fsdp.py --dataset latin1.csv", 1, "iconv"),
    ("t5_fsdp.py --dataset latin1.jsonl", 1, "iconv"),
    ("t5_fsdp.py --dataset cut.jsonl", 1, "--dataset cut.jsonl"),
    ("t5_fsdp.py --dataset cut.jsonl.gz", 1, "--dataset cut.jsonl.gz"),
    ("t5_fsdp.py --dataset header.csv", 1, "--dataset header.csv"),
]

HEADER = b"headline,title,text\n"
CONTENTS = {
    "ragged.csv": HEADER + b"a,b,c\na,b,c,d,e\n",
    "quote.csv": HEADER + b'a,b,c\na,"b,c\n',
    "latin1.csv": HEADER + b"\xc9t\xe9,t,text of summer\n",
    "latin1.jsonl": b'{"text": "\xc9t\xe9", "headline": "a"}\n',
    "header.csv": HEADER,
    "columns.csv": b"body,abstract\na,b\n",
    "columns.jsonl": b'{"body": "a"}\n',
    "utf16.csv": "text,headline\na,b\n".encode("utf-16"),
    "articles.xlsx": b"",
    "texts.tsv": b"text\na\n",
    "empty.jsonl": b"",
    "cut.jsonl.gz": gzip.compress(b'{"text": "a", "headline": "b"}\n' * 999)[:-30],
    "file": b"",
}

MISTAKES = [pytest.param(*one[:2], one[2:], id=one[0]) for one in USUAL]
MISTAKES += [pytest.param(*one[:2], one[2:], id=one[0], marks=pytest.mark.long) for one in RARE]


@pytest.fixture(scope="module")
def files(tmp_path_factory, articles_csv):
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(articles_csv, folder)
    lines = [json.dumps({"text": f"text {number}"}) + "\n" for number in range(3000)]
    for name, count in (("few", 2), ("some", 100), ("short", 3000)):
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    (folder / "cut.jsonl").write_text(lines[0] + lines[1][:9])
    for kind in ("jsonl", "json.gz", "parquet"):
        (folder / f"later-{kind}").mkdir()
        (folder / f"later-{kind}/a.jsonl").write_text("".join(lines))
    (folder / "later-jsonl/wrong.jsonl").write_text(lines[0] + lines[1][:9])
    (folder / "later-json.gz/wrong.json.gz").write_bytes(gzip.compress("".join(lines).encode())[:-500])
    datasets.Dataset.from_dict({"body": ["a"]}).to_parquet(folder / "later-parquet/wrong.parquet")
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    (folder / "linked").mkdir()
    for name in ("best", "model"):
        (folder / "linked" / name).symlink_to("../t5")
    (folder / "trained/checkpoints/step-0000001").mkdir(parents=True)
    (folder / "trained/checkpoints/step-0000001/.metadata").touch()

    make_model(folder / "t5")
    shutil.copytree(folder / "t5", folder / "t5-cut")
    os.truncate(folder / "t5-cut/model.safetensors", 9999)
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text('{"model_type": "bert"}')
    train_tokenizer(["0 1"], 300, append_eos=False).save_pretrained(folder / "short")
    LlamaConfig(max_position_embeddings=64).save_pretrained(folder / "short")
    endless = train_tokenizer(["0 1"], 300, append_eos=False)
    endless.save_pretrained(folder / "small")
    endless.eos_token = "<end>"  # the next id
    endless.save_pretrained(folder / "added")
    LlamaConfig(vocab_size=endless.vocab_size).save_pretrained(folder / "added")
    endless.eos_token = None
    endless.save_pretrained(folder / "endless")
    LlamaConfig(vocab_size=9).save_pretrained(folder / "small")
    T5Config().save_pretrained(folder / "t5-bare")
    LlamaConfig().save_pretrained(folder / "llama-bare")
    write_mnist(folder / "mnist")
    return folder


@pytest.fixture
def here(files, monkeypatch):
    """In that folder, without a network; nothing is saved."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    yield
    written = [path.name for path in Path("output").rglob("*") if path.is_file()]
    assert set(written) <= {"metrics.jsonl"}


def refuse(script, *flags, words, processes=1, fork=True, **options):
    """The command ends with code 2 and one sentence, which has these words."""
    finished = run(script, *flags, processes=processes, fork=fork, **options)
    start = f"{Path(script).name}: error: "
    [sentence] = [line for line in finished.stderr.splitlines() if line.startswith(start)]
    for word in words:
        assert word in sentence
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("command, processes, words", MISTAKES)
def test_a_mistake_is_one_sentence(command, processes, words, here):
    script, *flags = shlex.split(command)
    refuse(script, *flags, words=words, processes=processes)


@pytest.mark.parametrize("fate", ["silent", "killed"])
def test_a_worker_that_cannot_send(fate, here, tmp_path):
    """As in a container with a small /dev/shm: it is killed, or what it sends is lost."""
    refuse("lm_multinode.py", "--output-dir", tmp_path, words=["--shm-size"], change=("lose_workers", fate))


@pytest.mark.long
@pytest.mark.parametrize("kind", "gemma2 gpt_oss bloom mamba falcon t5 biogpt gemma3 bert".split())
def test_a_model_that_the_lm_cannot_train(kind, here, tmp_path):
    """Before its weights or the data are read: there are none."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    flags = ("--model", tmp_path, "--tokenizer", "short", "--dataset", "absent.jsonl", "--num-processes", 1)
    refuse("lm_multinode.py", *flags, words=[f"--model {tmp_path}"])


@pytest.mark.parametrize("flags", [("t5_fsdp.py", "--num-processes", 1), ("mnist_fsdp.py",)])
def test_one_of_the_variables_of_torchrun_without_the_others(flags, here):
    """Where one process would wait for others, and where torchrun would set all of them."""
    for name, value in {"RANK": "0", "MASTER_ADDR": "localhost"}.items():
        refuse(*flags, words=[name, "torchrun"], processes=None, **{name: value})


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an Intel GPU, on which it trains")
def test_the_xpu_script_trains_on_a_cpu_only_when_told_to(here):
    refuse("mnist_fsdp_xpu.py", words=["--device xpu", "--device cpu"], device=None)
