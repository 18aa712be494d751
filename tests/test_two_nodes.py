"""lm_multinode.py, started as on a cluster, does on two nodes what it does on one."""

import contextlib
import json
import os
import re

import pytest
from conftest import ROOT, SMALL, check_curves, curve, losses, run_many
from two_nodes import NoNamespacesError, two_nodes

SIZES = (*SMALL, "--global-batch-size", 8, "--validate-every", 100, "--no-save-model", "--device", "cpu")


@pytest.fixture(scope="module")
def nodes():
    """Two nodes. A machine that cannot have them skips these tests; with CI set, they fail."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except NoNamespacesError as error:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
        yield nodes


def run_on_two_nodes(nodes, settings, change=(), options=()):
    """Run one real torchrun with one process on each node. Returns what both printed: rank 0 can be on either."""
    settings = [[str(argument) for argument in arguments] for arguments in settings]
    arguments = (ROOT / "lm_multinode.py", json.dumps(settings), json.dumps(change))
    finished = nodes.torchrun("tests/forked.py", *arguments, options=("--nproc_per_node", 1, *options))
    texts = [f"node {node}:\n{run.stdout[-2000:]}\n{run.stderr[-5000:]}" for node, run in enumerate(finished)]
    assert [run.returncode for run in finished] == [0, 0], "\n".join(texts)
    return "".join(run.stdout for run in finished)


@pytest.mark.long
def test_two_nodes_have_the_losses_of_one(nodes, tiny_llama, tmp_path):
    """On one node, two processes believe that they are on two. So by default each is a replica of HYBRID_SHARD."""
    one_node, both_nodes = [], []
    for name in ("FULL_SHARD", "HYBRID_SHARD"):
        flags = [*SIZES, "--model", tiny_llama, "--max-steps", 3, "--sharding-strategy", name, "--output-dir"]
        one_node.append([*flags, tmp_path / "one" / name])
        both_nodes.append([*flags, tmp_path / "two" / name])
    run_many("lm_multinode.py", one_node, 2, per_node=1)
    run_on_two_nodes(nodes, both_nodes)
    for *_, folder in both_nodes:
        expected = [curve(tmp_path / "one" / folder.name, name) for name in ("loss", "grad_norm")]
        assert len(expected[0]) == 3
        check_curves(folder, expected)


@pytest.mark.long
def test_torchrun_restarts_all_processes_when_one_on_the_other_node_is_killed(nodes, tmp_path):
    """Both runs have one process on a node: on some CPUs the number of threads changes the last digits."""
    whole, killed = ([*SIZES, "--max-steps", 12, "--output-dir", tmp_path / name] for name in ("whole", "killed"))
    run_many("lm_multinode.py", [whole], 2, per_node=1)
    change = ("signal_in_step", 1, 4)
    killed = [*killed, "--checkpoint-every", 2, "--resume"]
    printed = run_on_two_nodes(nodes, [killed], change, ("--max-restarts", 2))
    # Both nodes must have resumed, although torchrun counts the restart on only one.
    resumed = re.findall(r"^resumed\D+(\d+) of 12$", printed, re.MULTILINE)
    assert resumed and min(map(int, resumed)) >= 2
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
