"""The predicted peak of a training step is what a real one holds: every tensor that is alive, to 1%."""

import json
import re
from argparse import Namespace

import pytest
import will_it_fit
from conftest import ROOT, run, run_many
from memory_tracker import record_peak

SHARED = ("--max-steps", 4, "--no-save-model")
LM = (*SHARED, "--seq-length", 128, "--micro-batch-size", 4, "--num-validation-texts", 20, "--model", "tiny")
T5 = (*SHARED, "--no-run-validation", "--num-train-samples", 64, "--batch-size", 2)
T5 = (*T5, "--max-source-length", 16, "--max-target-length", 8)  # every article and summary is longer
FP32, BF16, ONE = ("--precision", "fp32"), ("--precision", "bf16"), ("--global-batch-size", 16)  # micro-batch a step
TWO = ("--shards-per-replica", 2)
CASES = {
    "FULL_SHARD": (*LM, *FP32, *ONE),
    "bf16": (*LM, *BF16, *ONE),
    "SHARD_GRAD_OP, accumulating": (*LM, *FP32, "--global-batch-size", 32, "--sharding-strategy", "SHARD_GRAD_OP"),
    "NO_SHARD": (*LM, *FP32, *ONE, "--sharding-strategy", "NO_SHARD"),
    "HYBRID_SHARD": (*LM, *FP32, *ONE, "--sharding-strategy", "HYBRID_SHARD", *TWO),
    "DILOCO": (*LM, *FP32, *ONE, "--sharding-strategy", "DILOCO", *TWO, "--local-steps", 2, "--validate-every", 2),
    "recomputing": (*LM, *BF16, *ONE, "--activation-checkpointing"),
}


def test_the_prediction_is_what_a_real_step_of_the_llama_holds(tmp_path):
    settings = [[*flags, "--output-dir", tmp_path / name] for name, flags in CASES.items()]
    run_many("lm_multinode.py", settings, 4, change=record_peak)
    for name, flags in CASES.items():
        check("lm_multinode.py", flags, 4, tmp_path / name)


def check(script, flags, processes, folder):
    """The prediction for a CPU is what this run of rank 0 held."""
    held = json.loads((folder / "peak-0.json").read_text())
    options = Namespace(vocabulary=held["vocabulary"], per_node=processes, attention="cpu")
    with will_it_fit.traced(script, [*flags, "--num-processes", processes], options) as run:
        assert run.peak() == pytest.approx(held["peak"], rel=0.01), folder.name


def test_the_prediction_is_what_a_real_step_of_t5_holds(tiny_model, articles_csv, tmp_path):
    """The last one is the model that the script makes itself."""
    cases = {
        f"{precision} {strategy} {' '.join(more)}": ("--sharding-strategy", strategy, "--precision", precision, *more)
        for strategy, precision, more in (
            ("FULL_SHARD", "fp32", ()),
            ("SHARD_GRAD_OP", "bf16", ()),
            ("FULL_SHARD", "grad-bf16", ("--accumulation-steps", "2")),
            ("FULL_SHARD", "fp32", ("--activation-checkpointing", "--backward-prefetch", "none")),
        )
    }
    cases = {name: ("--model", tiny_model, "--dataset", articles_csv, *flags) for name, flags in cases.items()}
    cases["builtin"] = ("--precision", "fp32")
    settings = [[*T5, *flags, "--output-dir", tmp_path / name] for name, flags in cases.items()]
    run_many("t5_fsdp.py", settings, 2, change=record_peak)
    for name, flags in cases.items():
        check("t5_fsdp.py", (*T5, *flags), 2, tmp_path / name)


PAGE = (ROOT / "docs" / "will-it-fit.md").read_text()
GPU = Namespace(vocabulary=32_000, per_node=8, attention="gpu")


