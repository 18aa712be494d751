"""Bad input ends with code 2 and one sentence on stderr, which names the flag and the cure; nothing is saved."""

import gzip
import shlex
import shutil
from pathlib import Path

import torch

import pytest
from conftest import hub, make_model, run, write_mnist
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig

from inside import train_tokenizer

T5 = "t5_fsdp.py --model t5 --dataset articles.csv"
HYBRID = "lm_multinode.py --sharding-strategy HYBRID_SHARD"
MNIST = "mnist_fsdp.py --dataset mnist --data-dir"
# The first file has the held-out texts. A worker finds what is wrong with the second.
LATE = "lm_multinode.py --num-validation-texts 100 --dataset whole.json.gz"

# A user's command, its processes, and what the sentence names: the flag and the cure, or the library's cause.
# What all scripts share is tested with t5_fsdp.py.
USUAL = [
    ("t5_fsdp.py --epoch 1", 1, "--epoch 1", "--help"),
    ("t5_fsdp.py --lr fast", 1, "--lr", "fast"),
    ("t5_fsdp.py --batch-size 0", 2, "--batch-size", "1 or more"),  # of two processes one speaks
    ("t5_fsdp.py --device tpu", 2, "--device tpu", "--device cpu"),
    ("t5_fsdp.py --device mps", 1, "--device mps", "Apple", "--device cpu"),
    ("t5_fsdp.py --output-dir file", 1, "--output-dir", "file"),
    ("t5_fsdp.py --output-dir trained", 1, "trained", "--resume", "--output-dir"),
    ("t5_fsdp.py --dataset absent.csv", 2, "--dataset", "absent.csv"),
    ("t5_fsdp.py --dataset columns.csv", 1, "--text-column", "--summary-column", "body", "abstract"),
    ("t5_fsdp.py --text-column body", 1, "--dataset builtin", "--text-column body"),
    (f"{T5} --batch-size 500", 2, "1000", "--batch-size"),
    (f"{T5} --model bert", 1, "--model bert", "docs/your-model-and-data.md"),
    (f"{T5} --model ./absent", 1, "--model ./absent does not exist"),
    (f"{T5} --model no-start", 1, "--model no-start", "decoder_start_token_id"),
    ("t5_fsdp.py --dataset rows.tsv", 1, "--dataset rows.tsv", ".csv", ".parquet"),
    ("t5_fsdp.py --dataset ./nothing", 1, "--dataset ./nothing does not exist"),
    ("t5_fsdp.py --backward-prefetch post", 1, "--backward-prefetch", "--fsdp-version 1"),
    ("lm_multinode.py --dataset absent*.jsonl", 1, "--dataset", "absent*.jsonl"),
    ("lm_multinode.py --dataset empty", 1, "--dataset empty"),
    ("lm_multinode.py --dataset whole.json.gz c4", 1, "--dataset whole.json.gz c4", "files"),
    ("lm_multinode.py --model gpt2", 1, "--model gpt2", "docs/your-model-and-data.md"),
    ("lm_multinode.py --tokenizer no-end", 1, "no-end", "end-of-text"),
    ("lm_multinode.py --dataset articles.csv", 1, "--dataset articles.csv", ".jsonl"),
    ("lm_multinode.py --global-batch-size 20", 2, "--global-batch-size", "--micro-batch-size"),
    ("lm_multinode.py --seq-length 99999", 1, "--seq-length"),
    (f"{HYBRID} --shards-per-replica 2", 3, "--shards-per-replica"),
    ("mnist_fsdp.py --batch-size 9999", 2, "--batch-size 9999"),
    ("mnist_fsdp.py --mode local", 2, "--mode local", "python", "torchrun"),
    (f"{MNIST} absent", 1, "MNIST", "absent"),
    (f"{MNIST} broken", 2, "MNIST", "broken"),
    ("mnist_fsdp_xpu.py --device cpu --batch-size 9999", 2, "--batch-size 9999"),
]
RARE = [
    ("lm_multinode.py --model ~/absent", 1, "--model ~/absent does not exist"),
    ("lm_multinode.py --dataset ./nothing", 2, "--dataset ./nothing does not exist"),
    ("t5_fsdp.py --lr nan", 1, "--lr", "nan"),
    ("t5_fsdp.py --sharding-strategy HYBRID_SHARD", 1, "--sharding-strategy", "FULL_SHARD", "SHARD_GRAD_OP"),
    ("t5_fsdp.py --precision fp16 --cpu-offload", 1, "--precision", "--cpu-offload", "bf16", "fp32"),
    ("t5_fsdp.py --fsdp-version 1 --cpu-offload", 1, "--fsdp-version 2"),
    (f"{T5} --lr 1e30 --precision fp32 --no-run-validation --batch-size 2 --checkpoint-every 4", 1, "finite", "--lr"),
    (f"{T5} --model empty", 1, "--model empty", "config.json"),
    ("t5_fsdp.py --dataset someone/absent", 1, "--dataset someone/absent"),
    ("lm_multinode.py --dataset c4", 1, "--dataset c4", "reach"),
    ("lm_multinode.py --dataset short.json.gz --seq-length 2048", 1, "--dataset short.json.gz", "--seq-length"),
    ("lm_multinode.py --model short", 1, "--model short", "--seq-length"),
    (f"{LATE} latin1.json.gz", 1, "--dataset whole.json.gz latin1.json.gz", "utf-8"),
    (f"{LATE} cut.json.gz", 1, "--dataset whole.json.gz cut.json.gz", "end-of-stream"),
    (f"{MNIST} mnist --lr 1e30 --epochs 1 --model shallow --batch-size 16", 2, "finite", "--lr"),
]

