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
import torch.distributed as dist

import pytest
from conftest import (
    CLOSE,
    ROOT,
    SAVE_ON_CPU,
    VERSIONS,
    check_bad_input,
    curve,
    fsdp,
    losses,
    make_model,
    records,
    run,
    run_many,
    succeed,
)
from safetensors.torch import load_file
from test_t5_data import load
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import common
import t5_fsdp

# 190 training articles in batches of 2 x 8 are 11 steps an epoch: a save in each, and one at the end of each.
STEPS, EVERY, KEPT = 15, 5, ["step-0000011", "step-0000015"]
SUMMARY = 15  # tokens: no article has a longer summary, but an untrained model would not stop writing


@pytest.fixture(scope="session")
def shared(tmp_path_factory, articles_csv):
    """Arguments of all runs; the model has dropout."""
    model = make_model(tmp_path_factory.mktemp("dropout-model"), dropout=0.1)
    arguments = ["--model", model, "--dataset", articles_csv, "--num-train-samples", 0, "--batch-size", 8]
    arguments += ["--max-target-length", SUMMARY, "--log-every", 1, "--precision", "fp32", "--max-steps", STEPS]
    return [*map(str, arguments), "--sharding-strategy", "SHARD_GRAD_OP"]


@pytest.fixture(scope="session")
def resumed(shared, tmp_path_factory):
    """For each version a run of STEPS steps, and one that is stopped twice: in the first epoch and in the second."""
    root, settings = tmp_path_factory.mktemp("resume"), []
    for version in VERSIONS:
        saving = [*shared, *fsdp(version), "--checkpoint-every", EVERY]
        settings.append([*saving, "--output-dir", root / f"whole{version}"])
        for stop in (EVERY, EVERY + 8, STEPS):
            settings.append([*saving, "--output-dir", root / f"parts{version}", "--max-steps", stop, "--resume"])
    run_many("t5_fsdp.py", settings, processes=2)
    return root


@pytest.fixture
def copy(resumed, tmp_path):
    """A function that copies the finished run of FSDP2, to go on from."""
    return lambda name="copy": shutil.copytree(resumed / "whole2", tmp_path / name)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(resumed, version):
    whole, parts = resumed / f"whole{version}", resumed / f"parts{version}"
    assert [row["step"] for row in records(parts, "loss")] == list(range(1, STEPS + 1))  # none was made twice
    assert losses(parts) == losses(whole)
    # The second stop was after the first epoch's end: its validation, and the last one, are the same too.
    before, *ends = ({row["step"]: row["val_loss"] for row in records(path, "val_loss")} for path in (whole, parts))
    assert set(before) == {0, 11, STEPS} and before.items() <= ends[0].items()


def test_gamma_lowers_the_learning_rate_after_each_epoch(resumed):
    rates = {row["epoch"]: row["lr"] for row in records(resumed / "parts1", "loss")}
    assert rates == {1: 1e-3, 2: pytest.approx(1e-3 * 0.8)}


def test_the_newest_two_checkpoints_are_kept(resumed):
    assert sorted(path.name for path in (resumed / "whole2" / "checkpoints").iterdir()) == KEPT


def test_checkpoints_move_to_another_number_of_processes(copy, shared):
    folder = copy()
    arguments = ("--resume", "--no-save-model", "--output-dir", folder)
    finished = succeed("t5_fsdp.py", *shared, *arguments, processes=4, fork=True)
    assert (
        f"from step {STEPS}, keeps all but the order of the articles, and dropout's random numbers" in finished.stdout
    )
    before, after = records(folder, "val_loss")[-2:]
    assert after["step"] == before["step"] == STEPS  # nothing was trained, the loaded model was only evaluated
    assert after["val_loss"] == pytest.approx(before["val_loss"], **CLOSE)


def test_torchrun_restarts_after_a_killed_process_and_loses_nothing(resumed, shared, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "--max-restarts", "1", ROOT / "t5_fsdp.py", *shared, "--checkpoint-every", str(EVERY)]
    with started([*command, "--no-save-model", "--output-dir", tmp_path]) as running:
        wait_for(running, (tmp_path / "checkpoints" / "step-0000005" / ".metadata").exists)
        os.kill(processes_of(running)[-1], signal.SIGKILL)
        assert running.wait(timeout=200) == 0
    assert losses(tmp_path) == losses(resumed / "whole2")
    assert len({row["run"] for row in records(tmp_path, "loss")}) == 2  # it did start twice


