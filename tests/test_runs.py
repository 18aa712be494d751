"""Runs as users start them: scripts learn, save, and report what runs."""

import json
import math
import os
import re
import shutil
import statistics

import torch
import torch.distributed.checkpoint as dcp

import pytest
from conftest import CLOSE, SMALL, curve, hub, long, make_llama, records, run_many, succeed
from plain import lm_validation_loss, t5_ordered, t5_samples
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
)

import inside

ROUGE = ("rouge1", "rouge2", "rougeL")
SIZES = {"layers": 51_451_274, "deep": 94_104_234, "shallow": 1_199_882, "xpu": 1_199_882}


# ---- MNIST: both runs ------------------------------------------------------------------------------------------------
def test_networks_have_the_published_sizes():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in make().parameters()) for name, make in inside.NETWORKS.items()}
    assert sizes == SIZES


@pytest.mark.parametrize("network", ["shallow", long("layers")])
def test_the_second_run_of_mnist_ends_with_both(network, small_mnist, tmp_path):
    """With torchrun each of two processes holds half of the state. "layers" has the same losses, and a lower peak."""
    flags = ("--model", network, "--dataset", "mnist", "--data-dir", small_mnist, "--output-dir", tmp_path)
    flags = (*flags, "--epochs", 1, "--global-batch-size", 24)
    if network == "shallow":
        flags += ("--min-num-params", 10**7)  # one unit, whose gathered weights must not count as state
    run_many("mnist_fsdp.py", [flags])
    printed = run_many("mnist_fsdp.py", [flags], 2).stdout
    local, sharded = records(tmp_path, "loss")
    assert (local["mode"], local["processes"]) == ("local", 1)
    assert (sharded["mode"], sharded["processes"]) == ("fsdp", 2)
    for row in (local, sharded):
        assert re.search(
            rf"^{network} .* {row['epoch']} \| .* \| {row['loss']:.4f} +\| +{row['test_loss']:.4f} ", printed, re.M
        )
    other = run_many("mnist_fsdp.py", [(*flags, "--seed", 2, "--print-model")], 2).stdout
    assert len(re.findall(rf"^{network} +\| ", other, re.M)) == 2  # its epoch, and a table without the other runs
    if network == "shallow":
        assert re.search(r"^fc1.weight .*\(128, 9216\), here \(64, 9216\)$", other, re.M)
    epoch, *table = re.findall(rf"^{network} +\| .*", printed, re.MULTILINE)
    assert table[1:] == [epoch] and "local x 1" in table[0]
    assert local["state_gib"] == pytest.approx(16 * SIZES[network] / 2**30, rel=0.01)
    assert sharded["state_gib"] == pytest.approx(local["state_gib"] / 2, rel=0.02)
    if network == "layers":
        for name in ("loss", "test_loss"):
            assert sharded[name] == pytest.approx(local[name], abs=5e-5)  # up to the printed digits
        assert sharded["accuracy"] == pytest.approx(local["accuracy"], abs=6e-4)  # at most one image differs
        assert local["peak_gib"] - sharded["peak_gib"] > (local["state_gib"] - sharded["state_gib"]) / 2


# ---- T5 --------------------------------------------------------------------------------------------------------------
def test_t5_prints_what_runs_and_rouge_equals_that_of_plain_transformers(tmp_path):
    """rouge_score scores the first 100 of 103 articles. Three processes must count each once, in several batches."""
    flags = ("--num-train-samples", 240, "--epochs", 1, "--global-batch-size", 24, "--lr", 5e-3, "--precision", "fp32")
    flags += ("--num-validation-samples", 103, "--test-batch-size", 7, "--max-target-length", 16, "--log-every", 1)
    printed = run_many("t5_fsdp.py", {tmp_path: flags}, 3).stdout
    assert 0 < curve(tmp_path, "waited")[-1] < 1
    model, tokenizer = (kind.from_pretrained(tmp_path / "best") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    facts = ["3 x cpu", torch.__version__, "FSDP2", "FULL_SHARD", f"{model.num_parameters():,}", "8,653"]
    facts += [f"{name} {curve(tmp_path, name)[-1]:.4f}" for name in ROUGE]
    for fact in (*facts, "\narticle ", "\nreference ", "\nsummary ", "metrics.jsonl"):
        assert fact in printed

    train, validation = inside.t5_articles("builtin")
    batches = t5_ordered(t5_samples(train.take(240), tokenizer, 512, 16), 24)
    targets = [sum(len(sample["labels"]) for sample in batch) for batch in batches]
    mean = statistics.fmean(curve(tmp_path), targets)
    assert records(tmp_path, "epoch_loss")[0]["epoch"] == 1
    assert curve(tmp_path, "epoch_loss") == pytest.approx([mean], **CLOSE)

    articles = validation.take(100)
    batch = DataCollatorForSeq2Seq(tokenizer)(t5_samples(articles, tokenizer, 512, 16))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=16), skip_special_tokens=True)
    scorer = RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(reference, text) for reference, text in zip(articles["summary"], texts, strict=True)]
    for name in ROUGE:
        expected = sum(score[name].fmeasure for score in scores) / len(scores)
        assert curve(tmp_path, name)[-1] == pytest.approx(expected, abs=0.005)  # one word may differ, if two tie


