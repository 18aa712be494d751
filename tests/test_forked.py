"""The forks that most tests start are what torchrun's processes are: their environment, their end, what they print."""

import signal

import pytest
from conftest import run

SCRIPT = """
import os, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
print(os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], __name__, sys.argv[1:], "common" in sys.modules, flush=True)
if rank == 0:
    {first}
if rank == 1:
    Path(sys.argv[1]).touch()
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    "first, kill, code, error",
    [
        ("time.sleep(1000)", 1, -signal.SIGKILL, ""),
        ("sys.exit(2)", None, 2, ""),
        ("raise ValueError(7)", None, 1, "ValueError: 7\n"),
    ],
)
def test_one_that_fails_or_is_killed_ends_all(first, kill, code, error, tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "rank 1 was here"
    script.write_text(SCRIPT.format(first=first))
    finished = run(
        script, path, processes=2, fork=True, kill=kill and (kill, path.exists), timeout=95
    )  # the sleep: 100
    assert finished.returncode == code and finished.stderr.endswith(error)
    lines = [f"{rank} 2 __main__ [{str(path)!r}] False" for rank in (0, 1)]
    assert set(finished.stdout.splitlines()) <= set(lines) and (not kill or len(finished.stdout.splitlines()) == 2)
