"""FSDP does what its flags say, seen from inside a step: its units, bytes and order. No step reads the device.

test_will_it_fit.py traces the LM's steps, and checks their bytes under each strategy.
"""

import json
import re

import pytest
from conftest import SMALL, VERSIONS, check_curves, curve, make_llama, make_model, run_many
from shared import patched
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

pytestmark = pytest.mark.long

T5 = (
    *("--num-train-samples", 16, "--global-batch-size", 8, "--epochs", 1, "--no-save-model", "--precision", "fp32"),
    *("--num-validation-samples", 2, "--max-target-length", 2),
)
LM = (*SMALL, "--micro-batch-size", 2, "--no-save-model")
RECOMPUTING = ("--activation-checkpointing",)
FSDP1 = ("--fsdp-version", 1)


def second_step(folder):
    """The first step is different: some units are still gathered from the validation before it."""
    return [(name, size) for name, size, _ in json.loads((folder / "collectives-0.json").read_text())["step 2"]]


# ---- T5 on two processes ---------------------------------------------------------------------------------------------
LETTERS = {"compute": "C", "allgather": "G", "allgather_base": "G", "reduce_scatter_base": "R"}


def order_of(folder):
    return re.sub("C+", "C", "".join(LETTERS.get(name, "") for name, _ in second_step(folder)))


@pytest.mark.parametrize("version", VERSIONS)
def test_units_bytes_and_order_of_a_step_of_t5(version, tiny_model, articles_csv, tmp_path):
    """Each block is a unit, and so is the root. Flags decide when, how many and in which precision units are sent."""
    variants = {
        "fp32": ("--print-model",),
        "bf16": ("--precision", "bf16"),
        "bf16-reduce": ("--precision", "bf16-reduce"),
        "grad-bf16": ("--precision", "grad-bf16"),
        "zero2": ("--sharding-strategy", "SHARD_GRAD_OP"),
        "recomputing": RECOMPUTING,
        "none": ("--backward-prefetch", "none"),
    }
    variants |= {1: {"post": ("--backward-prefetch", "post")}, 2: {"of two": ("--layers-per-unit", 2)}}[version]
    flags = (*T5, "--model", tiny_model, "--dataset", articles_csv, "--fsdp-version", version)
    settings = {tmp_path / name: (*flags, *variants[name]) for name in variants}
    printed = run_many("t5_fsdp.py", settings, 2, change=("record_collectives",)).stdout
    assert printed.count("): FullyShardedDataParallel(" if version == 1 else ": FSDPT5Block(") == 4
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_model)
    whole = model.num_parameters()
    blocks = sum(p.numel() for part in (model.encoder, model.decoder) for p in part.block.parameters())
    # Forward gathers all parameters, backward gathers those of the blocks again, and all gradients are reduced.
    bytes_sent = {"fp32": (4, 4), "bf16": (2, 4), "bf16-reduce": (2, 2), "grad-bf16": (4, 2)}
    for name, (parameter_bytes, gradient_bytes) in bytes_sent.items():
        sent = second_step(tmp_path / name)
        tensors = {"allgather": 2, "allgather_base": 1}  # FSDP1 gathers two tensors, FSDP2 one
        gathered = sum(tensors[kind] * size for kind, size in sent if kind in tensors)
        reduced = sum(size for kind, size in sent if kind == "reduce_scatter_base")
        assert gathered == pytest.approx(parameter_bytes * (whole + blocks), rel=0.02), name
        assert reduced == pytest.approx(gradient_bytes * whole, rel=0.02), name
    assert order_of(tmp_path / "zero2").count("G") == 5  # units stay gathered until backward
    plain, recomputing = (second_step(tmp_path / name).count(("compute", 0)) for name in ("fp32", "recomputing"))
    assert recomputing > 1.2 * plain
    # Backward gathers the next block before this one computes, or only when needed, or after this one has computed.
    assert order_of(tmp_path / "fp32").endswith("GC GCR GCR GCR CR R".replace(" ", ""))
    assert order_of(tmp_path / "none").endswith("GCR GCR GCR GCR R".replace(" ", ""))
    if version == 1:
        assert order_of(tmp_path / "post").endswith("GC GRC GRC GRC R R".replace(" ", ""))
    else:
        assert order_of(tmp_path / "of two").endswith("GC GCR CR R".replace(" ", ""))


# ---- The LM ----------------------------------------------------------------------------------------------------------
def test_units_and_products_of_a_step_of_the_lm(tiny_llama, tmp_path):
    """Only the embedding is gathered before, and reduced after, all computation. The output layer is equally large, but
    it is another unit, so the layers can compute while it is sent."""
    flags = (*LM, "--model", tiny_llama, "--global-batch-size", 4, "--micro-batch-size", 1, "--max-steps", 2)
    variants = {"plain": (), "recomputing": RECOMPUTING, "of two": ("--layers-per-unit", 2)}
    settings = {tmp_path / name: (*flags, *extra) for name, extra in variants.items()}
    run_many("lm_multinode.py", settings, 2, change=("record_collectives",))
    plain, recomputing, of_two = map(second_step, settings)
    embedding = AutoModelForCausalLM.from_pretrained(tiny_llama).model.embed_tokens.weight.nbytes
    gathered = [size for name, size in plain if name == "allgather_base"]
    reduced = [size for name, size in plain if name == "reduce_scatter_base"]
    assert len(reduced) == 2 * 5  # in each micro-batch: output layer, root with the last norm, two layers, embedding
    assert sum(name == "reduce_scatter_base" for name, _ in of_two) == 2 * 4
    # The other unit here is the root, which is only one norm.
    assert max(gathered[:2]) == pytest.approx(embedding, rel=0.01)
    assert max(reduced[-2:]) == pytest.approx(embedding, rel=0.01)
    # Two layers in two micro-batches. Each layer has seven products; the last is not needed again.
    assert recomputing.count(("compute", 0)) - plain.count(("compute", 0)) == 2 * 2 * 6


