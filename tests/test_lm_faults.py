"""Whatever ends a run of lm_multinode.py, the next one goes on as if nothing had been: the same losses, to the bit."""

import os
import random
import re
import shutil
import signal
import subprocess
import time

import torch
import torch.distributed as dist

import pytest
from conftest import check_bad_input, losses, records, run, run_many, succeed

PROCESSES, STEPS, EVERY = 4, 48, 3
LAST = {1: 12, 2: STEPS}  # of each version
SETTINGS = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 4, "--max-steps", STEPS, "--log-every", 1),
    *("--warmup-steps", 3, "--num-validation-texts", 3, "--validate-every", 1000, "--precision", "fp32"),
    *("--no-save-model", "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2),
)
SAVING = ("--checkpoint-every", EVERY)


def steps_in(folder):
    """The steps that were made, in order; none before the first row."""
    return [record["step"] for record in records(folder, "loss")] if (folder / "metrics.jsonl").exists() else []


def steps_of(folder):
    """The steps of the whole checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("checkpoints/step-*/.metadata"))


def unfinished(folder, since=0.0):
    """The checkpoints that are being saved, or were when the run ended."""
    begun = [path for path in folder.glob("checkpoints/step-*/progress.json") if path.stat().st_mtime > since]
    return [path.parent for path in begun if not (path.parent / ".metadata").exists()]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run with checkpoints of both versions."""
    root = tmp_path_factory.mktemp("faults")
    folders = {version: root / str(version) for version in LAST}
    settings = [
        [*SETTINGS, *SAVING, "--fsdp-version", version, "--max-steps", LAST[version], "--output-dir", path]
        for version, path in folders.items()
    ]
    run_many("lm_multinode.py", settings, PROCESSES)
    for version, folder in folders.items():
        assert len(losses(folder)) == LAST[version] and steps_of(folder) == [LAST[version] - EVERY, LAST[version]]
        assert not (folder / "model").exists()  # --no-save-model
    return folders


def test_ten_kills_at_random_moments_lose_nothing(whole, tmp_path):
    """Each rank, between steps and inside saves; then the run ends with the losses of the uninterrupted one."""
    choose = random.Random(0)
    ranks = [*range(PROCESSES)] * 2 + [0, PROCESSES - 1]
    choose.shuffle(ranks)
    in_saves = 0
    for attempt, rank in enumerate([*ranks, None]):
        begins, before, began = (steps_of(tmp_path) or [0])[-1], len(steps_in(tmp_path)), time.time()
        count, moment = before + choose.choice((1, 2, 3, 4)), choose.uniform(0, 0.3)  # seconds

        def between_steps(count=count, moment=moment):
            return len(steps_in(tmp_path)) >= count and not time.sleep(moment)

        def in_a_save(began=began, moment=moment):
            return unfinished(tmp_path, began) and not time.sleep(moment / 10)

        finished = run(
            "lm_multinode.py",
            *(*SETTINGS, *SAVING, "--output-dir", tmp_path),
            processes=PROCESSES,
            fork=True,
            kill=None if rank is None else (rank, in_a_save if attempt % 2 else between_steps),
            TORCHELASTIC_RESTART_COUNT=str(attempt),  # as torchrun --max-restarts starts it again
        )
        new = steps_in(tmp_path)[before:]
        assert new[:1] in ([], [begins + 1])  # nothing before the newest checkpoint was done again
        in_saves += bool(unfinished(tmp_path, began))
        assert finished.returncode == (0 if rank is None else -signal.SIGKILL), finished.stderr[-2000:]
    assert in_saves >= 2
    assert losses(tmp_path) == losses(whole[2])


