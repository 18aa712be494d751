"""The predicted peak of a training step is what a real one holds: every tensor that is alive, to 1%."""

import json
import re
import shutil
from argparse import Namespace

import pytest
import will_it_fit
from conftest import ROOT, run_many
from test_recipes import patched

from inside import LM_READS_THE_LOSS, LM_WIDER

TOOL = "tests/benchmarks/will_it_fit.py"
GPU = Namespace(vocabulary=32_000, per_node=8, attention="gpu")
STEPS = ("--max-steps", 3, "--no-save-model", "--precision", "fp32")
LM = (*STEPS, "--seq-length", 128, "--micro-batch-size", 4, "--num-validation-texts", 3)
T5 = (*STEPS, "--no-run-validation", "--num-train-samples", 64, "--batch-size", 2)
T5 = (*T5, "--max-source-length", 16, "--max-target-length", 8)  # every article and summary is longer
ZERO2 = ("--sharding-strategy", "SHARD_GRAD_OP")
CASES = (
    ("--precision", "bf16", "--activation-checkpointing", "--global-batch-size", 8),
    ("--sharding-strategy", "_HYBRID_SHARD_ZERO2", "--shards-per-replica", 1, "--global-batch-size", 16),
    ("--sharding-strategy", "DILOCO", "--shards-per-replica", 1, "--local-steps", 2, "--global-batch-size", 8),
)


def check(script, settings, processes, tmp_path):
    """For each list of flags the prediction for a CPU is what a run of rank 0 held."""
    folders = [tmp_path / str(number) for number in range(len(settings))]
    arguments = [[*flags, "--output-dir", folder] for flags, folder in zip(settings, folders, strict=True)]
    run_many(script, arguments, processes, change=("record_peak",))
    for flags, folder in zip(settings, folders, strict=True):
        held = json.loads((folder / "peak-0.json").read_text())
        options = Namespace(vocabulary=held["vocabulary"], per_node=processes, attention="cpu")
        with will_it_fit.traced(script, [*flags, "--num-processes", processes], options) as run:
            assert run.peak() == pytest.approx(held["peak"], rel=0.01), flags


@pytest.mark.long
def test_the_prediction_is_what_a_real_step_holds(tmp_path):
    """With one micro-batch in a step, and with two, which hold whole gradients."""
    check("lm_multinode.py", [(*LM, *more) for more in CASES], 2, tmp_path)


@pytest.mark.long
def test_the_prediction_is_what_a_real_step_of_t5_holds(tiny_model, articles_csv, tmp_path):
    """The last one is the model that the script makes itself."""
    tiny = (*T5, "--model", tiny_model, "--dataset", articles_csv)
    grad_bf16 = ("--precision", "grad-bf16", "--accumulation-steps", 2)
    ways = [(*tiny, *grad_bf16, *ZERO2), (*T5, "--activation-checkpointing", "--backward-prefetch", "none")]
    check("t5_fsdp.py", ways, 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5-lora", "lm-lora"])
def test_frozen_weights_have_no_gradients(name, tiny_model, tiny_llama, articles_csv, tmp_path):
    """In a copy with LoRA."""
    copy = patched(tmp_path / "copy", name)
    if name == "lm-lora":
        check(copy / "lm_multinode.py", [(*LM, "--model", tiny_llama, "--global-batch-size", 16)], 2, tmp_path)
    else:
        check(copy / "t5_fsdp.py", [(*T5, "--model", tiny_model, "--dataset", articles_csv)], 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "DILOCO", "NO_SHARD"])
