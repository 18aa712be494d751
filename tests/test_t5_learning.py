"""The bare command, as in the README but for one epoch instead of four: it learns, and its model can be loaded."""

import re

import torch

import pytest
from conftest import ROOT, reports, succeed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import common
import t5_fsdp


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("trained")
    finished = succeed("t5_fsdp.py", "--epochs", 1, "--output-dir", output_dir, processes=2)
    return output_dir, finished.stdout


def test_rouge_climbs(trained):
    before, *_, after = reports(trained[0], "epoch")
    assert before["rougeL"] < 0.2
    assert after["rougeL"] > 0.5
    assert after["rouge1"] > 0.6 and after["rouge2"] > 0.4
    assert after["validation_loss"] < before["validation_loss"] / 10


def test_the_start_block_says_what_runs(trained):
    for line in (
        r"device     cpu \(gloo\), nodes: 1, processes: 2, threads in each: \d+",
        r"fsdp       version 2, FULL_SHARD, 4 T5Blocks and the root, backward prefetch pre",
        r"data       builtin, 8,000 articles to train on, 300 to validate",
        r"settings   .*--batch-size 16 \(4\).*in brackets the tutorial's",
    ):
        assert re.search(line, trained[1]), line


def test_the_exported_model_writes_the_printed_summaries(trained, tmp_path):
    folder = next(trained[0].glob("t5-*"))
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    data = common.load_summarization_data("builtin", "text", "headline", 8000, 300, trained[0])
    rows = common.tokenize(data.validation, tokenizer, t5_fsdp.SOURCE_PREFIX, 512, 150)
    batch = DataCollatorForSeq2Seq(tokenizer)([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        loss, tokens = t5_fsdp.summed_loss(model, batch)
        # The run computed in bf16 where the machine does so natively.
        assert (loss / tokens).item() == pytest.approx(reports(trained[0], "epoch")[-1]["validation_loss"], rel=0.02)
        inputs = {"input_ids": batch["input_ids"][:3], "attention_mask": batch["attention_mask"][:3]}
        with torch.autocast("cpu", torch.bfloat16, enabled="precision  bf16" in trained[1]):
            tokens = model.generate(**inputs, max_new_tokens=150, do_sample=False)
    printed = re.findall(r"^summary    (.*)$", trained[1], re.MULTILINE)
    summaries = [" ".join(text.split()) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    assert printed == summaries


def test_the_readme_shows_the_commands_that_ci_runs():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "torchrun --nproc_per_node 2 t5_fsdp.py" in readme
    assert "README.md" in ci
