"""The four scripts on the accelerator that PyTorch finds (CUDA, XPU, a simulated one), beside the same runs on a CPU.

Skipped where there is none; all other tests name the CPU.
"""

import re
import shutil

import torch

import pytest
from conftest import AFTER_ADAM, VERSIONS, curve, records, run, run_many, succeed
from shared import patched

from inside import lm_num_parameters

FOUND = torch.accelerator.current_accelerator(check_available=True)
USABLE = FOUND is not None and FOUND.type != "mps"
DEVICES = torch.accelerator.device_count() if USABLE else 0
# Processes can share a device: NVIDIA's from NCCL 2.30 on, and the simulated one.
SHARES = USABLE and FOUND.type != "xpu"
if SHARES and FOUND.type == "cuda":
    SHARES = torch.cuda.nccl.version() >= (2, 30)
PROCESSES = [1, 2] if DEVICES >= 2 or SHARES else [1]
pytestmark = pytest.mark.skipif(not USABLE, reason="PyTorch finds no accelerator that FSDP runs on")
STEPS = 4
SAVING = ("--checkpoint-every", 2)


def run_on(device, script, settings, processes):
    """Run a script for {output folder: flags}, on the CPU or on the accelerator. Returns the output."""
    options = {"device": device, "change": ("compute_in_fp32",), "fork": device == "cpu"}
    if device != "cpu" and processes > DEVICES:
        options["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    finished = run_many(script, settings, processes, **options)
    if device != "cpu":
        assert len(re.findall(rf" {processes} x {FOUND.type},", finished.stdout)) == len(settings)
    return finished.stdout


def with_versions(ways):
    return {f"FSDP{version} {name}": (*ways[name], "--fsdp-version", version) for version in VERSIONS for name in ways}


def check_like_the_cpu(root, names, *fields, **tolerance):
    """In fp32; lower precisions are near it, and something else."""
    for name in names:
        if "16" in name:
            assert curve(root / name) == pytest.approx(curve(root / "cpu"), rel=0.02), name
            assert curve(root / name) != curve(root / "cpu"), name
            continue
        for field in fields:
            assert curve(root / name, field), (name, field)
            on_cpu = pytest.approx(curve(root / "cpu", field), **tolerance or AFTER_ADAM)
            assert curve(root / name, field) == on_cpu, (name, field)


def check_resume(device, script, settings, processes, tmp_path):
    """Go on from step 2 of each {folder of a run: flags}: to the bit, or from the other device with its losses. Returns
    the output."""
    resumed = {}
    for folder, flags in settings.items():
        checkpoint = "checkpoints/step-0000002"
        shutil.copytree(folder / checkpoint, tmp_path / folder.name / checkpoint)
        resumed[tmp_path / folder.name] = (*flags, "--resume")
    printed = run_on(device, script, resumed, processes)
    assert len(re.findall("^resumed  from step 2", printed, re.M)) == len(settings)
    for before, after in zip(settings, resumed, strict=True):
        expected = curve(before)[2:]
        is_same_device = (before.name == "cpu") == (device == "cpu")
        assert curve(after) == (expected if is_same_device else pytest.approx(expected, **AFTER_ADAM)), after
    return printed


# ---- LM --------------------------------------------------------------------------------------------------------------
LM = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 2, "--num-validation-texts", 3),
    *("--max-steps", STEPS, "--warmup-steps", 2, "--lr", 1e-3, "--log-every", 1, "--precision", "fp32"),
)


