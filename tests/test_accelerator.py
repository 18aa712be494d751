"""What only an accelerator can show: CUDA, XPU, or a simulated one. To compare its losses with plain loops on the CPU:

DEVICE=cuda python -m pytest -m "" tests/test_parity.py
"""

import shutil

import torch

import pytest
from conftest import AFTER_ADAM, SMALL, curve, run_many

from inside import lm_shape

FOUND = torch.accelerator.current_accelerator(check_available=True)
USABLE = FOUND is not None and FOUND.type != "mps"
DEVICES = torch.accelerator.device_count() if USABLE else 0
# Processes can share NVIDIA's devices, from NCCL 2.30 on, and the simulated one.
SHARES = USABLE and FOUND.type != "xpu"
if SHARES and FOUND.type == "cuda":
    SHARES = torch.cuda.nccl.version() >= (2, 30)
PROCESSES = [1, 2] if DEVICES >= 2 or SHARES else [1]
pytestmark = [
    pytest.mark.skipif(not USABLE, reason="PyTorch finds no accelerator that FSDP runs on"),
    pytest.mark.long,
]
LM = (*SMALL, "--global-batch-size", 16, "--micro-batch-size", 2, "--max-steps", 4, "--lr", 1e-3, "--no-save-model")


@pytest.mark.parametrize("processes", PROCESSES)
def test_the_lm_offloads_and_resumes(processes, tmp_path):
    """Offloaded or not, it resumes to the bit. It also resumes on the CPU and in one process, with the same losses."""
    saving = (*LM, "--checkpoint-every", 2)
    runs = {"plain": saving, "offload": (*saving, "--cpu-offload")}
    run_many("lm_multinode.py", {tmp_path / name: runs[name] for name in runs}, processes, device="auto")
    # The CPU's memory holds the offloaded shards and the optimizer's two numbers for each weight.
    saved = curve(tmp_path / "plain", "peak_gib")[-1] - curve(tmp_path / "offload", "peak_gib")[-1]
    assert saved > 0.7 * 12 * lm_shape("tiny", 2048).num_parameters() / processes / 2**30

    to_the_bit = {("plain", FOUND.type, processes), ("offload", FOUND.type, processes)}
    for name, device, count in to_the_bit | {("plain", "cpu", processes), ("plain", FOUND.type, 1)}:
        again = tmp_path / f"{name} {device} {count} again"
        shutil.copytree(tmp_path / name / "checkpoints/step-0000002", again / "checkpoints/step-0000002")
        printed = run_many("lm_multinode.py", {again: (*runs[name], "--resume")}, count, device=device).stdout
        assert "resumed  from step 2" in printed and f" {count} x {device}," in printed
        expected = curve(tmp_path / name)[2:]
        is_same = (name, device, count) in to_the_bit
        assert curve(again) == (expected if is_same else pytest.approx(expected, **AFTER_ADAM)), again
