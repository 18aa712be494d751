"""mnist_fsdp.py from the command line: the comparison, the data, the units, bad input, and how a run ends."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

import pytest
from conftest import ROOT, check_bad_input, records, run, run_many, succeed, write_mnist
from safetensors.torch import load_file

import common
import mnist_fsdp


@pytest.fixture
def world():
    """A process group of one, in this process."""
    yield common.setup(None)
    torch.distributed.destroy_process_group()


def lines_of(stdout):
    """The lines of the epochs, of both halves, and those that stand side by side at the end."""
    halves, _, together = stdout.partition("The last epoch of each, side by side:")
    line = r"^(?:shallow|deep|layers) +\| (?:local|fsdp) .*"
    return re.findall(line, halves, re.MULTILINE), re.findall(line, together, re.MULTILINE)


def test_both_halves_learn_the_digits_and_stand_side_by_side(tmp_path):
    """`python mnist_fsdp.py` with fewer images in smaller batches: each process holds half of the state, and both saved
    networks score as reported."""
    fewer = ("--num-train-samples", 1920, "--batch-size", 32, "--model", "shallow")
    finished = succeed("mnist_fsdp.py", *fewer, "--save-model", "--output-dir", tmp_path, timeout=600)
    assert "torchrun --standalone --nproc_per_node 2 " in finished.stdout
    assert finished.stdout.count("1,199,882 parameters") == 2
    rows = records(tmp_path, "loss")
    kinds = [(row["mode"], row["processes"], row["epoch"]) for row in rows]
    assert kinds == [("local", 1, 1), ("local", 1, 2), ("local", 1, 3), ("fsdp", 2, 1), ("fsdp", 2, 2), ("fsdp", 2, 3)]
    local, fsdp = rows[2], rows[5]
    assert local["accuracy"] >= 0.85 and fsdp["accuracy"] >= 0.85
    assert local["state_gb"] == pytest.approx(16 * 1_199_882 / 2**30, rel=0.01)
    assert fsdp["state_gb"] == pytest.approx(local["state_gb"] / 2, rel=0.02)
    assert local["peak_gb"] > 0.1 and fsdp["peak_gb"] > 0.1  # PyTorch alone takes more
    epochs, together = lines_of(finished.stdout)
    assert together == [epochs[2], epochs[5]]
    images, labels = mnist_fsdp.draw_digits(2000, 3).tensors  # the test images of seed 1
    for row in (local, fsdp):
        model = mnist_fsdp.Network(128)
        [path] = tmp_path.rglob(f"shallow-{row['mode']}*/**/*.safetensors")
        model.load_state_dict(load_file(path))
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in images.split(1000)])
        assert F.nll_loss(outputs, labels).item() == pytest.approx(row["test_loss"], abs=1e-5)
        assert (outputs.argmax(1) == labels).sum().item() == round(2000 * row["accuracy"])


def test_a_linear_classifier_does_not_learn_the_digits():
    """It fits 6,400 images and fails on new ones, so the networks have something to do."""
    images, labels = mnist_fsdp.draw_digits(6400, 2).tensors
    linear = nn.Linear(784, 10)
    nn.init.zeros_(linear.weight)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=50)

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(linear(images.flatten(1)), labels)
        value.backward()
        return value

    optimizer.step(loss)
    scores = [
        (linear(images.flatten(1)).argmax(1) == labels).float().mean().item()
        for images, labels in (mnist_fsdp.draw_digits(6400, 2).tensors, mnist_fsdp.draw_digits(2000, 3).tensors)
    ]
    assert scores[0] > 0.99 and 0.5 < scores[1] < 0.82


def test_digits_are_the_same_for_a_seed():
    one, again, other = (mnist_fsdp.draw_digits(1500, seed) for seed in (1, 1, 2))
    assert torch.equal(one.tensors[0], again.tensors[0]) and torch.equal(one.tensors[1], again.tensors[1])
    assert not torch.equal(one.tensors[0], other.tensors[0])
    assert one.tensors[0].shape == (1500, 1, 28, 28) and sorted(set(one.tensors[1].tolist())) == list(range(10))


@pytest.fixture(scope="module")
def compared(small_mnist, tmp_path_factory):
    """A comparison of all networks: what it printed, and its rows."""
    folder = tmp_path_factory.mktemp("compared")
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--num-train-samples=70", "--epochs", 1)
    flags += ("--batch-size", 32, "--num-processes", 2, "--fsdp-version", 1, "--print-model", "--output-dir", folder)
    finished = succeed("mnist_fsdp.py", *flags)
    return finished, {(row["network"], row["mode"], row["processes"]): row for row in records(folder, "loss")}


def test_comparison_of_all_networks(compared):
    """On files, with FSDP1, and the networks printed with their units."""
    finished, rows = compared
    networks = {"layers": 51_451_274, "deep": 94_104_234, "shallow": 1_199_882}
    assert list(rows) == [(name, mode, n) for mode, n in (("local", 1), ("fsdp", 2)) for name in networks]
    assert "70 images to train on, 100 to test" in finished.stdout
    epochs, together = lines_of(finished.stdout)
    assert together == [line for of_network in zip(epochs[:3], epochs[3:], strict=True) for line in of_network]
    for network, size in networks.items():
        assert finished.stdout.count(f"{size:,} parameters") == 2
        for mode, processes in (("local", 1), ("fsdp", 2)):
            state = rows[network, mode, processes]["state_gb"]
            assert state == pytest.approx(16 * size / processes / 2**30, rel=0.02)
    assert finished.stdout.count("(fc1): FullyShardedDataParallel(") == 3


def test_with_equal_layers_the_peak_of_a_process_falls_with_their_number(compared, small_mnist, tmp_path):
    options = ("--model", "layers", "--batch-size", 8, "--num-train-samples", 64, "--epochs", 1)
    options += ("--dataset", "mnist", "--data-dir", small_mnist, "--output-dir", tmp_path)
    succeed("mnist_fsdp.py", *options, processes=4, fork=True)
    [four] = records(tmp_path, "loss")
    assert four["state_gb"] == pytest.approx(16 * 51_451_274 / 4 / 2**30, rel=0.02)
    one, two = (compared[1]["layers", mode, count]["peak_gb"] for mode, count in (("local", 1), ("fsdp", 2)))
    # Half of the state is 0.38 GB, three quarters are 0.58.
    assert one - two > 0.15 and one - four["peak_gb"] > 0.25, (one, two, four)


def test_settings_change_what_is_trained(small_mnist, tmp_path):
    changes = {
        "base": [],
        "seed": ["--seed", 2],
        "lr": ["--lr", 0.01],
        "batch": ["--batch-size", 32],
        "samples": ["--num-train-samples", 130],
        "epochs": ["--epochs", 2, "--print-model"],
        "dataset": ["--dataset", "builtin", "--num-train-samples", 192],
        "units": ["--min-num-params", 100, "--print-model", "--lr", 0.02],
        "deep": ["--dataset", "builtin", "--model", "deep", "--num-train-samples", 64, "--epochs", 2],
    }
    base = ["--dataset", "mnist", "--data-dir", small_mnist, "--model", "shallow", "--epochs", 1, "--batch-size", 64]
    settings = [[*base, *change, "--output-dir", tmp_path / name] for name, change in changes.items()]
    finished = run_many("mnist_fsdp.py", settings, 1)
    rows = {name: records(tmp_path / name, "loss") for name in changes}
    assert len({of_one[-1]["test_loss"] for of_one in rows.values()}) == len(changes)
    # Over drawn digits the deep network makes one epoch, whatever --epochs says.
    assert {name: len(of_one) for name, of_one in rows.items() if len(of_one) > 1} == {"epochs": 2}
    assert finished.stdout.count("FSDPNetwork(") == 2 and finished.stdout.count("FSDPConv2d(1, 32") == 1


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
@pytest.mark.parametrize("network", ["shallow", "deep", "layers", "nested"])
def test_both_versions_make_the_same_units(network, world):
    """For several bounds; with 20,000 those of the notebook."""
    make = Nested if network == "nested" else mnist_fsdp.NETWORKS[network]
    units = {}
    for bound in (20_000, 2_000_000) if network in ("deep", "layers") else (60, 100, 200, 20_000, 2_000_000):
        args, models = argparse.Namespace(min_num_params=bound), []
        for shard in (mnist_fsdp.shard_with_fsdp2, mnist_fsdp.shard_with_fsdp1):
            with torch.device("meta"):  # spares the 94 million random numbers
                model = make()
            models.append(shard(args, world, model.to_empty(device="cpu")))
        kinds = [(FSDPModule, models[0]), (mnist_fsdp.FSDP, models[1])]
        two, one = ([name for name, module in model.named_modules() if isinstance(module, k)] for k, model in kinds)
        clean = {name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".") for name in one}
        units[bound] = set(two)
        assert clean == units[bound]
    assert len(set(map(frozenset, units.values()))) > 1
    wanted = {"shallow": {"", "fc1"}, "deep": {"", "fc1", "fc2.0", "fc2.1", "fc2.2", "fc2.3"}, "nested": {""}}
    wanted["layers"] = {"", "fc1", *(f"fc2.{number}" for number in range(40))}
    assert units[20_000] == wanted[network]


def load_mnist(folder, world):
    return mnist_fsdp.load_digits(argparse.Namespace(dataset="mnist", data_dir=folder, num_train_samples=0), world)


def test_existing_mnist_is_read(small_mnist, world):
    """As the pixels are, in the notebook's scale."""
    for part, (count, seed) in zip(load_mnist(small_mnist, world), ((192, 0), (100, 1)), strict=True):
        images, labels = part[:]
        drawn, wanted = mnist_fsdp.draw_digits(count, seed).tensors
        assert torch.equal(labels, wanted)
        pixels = (images * 0.3081 + 0.1307) * 255
        assert pixels.shape == drawn.shape and (pixels - (drawn.clamp(0, 1) * 255).round()).abs().max() < 0.01


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("left", [0, 1, 12, -5])
def test_broken_files_are_named(name, left, tmp_path, world):
    """Cut off in the header, in the data, or empty."""
    path = write_mnist(tmp_path, 20, 20) / "MNIST" / "raw" / name
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(common.UserError, match=f"MNIST in {tmp_path} cannot be read"):
        load_mnist(tmp_path, world)