def test_what_is_sent_is_what_the_formulas_say(strategy):
    """Those of docs/multi-node.md: two micro-batches in bf16 on two nodes of two processes."""
    flags = ("--sharding-strategy", strategy, "--precision", "bf16", "--num-processes", 4, "--global-batch-size", 32)
    options = Namespace(vocabulary=2048, per_node=2, attention="gpu")
    with will_it_fit.traced("lm_multinode.py", flags, options) as run:
        whole, layers = (sum(p.numel() for p in part.parameters()) for part in (run.model, run.model.model.layers))
        cost = run.cost()
    gathered, reduced = 2 * 2 * (whole + layers), 4 * whole
    everything = 3 / 4 * (gathered + reduced)  # leaves a node once, of two processes
    in_replica = 1 / 2 * (gathered + reduced)
    expected = {
        "FULL_SHARD": (everything / 2, everything / 2),
        "HYBRID_SHARD": (in_replica, reduced / 2),
        "DILOCO": (in_replica, reduced / 2 / 50),
        "NO_SHARD": (3 / 4 * reduced, 3 / 4 * reduced),
    }
    assert (cost["inside"], cost["between"]) == pytest.approx(expected[strategy], rel=0.01)
    tokens = 8 * 128  # a process's; PaLM's appendix B, whose 12 are 14 where backward computes the scores again
    attention = 14 * 2 * 128 * 128
    assert cost["flops"] == pytest.approx(tokens * (6 * (whole - 2048 * 128) + attention), rel=0.01)


@pytest.mark.long
def test_sweeps_offload_and_the_largest_batch():
    tiny = ("lm_multinode.py", "--model", "tiny", "--num-processes", 4)
    ways = [("--sweep", "micro-batch-size=1,4"), ("--cpu-offload",), ("--device-gb", 1)]
    ways.append(("--sweep", "sharding-strategy", "--processes-per-node", 2, "--network-gbits", 1, "--device-gb", 1))
    printed = run_many(TOOL, [[*tiny, *flags] for flags in ways]).stdout
    one, four, offloaded = (line.split("|")[1:-1] for line in printed.splitlines() if re.match(r"\| [014] ", line))
    # 16 sequences on 4 processes, as in the run: the first accumulates four micro-batches, and has whole gradients.
    assert float(one[4]) > 3 * float(four[4])
    assert float(one[5]) < float(four[5])
    assert offloaded[:2] == [" 0 ", " 0 "]  # parameters and optimizer are in the CPU's memory
    assert "4 sequences of 128 tokens" in printed  # what it has counted
    assert int(re.search(r"^largest batch .* (\d+)$", printed, re.M)[1]) > 4
    assert re.findall(r"^\| (\w+) .*<-", printed, re.M) == ["_HYBRID_SHARD_ZERO2"]  # the slow link decides
    with will_it_fit.traced("lm_multinode.py", ["--num-processes", 4], GPU) as run:
        [largest] = run.largest_batches([1])
        for size in (largest, largest + 1):
            run.set_batch(size)
            assert (run.peak() <= 0.9 * 2**30) == (size == largest)  # a tenth is to spare
    mistakes = {
        "lm_multinode.py --model absent": "absent",
        "t5_fsdp.py --fsdp-version 1": "FSDP1",
        "t5.py": "t5.py",
        "lm_multinode.py --num-processes 12 --sharding-strategy HYBRID_SHARD": "--shards-per-replica",
    }
    for command, word in mistakes.items():
        finished = run_many(TOOL, [command.split()], check=False)
        assert finished.returncode == 2 and "Traceback" not in finished.stderr, command
        assert word in finished.stderr.splitlines()[-1]


@pytest.mark.long
def test_an_edited_copy_is_traced_and_a_read_is_named_with_its_line(tmp_path):
    """With layers a hundred times as wide it needs more."""
    shutil.copy(ROOT / "common.py", tmp_path)
    copy = tmp_path / "lm_multinode.py"
    text = (ROOT / "lm_multinode.py").read_text()
    copy.write_text(text.replace(*LM_WIDER))
    printed = run_many(TOOL, [["lm_multinode.py"], [copy]]).stdout
    mine, edited = re.findall(r"^peak ([\d.]+) GB", printed, re.M)
    assert float(edited) > float(mine) + 0.1

    copy.write_text(text.replace(*LM_READS_THE_LOSS))
    finished = run_many(TOOL, [[copy]], check=False)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert re.search(r"lm_multinode.py, line \d+ .*: loss_sum \+= loss.item\(\)$", finished.stderr, re.M)
