"""The four scripts on the accelerator that PyTorch finds (CUDA, XPU, a simulated one), beside the same runs on a CPU.

Skipped where there is none; all other tests name the CPU.
"""

import re
import shutil

import torch

import pytest
from conftest import VERSIONS, curve, records, run, run_many, succeed
from test_mnist_parity import no_dropout

import common

FOUND = torch.accelerator.current_accelerator(check_available=True)
USABLE = FOUND is not None and FOUND.type != "mps"
DEVICES = torch.accelerator.device_count() if USABLE else 0
pytestmark = pytest.mark.skipif(not USABLE, reason="PyTorch finds no accelerator that FSDP runs on")
PROCESSES = [count for count in (1, 2) if count <= DEVICES] or [1]
# An accelerator adds up in another order than a CPU, and Adam divides by what may be small.
NEAR = {"abs": 1e-4}


def compute_in_fp32(script):
    """Without TF32, and without dropout, as a CPU draws other numbers."""
    torch.set_float32_matmul_precision = lambda precision: None
    torch.backends.cudnn.allow_tf32 = False
    no_dropout(script)


def run_on(device, script, settings, processes):
    """Run a script for {output folder: flags}, on the CPU or on the accelerator. Returns the output."""
    arguments = [[*flags, "--output-dir", folder] for folder, flags in settings.items()]
    options = {"device": device, "change": compute_in_fp32, "fork": device == "cpu"}
    finished = run_many(f"{script}.py", arguments, processes, **options)
    if device != "cpu":
        assert len(re.findall(rf" {processes} process(?:es)? on {FOUND.type},", finished.stdout)) == len(settings)
    return finished.stdout


def resume_from(folder, step, target):
    """The flags that go on in `target` from a copy of one checkpoint."""
    name = f"step-{step:07d}"
    shutil.copytree(folder / "checkpoints" / name, target / "checkpoints" / name)
    return ("--resume", "--output-dir", target)


# ---- LM ------------------------------------------------------------------------------------------------------------
LM_STEPS = 4
LM = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 2, "--num-validation-texts", 3),
    *("--max-steps", LM_STEPS, "--warmup-steps", 2, "--lr", 1e-3, "--log-every", 1, "--precision", "fp32"),
)
SAVING = ("--checkpoint-every", 2)