@pytest.mark.parametrize("version, last", LAST.items())
def test_an_unfinished_newest_checkpoint_is_left_for_the_one_before(whole, version, last, tmp_path):
    """As a killed run leaves it. A damaged one is in test_t5_checkpoints.py."""
    shutil.copytree(whole[version], tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / f"step-{last:07d}"
    (newest / ".metadata").unlink()
    (newest / "of a killed run").touch()
    arguments = (*SETTINGS, *SAVING, "--fsdp-version", version, "--max-steps", last, "--resume")
    finished = succeed("lm_multinode.py", *arguments, "--output-dir", tmp_path, processes=PROCESSES, fork=True)
    assert f"from step {last - EVERY}\n" in finished.stdout
    assert steps_in(tmp_path)[last:] == [last - 2, last - 1, last]
    assert losses(tmp_path) == losses(whole[version])
    assert steps_of(tmp_path) == [last - EVERY, last]
    # The folder itself stays: a faster rank, which makes it too, fails when another removes it in that moment.
    assert (newest / "of a killed run").exists()


def test_sigterm_on_one_process_saves_and_leaves_with_code_0(whole, tmp_path):
    arguments = (*SETTINGS, "--output-dir", tmp_path)

    def when():
        return len(steps_in(tmp_path)) >= 5

    finished = run("lm_multinode.py", *arguments, processes=PROCESSES, fork=True, kill=(2, when, signal.SIGTERM))
    assert finished.returncode == 0, finished.stderr[-2000:]
    [step] = steps_of(tmp_path)
    assert 5 <= step < STEPS
    assert re.search(f"^stopped  on request at step {step}, all saved; --resume goes on$", finished.stdout, re.M)
    succeed("lm_multinode.py", *arguments, "--resume", processes=PROCESSES, fork=True)
    assert losses(tmp_path) == losses(whole[2])


def test_another_number_of_processes_keeps_weights_and_says_what_it_cannot_keep(whole, tmp_path):
    """From 2 replicas of 2 shards to 2 shards, two steps before the end."""
    shutil.copytree(whole[2], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{STEPS:07d}")
    arguments = (*SETTINGS, "--sharding-strategy", "FULL_SHARD", "--shards-per-replica", 0, "--resume")
    finished = succeed("lm_multinode.py", *arguments, "--output-dir", tmp_path, processes=2, fork=True)
    assert "saved by 4 processes: the position in the data is lost, a new pass begins" in finished.stdout
    assert f"from step {STEPS - EVERY}\n" in finished.stdout
    assert steps_in(tmp_path)[STEPS:] == [STEPS - 2, STEPS - 1, STEPS]
    # Other texts, but by the trained model: it began at 7.6.
    assert losses(tmp_path)[STEPS - 2] == pytest.approx(losses(whole[2])[STEPS - 2], abs=1)


def test_a_folder_with_checkpoints_of_another_run_is_refused(whole):
    settings = (*SETTINGS, "--sharding-strategy", "FULL_SHARD", "--shards-per-replica", 0, "--output-dir", whole[2])
    cases = [
        (settings, 1, "holds checkpoints of an earlier run; add --resume, or choose another --output-dir"),
        ((*settings, "--resume", "--seed", 2), 1, "was made with --seed 1; resume with it, or choose another"),
    ]
    check_bad_input("lm_multinode.py", [], cases)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MB: room for one checkpoint of 11 MB, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True).returncode:
        assert "CI" not in os.environ, "CI must be able to mount a tmpfs"
        pytest.skip("no right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoint(whole, small_disk):
    arguments = (*SETTINGS, *SAVING, "--output-dir", small_disk)
    finished = run("lm_multinode.py", *arguments, processes=PROCESSES, fork=True)
    assert finished.returncode == 2, finished.stderr[-2000:]
    [error] = [line for line in finished.stderr.splitlines() if line.startswith("lm_multinode.py: error: ")]
    assert f"could not save {small_disk / 'checkpoints' / 'step-0000006'}, where 0.0" in error
    # torch.save may fail over the first and hide it.
    assert re.search(r" GB are free: .*(No space left on device|unexpected pos)", error)
    assert "Traceback" not in error
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == [f"step-{EVERY:07d}"]
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    succeed("lm_multinode.py", *arguments, "--resume", processes=PROCESSES, fork=True)
    assert losses(small_disk) == losses(whole[2])


def make_a_loss_infinite(script):
    """The fifth time that rank 2 trains on a batch."""
    summed_loss, calls = script.summed_loss, []

    def infinite_once(model, batch, *options):
        if torch.is_grad_enabled():
            calls.append(None)
        infinite = dist.get_rank() == 2 and len(calls) == 5
        return summed_loss(model, batch) * (float("inf") if infinite else 1)

    script.summed_loss = infinite_once


def test_a_loss_that_is_not_finite_stops_all_and_is_not_saved(tmp_path):
    """It happens in the fifth micro-batch, the first of step 3; the save of step 4 is what finds it."""
    options = (*SETTINGS, "--micro-batch-size", 2, "--log-every", 10, "--checkpoint-every", 2, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *options, processes=PROCESSES, fork=True, change=make_a_loss_infinite)
    assert finished.returncode == 2, finished.stderr[-2000:]
    assert "the loss is not finite at step 4; start again with a lower --lr" in finished.stderr
    assert steps_of(tmp_path) == [2]
