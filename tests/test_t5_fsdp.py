"""Each FSDP flag does what it says, seen from inside one training step."""

import json

import pytest
from conftest import make_model, reports, run_many, succeed

SETTINGS = {
    (version, *arguments): ["--fsdp-version", str(version), *arguments]
    for version in (1, 2)
    for arguments in (
        (),
        ("--sharding-strategy", "SHARD_GRAD_OP"),
        ("--backward-prefetch", "none"),
        ("--backward-prefetch", "post"),
        ("--activation-checkpointing",),
    )
    if (version, arguments[-1:]) != (2, ("post",))
}


@pytest.fixture(scope="module")
def observed():
    finished = succeed("tests/observe_fsdp.py", json.dumps(list(SETTINGS.values())), processes=2, fork=True)
    output = json.loads(finished.stdout.splitlines()[-1])
    return dict(zip(SETTINGS, output["results"], strict=True)), output["on_meta"]


@pytest.mark.parametrize("version", [1, 2])
def test_the_four_blocks_and_the_root_are_units(observed, version):
    assert observed[0][(version,)]["forward_gathers"] == 5


@pytest.mark.parametrize("version", [1, 2])
def test_full_shard_gathers_blocks_again_in_backward_and_shard_grad_op_keeps_them(observed, version):
    assert len(observed[0][(version,)]["backward_gathers"]) == 4
    assert observed[0][(version, "--sharding-strategy", "SHARD_GRAD_OP")]["backward_gathers"] == []


@pytest.mark.parametrize("version", [1, 2])
def test_prefetch_decides_when_the_next_block_is_gathered(observed, version):
    results = observed[0]
    # The root is still gathered when backward begins, and prefetches the last block.
    assert results[(version,)]["backward_gathers"] == ["pre"] * 4
    assert results[(version, "--backward-prefetch", "none")]["backward_gathers"] == ["need"] * 4
    if version == 1:
        assert results[(1, "--backward-prefetch", "post")]["backward_gathers"] == ["need", "post", "post", "post"]


@pytest.mark.parametrize("version", [1, 2])
def test_activation_checkpointing_saves_less_for_backward(observed, version):
    results = observed[0]
    assert results[(version, "--activation-checkpointing")]["saved_bytes"] < 0.4 * results[(version,)]["saved_bytes"]


def test_only_rank_0_holds_weights_before_sharding_and_all_end_with_the_same_model(observed):
    results, on_meta = observed
    assert on_meta == [[False] * len(SETTINGS), [True] * len(SETTINGS)]
    assert len({round(result["checksum"], 6) for result in results.values()}) == 1
    assert all(result["tied"] for result in results.values())


def test_print_model_shows_the_units(tmp_path, tiny_model, articles_csv):
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 8, "--epochs", 1]
    arguments += ["--no-run-validation", "--no-save-model", "--print-model", "--max-target-length", 8]
    settings = [[*arguments, "--output-dir", tmp_path / str(v), "--fsdp-version", v] for v in (1, 2)]
    printed = run_many("t5_fsdp", settings, processes=2).stdout
    assert printed.count("): FullyShardedDataParallel(") == 4
    assert printed.count("FullyShardedDataParallel(\n  (_fsdp_wrapped_module): T5ForConditionalGeneration") == 1
    assert printed.count(": FSDPT5Block(") == 4 and printed.count("FSDPT5ForConditionalGeneration(") == 1


def test_compile_keeps_the_losses(tmp_path, articles_csv):
    """The graphs are captured and run, but not made into machine code, which takes a minute (lm_multinode.py's are)."""
    model = make_model(tmp_path / "model", num_layers=1)
    arguments = ["--model", model, "--dataset", articles_csv, "--num-train-samples", 8, "--max-steps", 1]
    arguments += ["--no-run-validation", "--no-save-model", "--precision", "fp32", "--max-target-length", 8]
    switches = ("--no-compile", "--compile")
    settings = [[*arguments, switch, "--output-dir", tmp_path / switch] for switch in switches]
    printed = run_many("t5_fsdp", settings, 1, "graphs-only").stderr
    assert printed.count("graph captured") >= 2  # an encoder's block and a decoder's
    [plain], [compiled] = (reports(tmp_path / switch, "step") for switch in switches)
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-5)
    assert compiled["grad_norm"] == pytest.approx(plain["grad_norm"], abs=1e-4)
