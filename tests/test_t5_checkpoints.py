"""Resume is exact, also with dropout and in the middle of an epoch; exported models are what was trained."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import pytest
from conftest import ROOT, make_model, reports, run, run_many, succeed
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import common
import t5_fsdp

# 190 training articles in batches of 16 are 12 steps an epoch, the last one with 14 articles.
STEPS, HALF = 15, 5
SUMMARY = 40  # tokens; no article has a summary as long, but an untrained model would not stop writing


@pytest.fixture(scope="session")
def dropout_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("dropout-model"), dropout=0.1)


@pytest.fixture(scope="session")
def resumed(dropout_model, articles_csv, tmp_path_factory):
    """For each version a run of STEPS steps, and one that is stopped twice: in the first epoch and in the second."""
    root = tmp_path_factory.mktemp("resume")
    settings = []
    for version in (1, 2):
        common_arguments = [
            *("--model", dropout_model, "--dataset", articles_csv, "--num-train-samples", 0, "--batch-size", 8),
            *("--fsdp-version", version, "--log-every", 1, "--num-rouge-samples", 0, "--precision", "fp32"),
            *("--test-batch-size", 8, "--checkpoint-every", HALF, "--sharding-strategy", "SHARD_GRAD_OP"),
            *("--max-target-length", SUMMARY),
        ]
        whole, parts = root / f"whole{version}", root / f"parts{version}"
        settings.append([*common_arguments, "--output-dir", whole, "--max-steps", STEPS])
        for stop in (HALF, HALF + 8, STEPS):
            settings.append([*common_arguments, "--output-dir", parts, "--max-steps", stop, "--resume"])
    run_many("t5_fsdp", settings, processes=2)
    return root


def losses(folder):
    return [report["train_loss"] for report in reports(folder, "step")]


@pytest.mark.parametrize("version", [1, 2])
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(resumed, version):
    whole, parts = resumed / f"whole{version}", resumed / f"parts{version}"
    assert len(losses(whole)) == STEPS
    assert losses(parts) == losses(whole)
    # The second stop was after the first epoch's end: its report, and the last one, are the same too.
    ends = [{report["epoch"]: report for report in reports(folder, "epoch")} for folder in (whole, parts)]
    for epoch in (1, 2):
        for name in ("train_loss", "validation_loss", "step"):
            assert ends[0][epoch][name] == ends[1][epoch][name]
    assert "rougeL" not in ends[0][1]  # --num-rouge-samples 0


def test_gamma_lowers_the_learning_rate_after_each_epoch(resumed):
    rates = {report["epoch"]: report["learning_rate"] for report in reports(resumed / "parts1", "step")}
    assert rates == {1: 0.002, 2: pytest.approx(0.002 * 0.7)}


def test_only_the_newest_checkpoints_are_kept(resumed):
    folders = sorted(path.name for path in (resumed / "whole2" / "checkpoints").iterdir())
    assert folders == ["step-10", "step-15"]


def test_checkpoints_move_to_another_number_of_processes(resumed, tmp_path, dropout_model, articles_csv):
    shutil.copytree(resumed / "whole2", tmp_path / "moved")
    finished = succeed(
        "t5_fsdp.py",
        *("--model", dropout_model, "--dataset", articles_csv, "--num-train-samples", 0, "--batch-size", 4),
        *("--max-steps", STEPS, "--num-rouge-samples", 0, "--precision", "fp32", "--resume", "--no-save-model"),
        *("--output-dir", tmp_path / "moved", "--max-target-length", SUMMARY),
        processes=4,
        fork=True,
    )
    assert "all but the random state of dropout: it was saved by 2 processes" in finished.stdout
    before, after = reports(tmp_path / "moved", "epoch")[-2:]
    assert after["step"] == before["step"] == STEPS  # nothing was trained, the loaded model was only evaluated
    assert after["validation_loss"] == pytest.approx(before["validation_loss"], abs=1e-5)


def test_torchrun_restarts_after_a_killed_process_and_loses_nothing(resumed, tmp_path, dropout_model, articles_csv):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1"]
    command += [str(ROOT / "t5_fsdp.py"), "--model", str(dropout_model), "--dataset", str(articles_csv)]
    command += ["--num-train-samples", "0", "--batch-size", "8", "--test-batch-size", "8", "--log-every", "1"]
    command += ["--num-rouge-samples", "0", "--precision", "fp32", "--max-steps", str(STEPS), "--no-save-model"]
    command += ["--sharding-strategy", "SHARD_GRAD_OP", "--checkpoint-every", "5", "--output-dir", str(tmp_path)]
    command += ["--max-target-length", str(SUMMARY)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "checkpoints" / "step-5").exists():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.02)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert running.wait(timeout=120) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    by_step = {report["step"]: report["train_loss"] for report in reports(tmp_path, "step")}
    assert [by_step[step + 1] for step in range(STEPS)] == losses(resumed / "whole2")
    assert len(reports(tmp_path, "settings")) == 2  # it did start twice


def test_sigterm_on_one_process_saves_and_leaves_with_code_0(resumed, tmp_path, dropout_model, articles_csv):
    """Without --checkpoint-every; the resumed run goes on as if nothing had happened."""
    arguments = [
        *("--model", dropout_model, "--dataset", articles_csv, "--num-train-samples", 0, "--batch-size", 8),
        *(
            "--log-every",
            1,
            "--num-rouge-samples",
            0,
            "--precision",
            "fp32",
            "--test-batch-size",
            8,
            "--max-steps",
            STEPS,
        ),
        *("--max-target-length", SUMMARY, "--no-save-model", "--output-dir", tmp_path),
    ]

    def when():
        return (tmp_path / "metrics.jsonl").exists() and len(losses(tmp_path)) >= 3

    finished = run("t5_fsdp.py", *arguments, processes=2, fork=True, kill=(1, when, signal.SIGTERM))
    assert finished.returncode == 0, finished.stderr[-2000:]
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert 3 <= step < STEPS
    assert f"stopped    by SIGTERM at step {step}, all saved; the same command with --resume goes on" in finished.stdout
    succeed("t5_fsdp.py", *arguments, "--resume", processes=2, fork=True)
    assert losses(tmp_path) == losses(resumed / "whole2")


def test_half_written_checkpoints_are_never_resumed(resumed, tmp_path, dropout_model, articles_csv):
    shutil.copytree(resumed / "whole2", tmp_path / "killed")
    (tmp_path / "killed" / "checkpoints" / "step-15").rename(tmp_path / "killed" / "checkpoints" / "step-15.partial")
    finished = succeed(
        "t5_fsdp.py",
        *("--model", dropout_model, "--dataset", articles_csv, "--num-train-samples", 0, "--batch-size", 8),
        *("--max-steps", 10, "--num-rouge-samples", 0, "--precision", "fp32", "--resume", "--no-save-model"),
        *("--output-dir", tmp_path / "killed", "--max-target-length", SUMMARY),
        fork=True,
    )
    assert "step-10, keeps" in finished.stdout
    assert reports(tmp_path / "killed", "epoch")[-1]["step"] == 10


def evaluate_plainly(folder, articles_csv, tmp_path):
    """Load an exported folder without FSDP; return the model, its validation loss and summaries of three articles."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    data = common.load_summarization_data(str(articles_csv), "text", "headline", 0, 300, tmp_path)
    rows = common.tokenize(data.validation, tokenizer, t5_fsdp.SOURCE_PREFIX, 512, SUMMARY)
    batch = DataCollatorForSeq2Seq(tokenizer)([rows[i] for i in range(len(rows))])
    inputs = {"input_ids": batch["input_ids"][:3], "attention_mask": batch["attention_mask"][:3]}
    with torch.no_grad():
        loss, tokens = t5_fsdp.summed_loss(model, batch)
        texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=SUMMARY), skip_special_tokens=True)
    return model, (loss / tokens).item(), [text.strip() for text in texts]