def test_bad_input_is_one_sentence(tmp_path, small_mnist):
    """Exit code 2, one line on stderr without a traceback; torchrun adds its own report below.

    Some start as a user's would, the others as forks.
    """
    mnist = ("--dataset", "mnist", "--data-dir")
    (tmp_path / "file").write_text("")
    broken = write_mnist(tmp_path / "broken", 20, 20) / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    broken.write_bytes(b"\0")
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    output = ("--output-dir", tmp_path / "output")
    small = (*mnist, small_mnist, "--batch-size", 16, "--model", "shallow")
    as_users = [
        (("--batch-size", 9999, *output), None, "6400 images are too few for --batch-size 9999 on 1 ranks"),
        ((*mnist, tmp_path / "broken", *output), 2, "MNIST in .*broken cannot be read"),
    ]
    as_forks = [
        (("--lr", "nan"), None, "--lr: nan is not a number of at least 0"),
        (("--batch-size", 9999, *output), 2, "--batch-size 9999 on 2 ranks"),
        (("--batch-size", 0), None, "--batch-size: 0 is not a whole number of at least 1"),
        (("--epoch", 1), None, "unrecognized arguments: --epoch"),
        (("--mode", "local"), 2, "--mode local trains in one process of its own; start it with python"),
        ((*mnist, tmp_path / "absent", *output), 2, "MNIST in .*absent cannot be read, nor downloaded"),
        (("--output-dir", tmp_path / "file"), 2, "cannot be written"),
        (("--lr", 1e30, "--epochs", 1, *small, *output), 2, "the loss is not finite in epoch 1; start"),
        (("--device", "tpu"), 2, "--device tpu: torch .* finds none; install its build or use --device cpu"),
    ]
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(run, "mnist_fsdp.py", *output, RANK="1")
        check_bad_input("mnist_fsdp.py", as_users, as_forks, **offline)
    alone = alone.result()
    assert alone.returncode == 2 and len(alone.stderr.splitlines()) == 1, alone.stderr
    assert "RANK is set without torchrun's other variables" in alone.stderr


