"""LoRA as docs/your-model-and-data.md makes it: sharded, it trains as a plain loop with peft does."""

import itertools
import re
import shutil
import sys

import torch

import pytest
from conftest import CLOSE, SAVE_ON_CPU, VERSIONS, check_curves, fsdp, losses, records, run, run_many, succeed
from peft import LoraConfig, PeftModel, get_peft_model
from test_recipes import LORA_LM, LORA_T5, PAGE, adamw, cross_entropy, global_batches, patched, train_plainly
from test_t5_parity import train_plainly as train_t5_plainly
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    T5Config,
)

import lm_multinode

STEPS, LENGTH = 4, 32
EXACT = ("--precision", "fp32", "--log-every", 1, "--max-steps", STEPS)


def add_adapters(model, *names):
    """As the recipe does, but by peft's own class."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=list(names)))


def train(script, title, arguments, root):
    """Both versions, and what changes no number; on two processes. Then both go on from the middle, as `parts`."""
    script = patched(root / "copy", title) / f"{script}.py"
    saving = {f"fsdp{version}": (*fsdp(version), "--checkpoint-every", STEPS // 2) for version in VERSIONS}
    runs = saving | {
        f"fsdp{version} recomputing": (*fsdp(version), "--activation-checkpointing") for version in VERSIONS
    }
    runs["offloading"] = ("--cpu-offload",)
    settings = [[*arguments, *flags, "--output-dir", root / name] for name, flags in runs.items()]
    printed = run_many(script, settings, 2).stdout
    for name in saving:
        shutil.copytree(root / name, root / f"parts of {name}")
        shutil.rmtree(root / f"parts of {name}" / "checkpoints" / f"step-{STEPS:07d}")
    settings = [
        [*arguments, *flags, "--resume", "--output-dir", root / f"parts of {name}"] for name, flags in saving.items()
    ]
    run_many(script, settings, 2)
    for name in saving:
        again = [row["step"] for row in records(root / f"parts of {name}", "loss")][STEPS:]
        assert again == list(range(STEPS // 2 + 1, STEPS + 1))
        assert losses(root / f"parts of {name}") == losses(root / name)
    return [root / name for name in runs], printed


def check(folders, *plain):
    for folder in folders:
        check_curves(folder, plain)


def check_size(model, printed, frozen=4):
    """16 bytes for each trained parameter and 4, or 2, for each frozen one, on two processes."""
    counts = [
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() for p in model.parameters()),
    ]
    state = (16 * counts[0] + frozen * (counts[1] - counts[0])) / 2 / 2**30
    assert 0 < counts[0] < counts[1] / 2
    assert f"{counts[1]:,} parameters, {state:.3f} GB of state a process" in printed


def test_t5_trains_as_peft_does(tiny_model, articles_csv, tmp_path):
    plain = train_t5_plainly(tiny_model, articles_csv, clip=1.0, prepare=lambda model: add_adapters(model, "q", "v"))
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 0, "--batch-size", 4]
    arguments += ["--num-validation-samples", 0, "--max-source-length", 40, "--max-target-length", 12, *EXACT]
    folders, printed = train("t5_fsdp", LORA_T5, arguments, tmp_path)
    check(folders, plain["losses"], plain["norms"])
    base = AutoModelForSeq2SeqLM.from_pretrained(tiny_model)
    check_size(add_adapters(base, "q", "v"), printed)
    for version in SAVE_ON_CPU:
        assert records(tmp_path / f"fsdp{version}", "val_loss")[-1]["val_loss"] == pytest.approx(
            plain["after"], **CLOSE
        )
        folder = tmp_path / f"fsdp{version}" / "best"
        assert (folder / "adapter_model.safetensors").stat().st_size < (tiny_model / "model.safetensors").stat().st_size
        model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tiny_model), folder)
        trained = plain["model"].state_dict()
        assert all(torch.allclose(trained[name], weight, atol=1e-5) for name, weight in model.state_dict().items())


LM = ("--seq-length", LENGTH, "--global-batch-size", 8, "--micro-batch-size", 2, *EXACT)
LM = (*LM, "--warmup-steps", 1, "--lr", 0.02, "--num-validation-texts", 3)


def train_lm_plainly(llama, model, monkeypatch):
    """Losses and gradient norms of peft's model, on the batches of two processes together."""
    monkeypatch.setattr(sys, "argv", ["", *map(str, LM)])
    args, tokenizer = lm_multinode.parse_args(), AutoTokenizer.from_pretrained(llama)
    batches = itertools.islice(global_batches(lm_multinode, args, tokenizer, 2), STEPS)
    steps = [lambda batch=batch: cross_entropy(model, batch) for batch in batches]
    return train_plainly(adamw(model, args.weight_decay), steps, lambda step: lm_multinode.learning_rate(args, step))


