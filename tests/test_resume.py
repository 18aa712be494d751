"""Whatever ends a run, the next one with --resume goes on as if nothing had been: the same losses, to the bit."""

import json
import os
import re
import shutil
import signal
import subprocess

import torch

import pytest
from conftest import CLOSE, SAVE_ON_CPU, VERSIONS, curve, fsdp, losses, make_model, records, run, run_many, started
from safetensors.torch import load_file
from test_errors import refuse
from test_recipes import patched
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from inside import UserError, check_settings, parse, t5_articles, t5_loss, t5_tokenized

LM_STEPS = 6
LM = (
    *("--max-steps", LM_STEPS, "--warmup-steps", 2, "--log-every", 1, "--validate-every", 3, "--checkpoint-every", 2),
    *("--seq-length", 32, "--global-batch-size", 8, "--micro-batch-size", 2, "--num-validation-texts", 20),
    *("--precision", "fp32"),
)
DILOCO = ("--sharding-strategy", "DILOCO", "--local-steps", 3)

# 64 articles in batches of 2 x 8 are 4 steps an epoch: a checkpoint in each, and one at the end of each.
T5_STEPS = 8
T5 = (
    *("--num-train-samples", 64, "--batch-size", 8, "--epochs", 2, "--log-every", 1, "--checkpoint-every", 3),
    *("--max-target-length", 15, "--sharding-strategy", "SHARD_GRAD_OP"),  # no article has a longer summary
    *("--precision", "fp32"),
)


def launch(script, *flags, processes=2, check=True, **options):
    return run(script, *flags, processes=processes, fork=True, check=check, **options)


@pytest.fixture(scope="module")
def lm(tiny_llama):
    """Flags of all runs of the LM script."""
    return ["--model", tiny_llama, *LM]


