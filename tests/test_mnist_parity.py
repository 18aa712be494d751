"""Sharded training computes what one plain loop on the same global batch computes, in fp32 and without dropout."""

import functools

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pytest
from conftest import CLOSE, SAVE_ON_CPU, VERSIONS, records, run_many
from safetensors.torch import load_file

import mnist_fsdp
import mnist_fsdp_xpu

GLOBAL_BATCH = 48
NETWORKS = mnist_fsdp.NETWORKS | {"xpu": mnist_fsdp_xpu.Network}


def digits(count, seed):
    """What `small_mnist` holds, in the notebook's scale."""
    images, labels = mnist_fsdp.draw_digits(count, seed).tensors
    return TensorDataset(((images.clamp(0, 1) * 255).round() / 255 - 0.1307) / 0.3081, labels)


@functools.cache
def plain_loop(network, processes, count=192, epochs=2):
    """A loop without FSDP or distributed anything: [(loss, test_loss, accuracy)] of each epoch.

    The documents minimize the sum of the losses over a process's batch, and FSDP averages over processes.
    """
    train_set, test_set = digits(192, 0), digits(100, 1)
    train_set = TensorDataset(*train_set[:count])
    order = DistributedSampler(train_set, num_replicas=1, rank=0, seed=1, drop_last=True)
    torch.manual_seed(1)
    model = NETWORKS[network]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if network == "xpu":
        optimizer, gamma = torch.optim.Adadelta(model.parameters(), lr=0.1), 0.5
    else:
        optimizer, gamma = torch.optim.Adam(model.parameters(), lr=0.001), 1.0
    results = []
    for epoch in range(1, epochs + 1):
        order.set_epoch(epoch)
        total = 0.0
        for images, labels in DataLoader(train_set, GLOBAL_BATCH, sampler=order, drop_last=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            (loss / processes).backward()
            optimizer.step()
            total += loss.item()
        images, labels = test_set[:]
        with torch.no_grad():
            outputs = model(images)
        accuracy = (outputs.argmax(1) == labels).sum().item() / len(labels)
        results.append((total / count, F.nll_loss(outputs, labels).item(), accuracy))
        for group in optimizer.param_groups:
            group["lr"] *= gamma
    return results


def no_dropout(script):
    """Each rank has its own dropout: parity needs none."""
    torch.nn.Dropout.forward = lambda self, x: x


def check(output_dir, plain):
    """The losses, and how many of the 100 test images are right: on 3 processes some could be counted twice."""
    rows = records(output_dir, "loss")
    assert len(rows) == len(plain)
    for row, (loss, test_loss, accuracy) in zip(rows, plain, strict=True):
        assert (row["loss"], row["test_loss"]) == pytest.approx((loss, test_loss), **CLOSE)
        assert row["accuracy"] == accuracy


def flags(folder, processes, epochs=2):
    batch = GLOBAL_BATCH // (processes or 1)
    return ["--dataset", "mnist", "--data-dir", folder, "--epochs", epochs, "--batch-size", batch, "--device", "cpu"]


@pytest.mark.parametrize("processes", [None, 2, 3, 4])
def test_shallow_network_equals_a_plain_loop(processes, small_mnist, tmp_path):
    """Two epochs of Adam: FSDP2, FSDP1, and FSDP2 with other units and another batch in the test; None is local."""
    changes = [[], ["--fsdp-version", 1], ["--min-num-params", 100, "--test-batch-size", 7]]
    if processes is None:
        changes = [["--mode", "local"]]
    base = ["--model", "shallow", *flags(small_mnist, processes)]
    settings = [[*base, *change, "--output-dir", tmp_path / str(i)] for i, change in enumerate(changes)]
    run_many("mnist_fsdp.py", settings, processes or 1, change=no_dropout)
    for i in range(len(settings)):
        check(tmp_path / str(i), plain_loop("shallow", processes or 1))


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_xpu_script_equals_a_plain_loop(processes, small_mnist, tmp_path):
    """Two epochs of Adadelta with a learning rate that falls; FSDP2 sums and divides, where others average."""
    base = [*flags(small_mnist, processes), "--gamma", 0.5, "--lr", 0.1]
    settings = [[*base, "--fsdp-version", v, "--output-dir", tmp_path / str(v)] for v in VERSIONS]
    run_many("mnist_fsdp_xpu.py", settings, processes, change=no_dropout)
    for version in VERSIONS:
        check(tmp_path / str(version), plain_loop("xpu", processes))


def test_the_divisor_matters():
    """Else the tests above would not tell an average over processes from a sum."""
    one, four = (plain_loop("xpu", processes)[-1][1] for processes in (1, 4))
    assert abs(one - four) > 1e-3


@pytest.mark.parametrize("processes, version", [(1, 1), (4, 2)])
def test_deep_network_is_sharded_in_equal_parts_and_equals_a_plain_loop(processes, version, small_mnist, tmp_path):
    """The state falls as 1/N within 2% (2 processes are in test_mnist.py), and two steps give the same losses."""
    options = ["--model", "deep", *flags(small_mnist, processes, epochs=1), "--num-train-samples", 2 * GLOBAL_BATCH]
    options += ["--fsdp-version", version, "--output-dir", tmp_path]
    finished = run_many("mnist_fsdp.py", [options], processes, change=no_dropout)
    assert "94,104,234 parameters" in finished.stdout
    [row] = records(tmp_path, "loss")
    assert row["state_gb"] == pytest.approx(16 * 94_104_234 / processes / 2**30, rel=0.02)
    check(tmp_path, plain_loop("deep", processes, count=2 * GLOBAL_BATCH, epochs=1))


def test_saved_network_scores_the_same_in_one_process(small_mnist, tmp_path):
    """With dropout, which differs on each of the 3 processes. Before torch 2.14 FSDP1 cannot save on a CPU."""
    base = ["--model", "shallow", *flags(small_mnist, 3, epochs=1), "--save-model"]
    run_many("mnist_fsdp.py", [[*base, "--fsdp-version", v, "--output-dir", tmp_path / str(v)] for v in SAVE_ON_CPU], 3)
    images, labels = digits(100, 1)[:]
    for version in SAVE_ON_CPU:
        [path] = (tmp_path / str(version)).rglob("*.safetensors")
        model = NETWORKS["shallow"]()
        model.load_state_dict(load_file(path))
        model.eval()
        with torch.no_grad():
            outputs = model(images)
        [row] = records(tmp_path / str(version), "loss")
        assert F.nll_loss(outputs, labels).item() == pytest.approx(row["test_loss"], **CLOSE)
        assert (outputs.argmax(1) == labels).sum().item() / 100 == row["accuracy"]