# A file, its content, and what the sentence names beside the file.
HEADER = b"headline,title,text\n"
LINES = b"".join(b'{"text": "text %d"}\n' % number for number in range(3000))
PACKED = gzip.compress(LINES)
CUT = PACKED[:-20]
LATIN1 = gzip.compress(LINES + b"\xff")
FILES = [
    ("notes.txt", b"text", ""),
    ("gap.csv", HEADER + b",t,a text\n", "--max-summary-share"),
    ("ragged.csv", HEADER + b"a,b,c\na,b,c,d,e\n", ""),
    ("latin1.csv", HEADER + b"\xc9t\xe9,t,text of summer\n", "utf-8"),
    ("cut.jsonl", b'{"text": "a", "headline"\n', ""),
    ("empty.json", b"", ""),
    ("header.csv", HEADER, ""),
    ("few.json.gz", gzip.compress(LINES[:40]), ""),
    ("columns.json.gz", gzip.compress(LINES.replace(b'"text"', b'"body"')), "body"),
]


def mistakes():
    """As pytest's parameters."""
    for table, marks in ((USUAL, ()), (RARE, pytest.mark.long)):
        for command, processes, *words in table:
            yield pytest.param(command, processes, words, marks=marks, id=command)


@pytest.fixture(scope="module")
def files(tmp_path_factory, articles_csv):
    """A folder with all that the commands name."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(articles_csv, folder)
    (folder / "short.json.gz").write_bytes(gzip.compress(LINES.replace(b"text ", b"")))
    for name, content in (("whole", PACKED), ("cut", CUT), ("latin1", LATIN1)):
        (folder / f"{name}.json.gz").write_bytes(content)
    (folder / "columns.csv").write_text("body,abstract\na,b\n")
    (folder / "file").touch()
    (folder / "empty").mkdir()
    (folder / "trained/checkpoints/step-0000001").mkdir(parents=True)
    (folder / "trained/checkpoints/step-0000001/.metadata").touch()

    make_model(folder / "t5")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text('{"model_type": "bert"}')
    tokenizer = train_tokenizer(["0 1"], 300, append_eos=False)
    tokenizer.save_pretrained(folder / "gpt2")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "short")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "no-end")
    no_start = AutoConfig.from_pretrained(make_model(folder / "no-start"))
    no_start.decoder_start_token_id = None
    no_start.save_pretrained(folder / "no-start")
    (folder / "rows.tsv").write_text("headline\ttext\na\tb\n")
    LlamaConfig(max_position_embeddings=64).save_pretrained(folder / "short")

    write_mnist(folder / "mnist")
    broken = write_mnist(folder / "broken", 20, 20) / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    broken.write_bytes(b"")
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
    [sentence] = [line for line in finished.stderr.splitlines() if line.startswith(f"{script}: error: ")]
    for word in words:
        assert word in sentence
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("command, processes, words", [*mistakes()])
def test_a_mistake_is_one_sentence(command, processes, words, here):
    script, *flags = shlex.split(command)
    refuse(script, *flags, words=words, processes=processes)


@pytest.mark.long
@pytest.mark.parametrize("name, content, word", [pytest.param(*file, id=file[0]) for file in FILES])
def test_a_file_without_usable_texts(name, content, word, here):
    Path(name).write_bytes(content)
    script = "lm_multinode.py" if name.endswith(".gz") else "t5_fsdp.py"
    refuse(script, "--dataset", name, words=[f"--dataset {name}", word])


def test_rank_without_the_other_variables_of_torchrun(here):
    refuse("t5_fsdp.py", words=["RANK", "torchrun"], processes=None, RANK="0")


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an Intel GPU, on which it trains")
def test_the_xpu_script_trains_on_a_cpu_only_when_told_to(here):
    refuse("mnist_fsdp_xpu.py", words=["--device xpu", "--device cpu"], device=None)


def test_fsdp1_saves_no_model_from_a_cpu_before_torch_2_14(here):
    """Which is said before it trains."""
    words = ["2.14", "--no-save-model", "--fsdp-version 2"]
    refuse("t5_fsdp.py", "--max-steps", 1, "--fsdp-version", 1, words=words, change=("pretend_torch", "2.13.1"))


@pytest.mark.long
def test_a_row_of_models_that_the_layers_do_not_fit(here):
    refuse("lm_multinode.py", words=["--model tiny", "docs/your-model-and-data.md"], change=("add_gpt2_row",))


@pytest.mark.long
def test_a_gated_tokenizer(here):
    """A real command: the Hub's address is read when its library is imported."""
    command = ("lm_multinode.py", "--tokenizer", "someone/gated", "--num-processes", 1)
    words = ["--tokenizer someone/gated", "hf auth login"]
    with hub() as (online, _):
        refuse(*command, words=words, processes=None, fork=False, **online)


@pytest.mark.long
@pytest.mark.parametrize("strategy, gigabytes", [("FULL_SHARD", 14.564), ("DILOCO", 21.846)])
def test_a_model_that_does_not_fit(strategy, gigabytes, here):
    """About a billion parameters in 8 GB, at 16 bytes each; DiLoCo holds 24."""
    flags = ("--model", "1b", "--sharding-strategy", strategy)
    refuse("lm_multinode.py", *flags, words=[f"{gigabytes}", "more processes"], change=("pretend_memory", 8))
