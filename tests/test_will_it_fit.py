"""The predicted peak of a training step is what a real one holds: every tensor that is alive, to 1%."""

import json
from argparse import Namespace

import pytest
import will_it_fit
from conftest import run_many
from memory_tracker import Tracker
from transformers import AutoTokenizer


def record_peak(script):
    """Write the most bytes that the tensors of this rank take in the second step."""
    train_step, calls, outers = script.train_step, [], []
    if hasattr(script, "OuterOptimizer"):
        outer_optimizer = script.OuterOptimizer
        script.OuterOptimizer = lambda *arguments: outers.append(outer_optimizer(*arguments)) or outers[-1]

    def recorded_step(args, world, model, optimizer, *rest):
        calls.append(None)
        if len(calls) != 2:
            return train_step(args, world, model, optimizer, *rest)
        state = [tensor for outer in outers for tensor in (*outer.shared, *outer.momentum)]
        with Tracker(model, optimizer, optimizer_state=state) as tracker:
            result = train_step(args, world, model, optimizer, *rest)
        (args.output_dir / f"peak-{world.rank}.json").write_text(json.dumps(max(tracker.totals)))
        return result

    script.train_step = recorded_step


SHARED = ("--max-steps", 2, "--no-save-model")
LM = (*SHARED, "--seq-length", 64, "--micro-batch-size", 2, "--num-validation-texts", 20, "--model", "tiny")
T5 = (*SHARED, "--no-run-validation", "--num-train-samples", 64, "--batch-size", 2)
T5 = (*T5, "--max-source-length", 16, "--max-target-length", 8)  # every article and summary is longer
CASES = {
    "FULL_SHARD": (*LM, "--precision", "fp32"),
    "bf16": (*LM, "--precision", "bf16"),
    "SHARD_GRAD_OP, accumulating": (*LM, "--sharding-strategy", "SHARD_GRAD_OP", "--precision", "fp32"),
    "NO_SHARD": (*LM, "--sharding-strategy", "NO_SHARD", "--precision", "fp32"),
    "HYBRID_SHARD": (*LM, "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2, "--precision", "fp32"),
    "DILOCO": (*LM, "--sharding-strategy", "DILOCO", "--shards-per-replica", 2, "--precision", "fp32"),
    "recomputing": (*LM, "--activation-checkpointing", "--precision", "bf16"),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """How many tokens the built-in texts give the tiny Llama."""
    folder = tmp_path_factory.mktemp("tokens")
    run_many("lm_multinode.py", [[*LM, "--max-steps", 1, "--save-model", "--output-dir", folder]], 1)
    return len(AutoTokenizer.from_pretrained(folder / "model"))


@pytest.mark.parametrize("processes", [2, 4])
def test_the_prediction_is_what_a_real_step_of_the_llama_holds(processes, tokens, tmp_path):
    cases = {}
    for name, flags in CASES.items():
        if processes == 4 or name not in ("HYBRID_SHARD", "DILOCO"):
            micro_batches = 2 if "accumulating" in name else 1
            diloco = ("--local-steps", 2, "--validate-every", 2) if name == "DILOCO" else ()
            cases[name] = (*flags, "--global-batch-size", 2 * processes * micro_batches, *diloco)
    settings = [[*flags, "--output-dir", tmp_path / name] for name, flags in cases.items()]
    run_many("lm_multinode.py", settings, processes, change=record_peak)
    for name, flags in cases.items():
        found = predict("lm_multinode.py", flags, processes, tokens)
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
