"""The bare command with an eighth of its steps: it learns, and its model can be loaded."""

import re

import torch

import pytest
from conftest import records, succeed
from rouge_score.rouge_scorer import RougeScorer
from test_t5_data import load
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import t5_fsdp

ROUGE = ("rouge1", "rouge2", "rougeL")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("trained")
    fewer = ("--epochs", 1, "--num-train-samples", 4000)
    return output_dir, succeed("t5_fsdp.py", *fewer, "--output-dir", output_dir, timeout=600).stdout


def test_rouge_climbs(trained):
    before, after = records(trained[0], "val_loss")
    assert before["rougeL"] < 0.2
    assert after["rouge1"] > 0.8 and after["rouge2"] > 0.6 and after["rougeL"] > 0.55
    assert after["val_loss"] < before["val_loss"] / 10


def test_the_first_lines_say_what_runs(trained):
    for line in (
        r"torchrun --standalone --nproc_per_node \d+ .*t5_fsdp\.py --epochs 1",
        r"run      2 processes on cpu, torch 2\.[^,]*, transformers ",
        r"fsdp     FSDP2, FULL_SHARD, (fp32|bf16)",
        r"model    builtin, [\d,]+ parameters, 0\.\d+ GB of state a process, which has",
        r"dataset  builtin, 10,000 rows, of which 10,000 have a text and a summary within --max-summary-share",
        r"data     4,000 articles to train on, 300 to validate",
        r"step      0 \| val_loss \d\.\d{4} \| rouge1 0\.\d{4} \| rouge2 0\.\d{4} \| rougeL 0\.\d{4}$",
        r"step     25 \| loss \d\.\d{4} \| grad_norm \d+\.\d{3} \| lr 1\.00e-03 \| +[\d,]+ tokens/s \| \d\.\d\d GB$",
    ):
        assert re.search(f"^{line}", trained[1], re.MULTILINE), line
    assert len(records(trained[0], "loss", "grad_norm", "lr", "tokens/s", "peak_gb")) == len(
        records(trained[0], "loss")
    )


def test_the_exported_model_writes_the_printed_summaries(trained):
    """ROUGE too is what rouge_score makes of the first 100 summaries."""
    output_dir, printed = trained
    model, tokenizer = (kind.from_pretrained(output_dir / "best") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    articles = load("builtin", 4000, 300)[1]
    options = {"tokenizer": tokenizer, "source_length": 512, "target_length": 150}
    rows = articles.map(t5_fsdp.tokenize, batched=True, fn_kwargs=options, remove_columns=articles.column_names)
    batch = DataCollatorForSeq2Seq(tokenizer)([*rows])
    with torch.no_grad():
        loss = t5_fsdp.summed_loss(model.eval(), batch) / (batch["labels"] != -100).sum()
        inputs = {"input_ids": batch["input_ids"][:100], "attention_mask": batch["attention_mask"][:100]}
        bf16 = "FULL_SHARD, bf16" in printed  # where the machine computes so
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=150), skip_special_tokens=True)
    row = records(output_dir, "val_loss")[-1]
    assert row["val_loss"] == pytest.approx(loss.item(), rel=0.02 if bf16 else 1e-4)
    scorer = RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(*pair) for pair in zip(articles["summary"][:100], texts, strict=True)]
    for name in ROUGE:
        mean = sum(score[name].fmeasure for score in scores) / 100
        assert row[name] == pytest.approx(mean, abs=0.05 if bf16 else 1e-6)
    summaries = re.findall(r"^summary    (.+(?:\n {11}.+)*)$", printed, re.MULTILINE)
    assert summaries
    assert bf16 or summaries[-1].split() == texts[0].split()


def test_rouge_is_the_same_on_any_number_of_processes(trained, tmp_path):
    """100 articles cannot be divided among 3 processes, and there are several batches of them."""
    arguments = ["--model", trained[0] / "best", "--num-train-samples", 48, "--num-validation-samples", 100]
    arguments += ["--test-batch-size", 20, "--epochs", 1, "--no-save-model", "--output-dir", tmp_path]
    succeed("t5_fsdp.py", *arguments, processes=3, fork=True)
    before, two = records(tmp_path, "val_loss")[0], records(trained[0], "val_loss")[-1]
    bf16 = "FULL_SHARD, bf16" in trained[1]
    assert [before[name] for name in ROUGE] == pytest.approx([two[name] for name in ROUGE], abs=0.05 if bf16 else 1e-6)
