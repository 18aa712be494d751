"""Stops reach all processes of a run at once, as from Slurm or a terminal: it saves, and leaves none behind."""

import re
import time
from pathlib import Path

import pytest
from conftest import curve, losses, run, run_many

import inside

LM = (
    *("--max-steps", 50, "--warmup-steps", 2, "--log-every", 1, "--validate-every", 0, "--num-validation-texts", 3),
    *("--seq-length", 32, "--global-batch-size", 160, "--micro-batch-size", 2, "--precision", "fp32"),
)


def check_that_none_is_left(printed):
    """Of the sessions of the ranks. A worker looks every five seconds whether its parent is alive."""
    sessions = re.findall(r"^session (\d+)$", printed, re.M)
    assert len(sessions) == 2
    deadline = time.monotonic() + 30
    while left := [name for name in processes_of(sessions)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes_of(sessions):
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = path.read_text().rsplit(")", 1)
        except OSError:  # it has just ended
            continue
        state, _, _, session = fields.split()[:4]
        if session in sessions and state != "Z":
            yield name


CASES = [("SIGTERM", "in a step", "fork"), ("SIGINT", "at the start", "fork")]
MORE_CASES = [
    ("SIGINT", "in a step", "fork"),
    ("SIGTERM", "at the start", "fork"),
    ("SIGINT", "in a step", "spawn"),
    ("SIGTERM", "at the start", "spawn"),
    ("SIGTERM", "in a step", "forkserver"),
    ("SIGINT", "at the start", "forkserver"),
]


@pytest.mark.parametrize(
    "name, when, worker_start", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_CASES)]
)
def test_a_stop_of_the_group_is_saved(name, when, worker_start, tiny_llama, tmp_path):
    """Rank 0 says at once that it stops, and at the end how to go on; nothing is validated."""
    flags = (*LM, "--model", tiny_llama, "--output-dir", tmp_path)
    change = ("stop_group", name, when, worker_start)
    finished = run("lm_multinode.py", *flags, processes=2, fork=True, check=True, change=change)
    last_step = 1 if when == "at the start" else 2
    assert list(losses(tmp_path)) == [*range(1, last_step + 1)]
    assert (tmp_path / f"checkpoints/step-{last_step:07d}/.metadata").exists()
    said, *_, last = [line for line in finished.stdout.splitlines() if line.startswith("stop")]
    assert said.startswith("stopping")
    assert "--resume" in last and "--output-dir" in last
    assert curve(tmp_path, "val_loss") == []
    if worker_start == "fork":
        check_that_none_is_left(finished.stdout)


@pytest.mark.long
def test_a_stop_is_saved_though_nobody_reads_any_more(tiny_llama, tmp_path):
    """Here what rank 0 prints fails from the first step on, which is where it is told to stop. Then stderr says how to
    go on."""
    flags = (*LM, "--model", tiny_llama, "--log-every", 10, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *flags, processes=1, fork=True, check=True, change=("stop_without_reader", 1))
    assert (tmp_path / "checkpoints/step-0000001/.metadata").exists()
    assert "--resume" in finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.long
def test_a_killed_process_leaves_none_behind(tiny_llama, tmp_path):
    """Also where Python would start a fork server, as it does from 3.14 on."""
    flags = (*LM, "--model", tiny_llama, "--output-dir", tmp_path)
    options = {"change": ("kill_alone", 1), "START_METHOD": "forkserver"}
    finished = run("lm_multinode.py", *flags, processes=2, fork=True, **options)
    assert finished.returncode != 0
    check_that_none_is_left(finished.stdout)


@pytest.mark.long
def test_each_process_has_two_sockets_for_each_other(tmp_path):
    """However often they wait for the first: with the usual limit of 1,024 files 500 processes can meet."""
    script = tmp_path / "sockets.py"
    script.write_text(inside.SOCKETS)
    counts = []
    for processes in (2, 4):
        printed = run(script, processes=processes, fork=True, check=True).stdout
        counts.append(int(re.search(r"^sockets (\d+)$", printed, re.M)[1]))
    assert counts[1] - counts[0] == 2 * 2


@pytest.mark.long
def test_others_wait_for_a_slow_disk_and_a_taken_port_does_no_harm(tiny_model, articles_csv, tiny_llama, tmp_path):
    t5 = ("--model", tiny_model, "--dataset", articles_csv, "--max-steps", 1, "--no-run-validation")
    run_many("t5_fsdp.py", [[*t5, "--output-dir", tmp_path]], 2, change=("slow_disk_in_export",))
    assert (tmp_path / "best" / "model.safetensors").exists()
    lm = (*LM, "--model", tiny_llama, "--max-steps", 1, "--no-save-model", "--output-dir", tmp_path / "lm")
    run_many("lm_multinode.py", [lm], 2, change=("take_next_port",))
