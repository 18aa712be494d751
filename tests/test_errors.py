"""Bad input ends a run with code 2, and one sentence on stderr names the flag and the cure. Nothing is saved."""

import json
import shlex
import shutil
from pathlib import Path

import torch

import pytest
from conftest import make_model, make_tokenizer, run, write_mnist
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    T5Config,
)

from inside import train_tokenizer

T5 = "t5_fsdp.py --model t5 --dataset articles.csv"
MNIST = "mnist_fsdp.py --dataset mnist --data-dir mnist"

# A user's command, its number of processes, and words of the sentence: the flag and the cure, or the library's message.
# t5_fsdp.py stands for all scripts where they share the check.
USUAL = [
    ("t5_fsdp.py --epoch 1", 1, "--epoch 1"),
    ("t5_fsdp.py --batch-size 4", 2, "--batch-size 4"),  # only one of two processes prints it
    ("t5_fsdp.py --micro-batch-size 0", 2, "--micro-batch-size", "1 or more"),
    ("t5_fsdp.py --num-processes 4", 2, "torchrun has started 2", "--num-processes"),
    ("t5_fsdp.py --device tpu", 2, "--device tpu", "--device cpu"),
    ("t5_fsdp.py --output-dir file", 1, "file"),
    ("t5_fsdp.py --model t5 --output-dir linked", 2, "replace --model", "--output-dir"),
    ("lm_multinode.py --model linked/model --output-dir t5/../linked", 1, "replace --model", "--output-dir"),
    ("t5_fsdp.py --output-dir trained", 1, "trained", "--resume", "--output-dir"),
    ("t5_fsdp.py --global-batch-size 9", 2, "--global-batch-size", "multiple of 2"),
    ("t5_fsdp.py --dataset absent.csv", 2, "absent.csv"),
    ("t5_fsdp.py --dataset columns.csv", 1, "--dataset columns.csv", "text", "body", "abstract"),
    ("t5_fsdp.py --dataset empty.csv", 1, "--dataset empty.csv", "too few rows", "--max-summary-share"),
    ("t5_fsdp.py --text-column title --summary-column body", 1, "builtin", "body"),
    (f"{T5} --global-batch-size 500", 2, "articles", "--global-batch-size"),
    (f"{T5} --model bert", 1, "--model bert", "docs/your-model-and-data.md"),
    (f"{T5} --model t5-bare", 2, "t5-bare has no tokenizer"),
    (f"{T5} --model compiled", 2, "compiled has no weights for", "encoder.final_layer_norm.weight"),
    ("t5_fsdp.py --backward-prefetch post", 1, "--backward-prefetch", "--fsdp-version 1"),
    ("lm_multinode.py --dataset absent*.jsonl", 1, "absent*.jsonl"),
    ("lm_multinode.py --dataset columns.jsonl", 2, "columns.jsonl", "text", "body"),
    ("lm_multinode.py --dataset one.txt", 1, "--dataset one.txt", "too few texts: 1", "empty lines"),
    ("lm_multinode.py --dataset columns.csv", 1, "--dataset columns.csv", "jsonl"),
    ("lm_multinode.py --dataset one.txt some.jsonl mixed.jsonl", 1, "some.jsonl mixed.jsonl", "quotes"),
    (f"{T5} --model quantized", 2, "--model quantized", "it is quantized"),
    (f"{T5} --model adapter", 1, "--model adapter", "LoRA adapter"),
    (f"{T5} --model cut", 2, "--model cut", "weights"),
    ("lm_multinode.py --dataset mixed.jsonl", 2, "text", "extension<arrow.json>"),
    ("lm_multinode.py --model headless", 2, "headless has no weights for lm_head.weight"),
    ("lm_multinode.py --tokenizer endless", 1, "EOS"),
    ("lm_multinode.py --model short --seq-length 65", 1, "--model short", "--seq-length of 64"),
    ("lm_multinode.py --sharding-strategy HYBRID_SHARD --shards-per-replica 2", 3, "--shards-per-replica"),
    (f"{MNIST} --global-batch-size 9999", 1, "--global-batch-size"),
    ("mnist_fsdp.py --mode local", 2, "--mode local", "torchrun", "--num-processes"),
    ("mnist_fsdp.py --mode local --num-processes 2", None, "--mode local", "torchrun", "--num-processes"),
]
RARE = [
    ("t5_fsdp.py --lr nan", 1, "--lr", "nan"),
    ("t5_fsdp.py --fsdp-version 1 --cpu-offload", 1, "--fsdp-version 2"),
    ("t5_fsdp.py --dataset someone/absent", 1, "someone/absent"),
    ("lm_multinode.py --dataset someone/absent", 1, "someone/absent"),
    ("lm_multinode.py --dataset some.jsonl --seq-length 2048", 1, "texts", "--seq-length"),
    ("lm_multinode.py --model small --seq-length 64", 1, "--model small has a vocabulary of 9", "the tokenizer has"),
    ("lm_multinode.py --model added", 1, "--model added", "the tokenizer has"),
    ("lm_multinode.py --model words", 1, "--model words", "the tokenizer has 301"),
    ("lm_multinode.py --model remote", 1, "--model remote", "trust_remote_code"),
    ("lm_multinode.py --model pointer", 1, "--model pointer", "weights"),
    ("lm_multinode.py --model unbalanced --tokenizer small", 1, "output_router_logits"),
    ("lm_multinode.py --dataset late --num-validation-texts 9 --seq-length 8", 1, "99.jsonl", "holds int64"),
    (f"{T5} --lr 1e30 --precision fp32 --no-run-validation --checkpoint-every 2", 1, "finite", "--lr"),
    (f"{MNIST} --lr 1e30 --model shallow --global-batch-size 16 --mode fsdp", 2, "finite", "--lr"),
    ("mnist_fsdp_xpu.py --device cpu --global-batch-size 99998", 2, "--global-batch-size"),
]
MISTAKES = [pytest.param(*case[:2], case[2:], id=case[0]) for case in USUAL]
MISTAKES += [pytest.param(*case[:2], case[2:], id=case[0], marks=pytest.mark.long) for case in RARE]


