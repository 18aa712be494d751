"""The predicted peak of a training step is what a real one holds: every tensor that is alive, to 1%."""

import json
import re
from argparse import Namespace

import pytest
import will_it_fit
from conftest import ROOT, run, run_many
from memory_tracker import Tracker
from transformers import AutoTokenizer


def record_peak(script):
    """Write the most bytes that the tensors of this rank take in a step. The least of three steps after the first:
    gloo's threads may hold for a moment what they have sent."""
    train_step, peaks, outers = script.train_step, [], []
    if hasattr(script, "OuterOptimizer"):
        outer_optimizer = script.OuterOptimizer
        script.OuterOptimizer = lambda *arguments: outers.append(outer_optimizer(*arguments)) or outers[-1]

    def recorded_step(args, world, model, optimizer, *rest):
        state = [tensor for outer in outers for tensor in (*outer.shared, *outer.momentum)]
        with Tracker(model, optimizer, optimizer_state=state) as tracker:
            result = train_step(args, world, model, optimizer, *rest)
        peaks.append(max(tracker.totals))
        (args.output_dir / f"peak-{world.rank}.json").write_text(json.dumps(min(peaks[1:], default=0)))
        return result

    script.train_step = recorded_step


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


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """How many tokens the built-in texts give the tiny Llama."""
    folder = tmp_path_factory.mktemp("tokens")
    run_many("lm_multinode.py", [[*LM, "--max-steps", 1, "--save-model", "--output-dir", folder]], 1)
    return len(AutoTokenizer.from_pretrained(folder / "model"))


def test_the_prediction_is_what_a_real_step_of_the_llama_holds(tokens, tmp_path):
    settings = [[*flags, "--output-dir", tmp_path / name] for name, flags in CASES.items()]
    run_many("lm_multinode.py", settings, 4, change=record_peak)
    for name, flags in CASES.items():
        found = predict("lm_multinode.py", flags, 4, tokens)
        assert found == pytest.approx(json.loads((tmp_path / name / "peak-0.json").read_text()), rel=0.01), name


def predict(script, flags, processes, vocabulary=0):
    """As on this CPU."""
    options = Namespace(vocabulary=vocabulary, per_node=processes, attention="cpu")
    with will_it_fit.traced(script, [*flags, "--num-processes", processes], options) as run:
        return run.peak()


def test_the_prediction_is_what_a_real_step_of_t5_holds(tiny_model, articles_csv, tmp_path):
    cases = {
        f"{precision} {strategy} {' '.join(more)}": ("--sharding-strategy", strategy, "--precision", precision, *more)
        for strategy, precision, more in (
            ("FULL_SHARD", "fp32", ()),
            ("SHARD_GRAD_OP", "bf16", ()),
            ("FULL_SHARD", "grad-bf16", ("--accumulation-steps", "2")),
            ("FULL_SHARD", "fp32", ("--activation-checkpointing",)),
        )
    }
    data = ("--model", tiny_model, "--dataset", articles_csv)
    settings = [[*T5, *data, *flags, "--output-dir", tmp_path / name] for name, flags in cases.items()]
    run_many("t5_fsdp.py", settings, 2, change=record_peak)
    for name, flags in cases.items():
        found = predict("t5_fsdp.py", (*T5, *data, *flags), 2)
        assert found == pytest.approx(json.loads((tmp_path / name / "peak-0.json").read_text()), rel=0.01), name


PAGE = (ROOT / "docs" / "will-it-fit.md").read_text()
GPU = Namespace(vocabulary=32_000, per_node=8, attention="gpu")


def test_the_page_has_what_the_tool_says():
    """One row of its table; the batch that fits, and the next one, which does not; and the line of its command."""
    [row] = will_it_fit.table(GPU, ["150m"], [8])
    assert f"| {' | '.join(map(str, row.values()))} |\n" in PAGE
    script, *flags = will_it_fit.MODELS["150m"]
    with will_it_fit.traced(script, [*flags, "--num-processes", 8], GPU) as traced:
        assert traced.largest_batch(24) == int(row["24 GB"].split(" / ")[0])
    [command] = re.findall(r"^python tests/benchmarks/will_it_fit.py (lm_multinode.py --model 150m.+)$", PAGE, re.M)
    printed = run("tests/benchmarks/will_it_fit.py", *command.split(), fork=True, timeout=200).stdout
    peak = printed.splitlines()[-1]
    assert re.fullmatch(r"peak \d+\.\d\d GB a process", peak) and f"\n{peak}\n" in PAGE


def test_sweeps_offload_pictures_and_what_it_does_not_know(tmp_path):
    tool, tiny = "tests/benchmarks/will_it_fit.py", ("lm_multinode.py", "--model", "tiny", "--num-processes", 4)
    swept = run(tool, *tiny, "--sweep", "micro-batch-size=1,4", fork=True).stdout
    rows = [line.split("|") for line in swept.splitlines() if re.match(r"\| [14] ", line)]
    assert [row[1] for row in rows] == [" 1 ", " 4 "]
    # 16 sequences on 4 processes, as in the run: the first accumulates four micro-batches, and has whole gradients.
    assert float(rows[0][5]) > 3 * float(rows[1][5]) and float(rows[0][6]) < float(rows[1][6])
    offloaded = run(tool, *tiny, "--cpu-offload", fork=True).stdout
    assert re.search(r"^\| 0 \| 0 \| ", offloaded, re.M)  # parameters and optimizer are in the CPU's memory
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
