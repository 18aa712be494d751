"""lm_multinode.py on two nodes, started as on a cluster, does what it does on one."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import CLOSE, ROOT, losses, run_many
from two_nodes import NoNamespacesError, two_nodes

SIZES = (
    *("--precision", "fp32", "--no-save-model", "--log-every", 1, "--seq-length", 64, "--validate-every", 100),
    *("--micro-batch-size", 1, "--global-batch-size", 8, "--num-validation-texts", 3),
)
SHORT, LONG = ("--max-steps", 3, "--warmup-steps", 1), ("--max-steps", 12, "--warmup-steps", 2)
RUNS = {
    "FULL_SHARD": "1 x 4",
    "SHARD_GRAD_OP": "1 x 4",
    "NO_SHARD": "4 x 1",
    "HYBRID_SHARD": "2 x 2",  # unasked: a node is a replica
    "_HYBRID_SHARD_ZERO2": "2 x 2",
    "fsdp1 HYBRID_SHARD": "2 x 2",
}


@pytest.fixture(scope="module")
def nodes():
    """Two nodes. A machine that cannot have them skips these tests, but not where all of them must run."""
    with contextlib.ExitStack() as cleanup:
        try:
            made = cleanup.enter_context(two_nodes())
        except NoNamespacesError as error:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
        yield made


def check(finished):
    """Fail the test with the output of both nodes unless both succeeded."""
    texts = [f"node {node}:\n{one.stdout[-2000:]}\n{one.stderr[-5000:]}" for node, one in enumerate(finished)]
    assert [one.returncode for one in finished] == [0, 0], "\n".join(texts)


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """The folder with runs on one node of four processes: other tests show that strategies do not differ there."""
    folder = tmp_path_factory.mktemp("one")
    hybrid = ("--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2)
    runs = {"flat": SHORT, "hybrid": (*SHORT, *hybrid)}
    run_many("lm_multinode.py", [[*SIZES, *flags, "--output-dir", folder / name] for name, flags in runs.items()], 4)
    return folder


@pytest.fixture(scope="module")
def on_two_nodes(nodes, tmp_path_factory):
    """The folder with every run on two nodes of two processes."""
    folder = tmp_path_factory.mktemp("two")
    settings = []
    for name in RUNS:
        version, strategy = 1 if "fsdp1" in name else 2, name.split()[-1]
        flags = ("--device", "cpu", "--fsdp-version", version, "--sharding-strategy", strategy)
        settings.append([str(argument) for argument in (*SIZES, *SHORT, *flags, "--output-dir", folder / name)])
    finished = nodes.torchrun("tests/forked.py", ROOT / "lm_multinode.py", json.dumps(settings), "")
    check(finished)
    stdout = "".join(one.stdout for one in finished)  # rank 0 can be on either node
    assert re.findall("^fsdp .*replicas x shards: (.*), fp32$", stdout, re.M) == list(RUNS.values())
    assert stdout.count("run      4 processes on cpu") == len(RUNS)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_those_of_one_node(one_node, on_two_nodes, name):
    expected = losses(one_node / ("hybrid" if "HYBRID" in name else "flat"))
    assert len(expected) == 3
    assert losses(on_two_nodes / name) == pytest.approx(expected, **CLOSE)


def test_a_process_on_the_other_node_is_killed_and_torchrun_starts_all_again(nodes, tmp_path):
    """One process on each node, to save time. The run that it is compared with believes so too: as two processes of one
    node they would compute with fewer threads each, and on some CPUs with other last digits."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_many("lm_multinode.py", [[*SIZES, *LONG, "--output-dir", whole]], 2, per_node=1)
    flags = ("--device", "cpu", *SIZES, *LONG, "--checkpoint-every", 2, "--output-dir", killed)
    options = ["--nproc_per_node", 1, "--max-restarts", 2]
    torchruns = nodes.start_torchrun("lm_multinode.py", *flags, options=options)
    deadline = time.monotonic() + 120
    while not list(killed.glob("checkpoints/*/.metadata")) and time.monotonic() < deadline:
        time.sleep(0.01)
    agent = torchruns[1].pid
    workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(int(workers[0]), signal.SIGKILL)
    finished = nodes.finish(torchruns, timeout=180)
    check(finished)
    # torchrun counts the restart on the second node only, and both have resumed.
    steps = [int(step) for one in finished for step in re.findall(r"^resumed  from step (\d+)$", one.stdout, re.M)]
    assert len(steps) == 1 and steps[0] >= 2
    assert losses(killed) == losses(whole)