# ---- The language model ----------------------------------------------------------------------------------------------
def test_the_lm_prints_what_runs_and_exports_what_it_trained(tmp_path):
    """A run with 12 instead of 500 steps."""
    flags = ("--max-steps", 12, "--warmup-steps", 3, "--num-validation-texts", 9, "--log-every", 4)
    flags = (*flags, "--precision", "fp32")
    scratch = tmp_path / (100 * "x")  # too long for a socket
    scratch.mkdir()
    printed = run_many("lm_multinode.py", {tmp_path: flags}, 2, TMPDIR=str(scratch)).stdout
    *_, last = records(tmp_path, "val_loss")
    assert last["perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    steps = records(tmp_path, "loss", "grad_norm", "lr", "tokens/s", "peak_gib")
    assert [step["step"] for step in steps] == [1, 4, 8, 12]
    assert all(step["per_gpu"] == step["tokens/s"] / 2 for step in steps)
    assert "mfu" not in steps[0]  # it has no meaning on a CPU of unknown speed
    assert all(0 < step["waited"] < 1 for step in steps)
    model = tmp_path / "model"
    assert lm_validation_loss(model, "--num-validation-texts", 9) == pytest.approx(last["val_loss"], **CLOSE)
    size = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    facts = ("2 x cpu", torch.__version__, "FULL_SHARD", f"{size:,}", f"{last['val_loss']:.4f}", str(model))
    for fact in facts:
        assert fact in printed


@pytest.mark.parametrize("dtype", ["bfloat16", long(None)])
def test_a_saved_model_has_the_dtype_that_it_began_with(dtype, tiny_model, tiny_llama, articles_csv, tmp_path):
    """Without a dtype in its config, it is fp32."""
    kinds = {"lm_multinode.py": (AutoModelForCausalLM, tiny_llama), "t5_fsdp.py": (AutoModelForSeq2SeqLM, tiny_model)}
    for script, (kind, source) in kinds.items():
        start = shutil.copytree(source, tmp_path / script)
        if dtype:
            kind.from_pretrained(source, dtype=dtype).save_pretrained(start)
        else:
            config = json.loads((start / "config.json").read_text())
            (start / "config.json").write_text(json.dumps(config | {"dtype": None}))
        GenerationConfig.from_pretrained(start, repetition_penalty=1.5).save_pretrained(start)
        flags = SMALL if script == "lm_multinode.py" else ("--dataset", articles_csv, "--max-target-length", 8)
        flags = (*flags, "--model", start, "--max-steps", 2, "--precision", "bf16")
        run_many(script, {tmp_path / "output" / script: flags}, 2)
        [saved] = (tmp_path / "output" / script).glob("*/model.safetensors")
        assert {str(tensor.dtype) for tensor in load_file(saved).values()} == {f"torch.{dtype or 'float32'}"}
        assert kind.from_pretrained(saved.parent, dtype="auto").dtype == getattr(torch, dtype or "float32")
        assert GenerationConfig.from_pretrained(saved.parent).repetition_penalty == 1.5
        assert json.loads((saved.parent / "tokenizer.json").read_text())["truncation"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, long(torch.float16)])
