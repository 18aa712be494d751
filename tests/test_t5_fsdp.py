"""Each FSDP flag does what it says, seen from inside one training step."""

import json
import re

import pytest
from conftest import SAVE_ON_CPU, VERSIONS, curve, make_model, run_many, succeed
from test_lm_runs import capture_graphs_only
from transformers import GenerationConfig
from will_it_fit import state_bytes

SETTINGS = {
    (version, *arguments): ["--fsdp-version", str(version), *arguments]
    for version in VERSIONS
    for arguments in (
        (),
        ("--sharding-strategy", "SHARD_GRAD_OP"),
        ("--backward-prefetch", "none"),
        ("--backward-prefetch", "post"),
        ("--activation-checkpointing",),
        ("--cpu-offload",),
    )
    if (version, arguments[-1:]) not in ((2, ("post",)), (1, ("--cpu-offload",)))  # FSDP1 pins, which needs a GPU
}


@pytest.fixture(scope="module")
def observed():
    finished = succeed("tests/observe_fsdp.py", json.dumps(list(SETTINGS.values())), processes=2, fork=True)
    return dict(zip(SETTINGS, json.loads(finished.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_four_blocks_and_the_root_are_units(observed, version):
    assert observed[version,]["forward_gathers"] == 5


@pytest.mark.parametrize("version", VERSIONS)
def test_full_shard_gathers_blocks_again_in_backward_and_shard_grad_op_keeps_them(observed, version):
    assert len(observed[version,]["backward_gathers"]) == 4
    assert observed[version, "--sharding-strategy", "SHARD_GRAD_OP"]["backward_gathers"] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_prefetch_decides_when_the_next_block_is_gathered(observed, version):
    # The root is still gathered when backward begins, and prefetches the last block.
    assert observed[version,]["backward_gathers"] == ["pre"] * 4
    assert observed[version, "--backward-prefetch", "none"]["backward_gathers"] == ["need"] * 4
    if version == 1:
        assert observed[1, "--backward-prefetch", "post"]["backward_gathers"] == ["need", "post", "post", "post"]


@pytest.mark.parametrize("version", VERSIONS)
def test_activation_checkpointing_saves_less_for_backward(observed, version):
    assert observed[version, "--activation-checkpointing"]["saved_bytes"] < 0.4 * observed[version,]["saved_bytes"]


def test_cpu_offload_reaches_every_unit(observed):
    assert observed[2, "--cpu-offload"]["offloads"] == ["CPUOffloadPolicy"] * 5
    assert observed[2,]["offloads"] == ["OffloadPolicy"] * 5


def test_all_settings_start_from_the_same_tied_weights(observed):
    assert len({round(result["checksum"], 6) for result in observed.values()}) == 1
    assert all(result["tied"] for result in observed.values())


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_process_holds_its_share_and_the_real_buffers(observed, setting):
    result = observed[setting]
    # FSDP2 loads the model on rank 0 alone; the other has shapes, then its shards.
    assert result["loads"] == ([1, 1] if setting[0] == 1 else [1, 0])
    assert result["buffers"] == [[True, True]] * 2
    share = state_bytes(result["parameters"], "FULL_SHARD", 2)  # as under SHARD_GRAD_OP
    assert result["state_gb"] == pytest.approx([share / 2**30] * 2, rel=0.02)


def test_print_model_shows_the_units(tmp_path, tiny_model, articles_csv):
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 8, "--epochs", 1]
    arguments += ["--no-run-validation", "--no-save-model", "--print-model", "--batch-size", 4]
    settings = [[*arguments, "--output-dir", tmp_path / str(v), "--fsdp-version", v] for v in VERSIONS]
    printed = run_many("t5_fsdp.py", settings, processes=2).stdout
    assert printed.count("): FullyShardedDataParallel(") == 4
    assert printed.count("FullyShardedDataParallel(\n  (_fsdp_wrapped_module): T5ForConditionalGeneration") == 1
    assert printed.count(": FSDPT5Block(") == 4 and printed.count("FSDPT5ForConditionalGeneration(") == 1


def test_compile_keeps_the_losses(tmp_path, articles_csv):
    """The graphs are captured and run, but not made into machine code, which takes a minute (lm_multinode.py's are)."""
    model = make_model(tmp_path / "model", num_layers=1)
    arguments = ["--model", model, "--dataset", articles_csv, "--num-train-samples", 8, "--max-steps", 1]
    arguments += ["--batch-size", 8, "--no-run-validation", "--no-save-model", "--precision", "fp32"]
    switches = {"plain": (), "compiled": ("--compile",)}
    settings = [[*arguments, *switch, "--output-dir", tmp_path / name] for name, switch in switches.items()]
    printed = run_many("t5_fsdp.py", settings, 1, change=capture_graphs_only).stderr
    assert printed.count("graph captured") >= 2  # an encoder's block and a decoder's
    for name in ("loss", "grad_norm"):
        assert curve(tmp_path / "compiled", name) == pytest.approx(curve(tmp_path / "plain", name), abs=1e-4)


def test_a_models_own_settings_of_generation_are_kept_but_summaries_are_greedy(tmp_path, articles_csv):
    plain, beams = (make_model(tmp_path / name, initializer_factor=5.0) for name in ("plain", "beams"))
    GenerationConfig.from_pretrained(plain, num_beams=4).save_pretrained(beams)
    options = ("--dataset", articles_csv, "--num-train-samples", 8, "--batch-size", 8, "--epochs", 1, "--precision")
    options += ("fp32", "--max-target-length", 12, "--num-validation-samples", 3)
    cases = {"plain": (plain, 2)} | {f"beams-{version}": (beams, version) for version in SAVE_ON_CPU}
    settings = [
        [*options, "--model", model, "--fsdp-version", version, "--output-dir", tmp_path / name / "output"]
        for name, (model, version) in cases.items()
    ]
    printed = run_many("t5_fsdp.py", settings, 1).stdout
    summaries = re.findall(r"^summary    (.+(?:\n {11}.+)*)$", printed, re.MULTILINE)
    assert summaries == summaries[:2] * len(cases)  # of the first article, before and after training
    for version in SAVE_ON_CPU:
        best = tmp_path / f"beams-{version}" / "output" / "best"
        assert GenerationConfig.from_pretrained(best).num_beams == 4