@pytest.fixture(scope="module")
def files(tmp_path_factory, articles_csv, tiny_llama):
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(articles_csv, folder)
    rows = [{"text": f"text {index}"} for index in range(100)]
    for name, content in {"some": rows, "mixed": [*rows, {"text": 404}], "columns": [{"body": "a"}]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "one.txt").write_text("A line.\n" * 99)
    (folder / "late").mkdir()
    for index in range(100):
        lines = [json.dumps({"text": 404 if index == 99 else f"{index} {row}"}) + "\n" for row in range(100)]
        (folder / f"late/{index}.jsonl").write_text("".join(lines))
    (folder / "columns.csv").write_text("body,abstract\na,b\n")
    (folder / "empty.csv").write_text("text,headline\na,\n")
    (folder / "file").touch()
    (folder / "linked").mkdir()
    for name in ("best", "model"):
        (folder / "linked" / name).symlink_to("../t5")
    (folder / "trained/checkpoints/step-0000001").mkdir(parents=True)
    (folder / "trained/checkpoints/step-0000001/progress.json").touch()
    write_mnist(folder / "mnist")

    make_model(folder / "t5")
    shutil.copytree(folder / "t5", folder / "compiled")
    weights = load_file(folder / "t5/model.safetensors")
    weights = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    save_file(weights, folder / "compiled/model.safetensors", {"format": "pt"})
    shutil.copytree(tiny_llama, folder / "headless")
    AutoModelForCausalLM.from_pretrained(tiny_llama).model.save_pretrained(folder / "headless")
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

    for name in ("quantized", "adapter", "cut"):
        shutil.copytree(folder / "t5", folder / name)
    T5Config(quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(folder / "quantized")
    (folder / "adapter/adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "cut/model.safetensors").write_bytes((folder / "t5/model.safetensors").read_bytes()[:-9])
    for name in ("pointer", "words", "remote"):
        shutil.copytree(tiny_llama, folder / name)
    (folder / "pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (folder / "remote/config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    words = train_tokenizer(["0 1"], 300, append_eos=False)
    words.add_tokens([f"word{index}" for index in range(301 - len(words))])
    words.save_pretrained(folder / "words")
    LlamaConfig(vocab_size=300).save_pretrained(folder / "words")
    shape = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": 512}
    config = AutoConfig.for_model(
        "afmoe", **shape, num_experts=4, num_experts_per_tok=2, head_dim=8, output_router_logits=True
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "unbalanced")
    return folder


@pytest.fixture
def here(files, monkeypatch):
    """Run in the folder `files`, without a network. Afterwards, check that nothing was saved."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    yield
    written = [path.name for path in Path("output").rglob("*") if path.is_file()]
    assert set(written) <= {"metrics.jsonl"}


def refuse(script, *flags, words, processes=1, fork=True, **options):
    """Check that a command ends with code 2 and one sentence, which contains these words."""
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


@pytest.mark.long
@pytest.mark.parametrize("kind", "gemma2 gpt_oss bloom mamba falcon t5 biogpt gemma3 bert".split())
def test_a_model_that_the_lm_cannot_train_is_refused(kind, here, tmp_path):
    """The script refuses it before it reads weights: there are none."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    refuse("lm_multinode.py", "--model", tmp_path, "--tokenizer", "short", words=[f"--model {tmp_path}"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "doge"])
def test_a_model_with_its_own_mask_or_index_of_attention_is_refused(kind, here, tmp_path):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    make_tokenizer(tmp_path)
    config = AutoConfig.for_model(kind)
    if kind == "doge":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = AutoConfig.for_model(kind, **sizes, vocab_size=1024, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    words = ["mask"] if kind == "doge" else [f"--model {tmp_path}"]
    refuse("lm_multinode.py", "--model", tmp_path, "--seq-length", 32, words=words)


def test_different_data_on_two_nodes_is_refused(here):
    change = ("read_other_data",)
    refuse("lm_multinode.py", words=["--dataset", "all nodes"], processes=2, per_node=1, change=change)


@pytest.mark.long
def test_a_node_without_consecutive_ranks_is_refused(here):
    """This is the second of four processes on two nodes, as `srun -m cyclic` numbers them."""
    ranks = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    refuse("t5_fsdp.py", words=["consecutive", "-m block"], processes=None, **ranks)


@pytest.mark.skipif(torch.xpu.is_available(), reason="it would train on the Intel GPU here")
def test_the_xpu_script_trains_on_a_cpu_only_when_told_to(here):
    refuse("mnist_fsdp_xpu.py", words=["--device xpu", "--device cpu"], device=None)
