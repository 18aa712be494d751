"""mnist_fsdp.py from the command line: the comparison, the data, the units, processes without torchrun."""

import gzip
import subprocess
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

import pytest
from conftest import ROOT, check_bad_input, reports, run_many, succeed, write_idx, write_mnist
from safetensors.torch import load_file

import common
import mnist_fsdp


def test_default_run_of_the_shallow_network_learns_the_digits(tmp_path):
    """The bare command but for the deep network and the third epoch; the sentences say what the numbers say."""
    options = ("--model", "shallow", "--epochs", 2, "--save-model", "--output-dir", tmp_path)
    finished = succeed("mnist_fsdp.py", *options)
    local, fsdp = reports(tmp_path, "result")
    assert (local["mode"], local["processes"], local["parameters"]) == ("local", 1, 1_199_882)
    assert (fsdp["mode"], fsdp["processes"], fsdp["parameters"]) == ("fsdp", 2, 599_941)
    assert local["test_accuracy"] >= 0.98 and fsdp["test_accuracy"] >= 0.95
    assert fsdp["state_bytes"] == pytest.approx(local["state_bytes"] / 2, rel=0.01)
    peak, speed = (fsdp[name] / local[name] for name in ("peak_memory_gb", "samples_per_second"))
    text = " ".join(finished.stdout.split())
    assert f"each process holds 50% of the state and peaks at {peak:.0%} of the memory" in text
    assert f"FSDP trains {speed:.2f} times as many samples per second: " in text
    why = "communication comes on top" if speed < 1 else "noise of a short run, or other work"
    assert why in text
    model = mnist_fsdp.ShallowNet()
    [path] = tmp_path.glob("mnist-shallow-local-*.safetensors")
    model.load_state_dict(load_file(path))
    images, labels = mnist_fsdp.draw_digits(2000, 3).tensors  # the test images of seed 1
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in images.split(1000)])
        correct = (outputs.argmax(1) == labels).sum().item()
    assert correct == local["test_correct"]


def test_a_linear_classifier_does_not_learn_the_digits():
    """20 epochs on the images of the default run stay under 95%, so the networks have something to do."""
    images, labels = mnist_fsdp.draw_digits(6400, 2).tensors
    torch.manual_seed(0)
    linear = nn.Linear(784, 10)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.001)
    for _ in range(20):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(linear(images[batch].flatten(1)), labels[batch]).backward()
            optimizer.step()
    images, labels = mnist_fsdp.draw_digits(2000, 3).tensors
    accuracy = (linear(images.flatten(1)).argmax(1) == labels).float().mean().item()
    assert 0.5 < accuracy < 0.95


def test_digits_are_the_same_for_a_seed():
    one, again, other = (mnist_fsdp.draw_digits(1500, seed) for seed in (1, 1, 2))
    assert torch.equal(one.tensors[0], again.tensors[0]) and torch.equal(one.tensors[1], again.tensors[1])
    assert not torch.equal(one.tensors[0], other.tensors[0])
    assert one.tensors[0].shape == (1500, 1, 28, 28) and sorted(set(one.tensors[1].tolist())) == list(range(10))


def test_comparison_of_both_networks_and_flags(small_mnist, tmp_path):
    """Four rows in one table, with FSDP1, worker processes and the wrapped model printed."""
    finished = succeed(
        *("mnist_fsdp.py", "--dataset", "mnist", "--data-dir", small_mnist, "--epochs", 1, "--batch-size", 32),
        *(
            "--num-train-samples",
            70,
            "--num-processes",
            2,
            "--fsdp-version",
            1,
            "--print-model",
            "--num-workers",
            1,
            "--output-dir",
            tmp_path,
        ),
    )
    rows = [(r["network"], r["mode"], r["processes"]) for r in reports(tmp_path, "result")]
    assert rows == [("shallow", "local", 1), ("deep", "local", 1), ("shallow", "fsdp", 2), ("deep", "fsdp", 2)]
    table = [line for line in finished.stdout.splitlines() if line.startswith("| ")]
    assert len(table) == 6 and len({len(line) for line in table}) == 1
    assert "94,104,234" in table[3] and "1,505,667,808" in table[3]
    for sharded, local in (("shallow", 1_199_882), ("deep", 94_104_234)):
        [result] = [r for r in reports(tmp_path, "result") if r["network"] == sharded and r["mode"] == "fsdp"]
        assert result["parameters"] == pytest.approx(local / 2, rel=0.02)
        assert result["state_bytes"] == pytest.approx(4 * 4 * local / 2, rel=0.02)
    assert "deep, memory: each process holds 50% of the state" in " ".join(finished.stdout.split())
    assert finished.stdout.count("(fc1): FullyShardedDataParallel(") == 2


