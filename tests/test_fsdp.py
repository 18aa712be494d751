"""FSDP does what its flags say, seen from inside a step: its units, bytes and order. No step reads the device.

test_will_it_fit.py traces the LM's steps, and checks their bytes under each strategy.
"""

import json
import re

import pytest
from conftest import SAVE_ON_CPU, SMALL, VERSIONS, check_curves, curve, make_llama, make_model, run_many
from shared import patched
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

pytestmark = pytest.mark.long

T5 = (
    *("--num-train-samples", 16, "--global-batch-size", 8, "--epochs", 1, "--no-save-model", "--precision", "fp32"),
    *("--num-validation-samples", 2, "--max-target-length", 2),
)
LM = (*SMALL, "--micro-batch-size", 2, "--no-save-model")
RECOMPUTING = ("--activation-checkpointing",)
FSDP1 = ("--fsdp-version", 1)


def read_collectives(folder, rank=0):
    return json.loads((folder / f"collectives-{rank}.json").read_text())


def second_step(folder):
    """The first step is different: some units are still gathered from the validation before it."""
    return [(name, size) for name, size, _ in read_collectives(folder)["step 2"]]


# ---- T5 on two processes ---------------------------------------------------------------------------------------------
LETTERS = {"compute": "C", "allgather": "G", "allgather_base": "G", "reduce_scatter_base": "R"}


def order_of(folder):
    return re.sub("C+", "C", "".join(LETTERS.get(name, "") for name, _ in second_step(folder)))


@pytest.mark.parametrize("version", VERSIONS)
def test_units_bytes_and_order_of_a_step_of_t5(version, tiny_model, articles_csv, tmp_path):
    """Each block is a unit, and so is the root. Flags decide when and in which precision units are sent."""
    variants = {
        "fp32": ("--print-model",),
        "bf16": ("--precision", "bf16"),
        "bf16-reduce": ("--precision", "bf16-reduce"),
        "grad-bf16": ("--precision", "grad-bf16"),
        "zero2": ("--sharding-strategy", "SHARD_GRAD_OP"),
        "recomputing": RECOMPUTING,
        "none": ("--backward-prefetch", "none"),
    }
    if version == 1:
        variants["post"] = ("--backward-prefetch", "post")
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
    assert version == 2 or order_of(tmp_path / "post").endswith("GC GRC GRC GRC R R".replace(" ", ""))


def test_an_export_keeps_the_models_generation_settings_but_summaries_are_greedy(tmp_path, articles_csv):
    plain = make_model(tmp_path / "plain", initializer_factor=5.0)
    beams = make_model(tmp_path / "beams", initializer_factor=5.0)
    GenerationConfig.from_pretrained(plain, num_beams=4).save_pretrained(beams)

    flags = (*T5, "--dataset", articles_csv, "--max-target-length", 12)
    settings = {tmp_path / "output": (*flags, "--model", plain)}
    for version in SAVE_ON_CPU:
        settings[tmp_path / str(version)] = (*flags, "--model", beams, "--fsdp-version", version, "--save-model")
    printed = run_many("t5_fsdp.py", settings, 1).stdout

    summaries = re.findall(r"^summary    (.+(?:\n {11}.+)*)$", printed, re.MULTILINE)
    assert len(summaries) == 2 * len(settings)  # each run prints the first article's, before and after training
    assert summaries == summaries[:2] * len(settings)
    for version in SAVE_ON_CPU:
        assert GenerationConfig.from_pretrained(tmp_path / str(version) / "best").num_beams == 4


# ---- The LM ----------------------------------------------------------------------------------------------------------
def test_the_lm_recomputes_its_layers_when_told_to(tiny_llama, tmp_path):
    flags = (*LM, "--model", tiny_llama, "--global-batch-size", 4, "--max-steps", 2)
    settings = {tmp_path / "plain": flags, tmp_path / "recomputing": (*flags, *RECOMPUTING)}
    run_many("lm_multinode.py", settings, 1, change=("record_collectives",))
    plain, recomputing = (second_step(folder).count(("compute", 0)) for folder in settings)
    # Two layers in two micro-batches. Each layer has seven products; the last is not needed again.
    assert recomputing - plain == 2 * 2 * 6


def test_only_the_embedding_is_gathered_before_and_reduced_after_all_computation(tiny_llama, tmp_path):
    """The output layer is equally large, but it is another unit, so the layers can compute while it is sent."""
    flags = (*LM, "--model", tiny_llama, "--global-batch-size", 4, "--max-steps", 2)
    run_many("lm_multinode.py", {tmp_path: flags}, 2, change=("record_collectives",))
    embedding = AutoModelForCausalLM.from_pretrained(tiny_llama).model.embed_tokens.weight.nbytes
    gathered = [size for name, size in second_step(tmp_path) if name == "allgather_base"]
    reduced = [size for name, size in second_step(tmp_path) if name == "reduce_scatter_base"]
    assert len(reduced) == 5  # output layer, root with the last norm, two layers, embedding
    # The other unit here is the root, which is only one norm.
    assert max(gathered[:2]) == pytest.approx(embedding, rel=0.01)
    assert max(reduced[-2:]) == pytest.approx(embedding, rel=0.01)


def test_diloco_replicas_wait_for_each_other_only_at_synchronizations(tiny_llama, tmp_path):
    """In between, no collective spans all processes: in each step it would cost a round trip on a slow network."""
    script = patched(tmp_path / "copy", "lm-diloco") / "lm_multinode.py"
    flags = (*LM, "--model", tiny_llama, "--global-batch-size", 16, "--max-steps", 3, "--validate-every", 3)
    flags += ("--shards-per-replica", 2, "--local-steps", 3, "--sharding-strategy", "DILOCO", "--output-dir", tmp_path)
    run_many(script, [flags], 4, change=("record_collectives",))
    for rank in range(4):
        calls_by_phase = read_collectives(tmp_path, rank)
        over_all = {phase for phase, calls in calls_by_phase.items() if any(size == 4 for *_, size in calls)}
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
    expected = {20_000: ["fc1"], 1000: ["conv2", "fc1", "0"], 100: ["conv1", "conv2", "fc1", "0"]}
    flags = ("--mode", "fsdp", "--model", "shallow", "--dataset", "mnist", "--data-dir", small_mnist, "--epochs", 1)
    flags += ("--global-batch-size", 16, "--fsdp-version", version, "--print-model", "--output-dir", tmp_path)
    flags += ("--min-num-params",)
    printed = run_many("mnist_fsdp.py", [(*flags, bound) for bound in expected], 2).stdout
    runs = re.split("^run  ", printed, flags=re.M)[1:]
    units = [re.findall(r"\((\w+)\): (?:FSDP|FullyShardedDataParallel)", run) for run in runs]
    assert units == [*expected.values()]