def processes_of(torchrun):
    return [int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]


@contextlib.contextmanager
def started(command):
    """A running command, as in a terminal of its own; nothing of it outlives the block."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen([*map(str, command), "--device", "cpu"], **pipes, start_new_session=True)
    try:
        yield running
    finally:
        for pid in (*processes_of(running), running.pid) if running.poll() is None else ():
            os.kill(pid, signal.SIGKILL)


def trains(folder):
    """Whether a run has made a step."""
    return (folder / "metrics.jsonl").exists() and bool(losses(folder))


def wait_for(running, condition):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)


def assert_it_saved_and_goes_on(printed, folder, resumed, shared):
    """One checkpoint was saved, without --checkpoint-every; the resumed run goes on as if nothing had happened."""
    [checkpoint] = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert max(losses(folder)) == step < STEPS
    assert f"stopped  on request at step {step}, all saved; --resume goes on" in printed
    arguments = (*shared, "--no-save-model", "--resume", "--output-dir", folder)
    finished = succeed("t5_fsdp.py", *arguments, processes=2, fork=True)
    assert f"from step {step}, keeps everything" in finished.stdout
    assert losses(folder) == losses(resumed / "whole2")


def test_sigterm_on_one_process_saves_and_leaves_with_code_0(resumed, shared, tmp_path):
    kill = (1, lambda: trains(tmp_path), signal.SIGTERM)
    arguments = (*shared, "--no-save-model", "--output-dir", tmp_path)
    finished = run("t5_fsdp.py", *arguments, processes=2, fork=True, kill=kill)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert_it_saved_and_goes_on(finished.stdout, tmp_path, resumed, shared)


def test_ctrl_c_saves_and_leaves(resumed, shared, tmp_path):
    """In a terminal it reaches the process that has started the others, and hands it on."""
    command = [sys.executable, ROOT / "t5_fsdp.py", *shared, "--no-save-model", "--output-dir", tmp_path]
    with started(command) as running:
        wait_for(running, lambda: trains(tmp_path))
        os.killpg(running.pid, signal.SIGINT)
        printed = running.communicate(timeout=100)[0]
    assert running.returncode == 128 + signal.SIGINT and "Traceback" not in printed, printed
    assert_it_saved_and_goes_on(printed, tmp_path, resumed, shared)


DAMAGES = {
    "half-written": lambda path: (path / ".metadata").unlink(),
    "shard cut short": lambda path: os.truncate(path / "__0_0.distcp", 1000),
    "shard missing": lambda path: (path / "__1_0.distcp").unlink(),
    "list of shards empty": lambda path: os.truncate(path / ".metadata", 0),
    "list of shards cut short": lambda path: os.truncate(path / ".metadata", 1000),
    "progress empty": lambda path: os.truncate(path / "progress.json", 0),
}


def test_a_damaged_checkpoint_is_one_sentence_that_says_what_to_delete(resumed, copy, shared):
    """Then the one before is resumed. One that was never finished is no checkpoint."""
    folders = {name: copy(name) for name in DAMAGES}
    for name, damage in DAMAGES.items():
        newest = folders[name] / "checkpoints" / KEPT[1]
        damage(newest)
        os.remove(folders[name] / "metrics.jsonl")
        if (newest / ".metadata").exists():
            flags = ("--resume", "--no-save-model", "--output-dir", folders[name])
            finished = run("t5_fsdp.py", *shared, *flags, processes=2, fork=True)
            assert finished.returncode == 2 and "Traceback" not in finished.stderr
            assert f"error: {newest} is damaged; delete it to resume from the one before" in finished.stderr
            shutil.rmtree(newest)
    runs = [[*shared, "--resume", "--no-save-model", "--output-dir", folder] for folder in folders.values()]
    finished = run_many("t5_fsdp.py", runs, processes=2)
    assert finished.stdout.count("from step 11, keeps everything") == len(DAMAGES)
    expected = losses(resumed / "whole2")
    for name, folder in folders.items():
        assert losses(folder) == {step: expected[step] for step in range(12, STEPS + 1)}, name


def test_what_cannot_be_resumed_is_one_sentence(copy, shared, tmp_path):
    folder, broken = copy(), copy("broken")
    for kept in KEPT:
        os.truncate(broken / "checkpoints" / kept / "__0_0.distcp", 1000)
    cases = {
        ("--output-dir", folder): "holds checkpoints of an earlier run; add --resume",
        ("--output-dir", folder, "--resume", "--seed", 7): "step-0000015 was made with --seed 1; resume with it",
        ("--output-dir", folder, "--resume", "--lr", 0.5): "step-0000015 was made with --lr 0.001; resume with it",
        ("--output-dir", broken, "--resume"): "is damaged; delete it to resume from the one before",
    }
    # The model that --model names may have been replaced: by one of fewer layers, of more, of other widths.
    for changes in ({"num_layers": 1}, {"num_layers": 3}, {"d_ff": 96}):
        other = copy(f"other-{len(cases)}")
        model = make_model(tmp_path / f"model-{len(cases)}", **changes)
        progress = other / "checkpoints" / KEPT[1] / "progress.json"
        progress.write_text(progress.read_text().replace(shared[1], str(model)))
        cases["--model", model, "--output-dir", other, "--resume"] = "is of another model or strategy; resume with"
    as_forks = [((*shared, *arguments, "--num-processes", 1), None, sentence) for arguments, sentence in cases.items()]
    check_bad_input("t5_fsdp.py", [], as_forks)
    assert sorted(path.name for path in (folder / "checkpoints").glob("*")) == KEPT
    assert json.loads((folder / "checkpoints" / KEPT[1] / "progress.json").read_text())["step"] == STEPS


def evaluate_plainly(folder, articles_csv):
    """Load an exported folder without FSDP; return the model and its validation loss."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    articles = load(articles_csv, validation=300)[1]
    options = {"tokenizer": tokenizer, "source_length": 512, "target_length": SUMMARY}
    rows = articles.map(t5_fsdp.tokenize, batched=True, fn_kwargs=options, remove_columns=articles.column_names)
    with torch.no_grad():
        batch = DataCollatorForSeq2Seq(tokenizer)([*rows])
        loss = t5_fsdp.summed_loss(model, batch) / (batch["labels"] != -100).sum()
    return model, loss.item()


