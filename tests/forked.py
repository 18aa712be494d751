"""Start a script's processes as torchrun does, but as forks of one process that has imported everything already.

A launch then takes a moment and not the seconds that PyTorch and transformers take to import in each process. The forks
share more than torchrun's processes do (the modules, the seed of hash()), so each script is tested under torchrun too.

One launch can run a script several times, each with other flags. Where forks will not do (a GPU, two nodes), so can

    torchrun --nproc_per_node 2 tests/forked.py t5_fsdp.py '[["--lr", "1"], ["--lr", "2"]]' '["no_dropout"]'
"""

import gc
import importlib
import itertools
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent
OURS = [*(path.stem for path in FOLDER.parent.glob("*.py")), "inside"]
CONTEXT = multiprocessing.get_context("forkserver")
FIRST_PORTS = itertools.cycle(range(4_000, 16_000, 100))


def start_server():
    """Start the process that is forked, which imports while the tests are collected."""
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("t5", "llama")]  # else each fork imports them
    CONTEXT.set_forkserver_preload(["forked", "datasets", "pytest", *models, *OURS])
    # Python 3.11 does not hand it sys.path.
    with mock.patch.dict(os.environ, PYTHONPATH=f"{FOLDER.parent}{os.pathsep}{FOLDER}"):
        forkserver.ensure_running()


def run_rank(script, settings, change, environment, outputs):
    """One process: run the script as `python script` would, once for each list of arguments."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    # Else what the script starts would come from here too. None is the platform's own way.
    multiprocessing.set_start_method(environment.get("START_METHOD"), force=True)
    for name in OURS:
        sys.modules.pop(name, None)  # imported for what they import
    run_settings(script, settings, change)


def run_settings(script, settings, change):
    """In this process. `change`: the name of a function of inside.py and its arguments; it gets the script as a module
    before the script's main runs."""
    gc.freeze()  # else each collection would walk through all that was imported, and copy its pages
    sys.path.insert(0, str(Path(script).parent))
    port = int(os.environ.get("MASTER_PORT", 0))
    for number, arguments in enumerate(settings):
        if port:
            os.environ["MASTER_PORT"] = str(port + number)
        sys.argv = [script, *arguments]
        if change:
            inside = importlib.import_module("inside")
            inside.start_changed(script, *change)
        else:
            runpy.run_path(script, run_name="__main__")


def claim_ports(count):
    """A socket on the first of so many free ports, which other launches leave alone while it is open. No system hands
    these ports out by itself."""
    for first in FIRST_PORTS:
        sockets = [socket.socket() for _ in range(count)]
        try:
            for port, probe in enumerate(sockets, first):
                probe.bind(("localhost", port))
            return sockets.pop(0)
        except OSError:  # another process has one
            continue
        finally:
            for probe in sockets:
                probe.close()


def launch(script, settings, processes, environment, timeout, change=(), per_node=None):
    """As conftest's `run_many`; returns what subprocess.run would. All ranks end when one fails; the exit code is then
    its own. `per_node`: how many of the ranks take themselves to be on one node; all unless given."""
    environments = [environment]
    if processes:
        per_node = per_node or processes
        claim = claim_ports(len(settings) + 1)  # each setting has a port of its own
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": claim.getsockname()[1] + 1}
        shared |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": per_node}
        environments = []
        for rank in range(processes):
            of_rank = shared | {"RANK": rank, "LOCAL_RANK": rank % per_node}
            environments.append(environment | {name: str(value) for name, value in of_rank.items()})
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        ranks = [
            CONTEXT.Process(target=run_rank, args=(script, settings, change, of_rank, outputs))
            for of_rank in environments
        ]
        deadline = time.monotonic() + timeout
        try:
            for rank in ranks:
                rank.start()
            while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                if any(rank.exitcode for rank in ranks):
                    break
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired([script, settings], timeout)
                connection.wait(running, timeout=1)
            code = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        texts = [path.read_text() for path in outputs]
    return subprocess.CompletedProcess([script, settings], code, *texts)


if __name__ == "__main__":
    run_settings(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