def test_settings_change_what_is_trained(small_mnist, tmp_path):
    common_flags = [
        "--dataset",
        "mnist",
        "--data-dir",
        small_mnist,
        "--model",
        "shallow",
        "--epochs",
        1,
        "--num-workers",
        0,
    ]
    changes = {
        "base": [],
        "seed": ["--seed", 2],
        "lr": ["--lr", 0.01],
        "batch": ["--batch-size", 32],
        "samples": ["--num-train-samples", 130],
        "epochs": ["--epochs", 2],
    }
    settings = [
        [*common_flags, "--batch-size", 64, *change, "--output-dir", tmp_path / name]
        for name, change in changes.items()
    ]
    run_many("mnist_fsdp", settings, 1)
    losses = {name: reports(tmp_path / name, "result")[0]["test_loss"] for name in changes}
    assert len(set(losses.values())) == len(changes)
    assert [len(reports(tmp_path / name, "epoch")) for name in ("base", "epochs")] == [1, 2]


class Nested(nn.Module):
    """Modules in modules, parameters beside modules, and a ModuleList, whose forward nobody calls."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(70))
        self.stem = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 9)), nn.Linear(9, 1))
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Linear(10, 9), nn.Linear(2, 2)]
        )
        self.head = nn.Linear(12, 12)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("network", [mnist_fsdp.ShallowNet, mnist_fsdp.DeepNet, Nested])
def test_both_versions_make_the_same_units(network):
    """Lists of units for several bounds; with 20,000 those of the notebook."""
    common.setup_distributed("cpu")
    try:
        mesh = mnist_fsdp.init_device_mesh("cpu", (1,))
        counts = set()
        for bound in (60, 100, 200, 20_000, 2_000_000):
            two = mnist_fsdp.shard_with_fsdp2(network(), mesh, bound)
            one = mnist_fsdp.shard_with_fsdp1(network(), mesh, bound)
            units = {name for name, module in two.named_modules() if isinstance(module, FSDPModule)}
            clean = {
                name.replace("_fsdp_wrapped_module", "")
                for name, m in one.named_modules()
                if isinstance(m, mnist_fsdp.FSDP)
            }
            assert {name.replace("..", ".").strip(".") for name in clean} == units
            counts.add(len(units))
            if bound == 20_000 and network is mnist_fsdp.DeepNet:
                assert units == {"", "fc1", "fc1a", "fc1b", "fc1c", "fc1d"}
        assert len(counts) > 1
    finally:
        torch.distributed.destroy_process_group()


def test_existing_mnist_is_read_offline(tmp_path, small_mnist):
    """In torchvision's folders or flat, packed or not; all hold the same images."""
    plain = mnist_fsdp.load_mnist(small_mnist)
    for name, options in (("MNIST/raw", {}), ("MNIST/raw", {"zipped": True}), (".", {"zipped": True})):
        folder = tmp_path / f"{name.count('/')}{len(options)}"
        write_mnist(folder / name, **options)
        for one, other in zip(plain, mnist_fsdp.load_mnist(folder), strict=True):
            assert torch.equal(one.data, other.data) and torch.equal(one.targets, other.targets)
    image, label = plain[0][0]
    assert image.shape == (1, 28, 28) and label == plain[0].targets[0].item()
    drawn = mnist_fsdp.draw_digits(192, 0).tensors[0][0]
    assert torch.allclose(image, drawn, atol=0.5 / 255 / 0.3081 + 1e-6)


