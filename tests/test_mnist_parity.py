"""Sharded training computes what one plain loop on the same global batch computes, in fp32 and without dropout."""

import functools

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

import pytest
from conftest import reports, run_many
from safetensors.torch import load_file

import mnist_fsdp

GLOBAL_BATCH = 48


@functools.cache
def plain_loop(network, data_dir, optimizer_class, lr, gamma, epochs, count=192, seed=1):
    """The epochs of a loop without FSDP or distributed anything: [(train_loss, test_loss, correct)]."""
    train_set, test_set = mnist_fsdp.load_mnist(data_dir)
    train_set = Subset(train_set, range(count))
    order = DistributedSampler(train_set, num_replicas=1, rank=0, seed=seed, drop_last=True)
    torch.manual_seed(seed)
    model = network()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = optimizer_class(model.parameters(), lr=lr)
    results = []
    for epoch in range(1, epochs + 1):
        order.set_epoch(epoch)
        losses = []
        for images, labels in DataLoader(train_set, GLOBAL_BATCH, sampler=order, drop_last=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        images, labels = next(iter(DataLoader(test_set, len(test_set))))
        with torch.no_grad():
            outputs = model(images)
        correct = (outputs.argmax(1) == labels).sum().item()
        results.append((sum(losses) / len(losses), F.nll_loss(outputs, labels).item(), correct))
        for group in optimizer.param_groups:
            group["lr"] *= gamma
    return results


def results(output_dir):
    return [(r["train_loss"], r["test_loss"], r["test_correct"]) for r in reports(output_dir, "epoch")]


def agree(ours, plain):
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=1e-5)
        assert one[2] == other[2]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_shallow_network_equals_a_plain_loop(processes, small_mnist, tmp_path):
    """Two epochs of Adam: FSDP2, FSDP1, and FSDP2 with other units and another batch size in the test."""
    common = ["--dataset", "mnist", "--data-dir", small_mnist, "--model", "shallow", "--epochs", 2, "--num-workers", 0]
    common += ["--batch-size", GLOBAL_BATCH // processes]
    changes = [[], ["--fsdp-version", 1], ["--min-num-params", 100, "--test-batch-size", 7]]
    settings = [[*common, *change, "--output-dir", tmp_path / str(i)] for i, change in enumerate(changes)]
    run_many("mnist_fsdp", settings, processes, "no-dropout", fork=processes != 2)
    plain = plain_loop(mnist_fsdp.ShallowNet, small_mnist, torch.optim.Adam, 0.001, 1.0, epochs=2)
    for i in range(len(settings)):
        agree(results(tmp_path / str(i)), plain)


@pytest.mark.parametrize("processes", [2, 3])
def test_xpu_script_equals_a_plain_loop(processes, small_mnist, tmp_path):
    """Two epochs of Adadelta with a learning rate that falls, as the Intel document trains."""
    common = ["--dataset", "mnist", "--data-dir", small_mnist, "--device", "cpu", "--epochs", 2, "--num-workers", 0]
    common += ["--batch-size", GLOBAL_BATCH // processes, "--gamma", 0.5, "--lr", 0.1]
    settings = [[*common, "--fsdp-version", v, "--output-dir", tmp_path / str(v)] for v in (1, 2)]
    run_many("mnist_fsdp_xpu", settings, processes, "no-dropout", fork=processes != 2)
    plain = plain_loop(mnist_fsdp.ShallowNet, small_mnist, torch.optim.Adadelta, 0.1, 0.5, epochs=2)
    for version in (1, 2):
        agree(results(tmp_path / str(version)), plain)


@pytest.mark.parametrize("processes, version", [(1, 1), (4, 2)])
def test_deep_network_is_sharded_in_equal_parts_and_equals_a_plain_loop(processes, version, small_mnist, tmp_path):
    """State bytes fall as 1/N within 2% (2 processes are in test_mnist.py), and two steps give the same losses."""
    options = ["--dataset", "mnist", "--data-dir", small_mnist, "--model", "deep", "--epochs", 1, "--num-workers", 0]
    options += ["--num-train-samples", 2 * GLOBAL_BATCH, "--batch-size", GLOBAL_BATCH // processes]
    options += ["--fsdp-version", version, "--output-dir", tmp_path]
    run_many("mnist_fsdp", [options], processes, "no-dropout")
    [result] = reports(tmp_path, "result")
    assert result["parameters"] == pytest.approx(94_104_234 / processes, rel=0.02)
    assert result["state_bytes"] == pytest.approx(4 * 4 * 94_104_234 / processes, rel=0.02)
    plain = plain_loop(mnist_fsdp.DeepNet, small_mnist, torch.optim.Adam, 0.001, 1.0, 1, count=2 * GLOBAL_BATCH)
    agree(results(tmp_path), plain)


def test_saved_network_scores_the_same_in_one_process(small_mnist, tmp_path):
    common = ["--dataset", "mnist", "--data-dir", small_mnist, "--epochs", 1, "--num-workers", 0, "--batch-size", 16]
    settings = [
        [*common, "--model", "shallow", "--fsdp-version", v, "--save-model", "--output-dir", tmp_path / str(v)]
        for v in (1, 2)
    ]
    run_many("mnist_fsdp", settings, 3)
    images, labels = next(iter(DataLoader(mnist_fsdp.load_mnist(small_mnist)[1], 100)))
    for version in ("1", "2"):
        [path] = (tmp_path / version).glob("*.safetensors")
        model = mnist_fsdp.ShallowNet()
        model.load_state_dict(load_file(path))
        model.eval()
        with torch.no_grad():
            outputs = model(images)
        [reported] = reports(tmp_path / version, "result")
        assert F.nll_loss(outputs, labels).item() == pytest.approx(reported["test_loss"], abs=1e-5)
        assert (outputs.argmax(1) == labels).sum().item() == reported["test_correct"]
        assert path.name == f"mnist-shallow-fsdp-{reported['run_date']}.safetensors"
