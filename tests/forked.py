"""Start a script's processes as torchrun does, but as forks of one process that has already imported everything.

A launch then takes a moment, not the seconds that each process needs to import PyTorch and transformers. Forks share
more than torchrun's processes do (modules, the seed of hash()), so each script is tested under torchrun too.

One launch can run a script several times with different flags. On a GPU or two nodes, forks do not work. There, use

    torchrun --nproc_per_node 2 tests/forked.py t5_fsdp.py '[["--lr", "1"], ["--lr", "2"]]' '["no_dropout"]'
"""

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

from torch.distributed import TCPStore

FOLDER = Path(__file__).parent
OURS = [*(path.stem for path in FOLDER.parent.glob("*.py")), "inside"]
CONTEXT = multiprocessing.get_context("forkserver")


def start_server():
    """Start the process that will be forked. It imports while pytest collects the tests."""
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("t5", "llama")]  # or each fork imports them
    CONTEXT.set_forkserver_preload(["forked", "datasets", "pytest", *models, *OURS])
    # Python 3.11 does not pass sys.path to it.
    with mock.patch.dict(os.environ, PYTHONPATH=f"{FOLDER.parent}{os.pathsep}{FOLDER}"):
        forkserver.ensure_running()


def run_rank(script, settings, change, environment, ports, outputs):
    """One process: run the script as `python script` would, once for each list of arguments."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    multiprocessing.set_start_method(None, force=True)  # the script's own child processes start as usual
    for name in OURS:
        sys.modules.pop(name, None)  # the server imported them only to import their libraries
    run_settings(script, settings, change, ports)


def run_settings(script, settings, change, ports):
    """Run the script in this process. `change`: a function of inside.py and its arguments. It gets the script as a
    module before the script's main runs. `ports`: of each setting's store."""
    gc.freeze()  # otherwise each collection would visit all imported objects, and so copy their pages
    sys.path.insert(0, str(Path(script).parent))
    for arguments, port in zip(settings, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = [script, *arguments]
        if change:
            inside = importlib.import_module("inside")
            inside.start_changed(script, *change)
        else:
            runpy.run_path(script, run_name="__main__")


def launch(script, settings, processes, environment, timeout, change=(), per_node=None):
    """As conftest's `run_many`. Returns what subprocess.run would. When a rank fails, all end, and its exit code is
    returned. `per_node`: how many ranks believe that they share a node; by default all."""
    # As under torchrun, the parent has the stores. Without ranks they are not used.
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in settings]
    ports = [store.port for store in stores]
    environments = [environment]
    if processes:
        per_node = per_node or processes
        environments = []
        for rank in range(processes):
            variables = {"RANK": rank, "LOCAL_RANK": rank % per_node, "MASTER_ADDR": "localhost"}
            variables |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": per_node, "TORCHELASTIC_USE_AGENT_STORE": True}
            environments.append(environment | {name: str(value) for name, value in variables.items()})
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        ranks = [
            CONTEXT.Process(target=run_rank, args=(script, settings, change, environment, ports, outputs))
            for environment in environments
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
    script, settings, change = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    first_port = int(os.environ.get("MASTER_PORT", 0))
    run_settings(script, settings, change, range(first_port, first_port + len(settings)))
