"""lm_multinode.py on two nodes, started as on a cluster, does what it does on one."""

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
    """Two nodes. A machine that cannot have them skips these tests, but not where all of them must run."""
    with contextlib.ExitStack() as cleanup:
        try:
            made = cleanup.enter_context(two_nodes())
        except NoNamespacesError as error:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
        yield made


def run_on_two_nodes(nodes, settings, change=(), options=()):
    """One real torchrun with one process on each node; returns what both printed: rank 0 can be on either."""
    settings = [[str(argument) for argument in arguments] for arguments in settings]
    arguments = (ROOT / "lm_multinode.py", json.dumps(settings), json.dumps(change))
    finished = nodes.torchrun("tests/forked.py", *arguments, options=("--nproc_per_node", 1, *options))
    texts = [f"node {node}:\n{one.stdout[-2000:]}\n{one.stderr[-5000:]}" for node, one in enumerate(finished)]
    assert [one.returncode for one in finished] == [0, 0], "\n".join(texts)
    return "".join(one.stdout for one in finished)


@pytest.mark.long
def test_the_losses_are_those_of_one_node(nodes, tiny_llama, tmp_path):
    """With two processes there, which take it for two nodes; so a node is a replica of HYBRID_SHARD, unasked."""
    of_one, of_two = [], []
    for name in ("FULL_SHARD", "HYBRID_SHARD"):
        flags = [*SIZES, "--model", tiny_llama, "--max-steps", 3, "--sharding-strategy", name, "--output-dir"]
        of_one.append([*flags, tmp_path / "one" / name])
        of_two.append([*flags, tmp_path / "two" / name])
    run_many("lm_multinode.py", of_one, 2, per_node=1)
    run_on_two_nodes(nodes, of_two)
    for *_, folder in of_two:
        expected = [curve(tmp_path / "one" / folder.name, kind) for kind in ("loss", "grad_norm")]
        assert len(expected[0]) == 3
        check_curves(folder, expected)


@pytest.mark.long
def test_a_process_on_the_other_node_is_killed_and_torchrun_starts_all_again(nodes, tmp_path):
    """Both runs have one process on a node: with other numbers of threads, some CPUs compute other last digits."""
    whole, killed = ([*SIZES, "--max-steps", 12, "--output-dir", tmp_path / name] for name in ("whole", "killed"))
    run_many("lm_multinode.py", [whole], 2, per_node=1)
    change = ("signal_in_step", 1, 4)
    killed = [*killed, "--checkpoint-every", 2, "--resume"]
    printed = run_on_two_nodes(nodes, [killed], change, ("--max-restarts", 2))
    # torchrun counts the restart on one node only, and both have resumed.
    resumed = re.findall(r"^resumed\D+(\d+) of 12$", printed, re.MULTILINE)
    assert resumed and min(map(int, resumed)) >= 2
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
