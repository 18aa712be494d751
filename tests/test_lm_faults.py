"""Whatever ends a run of lm_multinode.py, the next one goes on as if nothing had been: the same losses, to the bit."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import reports, run, run_many, succeed

PROCESSES, STEPS, EVERY = 4, 48, 3
SETTINGS = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 4, "--max-steps", STEPS, "--log-every", 1),
    *("--warmup-steps", 3, "--num-validation-texts", 3, "--shuffle-buffer", 20, "--validate-every", 1000),
    *("--precision", "fp32", "--no-save-model", "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2),
)
SAVING = ("--checkpoint-every", EVERY)
MICRO = ("--micro-batch-size", 2)  # two micro-batches in a step


def losses(folder):
    """The loss of every step, of the last process that made it."""
    return {report["step"]: report["train_loss"] for report in reports(folder, "step")}


def steps_in(folder):
    """The steps that were made, in order; none before the first report."""
    return [report["step"] for report in reports(folder, "step")] if (folder / "metrics.jsonl").exists() else []


def steps_of(folder):
    """The steps of the whole checkpoints."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal())


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run with checkpoints of both versions."""
    root = tmp_path_factory.mktemp("faults")
    folders = {version: root / str(version) for version in (1, 2)}
    settings = [
        [*SETTINGS, *SAVING, "--fsdp-version", version, "--output-dir", path] for version, path in folders.items()
    ]
    run_many("lm_multinode", settings, PROCESSES)
    for folder in folders.values():
        assert len(losses(folder)) == STEPS and steps_of(folder) == [STEPS - EVERY, STEPS]
        assert not list(folder.glob("lm-*"))  # --no-save-model
    return folders


def test_ten_kills_at_random_moments_lose_nothing(whole, tmp_path):
    """Each rank, between steps and inside saves; then the run ends with the losses of the uninterrupted one."""
    choose = random.Random(0)
    ranks = [*range(PROCESSES)] * 2 + [0, PROCESSES - 1]
    choose.shuffle(ranks)
    in_saves = 0
    for attempt, rank in enumerate([*ranks, None]):
        begins = (steps_of(tmp_path) or [0])[-1]
        before = len(steps_in(tmp_path))
        moment = choose.uniform(0, 0.3)  # seconds
        if attempt % 2:
            step = begins + EVERY * choose.choice((1, 2))
            condition = (tmp_path / "checkpoints" / f"step-{step}.partial").exists
            moment /= 10
        else:
            count = before + choose.choice((1, 2, 3, 4))

            def condition(count=count):
                return len(steps_in(tmp_path)) >= count

        def when(condition=condition, moment=moment):
            return condition() and not time.sleep(moment)

        finished = run(
            "lm_multinode.py",
            *(*SETTINGS, *SAVING, "--output-dir", tmp_path),
            processes=PROCESSES,
            fork=True,
            kill=None if rank is None else (rank, when),
            TORCHELASTIC_RESTART_COUNT=str(attempt),  # as torchrun --max-restarts starts it again
        )
        new = steps_in(tmp_path)[before:]
        assert new[:1] in ([], [begins + 1])  # nothing before the newest checkpoint was done again
        in_saves += any((tmp_path / "checkpoints").glob("*.partial"))
        assert finished.returncode == (0 if rank is None else -signal.SIGKILL), finished.stderr[-2000:]
    assert in_saves >= 2
    assert losses(tmp_path) == losses(whole[2])


@pytest.mark.parametrize("version", [1, 2])
def test_a_damaged_newest_checkpoint_is_set_aside(whole, version, tmp_path):
    shutil.copytree(whole[version], tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / f"step-{STEPS}"
    [largest] = sorted(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)[-1:]
    os.truncate(largest, largest.stat().st_size - 100)
    arguments = (*SETTINGS, *SAVING, "--fsdp-version", version, "--resume", "--output-dir", tmp_path)
    finished = succeed("lm_multinode.py", *arguments, processes=PROCESSES, fork=True)
    assert f"step-{STEPS} is damaged: set aside as step-{STEPS}.damaged" in finished.stderr
    assert steps_in(tmp_path)[STEPS:] == [STEPS - 2, STEPS - 1, STEPS]
    assert losses(tmp_path) == losses(whole[version])
    assert steps_of(tmp_path) == [STEPS - EVERY, STEPS]


def test_sigterm_on_one_process_saves_and_leaves_with_code_0(whole, tmp_path):
    arguments = (*SETTINGS, "--output-dir", tmp_path)

    def when():
        return len(steps_in(tmp_path)) >= 5

    finished = run("lm_multinode.py", *arguments, processes=PROCESSES, fork=True, kill=(2, when, signal.SIGTERM))
    assert finished.returncode == 0, finished.stderr[-2000:]
    [step] = steps_of(tmp_path)
    assert 5 <= step < STEPS
    assert f"stopped    by SIGTERM at step {step}, all saved; the same command with --resume goes on" in finished.stdout
    succeed("lm_multinode.py", *arguments, "--resume", processes=PROCESSES, fork=True)
    assert losses(tmp_path) == losses(whole[2])


def test_another_number_of_processes_keeps_weights_and_says_what_it_cannot_keep(whole, tmp_path):
    shutil.copytree(whole[2], tmp_path, dirs_exist_ok=True)
    arguments = (*SETTINGS, "--sharding-strategy", "FULL_SHARD", "--shards-per-replica", 0, "--resume")
    finished = succeed("lm_multinode.py", *arguments, "--output-dir", tmp_path, processes=2, fork=True)
    assert "saved by 4 processes: the place in the data is lost, a new pass begins" in finished.stdout
    assert f"resumed    {tmp_path / 'checkpoints' / f'step-{STEPS}'}" in finished.stdout


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
    assert finished.returncode == 2
    errors = [line for line in finished.stderr.splitlines() if "error: " in line and "lm_multinode.py" in line]
    free = re.search(r"could not save .*/step-6, where (.*) GB are free: ", errors[0])[1]
    assert float(free) < 0.03 or "No space left on device" in errors[0]
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == [f"step-{EVERY}"]
    subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True)
    succeed("lm_multinode.py", *arguments, "--resume", processes=PROCESSES, fork=True)
    assert losses(small_disk) == losses(whole[2])


def test_a_loss_that_is_not_finite_stops_all_with_step_and_rank(tmp_path):
    """It happens in the fifth micro-batch, the first of step 3; that it is asked for only after ten loses nothing."""
    arguments = [*map(str, (*SETTINGS, *MICRO, "--log-every", 10, "--checkpoint-every", 2, "--output-dir", tmp_path))]
    script = ("tests/run_many.py", "lm_multinode", json.dumps([arguments]), "infinite-loss")
    finished = run(*script, processes=PROCESSES, fork=True)
    assert finished.returncode == 2, finished.stderr[-2000:]
    assert "the loss is not finite at step 3 on rank 2; start again with a lower --lr" in finished.stderr
    assert steps_of(tmp_path) == [2]  # the one of step 4 would have been useless
