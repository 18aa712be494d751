"""lm_multinode.py, started as on a cluster, does on two nodes what it does on one."""

import json
import os
import re
import subprocess

import pytest
from conftest import ROOT, SMALL, curve, losses, run_many
from two_nodes import two_nodes


@pytest.mark.long
def test_two_nodes_have_the_losses_of_one_although_a_process_is_killed(tiny_llama, texts, tmp_path):
    """Each node is a replica of two processes. When one of them is killed, torchrun restarts all, also on the other
    node, and they resume. The other run believes that it is on two nodes."""
    flags = (*SMALL, "--model", tiny_llama, "--dataset", texts, "--max-steps", 8, "--validate-every", 100)
    flags = (*flags, "--sharding-strategy", "HYBRID_SHARD", "--no-save-model", "--device", "cpu")
    run_many("lm_multinode.py", {tmp_path / "one": flags}, 4, per_node=2)

    flags = (*flags, "--checkpoint-every", 2, "--resume", "--output-dir", tmp_path / "two")
    settings, change = json.dumps([[str(flag) for flag in flags]]), json.dumps(("signal_in_step", 1, 4))
    arguments = ("tests/forked.py", ROOT / "lm_multinode.py", settings, change)
    try:
        with two_nodes() as nodes:
            finished = nodes.torchrun(*arguments, options=("--max-restarts", 2))
    except (OSError, subprocess.CalledProcessError) as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    texts = [f"node {node}:\n{run.stdout[-2000:]}\n{run.stderr[-5000:]}" for node, run in enumerate(finished)]
    assert [run.returncode for run in finished] == [0, 0], "\n".join(texts)
    # Both nodes must have resumed, although torchrun counts the restart on only one. Rank 0 can be on either.
    resumed = re.findall(r"^resumed\D+(\d+) of 8$", "".join(texts), re.MULTILINE)
    assert resumed and min(map(int, resumed)) >= 2
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert curve(tmp_path / "two", "grad_norm")[-1] == curve(tmp_path / "one", "grad_norm")[-1]