def test_a_narrow_model_keeps_small_updates_on_average(dtype, texts, tmp_path):
    """They are smaller than half a step of `dtype`. One checkpoint gives one file, on any number of processes. Without
    training the model stays as it was, to the bit."""
    base = make_llama(tmp_path / "base", hidden_size=256, dtype=dtype)
    flags = (*SMALL, "--model", base, "--dataset", texts, "--lr", 2e-5, "--max-steps", 4, "--checkpoint-every", 4)
    flags = (*flags, "--validate-every", 0, "--resume")
    untrained = (*flags, "--max-steps", 0)
    run_many("lm_multinode.py", {tmp_path / "two": flags, tmp_path / "untrained": untrained}, 2)
    shutil.copytree(tmp_path / "two/checkpoints", tmp_path / "one/checkpoints")
    run_many("lm_multinode.py", {tmp_path / "one": flags}, 1)
    files = [tmp_path / name / "model/model.safetensors" for name in ("one", "two", "untrained")]
    assert files[0].read_bytes() == files[1].read_bytes()

    original, exported, untrained = map(load_file, (base / "model.safetensors", *files[1:]))
    assert all(torch.equal(weight, untrained[name]) for name, weight in original.items())
    checkpoint = {name: torch.empty(weight.shape) for name, weight in original.items()}
    dcp.load({"model": checkpoint}, checkpoint_id=tmp_path / "two/checkpoints/step-0000004")

    def share_kept(weights):
        """The part of the updates that is in `weights`: 1 if they are the checkpoint's."""
        kept, whole = 0.0, 0.0
        for name, weight in original.items():
            update = checkpoint[name].double() - weight
            kept += (update * (weights[name].double() - weight)).sum().item()
            whole += update.square().sum().item()
        return kept / whole

    nearest = {name: weight.to(dtype) for name, weight in checkpoint.items()}
    assert share_kept(nearest) < 0.7
    assert share_kept(exported) == pytest.approx(1, abs=0.03)


@pytest.mark.long
def test_an_export_replaces_a_whole_model_and_nothing_else(tiny_llama, tmp_path):
    """Its tokenizer has two chat templates. Modes follow the umask."""
    bases = [shutil.copytree(tiny_llama, tmp_path / name) for name in ("with", "without")]
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(bases[0])
    model = tmp_path / "output" / "model"
    (model / "notes").mkdir(parents=True)
    for name in ("notes/mine.txt", "adapter_config.json"):
        (model / name).write_text("{}")

    usual = os.umask(0o027)
    for base in (bases[0], bases[0], bases[1]):
        succeed("lm_multinode.py", *SMALL, "--model", base, "--max-steps", 1, "--output-dir", model.parent)
        modes = {path.stat().st_mode & 0o777 for path in model.glob("*.*")}
        assert modes == {0o640}
        assert AutoTokenizer.from_pretrained(model).chat_template == AutoTokenizer.from_pretrained(base).chat_template
        assert (model / "notes/mine.txt").exists() and not (model / "adapter_config.json").exists()
    os.umask(usual)
    assert {path.name for path in model.iterdir()} - {"notes"} == {path.name for path in bases[1].iterdir()}


@pytest.mark.long
def test_a_pretrained_model_trains_with_its_dropout(tmp_path):
    """`from_pretrained` returns it in eval(), without dropout."""
    settings = {}
    for dropout in (0.0, 0.5):
        model = make_llama(tmp_path / f"model {dropout}", attention_dropout=dropout)
        settings[tmp_path / str(dropout)] = (*SMALL, "--model", model, "--max-steps", 1, "--no-save-model")
    run_many("lm_multinode.py", settings, 1)
    assert abs(curve(tmp_path / "0.0")[0] - curve(tmp_path / "0.5")[0]) > 1e-4


# ---- Requests to the Hub ---------------------------------------------------------------------------------------------
@pytest.mark.long
def test_only_one_process_asks_the_hub(tiny_llama, tmp_path):
    """One process of each node asks for config and tokenizer, and rank 0 for the weights."""
    flags = (*SMALL, "--model", "someone/model", "--max-steps", 1, "--no-save-model")
    requests_of_runs = []
    for processes in (None, 2):
        with hub(tiny_llama) as (variables, requests):
            # No fork: the Hub's library reads the address when it is imported.
            variables |= {"HF_HOME": str(tmp_path / f"cache{processes}")}
            succeed(
                "lm_multinode.py", *flags, "--output-dir", tmp_path / str(processes), processes=processes, **variables
            )
        requests_of_runs.append(sorted(requests))
    assert any("model.safetensors" in request for request in requests_of_runs[0])
    assert requests_of_runs[0] == requests_of_runs[1]