def lm_settings(processes):
    """Flags by name; every one of them computes the same losses, in bf16 nearly so."""
    ways = {
        "bf16": ("--precision", "bf16", "--no-save-model"),
        "recomputing": ("--activation-checkpointing", "--no-save-model"),
        "offload": ("--cpu-offload", *SAVING, "--no-save-model"),
        "saving": (*SAVING, "--no-save-model"),
    }
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        ways[strategy] = ("--sharding-strategy", strategy)
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        if processes > 1:
            ways[strategy] = ("--sharding-strategy", strategy, "--shards-per-replica", 2, "--no-save-model")

    replicas = ("--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 1, "--no-save-model")
    return ways | {"replicas": replicas, "replicas, offload": (*replicas, "--cpu-offload")}


@pytest.fixture(scope="module", params=PROCESSES)
def lm_runs(request, tmp_path_factory):
    """The folder of each setting's run, the run on the CPU ("cpu") and the number of processes."""
    processes = request.param
    root = tmp_path_factory.mktemp(f"lm{processes}")
    run_on("cpu", "lm_multinode.py", {root / "cpu": (*LM, *SAVING, "--no-save-model")}, processes)
    settings = {root / name: (*LM, *flags) for name, flags in lm_settings(processes).items()}
    run_on(FOUND.type, "lm_multinode.py", settings, processes)
    return root, processes


@pytest.mark.long
def test_every_strategy_of_the_lm_has_the_losses_of_the_cpu(lm_runs):
    root, processes = lm_runs
    check_like_the_cpu(root, lm_settings(processes), "loss", "grad_norm", "val_loss")
    # Offloaded shards, and the optimizer's two numbers for each, are in the CPU's memory, not in the device's.
    saved = curve(root / "saving", "peak_gib")[-1] - curve(root / "offload", "peak_gib")[-1]
    assert saved > 0.7 * 12 * lm_num_parameters("tiny", 2048) / processes / 2**30


@pytest.mark.long
def test_the_lm_resumes_to_the_bit_and_across_devices(lm_runs, tmp_path):
    root, processes = lm_runs
    plain = (*LM, "--no-save-model")
    settings = {root / "cpu": plain}
    for name, flags in lm_settings(processes).items():
        if "--checkpoint-every" in flags:
            settings[root / name] = (*LM, *flags)
    check_resume(FOUND.type, "lm_multinode.py", settings, processes, tmp_path)
    check_resume("cpu", "lm_multinode.py", {root / "saving": plain}, processes, tmp_path / "back")


@pytest.mark.long
@pytest.mark.skipif(max(PROCESSES) < 2, reason="fewer than two devices, which processes cannot share")
def test_diloco_has_the_losses_of_the_cpu(tmp_path):
    script = patched(tmp_path / "copy", "lm-diloco") / "lm_multinode.py"
    flags = (*LM, "--sharding-strategy", "DILOCO", "--shards-per-replica", 1, "--local-steps", 2)
    flags = (*flags, "--validate-every", 2, "--no-save-model", "--device")
    run_on("cpu", script, {tmp_path / "cpu": (*flags, "cpu")}, 2)
    flags = (*flags, FOUND.type)
    on_device = {tmp_path / "saving": (*flags, *SAVING), tmp_path / "offload": (*flags, "--cpu-offload")}
    run_on(FOUND.type, script, on_device, 2)
    check_like_the_cpu(tmp_path, ("saving", "offload"), "loss", "val_loss")


@pytest.mark.long
@pytest.mark.skipif(max(PROCESSES) < 2, reason="fewer than two devices, which processes cannot share")
def test_another_number_of_processes_goes_on_with_the_same_losses(tmp_path):
    """On the device, too: saved by two, resumed by one."""
    flags = (*LM, "--no-save-model")
    whole = tmp_path / "whole"
    run_on(FOUND.type, "lm_multinode.py", {whole: (*flags, *SAVING)}, 2)
    shutil.copytree(whole / "checkpoints/step-0000002", tmp_path / "one/checkpoints/step-0000002")
    run_on(FOUND.type, "lm_multinode.py", {tmp_path / "one": (*flags, "--resume")}, 1)
    assert curve(tmp_path / "one") == pytest.approx(curve(whole)[2:], **AFTER_ADAM)


@pytest.mark.long
@pytest.mark.skipif(not SHARES, reason="processes cannot share a device")
def test_four_processes_share_the_devices(tmp_path):
    """More than there are: sharded over all, and in two replicas of two."""
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
    replicas = ("--shards-per-replica", 2, "--validate-every", 2, "--no-save-model")
    settings = {name: (*LM, *replicas, "--sharding-strategy", name) for name in strategies}
    for device in ("cpu", FOUND.type):
        run_on(device, "lm_multinode.py", {tmp_path / device / name: settings[name] for name in strategies}, 4)
    for name in strategies:
        for field in ("loss", "val_loss"):
            expected = curve(tmp_path / "cpu" / name, field)
            assert curve(tmp_path / FOUND.type / name, field) == pytest.approx(expected, **AFTER_ADAM), (name, field)


@pytest.mark.long
@pytest.mark.skipif(DEVICES == 0 or not SHARES, reason="processes cannot share a device")
def test_more_processes_than_devices_only_when_asked_for(tmp_path):
    """On a cluster they are a mistake."""
    flags = ("--num-processes", 2 * DEVICES, "--max-steps", 1, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *flags, device=FOUND.type, NCCL_MULTI_RANK_GPU_ENABLE="0")
    assert finished.returncode == 2 and "NCCL_MULTI_RANK_GPU_ENABLE" in finished.stderr


@pytest.mark.long
@pytest.mark.parametrize("processes", PROCESSES)
def test_strategies_are_compared_on_the_device(processes, tmp_path):
    flags = (*LM, "--compare-strategies", "--shards-per-replica", 1, "--peak-tflops", 1)
    run_on(FOUND.type, "lm_multinode.py", {tmp_path: flags}, processes)
    rows = records(tmp_path, "strategy")
    assert len(rows) == 5
    for row in rows:
        assert row["tokens/s"] > 0
        assert row["peak_gib"] >= row["state_gib"] * 0.99  # of the device's memory alone


# ---- T5 --------------------------------------------------------------------------------------------------------------
T5_WAYS = {
    "zero2": ("--sharding-strategy", "SHARD_GRAD_OP"),
    "recomputing": ("--activation-checkpointing",),
    "no prefetch": ("--backward-prefetch", "none"),
    "saving": SAVING,
    "bf16": ("--precision", "bf16"),
    "grad-bf16": ("--precision", "grad-bf16"),
}


@pytest.mark.long
@pytest.mark.parametrize("processes", PROCESSES)
def test_t5_has_the_losses_and_summaries_of_the_cpu_and_resumes(processes, tiny_model, articles_csv, tmp_path):
    """In fp32; low precisions are near it."""
    flags = (
        *("--model", tiny_model, "--dataset", articles_csv, "--batch-size", 8 // processes, "--precision", "fp32"),
        *("--accumulation-steps", 2, "--max-steps", STEPS, "--epochs", 1, "--log-every", 1, "--max-target-length", 12),
    )
    late = ("--fsdp-version", 1, "--backward-prefetch", "post")
    ways = with_versions(T5_WAYS) | {"FSDP2 offload": ("--cpu-offload",), "FSDP1 late": late}
    root = tmp_path / "runs"
    run_on("cpu", "t5_fsdp.py", {root / "cpu": (*flags, *SAVING)}, processes)
    run_on(FOUND.type, "t5_fsdp.py", {root / name: (*flags, *more) for name, more in ways.items()}, processes)
    check_like_the_cpu(root, ways, "loss", "grad_norm", "val_loss", "rougeL")

    saved = {root / name: (*flags, *ways.get(name, ())) for name in ("FSDP1 saving", "FSDP2 saving", "cpu")}
    check_resume(FOUND.type, "t5_fsdp.py", saved, processes, tmp_path / "resumed")


# ---- MNIST -----------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("processes", PROCESSES)
def test_mnist_has_the_losses_of_the_cpu(processes, small_mnist, tmp_path):
    shared = ("--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 16, "--epochs", 2)
    mnist = {"fsdp": (*shared, "--model", "shallow", "--mode", "fsdp")}
    if processes == 1:
        mnist["local"] = (*shared, "--model", "shallow", "--mode", "local")
    for script, ways in (("mnist_fsdp.py", mnist), ("mnist_fsdp_xpu.py", {"xpu": (*shared, "--lr", 0.1)})):
        for name, flags in ways.items():
            root = tmp_path / name
            run_on("cpu", script, {root / "cpu": flags}, processes)
            both = with_versions({name: flags})
            run_on(FOUND.type, script, {root / each: both[each] for each in both}, processes)
            check_like_the_cpu(root, both, "loss", "test_loss", "accuracy", rel=1e-3, abs=1e-4)


# ---- Commands as users start them ------------------------------------------------------------------------------------
def test_python_alone_starts_a_process_for_each_device(tmp_path):
    flags = ("--max-steps", 1, "--num-validation-texts", 3, "--output-dir", tmp_path)
    printed = succeed("lm_multinode.py", *flags, device="auto").stdout
    assert re.search(rf" {DEVICES} x {FOUND.type},", printed)


@pytest.mark.long
def test_the_comparison_leaves_the_device_to_its_second_half(small_mnist, tmp_path):
    """Which, on one device, is the launching process: it has not touched the device before."""
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 16, "--epochs", 1, "--model", "shallow")
    printed = succeed("mnist_fsdp.py", *flags, "--output-dir", tmp_path, device="auto").stdout
    assert len(re.findall("^torchrun .*--nproc_per_node", printed, re.M)) == min(DEVICES, 2)
    assert [row["mode"] for row in records(tmp_path, "loss")] == ["local", "fsdp"]


@pytest.mark.long
def test_fsdp1_does_not_offload_what_is_not_sharded(tmp_path):
    """It would resume with other weights, in silence."""
    flags = ("--fsdp-version", 1, "--cpu-offload", "--num-processes", 1, "--num-train-samples", 100)
    finished = run("t5_fsdp.py", *flags, "--output-dir", tmp_path, device="auto")
    assert finished.returncode == 2
    assert re.search("error: .*--fsdp-version 2", finished.stderr)
    assert "Traceback" not in finished.stderr