def test_the_lm_trains_as_peft_does(tiny_llama, tmp_path, monkeypatch):
    folders, printed = train("lm_multinode", LORA_LM, ["--model", tiny_llama, *LM], tmp_path)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(tiny_llama), "q_proj", "v_proj").train()
    check_size(model, printed)
    check(folders, *train_lm_plainly(tiny_llama, model, monkeypatch))
    expected = model.merge_and_unload().state_dict()
    for version in SAVE_ON_CPU:
        folder = tmp_path / f"fsdp{version}" / "model"
        # The page's lines, which write one whole model.
        [code] = re.findall(r"^```python\n([^`]*?merge_and_unload.*?)^```$", PAGE, re.M | re.S)
        code = code.replace('"BASE"', repr(str(tiny_llama))).replace('"output/lm_multinode/model"', repr(str(folder)))
        (tmp_path / "merge.py").write_text(code.replace('"merged"', repr(str(tmp_path / f"merged{version}"))))
        succeed(tmp_path / "merge.py", fork=True)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged{version}").state_dict()
        assert all(torch.allclose(expected[name], merged[name], atol=1e-5) for name in merged)
        base = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
        changed = {name for name in base if not torch.equal(base[name], merged[name])}
        assert changed and all(re.search(r"[qv]_proj", name) for name in changed)


def test_a_base_in_bf16_needs_fsdp2(tiny_llama, tmp_path, monkeypatch):
    """It computes with rounded weights, and FSDP1 says what it cannot."""
    script = patched(tmp_path / "copy", LORA_LM) / "lm_multinode.py"
    text = script.read_text()
    assert text.count("dtype=torch.float32)") >= 2
    script.write_text(text.replace("dtype=torch.float32)", "dtype=torch.bfloat16)"))
    arguments = ["--model", tiny_llama, *LM, "--no-save-model", "--output-dir", tmp_path / "output"]
    finished = succeed(script, *arguments, processes=2, fork=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    model = add_adapters(model, "q_proj", "v_proj").float().train()
    check_size(model, finished.stdout, frozen=2)
    check([tmp_path / "output"], *train_lm_plainly(tiny_llama, model, monkeypatch))
    finished = run(script, *arguments, "--fsdp-version", 1, processes=2, fork=True)
    assert finished.returncode == 1 and "Must flatten tensors with uniform dtype" in finished.stderr
    assert "Must flatten tensors with uniform dtype" in PAGE


def test_the_table_of_states():
    shapes = {"d_model": 1024, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "d_kv": 128, "vocab_size": 32_128}
    llama = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama |= {"num_key_value_heads": 8, "vocab_size": 128_256}
    for name, kind, config, adapted in (
        ("T5-3B", AutoModelForSeq2SeqLM, T5Config(**shapes), ("q", "v")),
        ("Llama 3.1 8B", AutoModelForCausalLM, LlamaConfig(**llama), ("q_proj", "v_proj")),
    ):
        with torch.device("meta"):
            model = add_adapters(kind.from_config(config), *adapted)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in model.parameters()) - trained
        states = (16 * frozen, 16 * trained + 4 * frozen, 16 * trained + 2 * frozen)
        row = " | ".join(f"{state / 2**30:.1f}" for state in states)
        assert f"\n| {name}, {frozen / 1e9:.1f} billion parameters | {row} |\n" in PAGE, row