def lm_settings(processes):
    """Flags by name; every one of them computes the same losses."""
    found = {}
    for version in VERSIONS:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            found[f"fsdp{version} {strategy}"] = ("--fsdp-version", version, "--sharding-strategy", strategy)
        plain = ("--fsdp-version", version, "--no-save-model")
        found[f"fsdp{version} recomputing"] = (*plain, "--activation-checkpointing")
        if version == 2 or processes > 1:  # with one shard FSDP1 would not resume rightly
            found[f"fsdp{version} offload"] = (*plain, "--cpu-offload", *SAVING)
        found[f"fsdp{version} saving"] = (*plain, *SAVING)
        if processes > 1:
            for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
                hybrid = ("--sharding-strategy", strategy, "--shards-per-replica", 2)
                found[f"fsdp{version} {strategy}"] = (*plain, *hybrid)
    hybrid = ("--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 1, "--no-save-model")
    found["fsdp2 replicas"] = hybrid
    found["fsdp2 replicas offload"] = (*hybrid, "--cpu-offload")
    return found


@pytest.fixture(scope="module", params=PROCESSES)
def lm_runs(request, tmp_path_factory):
    """The folder of each setting's run, the run on the CPU ("cpu") and the number of processes."""
    processes = request.param
    root = tmp_path_factory.mktemp(f"lm{processes}")
    run_on("cpu", "lm_multinode", {root / "cpu": (*LM, *SAVING, "--no-save-model")}, processes)
    settings = {root / name: (*LM, *flags) for name, flags in lm_settings(processes).items()}
    run_on(FOUND.type, "lm_multinode", settings, processes)
    return root, processes


def test_every_strategy_of_the_lm_has_the_losses_of_the_cpu(lm_runs):
    root, processes = lm_runs
    for name in lm_settings(processes):
        assert len(curve(root / name)) == LM_STEPS
        for field in ("loss", "grad_norm", "val_loss"):
            assert curve(root / name, field) == pytest.approx(curve(root / "cpu", field), **NEAR), (name, field)


def test_the_lm_resumes_to_the_bit_and_across_devices(lm_runs, tmp_path):
    """On the same device exactly; from the CPU's checkpoint with its losses, and it says what is drawn anew."""
    root, processes = lm_runs
    settings = {}
    for name, flags in lm_settings(processes).items():
        if "--checkpoint-every" not in flags:
            continue
        settings[tmp_path / name] = (*LM, *flags, *resume_from(root / name, 2, tmp_path / name))
    settings[tmp_path / "cpu"] = (*LM, "--no-save-model", *resume_from(root / "cpu", 2, tmp_path / "cpu"))
    stdout = run_on(FOUND.type, "lm_multinode", settings, processes)
    for folder in settings:
        expected = curve(root / folder.name)[2:]
        assert curve(folder) == (pytest.approx(expected, **NEAR) if folder.name == "cpu" else expected), folder.name
    assert len(re.findall("^resumed  from step 2$", stdout, re.M)) == len(settings)
    assert len(re.findall("^ +saved on cpu: dropout, if the model has it, draws anew$", stdout, re.M)) == 1
    back = ("--resume", "--output-dir", tmp_path / "back")
    resume_from(root / "fsdp2 saving", 2, tmp_path / "back")
    stdout = run_on("cpu", "lm_multinode", {tmp_path / "back": (*LM, "--no-save-model", *back)}, processes)
    assert f"saved on {FOUND.type}: dropout" in stdout
    assert curve(tmp_path / "back") == pytest.approx(curve(root / "cpu")[2:], **NEAR)


def test_fsdp1_does_not_offload_what_is_not_sharded(tmp_path):
    """It would resume with other weights, in silence."""
    flags = ("--fsdp-version", 1, "--cpu-offload", "--num-processes", 1, "--output-dir", tmp_path)
    for script, more in (("lm_multinode.py", ()), ("t5_fsdp.py", ("--num-train-samples", 100))):
        finished = run(script, *flags, *more, device="auto")
        assert finished.returncode == 2 and "Traceback" not in finished.stderr
        assert "error: FSDP1 with --cpu-offload resumes wrongly with one shard; use" in finished.stderr


@pytest.mark.skipif(DEVICES < 2, reason="fewer than two devices")
def test_diloco_has_the_losses_of_the_cpu(tmp_path):
    flags = (*LM, "--sharding-strategy", "DILOCO", "--shards-per-replica", 1, "--local-steps", 2)
    flags = (*flags, "--validate-every", 2, "--no-save-model")
    run_on("cpu", "lm_multinode", {tmp_path / "cpu": flags}, 2)
    offloaded = {tmp_path / "offload": (*flags, "--cpu-offload")}
    run_on(FOUND.type, "lm_multinode", {tmp_path / "device": (*flags, *SAVING)} | offloaded, 2)
    for name in ("device", "offload"):
        for field in ("loss", "val_loss"):
            assert curve(tmp_path / name, field) == pytest.approx(curve(tmp_path / "cpu", field), **NEAR), name


@pytest.mark.parametrize("processes", PROCESSES)
def test_strategies_are_compared_on_the_device(processes, tmp_path):
    flags = (*LM, "--compare-strategies", "--shards-per-replica", 1, "--peak-tflops", 1)
    run_on(FOUND.type, "lm_multinode", {tmp_path: flags}, processes)
    rows = records(tmp_path, "strategy")
    assert len(rows) == 6 and rows[-1]["strategy"] == "NO_SHARD"
    for row in rows:
        assert row["tokens/s"] > 0 and row["peak_gb"] >= row["state_gb"] * 0.99  # of the device's memory alone


def test_bf16_of_the_lm_is_near_fp32(lm_runs, tmp_path):
    root, processes = lm_runs
    settings = {
        tmp_path / f"{version}": (*LM, "--precision", "bf16", "--no-save-model", "--fsdp-version", version)
        for version in VERSIONS
    }
    run_on(FOUND.type, "lm_multinode", settings, processes)
    for folder in settings:
        assert curve(folder) == pytest.approx(curve(root / "cpu"), rel=0.01)
        assert curve(folder) != pytest.approx(curve(root / "cpu"), abs=1e-6)


# ---- T5 ------------------------------------------------------------------------------------------------------------
T5_STEPS = 4
EXACT = {
    **{
        f"fsdp{version} {strategy}": ("--fsdp-version", version, "--sharding-strategy", strategy)
        for version in VERSIONS
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
    },
    **{
        f"fsdp{version} {name}": ("--fsdp-version", version, *flags)
        for version in VERSIONS
        for name, flags in {
            "recomputing": ("--activation-checkpointing",),
            "no prefetch": ("--backward-prefetch", "none"),
            "saving": ("--checkpoint-every", 2),
        }.items()
    },
    "fsdp2 offload": ("--cpu-offload",),
    "fsdp1 late prefetch": ("--fsdp-version", 1, "--backward-prefetch", "post"),
}
LOW = {
    f"fsdp{version} {precision}": ("--fsdp-version", version, "--precision", precision)
    for version in VERSIONS
    for precision in ("bf16", "fp16", "grad-bf16")
}


@pytest.fixture(scope="module", params=PROCESSES)
def t5_runs(request, tiny_model, articles_csv, tmp_path_factory):
    """The folder of each setting's run, the flags that all share, and the number of processes."""
    processes = request.param
    root = tmp_path_factory.mktemp(f"t5{processes}")
    shared = (
        *("--model", tiny_model, "--dataset", articles_csv, "--batch-size", 8 // processes, "--precision", "fp32"),
        *("--accumulation-steps", 2, "--max-steps", T5_STEPS, "--epochs", 1, "--log-every", 1),
        *("--max-target-length", 12),
    )
    save = ("--checkpoint-every", 2)
    run_on("cpu", "t5_fsdp", {root / "cpu": (*shared, *save)}, processes)
    names = EXACT | LOW
    run_on(FOUND.type, "t5_fsdp", {root / name: (*shared, *flags) for name, flags in names.items()}, processes)
    return root, shared, processes


def test_t5_has_the_losses_and_the_summaries_of_the_cpu(t5_runs):
    root, _, _ = t5_runs
    for name in EXACT:
        assert len(curve(root / name)) == T5_STEPS
        for field in ("loss", "grad_norm", "val_loss", "rougeL"):
            assert curve(root / name, field) == pytest.approx(curve(root / "cpu", field), **NEAR), (name, field)


def test_low_precisions_of_t5_are_near_fp32(t5_runs):
    root, _, _ = t5_runs
    for name in LOW:
        assert curve(root / name) == pytest.approx(curve(root / "cpu"), rel=0.02), name
        assert curve(root / name) != curve(root / "cpu"), name


def test_t5_resumes_to_the_bit_and_across_devices(t5_runs, tmp_path):
    root, shared, processes = t5_runs
    settings = {
        tmp_path / name: (*shared, *EXACT.get(name, ()), *resume_from(root / name, 2, tmp_path / name))
        for name in ("fsdp1 saving", "fsdp2 saving", "cpu")
    }
    stdout = run_on(FOUND.type, "t5_fsdp", settings, processes)
    for folder in settings:
        expected = curve(root / folder.name)[2:]
        assert curve(folder) == (pytest.approx(expected, **NEAR) if folder.name == "cpu" else expected), folder.name
    assert stdout.count("from step 2, keeps everything\n") == 2
    assert stdout.count("from step 2, keeps all but dropout's random numbers\n") == 1


# ---- MNIST ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("processes", PROCESSES)
def test_mnist_has_the_losses_of_the_cpu(processes, small_mnist, tmp_path):
    shared = ("--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 16, "--epochs", 2, "--lr")
    modes = ["fsdp", "local"] if processes == 1 else ["fsdp"]
    mnist = {
        f"{mode} {v}": ("--model", "shallow", "--mode", mode, "--fsdp-version", v) for mode in modes for v in VERSIONS
    }
    scripts = {
        "mnist_fsdp": {name: (*shared, 1e-3, *flags) for name, flags in mnist.items()},
        "mnist_fsdp_xpu": {f"xpu {v}": (*shared, 0.1, "--fsdp-version", v) for v in VERSIONS},
    }
    for script, settings in scripts.items():
        for device in ("cpu", FOUND.type):
            folders = {tmp_path / device / name: flags for name, flags in settings.items()}
            run_on(device, script, folders, processes)
        for name in settings:
            for field in ("loss", "test_loss", "accuracy"):
                on_cpu, on_device = (curve(tmp_path / device / name, field) for device in ("cpu", FOUND.type))
                assert len(on_cpu) == 2 and on_device == pytest.approx(on_cpu, rel=1e-3, abs=1e-4), (name, field)


# ---- Commands as users start them ----------------------------------------------------------------------------------
def test_python_alone_starts_a_process_for_each_device(tmp_path):
    flags = ("--max-steps", 1, "--num-validation-texts", 3, "--output-dir", tmp_path)
    stdout = succeed("lm_multinode.py", *flags, device="auto").stdout
    assert re.search(rf" {DEVICES} process(?:es)? on {FOUND.type},", stdout)
    assert common.find_accelerator(FOUND.type) == FOUND and common.find_accelerator("cpu") is None


def test_the_comparison_leaves_the_device_to_its_second_half(small_mnist, tmp_path):
    """Each half is in processes of its own; the launching one never touches the device."""
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 16, "--epochs", 1, "--model", "shallow")
    stdout = succeed("mnist_fsdp.py", *flags, "--output-dir", tmp_path, device="auto").stdout
    assert len(re.findall("^torchrun --standalone --nproc_per_node", stdout, re.M)) == 2
    assert [row["mode"] for row in records(tmp_path, "loss")] == ["local", "fsdp"]