def test_diloco_replicas_wait_for_each_other_only_at_synchronizations(tiny_llama, tmp_path):
    """In between, no collective spans all processes: in each step it would cost a round trip on a slow network."""
    script = patched(tmp_path / "copy", "lm-diloco") / "lm_multinode.py"
    flags = (*LM, "--model", tiny_llama, "--max-steps", 3, "--validate-every", 3, "--log-every", 3)
    flags = (*flags, "--sharding-strategy", "DILOCO", "--shards-per-replica", 2, "--local-steps", 3)
    run_many(script, {tmp_path: flags}, 4, change=("record_collectives",))
    for rank in range(4):
        phases = json.loads((tmp_path / f"collectives-{rank}.json").read_text())
        over_all = {phase for phase, calls in phases.items() if any(size == 4 for *_, size in calls)}
        # "after 0" sends and validates the initial weights; "after 2" begins to ask whether to stop at step 3.
        assert over_all == {"after 0", "after 2", "after 3"}


# ---- Nothing waits for the device ------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", ["lm_multinode.py", "t5_fsdp.py"])
def test_no_training_step_reads_the_device(script, tiny_model, articles_csv, tmp_path):
    """On a GPU each read waits. The first step may read: the LM's loader draws a seed, and FSDP1 waits."""
    flags = (*LM, "--global-batch-size", 8, "--max-steps", 3)
    variants = {"plain": (), "recomputing": RECOMPUTING, "offloading": ("--cpu-offload",)}
    if script == "t5_fsdp.py":
        flags = (*T5, "--micro-batch-size", 2, "--num-train-samples", 64, "--max-steps", 3, "--no-run-validation")
        flags = (*flags, "--log-every", 1, "--model", tiny_model, "--dataset", articles_csv)
        variants |= {"fsdp1": FSDP1, "fsdp1 recomputing": (*FSDP1, *RECOMPUTING)}
    settings = {tmp_path / name: (*flags, *extra) for name, extra in variants.items()}
    run_many(script, settings, 2, change=("record_host_reads",))
    for folder in settings:
        for rank in (0, 1):
            steps = json.loads((folder / f"reads-{rank}.json").read_text())
            assert len(steps) == 3
            assert steps[1] + steps[2] == [], folder


# ---- --compile -------------------------------------------------------------------------------------------------------
def test_t5_compiles_into_few_graphs_and_keeps_its_losses(articles_csv, tmp_path):
    """The graphs run, but only the next test makes machine code. New lengths need no new graphs."""
    model = make_model(tmp_path / "model", num_layers=1)
    flags = (*T5, "--model", model, "--dataset", articles_csv, "--no-run-validation", "--log-every", 1)
    settings = {tmp_path / "plain": flags, tmp_path / "graphs": (*flags, "--compile")}
    finished = run_many("t5_fsdp.py", settings, 1, change=("capture_graphs",))
    assert 2 <= finished.stderr.count("graph captured") <= 12
    check_curves(tmp_path / "graphs", [curve(tmp_path / "plain", name) for name in ("loss", "grad_norm")])


def test_compile_makes_kernels_and_keeps_the_losses(tmp_path):
    model = make_llama(tmp_path / "model", num_hidden_layers=1)
    flags = (*LM, "--model", model, "--global-batch-size", 2, "--max-steps", 1)
    settings = {tmp_path / "plain": flags, tmp_path / "compiled": (*flags, "--compile")}
    run_many("lm_multinode.py", settings, 1, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kernels"))
    assert list((tmp_path / "kernels").rglob("*.so"))
    for name in ("loss", "grad_norm"):
        assert curve(tmp_path / "compiled", name) == pytest.approx(curve(tmp_path / "plain", name), abs=1e-4)


# ---- MNIST -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", VERSIONS)
def test_a_module_of_many_parameters_becomes_a_unit(version, small_mnist, tmp_path):
    """Parameters of smaller units inside it do not count. The root gets the others. Both versions divide alike."""
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--epochs", 1, "--global-batch-size", 16)
    flags += ("--fsdp-version", version, "--output-dir", tmp_path)

    def units_of(script, *more_flags):
        printed = run_many(script, [(*flags, *more_flags)], 2).stdout
        return re.findall(r"\((\w+)\): (?:FSDP|FullyShardedDataParallel)", printed)

    units = {20_000: ["fc1"], 1000: ["conv2", "fc1", "0"], 100: ["conv1", "conv2", "fc1", "0"]}
    for bound, expected in units.items():
        mnist = ("--model", "shallow", "--print-model", "--min-num-params", bound)
        assert units_of("mnist_fsdp.py", *mnist) == expected
    assert units_of("mnist_fsdp_xpu.py") == ["conv1", "conv2", "fc1", "fc2"]
