"""Start a script's processes as torchrun does, but as forks of one process that has imported everything already.

A launch then takes a moment and not the seconds that PyTorch and transformers take to import in each process. The forks
share more than torchrun's processes do (the modules, the seed of hash()), so each script is tested under torchrun too.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent
OURS = [path.stem for path in FOLDER.parent.glob("*.py")]
CONTEXT = multiprocessing.get_context("forkserver")
ONE_LAUNCH = threading.Lock()  # multiprocessing looks after the children of all threads in each, and not safely


def start_server():
    """Start the process that is forked, which imports while the tests are collected."""
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("t5", "llama")]  # else each fork imports them
    CONTEXT.set_forkserver_preload(["forked", "datasets", *models, *OURS])
    # Python 3.11 does not hand it sys.path.
    with mock.patch.dict(os.environ, PYTHONPATH=f"{FOLDER.parent}{os.pathsep}{FOLDER}"):
        forkserver.ensure_running()


def run_rank(script, arguments, environment, outputs):
    """One process: run the script as `python script` would."""
    gc.freeze()  # else each collection would walk through all that was imported, and copy its pages
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    # Else what the script starts would come from here too. None is the platform's own way.
    multiprocessing.set_start_method(environment.get("START_METHOD"), force=True)
    for name in OURS:
        sys.modules.pop(name, None)  # imported for what they import
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def launch(script, arguments, processes, environment, timeout, kill=None, per_node=None):
    """Run a script in `processes` ranks, or as plain `python` does when None; returns what subprocess.run would.

    `per_node`: how many of them take themselves to be on one node; all unless given.

    All end when one fails; the exit code is then its own. `kill`, (rank, condition): as soon as the condition, which is
    called every 20 ms, holds, the rank gets SIGKILL, or the signal that is given as a third item.
    """
    environments = [environment]
    if processes:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port - 1}  # the scripts take the next one
        per_node = per_node or processes
        shared |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": per_node}
        places = [shared | {"RANK": rank, "LOCAL_RANK": rank % per_node} for rank in range(processes)]
        environments = [environment | {name: str(value) for name, value in place.items()} for place in places]
    with ONE_LAUNCH, tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        ranks = [CONTEXT.Process(target=run_rank, args=(script, arguments, each, outputs)) for each in environments]
        deadline = time.monotonic() + timeout
        try:
            for rank in ranks:
                rank.start()
            while (running := [rank.sentinel for rank in ranks if rank.exitcode is None]) and not any(
                rank.exitcode for rank in ranks
            ):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired([script, *arguments], timeout)
                if kill and kill[1]():
                    os.kill(ranks[kill[0]].pid, *(kill[2:] or [signal.SIGKILL]))
                    kill = None
                connection.wait(running, timeout=0.02 if kill else 1)
            code = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        texts = [path.read_text() for path in outputs]
    return subprocess.CompletedProcess([script, *arguments], code, *texts)
