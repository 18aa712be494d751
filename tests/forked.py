"""Start a script's processes as torchrun does, but as forks of one process that has imported everything already.

A launch then takes a moment and not the seconds that PyTorch and transformers take to import in each process. The forks
share more than torchrun's processes do (the modules, the seed of hash()), so each script is tested under torchrun too.

One launch can run a script several times, each with other flags. Where forks will not do (a GPU, two nodes), so can

    torchrun --nproc_per_node 2 tests/forked.py t5_fsdp.py '[["--lr", "1"], ["--lr", "2"]]' MODULE:FUNCTION
"""

import contextlib
import gc
import importlib
import itertools
import json
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
    """In this process. `change`, as module:function, gets the script as a module each time before its main runs."""
    gc.freeze()  # else each collection would walk through all that was imported, and copy its pages
    sys.path.insert(0, str(Path(script).parent))
    common = importlib.import_module("common")
    common.train_tokenizer = train_once(common.train_tokenizer)
    if change:
        module, function = change.split(":")
        change_script, run = getattr(importlib.import_module(module), function), common.run

        def run_changed(main, args, **options):
            changed = sys.modules["__main__"]
            change_script(changed)
            run(changed.main, args, **options)

        common.run = run_changed
    for arguments in settings:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def train_once(train_tokenizer):
    """Training is deterministic: for the same texts once is enough."""
    trained = {}

    def train(texts, vocab_size, append_eos):
        key = (*texts, vocab_size, append_eos)
        if key not in trained:
            trained[key] = train_tokenizer(key[:-2], vocab_size, append_eos)
        return trained[key]

    return train


def free_ports(count):
    """The first of so many free ports in a row: the scripts take the next one for each setting."""
    for first in itertools.count(20_000 + os.getpid() % 10_000, count):
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in range(first, first + count):
                opened.enter_context(socket.socket()).bind(("localhost", port))
            return first


def launch(script, settings, processes, environment, timeout, change="", kill=None, per_node=None):
    """Run a script in `processes` ranks, or as plain `python` does when None; returns what subprocess.run would.

    `settings`: a list of arguments for each time that it runs. `per_node`: how many of the ranks take themselves to be
    on one node; all unless given.

    All end when one fails; the exit code is then its own. `kill`, (rank, condition): as soon as the condition, which is
    called every 20 ms, holds, the rank gets SIGKILL, or the signal that is given as a third item.
    """
    environments = [environment]
    if processes:
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_ports(len(settings)) - 1}
        per_node = per_node or processes
        shared |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": per_node}
        environments = []
        for rank in range(processes):
            of_rank = shared | {"RANK": rank, "LOCAL_RANK": rank % per_node}
            environments.append(environment | {name: str(value) for name, value in of_rank.items()})
    with ONE_LAUNCH, tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        ranks = [
            CONTEXT.Process(target=run_rank, args=(script, settings, change, each, outputs)) for each in environments
        ]
        deadline = time.monotonic() + timeout
        try:
            for rank in ranks:
                rank.start()
            while (running := [rank.sentinel for rank in ranks if rank.exitcode is None]) and not any(
                rank.exitcode for rank in ranks
            ):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired([script, settings], timeout)
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
    return subprocess.CompletedProcess([script, settings], code, *texts)


if __name__ == "__main__":
    run_settings(sys.argv[1], json.loads(sys.argv[2]), change=sys.argv[3])