def test_the_page_has_what_the_tool_says():
    """One row of its table; the batch that fits, and the next one, which does not; and the line of its command."""
    [row] = will_it_fit.table(GPU, ["150m"], [8])
    assert f"| {' | '.join(map(str, row.values()))} |\n" in PAGE
    script, *flags = will_it_fit.MODELS["150m"]
    largest = int(row["24 GB"].split(" / ")[0])
    with will_it_fit.traced(script, [*flags, "--num-processes", 8], GPU) as traced:
        for size in (largest, largest + 1):
            traced.set_batch(size)
            assert (traced.peak() <= will_it_fit.USABLE * 24 * will_it_fit.GB) == (size == largest)
    [command] = re.findall(r"^python tests/benchmarks/will_it_fit.py (lm_multinode.py --model 150m.+)$", PAGE, re.M)
    printed = run("tests/benchmarks/will_it_fit.py", *command.split(), fork=True, timeout=200).stdout
    peak = printed.splitlines()[-1]
    assert re.fullmatch(r"peak \d+\.\d\d GB a process", peak) and f"\n{peak}\n" in PAGE


def test_the_largest_batch_fits_and_the_next_does_not():
    with will_it_fit.traced("lm_multinode.py", ["--model", "tiny", "--num-processes", 4], GPU) as traced:
        size = traced.largest_batch(1)
        peaks = [traced.set_batch(each) or traced.peak() for each in (size, size + 1)]
    assert size > 4 and peaks[0] <= will_it_fit.USABLE * will_it_fit.GB < peaks[1]


def test_sweeps_offload_and_what_it_does_not_know():
    tool, tiny = "tests/benchmarks/will_it_fit.py", ("lm_multinode.py", "--model", "tiny", "--num-processes", 4)
    swept = run(tool, *tiny, "--sweep", "micro-batch-size=1,4", fork=True).stdout
    rows = [line.split("|") for line in swept.splitlines() if re.match(r"\| [14] ", line)]
    assert [row[1] for row in rows] == [" 1 ", " 4 "]
    # 16 sequences on 4 processes, as in the run: the first accumulates four micro-batches, and has whole gradients.
    assert float(rows[0][5]) > 3 * float(rows[1][5]) and float(rows[0][6]) < float(rows[1][6])
    offloaded = run(tool, *tiny, "--cpu-offload", fork=True).stdout
    assert re.search(r"^\| 0 \| 0 \| ", offloaded, re.M)  # parameters and optimizer are in the CPU's memory
    assert "absent cannot be read: " in run(tool, "t5_fsdp.py", "--model", "absent", fork=True).stderr.splitlines()[-1]
    assert "FSDP1 is not traced" in run(tool, *tiny, "--fsdp-version", 1, fork=True).stderr


def test_a_copy_that_somebody_has_edited_is_traced(tmp_path):
    """With a layer twice as wide it needs more."""
    for name in ("common.py", "lm_multinode.py"):
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace('"intermediate_size": 352', '"intermediate_size": 35200'))
    flags = ("--model", "tiny", "--num-processes", 2)
    found = [
        int(float(run("tests/benchmarks/will_it_fit.py", script, *flags, fork=True).stdout.split()[-4]) * 100)
        for script in ("lm_multinode.py", tmp_path / "lm_multinode.py")
    ]
    assert found[1] > found[0] + 10


def test_a_model_that_reads_a_number_is_named_with_its_line(tmp_path):
    for name in ("common.py", "lm_multinode.py"):
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(
            text.replace("        loss_sum += loss.detach()\n", "        loss_sum += loss.item()\n")
        )
    finished = run("tests/benchmarks/will_it_fit.py", tmp_path / "lm_multinode.py", fork=True)
    assert finished.returncode == 1 and "Traceback" not in finished.stderr
    assert re.search(r"lm_multinode.py, line \d+ reads a number .*: loss_sum \+= loss.item\(\)$", finished.stderr, re.M)


def test_the_private_names_that_it_needs_are_there():
    """PyTorch has no public ones for a group that pretends, tensors without memory, and what FSDP2 gathers into."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert FakeTensorMode and FakeStore and hasattr(FSDPModule, "_get_fsdp_state")
