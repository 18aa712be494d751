"""mnist_fsdp_xpu.py without an Intel GPU: what it shares with mnist_fsdp.py, what it marks, its rehearsal."""

import ast

import torch

import pytest
from conftest import ROOT, check_bad_input, records, succeed
from safetensors.torch import load_file

import mnist_fsdp
import mnist_fsdp_xpu

SAME = ("shard_with_fsdp1", "train_one_epoch", "draw_digits", "load_digits", "make_loader", "evaluate")
# What the document's steps change: its packages, the device, the backend, the wrap, the time it took.
MARKED = ("whl/xpu", 'device="xpu"', "xccl", "device_id=", "set_force_sum_reduction_for_comms(", "torch.xpu.Event(")
MARKED += ("torch.xpu.synchronize(", "torch.xpu.set_device", "model.to", "init_device_mesh(")


def definitions(script):
    tree = ast.parse((ROOT / script).read_text())
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_what_the_scripts_share_is_the_same_and_in_the_same_order():
    base, xpu = definitions("mnist_fsdp.py"), definitions("mnist_fsdp_xpu.py")
    for name in SAME:
        assert base[name] == xpu[name], name
    assert [name for name in base if name in xpu] == list(xpu)


def test_what_intel_gpus_change_is_marked():
    """On the line, or in the three that `grep -A3 XPU:` shows; packages that have ended are in the header alone."""
    source = (ROOT / "mnist_fsdp_xpu.py").read_text()
    lines = source.splitlines()
    near = [any("XPU:" in line for line in lines[max(0, i - 3) : i + 1]) for i in range(len(lines))]
    for part in MARKED:
        assert any(marked and part in line for line, marked in zip(lines, near, strict=True)), part
    assert all(marked or "torch.xpu." not in line for line, marked in zip(lines, near, strict=True))
    code = source.split('"""', 2)[2]
    assert "ipex" not in code and "oneccl_bindings" not in code
    assert "XPU:" not in (ROOT / "mnist_fsdp.py").read_text()


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an Intel GPU, on which it trains")
def test_without_an_intel_gpu_it_does_not_train():
    """Not on a CPU either, unless it is told to."""
    as_users = [((), None, "--device xpu: .* finds none; install its build or use --device cpu")]
    as_forks = [
        (("--batch-size", 9999, "--device", "cpu"), 2, "6400 images are too few for --batch-size 9999 on 2 ranks"),
        (("--gamma", "nan"), None, "--gamma: nan is not a number of at least 0"),
        (("--model", "deep"), None, "unrecognized arguments: --model deep"),
    ]
    check_bad_input("mnist_fsdp_xpu.py", as_users, as_forks, device=None)


def test_rehearsal(small_mnist, tmp_path):
    """As the header has it but with fewer images: it learns, and what it saves scores the same."""
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--batch-size", 16, "--epochs", 3, "--lr", 0.1)
    finished = succeed("mnist_fsdp_xpu.py", "--device", "cpu", *flags, "--save-model", "--output-dir", tmp_path)
    assert "torchrun --standalone --nproc_per_node 2 " in finished.stdout
    assert "2 processes on cpu" in finished.stdout and "1,199,882 parameters" in finished.stdout
    assert "(conv1): FSDPConv2d(1, 32" in finished.stdout  # a unit for every 100 parameters
    rows = records(tmp_path, "loss")
    assert [row["epoch"] for row in rows] == [1, 2, 3] and rows[2]["loss"] < rows[0]["loss"]
    assert rows[2]["state_gb"] == pytest.approx(16 * 1_199_882 / 2 / 2**30, rel=0.02)
    [path] = tmp_path.rglob("*.safetensors")
    model = mnist_fsdp_xpu.Network()
    model.load_state_dict(load_file(path))
    model.eval()
    images, labels = mnist_fsdp.draw_digits(100, 1).tensors
    with torch.no_grad():
        outputs = model(((images.clamp(0, 1) * 255).round() / 255 - 0.1307) / 0.3081)
    assert torch.nn.functional.nll_loss(outputs, labels).item() == pytest.approx(rows[2]["test_loss"], abs=1e-5)
    assert (outputs.argmax(1) == labels).sum().item() == round(100 * rows[2]["accuracy"])