@pytest.fixture(scope="module")
def lm_whole(lm, tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("lm")
    launch("lm_multinode.py", *lm, "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def t5(articles_csv, tmp_path_factory):
    """Flags of all runs of the T5 script, of a model with dropout."""
    model = make_model(tmp_path_factory.mktemp("dropout"), dropout=0.1)
    return ["--model", model, "--dataset", articles_csv, *T5]


@pytest.fixture(scope="module")
def t5_runs(t5, tmp_path_factory):
    """For each version an uninterrupted run, and one that is stopped: FSDP1 in the second epoch, FSDP2 in the first."""
    root = tmp_path_factory.mktemp("t5")
    settings = []
    for version in VERSIONS:
        flags = [*t5, *fsdp(version), "--output-dir"]
        settings.append([*flags, root / f"whole{version}"])
        for stop in ({1: 6, 2: 3}[version], T5_STEPS):
            settings.append([*flags, root / f"parts{version}", "--max-steps", stop, "--resume", "--no-save-model"])
    run_many("t5_fsdp.py", settings, 2)
    return root


def results(folder, since=-1):
    """The losses and validation losses by step, after one of them; of a step that was made twice, the last."""
    found = {}
    for row in records(folder, "step"):
        for name in ("loss", "val_loss"):
            if name in row and row["step"] > since:
                found[name, row["step"]] = row[name]
    return found


def checkpoint(folder, step):
    return folder / "checkpoints" / f"step-{step:07d}"


def finished_checkpoints(folder):
    """Their steps."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/*/.metadata"))


def progress(folder, step):
    """What a checkpoint holds beside tensors and flags."""
    found = json.loads((checkpoint(folder, step) / "progress.json").read_text())
    return {name: value for name, value in found.items() if name != "settings"}


def check_resume(script, ways, folder, processes=2, **options):
    """With each list of flags a run to the end, and one that goes on from its last checkpoint but one, end alike."""
    pairs = [(folder / f"whole{number}", folder / f"again{number}") for number in range(len(ways))]
    flags = [(*way, "--no-save-model") for way in ways]
    run_many(script, {whole: way for way, (whole, _) in zip(flags, pairs, strict=True)}, processes, **options)
    for whole, again in pairs:
        before, _ = finished_checkpoints(whole)
        shutil.copytree(checkpoint(whole, before), checkpoint(again, before))
    settings = {again: (*way, "--resume") for way, (_, again) in zip(flags, pairs, strict=True)}
    run_many(script, settings, processes, **options)
    for whole, again in pairs:
        before, last = finished_checkpoints(whole)
        assert results(again) == results(whole, since=before)
        assert progress(again, last) == progress(whole, last)


def test_a_run_that_is_killed_twice_loses_nothing(lm, lm_whole, tmp_path):
    """After an update, and in a save, when shards are written and the file that makes a checkpoint of them is not."""
    flags = (*lm, "--resume", "--no-save-model", "--output-dir", tmp_path)
    finished = launch("lm_multinode.py", *flags, change=("signal_in_step", 1, 4), check=False)
    assert finished.returncode != 0
    assert list(losses(tmp_path)) == [1, 2, 3]

    finished = launch("lm_multinode.py", *flags, change=("kill_in_save", 0, 1), check=False)
    assert finished.returncode != 0
    assert list(checkpoint(tmp_path, 4).glob("*.distcp"))
    assert finished_checkpoints(tmp_path) == [2]

    launch("lm_multinode.py", *flags)
    assert results(tmp_path) == results(lm_whole)
    assert finished_checkpoints(tmp_path) == [4, 6]  # the newest two


@pytest.mark.long
def test_a_restart_goes_on_unless_the_run_was_refused(lm, lm_whole, tmp_path):
    """torchrun starts all processes again, also those that have refused a folder with an earlier run's checkpoint."""
    shutil.copytree(checkpoint(lm_whole, 4), checkpoint(tmp_path, 4))
    flags = (*lm, "--no-save-model", "--output-dir", tmp_path)
    for restart in "012":
        refuse("lm_multinode.py", *flags, words=["--resume"], processes=2, TORCHELASTIC_RESTART_COUNT=restart)
    launch("lm_multinode.py", *flags, "--resume", "--checkpoint-every", 5, change=("kill_in_save", 0, 1), check=False)
    assert list(losses(tmp_path)) == [5]
    launch("lm_multinode.py", *flags, TORCHELASTIC_RESTART_COUNT="1")
    assert results(tmp_path) == results(lm_whole, since=4)


@pytest.mark.parametrize("script, step", [("lm_multinode.py", 4), ("t5_fsdp.py", 5)])
def test_sigterm_on_one_process_saves_and_leaves_with_code_0(script, step, lm, lm_whole, t5, t5_runs, tmp_path):
    flags, whole = (lm, lm_whole) if script == "lm_multinode.py" else (t5, t5_runs / "whole2")
    flags = (*flags, "--checkpoint-every", 0, "--no-save-model", "--output-dir", tmp_path)
    finished = launch(script, *flags, change=("signal_in_step", 1, step, "SIGTERM"))
    assert "--resume" in finished.stdout
    [saved] = finished_checkpoints(tmp_path)
    assert step <= saved < max(losses(whole))

    launch(script, *flags, "--resume")
    assert curve(tmp_path, "loss") == curve(whole, "loss")  # no step was made twice
    assert results(tmp_path) == results(whole)
    assert finished_checkpoints(tmp_path)[-1] == max(losses(whole))  # a third run has nothing left to do


def test_replicas_resume(lm, tmp_path):
    """On two nodes; DiLoCo's between synchronizations."""
    ways = [(*lm, "--sharding-strategy", "HYBRID_SHARD"), (*lm, *DILOCO)]
    check_resume("lm_multinode.py", ways, tmp_path, processes=4, per_node=2)


@pytest.mark.parametrize("version", VERSIONS)
def test_t5_resumes_with_dropout_in_any_epoch(version, t5_runs):
    whole, parts = (t5_runs / f"{name}{version}" for name in ("whole", "parts"))
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [row[name] for row in records(parts, "loss")] == [row[name] for row in records(whole, "loss")]
    assert {("val_loss", step) for step in (0, 4, T5_STEPS)} < set(results(whole))
    assert results(whole).items() <= results(parts).items()  # it was also validated where --max-steps cut an epoch


def test_the_best_model_stays_the_best_after_a_resume(t5, tmp_path):
    """The best of those that were saved: what --no-save-model has validated does not count. A step further on the model
    is worse, and is not exported. Where no step is left, the checkpoint is not written again: a kill in the middle
    would leave none."""
    flags = (*t5, "--epochs", 1, "--lr", 1, "--checkpoint-every", 1000, "--resume", "--output-dir", tmp_path)
    launch("t5_fsdp.py", *flags, "--max-steps", 1, "--no-save-model")
    launch("t5_fsdp.py", *flags, "--max-steps", 2)
    exported = (tmp_path / "best" / "model.safetensors").read_bytes()
    launch("t5_fsdp.py", *flags, "--max-steps", 3)
    _, not_saved, best, worse = curve(tmp_path, "val_loss")
    assert worse > best > not_saved
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == exported

    saved = {file: file.stat().st_mtime_ns for file in checkpoint(tmp_path, 3).iterdir()}
    finished = launch("t5_fsdp.py", *flags, "--max-steps", 3)
    assert "no step is left" in finished.stdout
    assert {file: file.stat().st_mtime_ns for file in checkpoint(tmp_path, 3).iterdir()} == saved


@pytest.mark.long
def test_t5_ends_while_workers_make_batches(t5, tmp_path):
    """They ignore the SIGTERM with which Python ends them."""
    flags = (*t5, "--no-save-model", "--no-run-validation", "--output-dir", tmp_path)
    launch("t5_fsdp.py", *flags, change=("stop_beside_workers", 1, 2))
    assert finished_checkpoints(tmp_path) == [2]


def test_gamma_lowers_the_learning_rate_after_each_epoch(t5_runs):
    rates = {row["epoch"]: row["lr"] for row in records(t5_runs / "parts2", "loss")}
    assert rates == {1: pytest.approx(1e-3), 2: pytest.approx(0.8e-3)}


def load_and_validate(folder, articles_csv):
    """An exported model and its validation loss, without FSDP."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _, articles = t5_articles(articles_csv)
    batch = DataCollatorForSeq2Seq(tokenizer)([*t5_tokenized(articles, tokenizer, 512, 15)])
    with torch.no_grad():
        return model, t5_loss(model, batch).item()


@pytest.mark.parametrize("version", SAVE_ON_CPU)
def test_the_exported_model_is_what_was_trained(version, t5_runs, articles_csv):
    whole = t5_runs / f"whole{version}"
    model, loss = load_and_validate(whole / "best", articles_csv)
    assert loss == pytest.approx(min(curve(whole, "val_loss")[1:]), **CLOSE)
    assert model.lm_head.weight is model.shared.weight
    weights = load_file(whole / "best" / "model.safetensors")
    assert "shared.weight" in weights
    assert "lm_head.weight" not in weights  # tied weights are stored once


@pytest.mark.parametrize("number, only_gradient", [(5, False), (7, True)])
def test_a_loss_or_gradient_that_is_not_finite_stops_all_and_is_not_saved(number, only_gradient, lm, tmp_path):
    """In the first micro-batch of step 3, or of step 4, whose own loss is finite; the save of step 4 finds it."""
    flags = (*lm, "--log-every", 10, "--output-dir", tmp_path)
    change = ("infinite_loss", 1, number, True, only_gradient)
    refuse("lm_multinode.py", *flags, words=["--lr"], processes=2, change=change)
    assert finished_checkpoints(tmp_path) == [2]


@pytest.mark.long
def test_a_validation_loss_that_is_not_finite_is_not_saved(t5, tmp_path):
    """That after the first epoch."""
    flags = (*t5, "--checkpoint-every", 1000, "--output-dir", tmp_path)
    refuse("t5_fsdp.py", *flags, words=["--lr"], change=("infinite_loss", 0, 2, False))
    assert curve(tmp_path, "val_loss") and not finished_checkpoints(tmp_path)


@pytest.mark.long
def test_ctrl_c_saves_and_ends_with_code_130(lm, tmp_path):
    """In a terminal it reaches the process that has started the others. This run would not end by itself."""
    flags = [*lm, "--max-steps", 10**6, "--checkpoint-every", 0, "--no-save-model", "--output-dir", tmp_path]
    with started("lm_multinode.py", *flags, stderr=subprocess.STDOUT) as running:
        printed = ""
        for line in running.stdout:
            printed += line
            if line.startswith("step") and "| loss" in line:
                break
        os.killpg(running.pid, signal.SIGINT)
        printed += running.communicate()[0]
    assert running.returncode == 130, printed
    assert "Traceback" not in printed
    [saved] = finished_checkpoints(tmp_path)
    assert max(losses(tmp_path)) == saved

    launch("lm_multinode.py", *flags, "--resume", change=("signal_in_step", 0, 2, "SIGTERM"))
    steps = [row["step"] for row in records(tmp_path, "loss")]
    assert steps == list(range(1, max(steps) + 1))
    assert max(steps) > saved


@pytest.mark.long
def test_more_processes_keep_the_weights_of_the_lm_and_say_what_is_lost(lm, lm_whole, tmp_path):
    shutil.copytree(lm_whole / "checkpoints", tmp_path / "checkpoints")
    flags = (*lm, "--resume", "--output-dir", tmp_path)
    finished = launch("lm_multinode.py", *flags, processes=4)
    assert "saved by 2 processes" in finished.stdout
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (lm_whole, tmp_path))
    assert all(torch.equal(before[name], after[name]) for name in before)

    shutil.rmtree(checkpoint(tmp_path, 6))
    launch("lm_multinode.py", *flags, processes=4)
    assert list(losses(tmp_path)) == [5, 6]


def test_t5_goes_on_with_more_processes(t5, t5_runs, tmp_path):
    """With the same weights, which are first validated without a step."""
    whole = t5_runs / "whole2"
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    flags = (*t5, "--epochs", 3, "--checkpoint-every", 0, "--no-save-model", "--resume", "--output-dir", tmp_path)
    run_many("t5_fsdp.py", [(*flags, "--max-steps", T5_STEPS), flags], 4)
    assert curve(tmp_path, "val_loss")[0] == pytest.approx(curve(whole, "val_loss")[-1], **CLOSE)
    assert list(losses(tmp_path)) == [9, 10]  # of twice the size


@pytest.mark.long
def test_steps_of_another_size_are_named_when_an_epoch_is_resumed_in_its_middle(t5, tmp_path):
    """Then some articles come twice. Of a run that has ended it says so."""
    flags = (*t5, "--no-run-validation", "--no-save-model", "--resume", "--output-dir", tmp_path)
    launch("t5_fsdp.py", *flags, "--max-steps", 3)
    printed = launch("t5_fsdp.py", *flags, "--batch-size", 16).stdout
    assert re.search(r"\b16 articles\b.*\b32\b", printed)
    printed = launch("t5_fsdp.py", *flags, "--batch-size", 16).stdout
    assert not re.search(r"\b16 articles\b", printed)
    assert "--epochs" in printed


@pytest.mark.long
def test_a_damaged_checkpoint_is_one_sentence_and_the_one_before_resumes(lm, lm_whole, tmp_path):
    """Each of its files: cut short or missing."""
    shutil.copytree(lm_whole / "checkpoints", tmp_path / "checkpoints")
    flags = (*lm, "--no-save-model", "--resume", "--output-dir", tmp_path)
    newest = checkpoint(tmp_path, 6)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        refuse("lm_multinode.py", *flags, words=[str(newest), "delete"], processes=2)
        if path.name != ".metadata":  # without it the checkpoint was never finished
            path.unlink()
            refuse("lm_multinode.py", *flags, words=[str(newest), "delete"], processes=2)
        path.write_bytes(content)

    shutil.rmtree(newest)
    launch("lm_multinode.py", *flags)
    assert results(tmp_path) == results(lm_whole, since=4)


# With another value of one of these flags a run does not go on.
MATCHED = {
    "lm_multinode.py": (
        *("model", "dataset", "text_column", "tokenizer", "seq_length", "global_batch_size", "lr", "warmup_steps"),
        *("max_steps", "seed", "local_steps", "outer_lr", "outer_momentum"),
    ),
    "t5_fsdp.py": (
        *("model", "dataset", "text_column", "summary_column", "max_summary_share", "num_train_samples", "gamma"),
        *("num_validation_samples", "max_source_length", "max_target_length", "seed", "lr"),
    ),
}


@pytest.mark.parametrize("script", MATCHED)
def test_flags_that_must_match(script, lm, lm_whole, t5, t5_runs):
    flags, whole = (lm, lm_whole) if script == "lm_multinode.py" else (t5, t5_runs / "whole2")
    path = checkpoint(whole, finished_checkpoints(whole)[-1])
    check_settings(script, path, parse(script, *flags))
    for name in MATCHED[script]:
        args = parse(script, *flags)
        assert hasattr(args, name)
        setattr(args, name, "another value")
        with pytest.raises(UserError, match=f"with --{name.replace('_', '-')} "):
            check_settings(script, path, args)


@pytest.mark.long
def test_what_cannot_be_resumed_is_one_sentence(t5, tmp_path):
    model = shutil.copytree(t5[1], tmp_path / "model")
    flags = (*t5, "--model", model, "--max-steps", 3, "--no-run-validation", "--no-save-model")
    flags = (*flags, "--resume", "--output-dir", tmp_path)
    launch("t5_fsdp.py", *flags)
    newest = str(checkpoint(tmp_path, 3))
    refuse("t5_fsdp.py", *flags, "--seed", 7, words=[newest, "--seed 1"])

    # The model may have been replaced: by one of fewer layers, of more, of other widths.
    for change in ({"num_layers": 1}, {"num_layers": 3}, {"d_ff": 96}):
        make_model(model, **change)
        refuse("t5_fsdp.py", *flags, words=[newest, "model"])
    assert finished_checkpoints(tmp_path) == [3]


@pytest.mark.long
def test_replicas_of_diloco_that_cannot_be_resumed(lm, tmp_path):
    flags = (*lm, *DILOCO, "--shards-per-replica", 1, "--output-dir", tmp_path)
    launch("lm_multinode.py", *flags)
    flags = (*flags, "--resume")
    refuse("lm_multinode.py", *flags, "--outer-lr", 0.5, words=["--outer-lr 0.7"], processes=2)
    refuse("lm_multinode.py", *flags, words=["replicas", "DILOCO"])
    refuse("lm_multinode.py", *flags, "--shards-per-replica", 2, words=["shards", "DILOCO"], processes=2)
    refuse("lm_multinode.py", *flags, "--sharding-strategy", "FULL_SHARD", words=["strategy"], processes=2)


@pytest.fixture
def small_disk(lm_whole, tmp_path):
    """A file system with room for one and a half checkpoints."""
    size = sum(path.stat().st_size for path in checkpoint(lm_whole, 6).iterdir()) * 3 // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        assert "CI" not in os.environ, "CI must be able to mount a tmpfs"
        pytest.skip("no right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.long
def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoint(lm, lm_whole, small_disk):
    flags = (*lm, "--no-save-model", "--output-dir", small_disk)
    refuse("lm_multinode.py", *flags, words=[str(checkpoint(small_disk, 4)), "GiB are free"], processes=2)
    assert os.listdir(small_disk / "checkpoints") == ["step-0000002"]

    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    launch("lm_multinode.py", *flags, "--resume")
    assert results(small_disk) == results(lm_whole)


@pytest.mark.long
@pytest.mark.parametrize("version", SAVE_ON_CPU)
def test_flan_t5_keeps_its_output_layer_and_the_best_epoch_is_exported(version, t5, articles_csv, tmp_path):
    model = make_model(tmp_path / "flan", tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    flags = (*t5, "--model", model, "--fsdp-version", version, "--gamma", 1000)  # the second epoch is worse
    launch("t5_fsdp.py", *flags, "--output-dir", tmp_path)
    _, best, worse = curve(tmp_path, "val_loss")
    assert worse > best
    model, loss = load_and_validate(tmp_path / "best", articles_csv)
    assert loss == pytest.approx(best, **CLOSE)
    assert (model.lm_head.weight - model.shared.weight).abs().max() > 1


@pytest.mark.long
def test_a_failed_export_leaves_the_one_before(t5, tmp_path):
    """The disk is full when the second epoch is exported."""
    flags = (*t5, "--no-run-validation", "--output-dir")
    launch("t5_fsdp.py", *flags, tmp_path / "one", "--epochs", 1)
    change = ("full_disk_in_export", 2)
    refuse("t5_fsdp.py", *flags, tmp_path / "two", words=["best", "No space left"], processes=2, change=change)
    one, two = (tmp_path / name / "best" / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    launch("t5_fsdp.py", *flags, tmp_path / "two", "--resume")  # what it has left is in no one's way
    assert one.read_bytes() != two.read_bytes()


FP16 = ("--precision", "fp16")
LORA = {
    "t5-lora": ("--fsdp-version", 1),
    "lm-lora": (*DILOCO, "--shards-per-replica", 1),
}


@pytest.mark.long
def test_a_schedule_resumes_and_so_does_the_scale_of_fp16(t5, tmp_path):
    copy = patched(tmp_path / "copy", "t5-schedule")
    check_resume(copy / "t5_fsdp.py", [(*t5, *FP16)], tmp_path)
    assert progress(tmp_path / "whole0", T5_STEPS)["scaler"]["_growth_tracker"] > 0  # it counts steps


@pytest.mark.long
@pytest.mark.parametrize("name", LORA)
def test_adapters_resume(name, t5, lm, tmp_path):
    """Most weights are neither trained nor DiLoCo's."""
    script, flags = ("lm_multinode.py", lm) if name == "lm-lora" else ("t5_fsdp.py", t5)
    check_resume(patched(tmp_path / "copy", name) / script, [(*flags, *LORA[name])], tmp_path)