@pytest.mark.parametrize("version", SAVE_ON_CPU)
def test_the_exported_folder_is_what_was_trained(resumed, version, articles_csv):
    folder = resumed / f"whole{version}"
    assert sorted(path.name for path in folder.iterdir()) == ["best", "checkpoints", "metrics.jsonl"]
    model, loss = evaluate_plainly(folder / "best", articles_csv)
    assert model.lm_head.weight is model.shared.weight is model.encoder.embed_tokens.weight
    assert loss == pytest.approx(records(folder, "val_loss")[-1]["val_loss"], **CLOSE)
    weights = load_file(folder / "best" / "model.safetensors")
    assert "shared.weight" in weights and "lm_head.weight" not in weights  # tied weights once


def test_flan_t5_keeps_its_own_output_layer_and_the_best_epoch_is_exported(articles_csv, tmp_path):
    model = make_model(tmp_path / "flan", tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    arguments = ["--model", model, "--dataset", articles_csv, "--num-train-samples", 64, "--batch-size", 8]
    arguments += ["--epochs", 2, "--gamma", 1000, "--precision", "fp32", "--max-target-length", SUMMARY]  # worse, then
    outputs = {version: tmp_path / f"fsdp{version}" for version in SAVE_ON_CPU}
    runs = [[*arguments, "--fsdp-version", version, "--output-dir", path] for version, path in outputs.items()]
    run_many("t5_fsdp.py", runs, processes=2)
    for output in outputs.values():
        model, loss = evaluate_plainly(output / "best", articles_csv)
        assert (model.lm_head.weight - model.shared.weight).abs().max() > 1
        _, best, worse = curve(output, "val_loss")
        assert loss == pytest.approx(best, **CLOSE) and worse > best + 1


def test_a_failed_export_leaves_the_one_before(shared, tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            raise OSError("No space left on device")

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(shared[1]), AutoTokenizer.from_pretrained(shared[1])
    world = common.setup(None)
    common.export(model, tokenizer, tmp_path / "best", world)
    before = (tmp_path / "best" / "model.safetensors").read_bytes()
    model.shared.weight.data.zero_()
    with pytest.raises(common.UserError, match=r"could not save .*best: No space left on device"):
        common.export(model, Tokenizer(), tmp_path / "best", world)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == before
    common.export(model, tokenizer, tmp_path / "best", world)  # what the failed one has left is in no one's way
    assert (tmp_path / "best" / "model.safetensors").read_bytes() != before
    dist.destroy_process_group()
