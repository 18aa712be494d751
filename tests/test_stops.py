"""A run that a cluster, a terminal or a user stops saves, and leaves no process behind."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import joblib
import pytest
from conftest import ROOT, SMALL, long, losses, run_many
from shared import torchrun

LM = (*SMALL, "--validate-every", 0, "--micro-batch-size", 4)


def check_that_none_is_left(folder):
    """A moment later no process has this folder in its command, also no DataLoader worker."""
    deadline = time.monotonic() + 30
    while left := list(processes_of(folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes_of(folder):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # if the process has just ended
            if str(folder) in path.read_text():
                yield path


# torchrun's processes, or None without torchrun; and what ends the run.
STOPS = [
    (2, "Ctrl-C"),
    long(2, "SIGTERM"),
    long(2, "closed terminal"),
    long(None, "Ctrl-C"),
    long(None, "closed terminal, nohup"),  # it continues
]


@pytest.mark.parametrize("processes, end", STOPS)
def test_a_stopped_run_saves_and_leaves_no_process(processes, end, tiny_llama, texts, tmp_path, monkeypatch):
    """It does not validate or export, and says how to resume. After its terminal has closed, printing fails."""
    monkeypatch.chdir(tmp_path)  # for nohup.out
    steps = 40 if "nohup" in end else 10**6
    our_end, terminal = pty.openpty()
    tty = os.ttyname(terminal)
    # The first process of a session that opens a terminal makes it the session's own.
    start = ["sh", "-c", f'exec "$@" <{tty} >{tty if "closed" in end else "printed"} 2>&1', "sh"]
    start += ["nohup"] if "nohup" in end else []
    start += torchrun(processes) if processes else [sys.executable]
    flags = (*LM, "--model", tiny_llama, "--dataset", texts, "--max-steps", steps, "--validate-every", steps)
    flags = (*flags, "--device", "cpu", "--output-dir", tmp_path)
    command = [*start, ROOT / "lm_multinode.py", *flags]
    with subprocess.Popen(list(map(str, command)), start_new_session=True) as running:  # as a terminal does
        timer = threading.Timer(300, running.terminate)
        timer.start()
        while running.poll() is None and not (Path("metrics.jsonl").exists() and losses(tmp_path)):
            time.sleep(0.1)
        if end == "Ctrl-C":
            os.write(our_end, b"\x03")
        elif end == "SIGTERM":
            running.terminate()
        os.close(our_end)
        code = running.wait()
        timer.cancel()
    os.close(terminal)
    check_that_none_is_left(tmp_path)

    last_step = max(losses(tmp_path))
    saved = [path.parent.name for path in tmp_path.glob("checkpoints/*/progress.json")]
    if "nohup" in end:
        assert (last_step, saved, code) == (steps, [], 0)
    else:
        assert saved == [f"step-{last_step:07d}"]
        assert (code == 0) == (processes is None)  # torchrun reports a signal by its own code
    assert (tmp_path / "model").exists() == ("nohup" in end)
    if "closed" not in end:
        assert re.search(rf"^stopped .*step {last_step}\b.*--resume", Path("printed").read_text(), re.M)


@pytest.mark.parametrize("name", ["SIGTERM", long("SIGINT"), long("SIGHUP")])
def test_a_signal_to_all_does_not_end_the_worker_that_the_run_still_needs(name, tiny_llama, tmp_path):
    flags = (*LM, "--model", tiny_llama, "--max-steps", 50)
    run_many("lm_multinode.py", {tmp_path: flags}, change=("stop_group", name))
    assert list(losses(tmp_path)) == [1, 2] and (tmp_path / "checkpoints/step-0000002/progress.json").exists()


@pytest.mark.long
def test_a_killed_process_leaves_no_worker(tiny_llama, tmp_path):
    """Its worker, which is still reading, ends with it."""
    flags = (*LM, "--model", tiny_llama, "--max-steps", 50)
    finished = run_many("lm_multinode.py", {tmp_path: flags}, 2, False, change=("kill_alone",), check=False)
    assert "SIGKILL" in finished.stderr
    check_that_none_is_left(tmp_path)


@pytest.mark.long
def test_a_run_does_not_wait_for_its_worker(tiny_llama, tmp_path):
    """The worker reads without end."""
    flags = (*LM, "--model", tiny_llama, "--max-steps", 1, "--no-save-model")
    run_many("lm_multinode.py", {tmp_path: flags}, 1, change=("pause_worker", 400))


def test_an_error_that_nobody_reads_ends_a_run(tiny_llama, tmp_path):
    """As after `2>&1 | tee` has died. The worker ignores SIGTERM, so a normal exit would wait for it without end."""
    flags = (*LM, "--model", tiny_llama, "--max-steps", 9, "--device", "cpu", "--output-dir", tmp_path)
    settings = json.dumps([list(map(str, flags))])
    command = [sys.executable, ROOT / "tests/forked.py", ROOT / "lm_multinode.py", settings]
    with subprocess.Popen([*command, json.dumps(["infinite_loss", 0, 3])], stderr=subprocess.PIPE) as running:
        running.stderr.close()
        assert running.wait(timeout=120) == 2


@pytest.mark.parametrize("has_tokenized, variables", [(False, {}), (False, {"RAYON_NUM_THREADS": "3"}), (True, {})])
def test_a_worker_tokenizes_with_threads(has_tokenized, variables, tiny_llama, tmp_path):
    """As many as the training process has, or as a user wants. If that has tokenized with threads before its worker was
    forked, none: they would wait without end for those of the parent."""
    flags = {tmp_path: (*LM, "--model", tiny_llama, "--max-steps", 2, "--no-save-model")}
    finished = run_many("lm_multinode.py", flags, 2, change=("report_threads", has_tokenized), **variables)
    expected = 0 if has_tokenized else variables.get("RAYON_NUM_THREADS", max(1, joblib.cpu_count() // 2))
    assert re.findall(r"^\d+ threads$", finished.stderr, re.M) == 2 * [f"{expected} threads"]


def test_a_second_ctrl_c_ends_a_run_of_one_process_at_once(tiny_llama, tmp_path):
    """Here it comes in a step. It must also work while the run waits for texts that never come."""
    flags = (*LM, "--model", tiny_llama, "--max-steps", 50)
    change = ("signal_in_step", 0, 2, "SIGINT", 2)
    finished = run_many("lm_multinode.py", {tmp_path: flags}, change=change, check=False)
    assert finished.returncode == 130 and "Traceback" not in finished.stderr
    assert list(losses(tmp_path)) == [1] and not (tmp_path / "checkpoints").exists()
