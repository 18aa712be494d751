"""The README's table of strategies takes what the tool, with traces of the real models, finds the fastest."""

import re
from argparse import Namespace

import pytest
import will_it_fit
from conftest import ROOT
from step_time import GPUS

from inside import LM_STRATEGIES


def chosen_by_the_table(state, parameters, per_node, nodes, memory):
    """The strategy of the first row that fits."""
    section = re.search(r"^## Which strategy\?\n(.+?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    rows = re.findall(r"^\| (one|several) \| 16/(n|s)( \+ 2)? \| `(\w+)`", section, re.M)
    assert len(rows) == 6
    for where, shards, gathered, strategy in rows:
        needed = state / (per_node * nodes if shards == "n" else per_node) + bool(gathered) * parameters
        if (where == "one") == (nodes == 1) and needed <= memory:
            return strategy


@pytest.mark.long
@pytest.mark.parametrize("model", ["150m", "1b", "7b"])
def test_the_table_of_strategies_takes_what_the_tool_finds_the_fastest(model):
    """On a node of eight H100 (NVLink) or eight RTX 4090 (PCIe 4), and on two nodes of eight H100 at 10, 100 and 400
    Gbit/s. Activations are few, so that the largest model fits the smallest machine."""
    options = Namespace(vocabulary=32_000, per_node=8, attention="gpu")
    one_sequence = ("--seq-length", 1024, "--micro-batch-size", 1)
    for nodes, machines in (1, [("H100", None), ("RTX4090", None)]), (2, [("H100", gbits) for gbits in (10, 100, 400)]):
        size = 8 * nodes
        flags = ("--model", model, "--num-processes", size, *one_sequence, "--global-batch-size", size)
        costs = {}
        for strategy in LM_STRATEGIES:
            is_hybrid = "HYBRID" in strategy  # on one node they are the same as two others
            if is_hybrid and nodes == 1:
                continue
            with will_it_fit.traced("lm_multinode.py", [*flags, "--sharding-strategy", strategy], options) as run:
                costs[strategy] = run.cost()  # computing is the same for all
                count = run.model.num_parameters()
        state, parameters = 16 * count, 2 * count
        activations = costs["FULL_SHARD"]["peak"] - state / size

        for name, gbits in machines:
            usable = 0.9 * GPUS[name].memory_gib * 2**30
            rows = []
            for strategy, cost in costs.items():
                row = {"strategy": strategy, "fits": cost["peak"] <= usable}
                rows.append(row | will_it_fit.bounds(run, cost, GPUS[name], gbits))
            [fastest] = [
                row["strategy"] for row in will_it_fit.mark_the_fastest(rows) if "<-" in row["what takes the time"]
            ]
            assert fastest == chosen_by_the_table(state, parameters, 8, nodes, usable - activations), (name, gbits)