@pytest.mark.parametrize("version", [1, 2])
def test_the_exported_folder_is_the_best_model(resumed, version, articles_csv, tmp_path):
    folders = [path for path in (resumed / f"whole{version}").iterdir() if path.name.startswith("t5-")]
    assert len(folders) == 1  # an earlier, worse one is gone
    best = min((report for report in reports(resumed / f"whole{version}", "epoch")), key=lambda r: r["validation_loss"])
    assert folders[0].name.endswith(f"-epoch-{best['epoch']}-loss-{best['validation_loss']:.4f}")

    model, loss, summaries = evaluate_plainly(folders[0], articles_csv, tmp_path)
    assert model.lm_head.weight is model.shared.weight is model.encoder.embed_tokens.weight
    assert loss == pytest.approx(best["validation_loss"], abs=1e-5)
    assert best["epoch"] == 2  # so the summaries at the end of the run are this model's
    assert [report["summary"] for report in reports(resumed / f"whole{version}", "summary")] == summaries


def test_flan_t5_keeps_its_own_output_layer(articles_csv, tmp_path):
    changes = {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    folder = make_model(tmp_path / "flan", **changes)
    arguments = ["--model", folder, "--dataset", articles_csv, "--num-train-samples", 64, "--epochs", 1]
    arguments += ["--precision", "fp32", "--num-rouge-samples", 3, "--max-target-length", SUMMARY]
    outputs = [tmp_path / f"fsdp{version}" for version in (1, 2)]
    settings = [[*arguments, "--fsdp-version", output.name[-1], "--output-dir", output] for output in outputs]
    run_many("t5_fsdp", settings, processes=2)
    for output in outputs:
        model, loss, summaries = evaluate_plainly(next(output.glob("t5-*")), articles_csv, tmp_path)
        assert (model.lm_head.weight - model.shared.weight).abs().max() > 1
        assert loss == pytest.approx(reports(output, "epoch")[-1]["validation_loss"], abs=1e-5)
        assert [report["summary"] for report in reports(output, "summary")] == summaries


def test_exports_hold_each_shared_weight_once(resumed):
    weights = load_file(next(Path(resumed / "whole2").glob("t5-*/model.safetensors")))
    assert "shared.weight" in weights
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize("changes", [{"num_layers": 1}, {"num_layers": 3}, {"d_ff": 96}])
def test_a_checkpoint_of_another_model_is_refused(resumed, tmp_path, articles_csv, changes):
    """Also one of more layers, whose rest would go unused; the folder that --model names may have been replaced."""
    shutil.copytree(resumed / "whole2" / "checkpoints" / "step-15", tmp_path / "checkpoints" / "step-15")
    progress = tmp_path / "checkpoints" / "step-15" / "progress.json"
    model = make_model(tmp_path / "model", **changes)
    saved = json.loads(progress.read_text())
    saved["must_match"]["model"] = str(model)
    progress.write_text(json.dumps(saved))
    arguments = ("--model", model, "--dataset", articles_csv, "--num-train-samples", 0, "--max-target-length", SUMMARY)
    finished = run("t5_fsdp.py", *arguments, "--resume", "--output-dir", tmp_path, processes=2, fork=True)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr, finished.stderr[-3000:]
    assert "step-15 is of another model, which differs in " in finished.stderr
    assert "resume with the model it was made with" in finished.stderr


def test_a_fresh_run_does_not_touch_old_checkpoints(resumed, dropout_model, articles_csv):
    arguments = ("--model", dropout_model, "--dataset", articles_csv, "--num-train-samples", 0)
    for flags, sentence in (
        ((), "holds checkpoints of an earlier run (newest: step-15)"),
        (("--resume", "--seed", 7, "--max-target-length", SUMMARY), "was made with --seed 1 and not 7"),
        (("--resume", "--lr", 0.5, "--max-target-length", SUMMARY), "was made with --lr 0.002 and not 0.5"),
    ):
        finished = run("t5_fsdp.py", *arguments, *flags, "--output-dir", resumed / "whole2", fork=True)
        assert finished.returncode == 2
        assert sentence in finished.stderr
    assert json.loads((resumed / "whole2/checkpoints/step-15/progress.json").read_text())["step"] == STEPS