SMALL_SCRIPT = """
import argparse, os, signal, sys
sys.path.insert(0, {root!r})
import common

common.HEAD_START = 2  # seconds

def main(args, world):
    common.dist.all_reduce(total := common.torch.ones(1))
    os.write(1, f"together {{int(total)}}\\n".encode())
    if args.fate == "killed" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.fate == f"crash {{world.rank}}":
        raise ZeroDivisionError("a bug")
    common.dist.barrier()

args = argparse.Namespace(device="cpu", num_processes=2, fsdp_version=1, save_model=False, fate=sys.argv[1])
common.run(main, args)
"""


def test_processes_started_by_plain_python_end_together(tmp_path):
    """One that is killed or crashes ends all, promptly, with the cause on stderr."""
    script = tmp_path / "small.py"
    script.write_text(SMALL_SCRIPT.format(root=str(ROOT)))

    fates = {"killed": "SIGKILL", "crash 0": "ZeroDivisionError: a bug", "crash 1": "ZeroDivisionError: a bug"}
    with ThreadPoolExecutor(3) as pool:
        ends = pool.map(lambda fate: run(script, fate, timeout=150), fates)  # the timeout of a collective: 10 minutes
        for (fate, cause), finished in zip(fates.items(), ends, strict=True):
            assert finished.stdout.count("together 2") == 2
            assert finished.returncode == 1 and cause in finished.stderr, (fate, finished.stderr)


@pytest.mark.parametrize("half", ["local", "fsdp"])
def test_ctrl_c_ends_a_run_without_a_traceback(half, small_mnist, tmp_path):
    """In a terminal it reaches all processes: in the first half of the comparison, and in the sharded one."""
    flags = ["--dataset", "mnist", "--data-dir", small_mnist, "--model", "shallow", "--epochs", 100_000]
    flags += ["--batch-size", 32, "--mode", {"local": "both"}.get(half, half), "--output-dir", tmp_path]
    flags += ["--device", "cpu"]
    command = [sys.executable, ROOT / "mnist_fsdp.py", *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        rows = (line for line in process.stdout if line.startswith(f"shallow | {half}"))
        assert next(rows, None) and next(rows, None), process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        rest, errors = process.communicate(timeout=120)
    assert time.monotonic() - began < 60 and process.returncode == 130
    assert "Traceback" not in errors + rest, errors
    assert "side by side" not in rest and {row["mode"] for row in records(tmp_path, "loss")} == {half}
