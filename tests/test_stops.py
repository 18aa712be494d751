"""A stop by Slurm or a terminal reaches all processes of a run at once. The run saves and leaves no process behind."""

import os
import pty
import re
import time
from pathlib import Path

import pytest
from conftest import SMALL, curve, losses, run, run_many, started

LM = (*SMALL, "--max-steps", 50, "--validate-every", 0, "--global-batch-size", 160, "--micro-batch-size", 2)


def check_that_none_is_left(printed):
    sessions = re.findall(r"^session (\d+)$", printed, re.M)
    assert len(sessions) == 2
    deadline = time.monotonic() + 30
    while left := list(processes_of(sessions)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes_of(sessions):
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().rsplit(")", 1)
        except OSError:  # the process has just ended
            continue
        state, _, _, session = fields.split()[:4]
        if session in sessions and state != "Z":
            yield name


CASES = [
    ("SIGTERM", "fork"),
    ("SIGINT", "fork"),
    ("SIGHUP", "fork"),
    pytest.param("SIGTERM", "spawn", marks=pytest.mark.long),  # as on macOS
]


@pytest.mark.parametrize("name, worker_start", CASES)
def test_a_run_whose_process_group_is_stopped_saves(name, worker_start, tiny_llama, tmp_path):
    """It saves the second step or the one after it, and does not validate. The last line says how to resume."""
    flags = (*LM, "--model", tiny_llama, "--output-dir", tmp_path)
    change = ("stop_group", name, worker_start)
    finished = run("lm_multinode.py", *flags, processes=2, fork=True, check=True, change=change)
    last_step = max(losses(tmp_path))
    assert last_step in (2, 3)
    assert (tmp_path / f"checkpoints/step-{last_step:07d}/progress.json").exists()
    assert re.search(rf"^stopped .*step {last_step}\b.*--resume", finished.stdout, re.M)
    assert curve(tmp_path, "val_loss") == []
    if worker_start == "fork":
        check_that_none_is_left(finished.stdout)


@pytest.mark.long
@pytest.mark.parametrize("nohup, processes", [(False, 1), (False, 2), (True, 2)])
def test_a_run_saves_when_its_terminal_closes(nohup, processes, tiny_llama, tmp_path, monkeypatch):
    """From then on printing fails. The run saves and ends; under nohup it continues to its end."""
    steps = 30 if nohup else 10_000
    flags = (*LM, "--model", tiny_llama, "--global-batch-size", 16, "--max-steps", steps, "--num-processes", processes)
    our_end, terminal = pty.openpty()
    # The first process of a session that opens a terminal makes it the session's own.
    start = ("sh", "-c", 'exec "$@" <$0 >$0 2>&1', os.ttyname(terminal), *(["nohup"] if nohup else []))
    monkeypatch.chdir(tmp_path)  # for nohup.out
    with started("lm_multinode.py", *flags, "--output-dir", tmp_path, start=start) as running:
        while running.poll() is None and not (Path("metrics.jsonl").exists() and losses(tmp_path)):
            time.sleep(0.1)
        os.close(our_end)
        running.wait()
    os.close(terminal)
    last_step = max(losses(tmp_path))
    assert (last_step == steps) == nohup == (tmp_path / "model").exists()
    assert (tmp_path / f"checkpoints/step-{last_step:07d}/progress.json").exists() != nohup


@pytest.mark.long
def test_sigterm_in_the_first_half_of_mnist_ends_both(tmp_path):
    with started("mnist_fsdp.py", "--epochs", 1000, "--model", "shallow", "--output-dir", tmp_path) as running:
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.1)
        running.terminate()
        assert running.wait() == 143
        assert list(processes_of([str(running.pid)])) == []


@pytest.mark.long
def test_a_run_does_not_wait_for_a_worker_that_still_reads(tiny_llama, tmp_path):
    flags = (*LM, "--model", tiny_llama, "--max-steps", 1, "--no-save-model", "--output-dir", tmp_path)
    run_many("lm_multinode.py", [flags], 2, change=("read_without_end", 1))


@pytest.mark.long
def test_a_killed_process_leaves_none_behind(tiny_llama, tmp_path):
    """Even if Python starts processes from a fork server, its default from 3.14 on."""
    flags = (*LM, "--model", tiny_llama, "--output-dir", tmp_path)
    options = {"change": ("kill_alone", 1), "START_METHOD": "forkserver"}
    finished = run("lm_multinode.py", *flags, processes=2, fork=True, **options)
    assert finished.returncode != 0
    check_that_none_is_left(finished.stdout)


@pytest.mark.long
def test_a_second_ctrl_c_ends_a_run_of_one_process_at_once(tiny_llama, tmp_path):
    """Here it comes in a step. It must also work while the run waits for texts that never come."""
    flags = (*LM, "--model", tiny_llama, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *flags, processes=1, fork=True, change=("signal_in_step", 0, 2, "SIGINT", 2))
    assert finished.returncode == 130 and "Traceback" not in finished.stderr
    assert list(losses(tmp_path)) == [1]
