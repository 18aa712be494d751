"""The forks that most tests start are what torchrun's processes are: their environment, their end, what they print."""

import signal

import pytest
from conftest import run

SCRIPT = """
import os, sys, time
from pathlib import Path

rank = int(os.environ["RANK"])
print(os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], __name__, sys.argv[1:], "t5_fsdp" in sys.modules, flush=True)
Path(sys.argv[1], str(rank)).touch()
if rank == 0:
    {first}
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "first, kill, code, error",
    [
        ("time.sleep(1000)", signal.SIGKILL, -signal.SIGKILL, ""),
        ("time.sleep(1000)", signal.SIGTERM, -signal.SIGTERM, ""),
        ("sys.exit(2)", None, 2, ""),
        ("raise ValueError(7)", None, 1, "ValueError: 7\n"),
    ],
)
def test_one_that_fails_or_is_killed_ends_all(first, kill, code, error, tmp_path):
    script, were_here = tmp_path / "script.py", tmp_path / "were here"
    script.write_text(SCRIPT.format(first=first))
    were_here.mkdir()
    kill = kill and (1, lambda: len(list(were_here.iterdir())) == 2, kill)
    finished = run(script, were_here, processes=2, fork=True, kill=kill, timeout=95)  # the sleep: 1,000
    assert finished.returncode == code and finished.stderr.endswith(error)
    lines = [f"{rank} 2 __main__ [{str(were_here)!r}] False" for rank in (0, 1)]
    printed = finished.stdout.splitlines()
    assert set(printed) <= set(lines) and (not kill or len(printed) == 2)