def broken_folders(folder):
    """{name: (folder, what the sentence must say)}"""
    images, labels = torch.zeros(20, 28, 28), torch.zeros(20)
    for name in ("truncated", "empty", "counts", "size", "labels", "zip"):
        write_mnist(folder / name, 20, 20)
    for name in ("truncated", "empty"):
        path = folder / name / "train-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-5] if name == "truncated" else b"")
    write_idx(folder / "counts", images, labels[:-1], train=False)
    write_idx(folder / "size", images[:, :20, :20], labels, train=True)
    write_idx(folder / "labels", images, labels + 10, train=True)
    path = folder / "zip" / "train-images-idx3-ubyte"
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    path.unlink()
    return {
        "truncated": "training files in .* are broken",
        "empty": "training files in .* are broken",
        "counts": r"hold images \(20, 28, 28\) and labels \(19,\)",
        "size": r"hold images \(20, 20, 20\)",
        "labels": "as many labels of 0 to 9",
        "zip": "train-images-idx3-ubyte.gz could not be unpacked",
    }


def test_broken_files_are_named(tmp_path):
    for name, sentence in broken_folders(tmp_path).items():
        with pytest.raises(common.UserError, match=sentence):
            mnist_fsdp.load_mnist(tmp_path / name)


def test_weights_that_cannot_be_saved_are_one_sentence(tmp_path):
    world = common.setup_distributed("cpu")
    try:
        with pytest.raises(common.UserError, match=r"could not save .*absent/net.safetensors"):
            common.save_weights(world, nn.Linear(2, 2), tmp_path / "absent" / "net.safetensors")
    finally:
        torch.distributed.destroy_process_group()


def test_bad_input_is_one_sentence(tmp_path, small_mnist):
    """Exit code 2, one line on stderr without a traceback; torchrun adds its own report below.

    Three cases start as a user's would (one with a process of its own, one under torchrun), the others as forks.
    """
    mnist = ("--dataset", "mnist", "--data-dir")
    (tmp_path / "file").write_text("")
    write_mnist(tmp_path / "broken", 20, 20)
    (tmp_path / "broken" / "t10k-labels-idx1-ubyte").write_bytes(b"\0")
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    output = ("--output-dir", tmp_path / "output")
    small = (*mnist, small_mnist, "--batch-size", 16, "--model", "shallow", "--num-workers", 0)
    as_users = [
        (("--batch-size", 0), None, "must be a whole number of at least 1, not '0'"),
        (("--batch-size", 9999, *output), None, "6,400 training images are too few for a batch of 9999 in each of 2"),
        ((*mnist, tmp_path / "broken", *output), 2, "test files in .* are broken"),
    ]
    as_forks = [
        (("--mode", "both", "--num-processes", 0), 2, "--mode both trains in one process of its own; start it with"),
        (("--num-processes", 2), 2, "under torchrun --nproc_per_node sets it"),
        ((*mnist, tmp_path / "absent", *output), 2, "could not be downloaded .* or use --dataset builtin"),
        (("--output-dir", tmp_path / "file"), 2, "cannot be written"),
        (("--lr", 1e30, "--epochs", 1, *small, *output), 2, "the loss is not finite in epoch 1; start"),
        (("--device", "xpu"), None, "mnist_fsdp_xpu.py has"),
        (("--mode", "local", "--num-processes", 2), None, "--mode local trains in one process"),
    ]
    if not torch.cuda.is_available():
        as_forks.append((("--device", "cuda"), 2, "finds no such device; use --device cpu"))
    check_bad_input("mnist_fsdp.py", as_users, as_forks, **offline)


SMALL_SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
import common

def main(args, world):
    import torch.distributed as dist
    total = common.torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"together {{int(total)}}\\n".encode())
    if args == "killed" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if args == "crash" and world.rank == 0:
        raise ZeroDivisionError("a bug")
    dist.barrier()

class Args(str):
    device = "cpu"

if __name__ == "__main__":
    common.launch(main, Args(sys.argv[1]), 3)
"""


@pytest.mark.parametrize("fate", ["killed", "crash"])
def test_processes_started_without_torchrun_end_together(fate, tmp_path):
    """One that is killed or crashes ends all, promptly, with the cause on stderr."""
    script = tmp_path / "small.py"
    script.write_text(SMALL_SCRIPT.format(root=str(ROOT)))
    began = time.time()
    finished = subprocess.run([sys.executable, script, fate], capture_output=True, text=True, timeout=120)
    assert time.time() - began < 60
    assert finished.stdout.count("together 3") == 3
    assert finished.returncode == 1, finished.stderr
    sentence = {"killed": "process 1 was ended by SIGKILL", "crash": "ZeroDivisionError: a bug"}
    assert sentence[fate] in finished.stderr
