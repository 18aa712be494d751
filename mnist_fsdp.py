"""What does FSDP change?

Trains a shallow and a deep network on handwritten digits, first locally (one process, no FSDP), then sharded over
processes with FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`), and puts speed and memory side by side.
Without flags it needs no download: it draws its own digits.

    python mnist_fsdp.py                                        # the whole comparison; a laptop is enough
    python mnist_fsdp.py --dataset mnist --save-model           # on MNIST, downloaded once into data/
    torchrun --nproc_per_node 8 mnist_fsdp.py --model deep      # the sharded half only
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 mnist_fsdp.py

The first command prints, on 2 cores of an AMD EPYC with torch 2.15.0 in 80 seconds (some columns left out):

    | network |  mode | processes | test accuracy | samples per second | peak memory gb | parameters |   state bytes |
    | shallow | local |         1 |        0.9970 |            1,717.2 |         0.8787 |  1,199,882 |    19,198,144 |
    |    deep | local |         1 |        0.2160 |              155.0 |         2.2828 | 94,104,234 | 1,505,667,808 |
    | shallow |  fsdp |         2 |        0.9960 |            1,929.7 |         0.9160 |    599,941 |     9,599,088 |
    |    deep |  fsdp |         2 |        0.1820 |               68.2 |         2.2784 | 47,052,117 |   752,833,936 |

Follows the notebook "Local training vs. FSDP" (a shallow network of 1,199,882 parameters and a deep one of 94,104,234).
Where it departs: losses are means over real samples and every test image counts once (the notebook drops incomplete
batches and counts padding), both halves see the data in the same shuffled order, memory is the peak of training (the
notebook reads it once, before backward), and FSDP2 is the default because FSDP1 is deprecated.
"""

import argparse
import functools
import gzip
import json
import math
import os
import shutil
import statistics
import textwrap
import time
import warnings
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torchvision import datasets, transforms
from torchvision.transforms.functional import pil_to_tensor

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import common
from common import World

# What the bare command changes so that it ends after two minutes on two cores: (its own value, the notebook's).
DEFAULTS = {
    "epochs": ("few", 10),  # few: each network has its own, in NETWORKS
    "num_train_samples": ("few", 0),
    "batch_size": (128, 256),
    "num_workers": (0, 2),  # the images are in memory already, and workers would take cores from the network
}

# FSDP1 on one process says that there is nothing to shard; the first lines of the output say so too.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")

# Mean and standard deviation of MNIST's pixels.
NORMALIZE = transforms.Normalize((0.1307,), (0.3081,))


def parse_args() -> argparse.Namespace:
    parser = common.ArgumentParser(description="Compare local training with FSDP on digits.")
    count, size, number = common.non_negative_int, common.positive_int, common.positive_float
    flag, add = argparse.BooleanOptionalAction, parser.add
    under_torchrun = "RANK" in os.environ

    add("--model", "which network to train; both: all of NETWORKS", "both", choices=(*NETWORKS, "both"))
    mode = "fsdp" if under_torchrun else "both"
    text = "local: one process without FSDP; fsdp: sharded; both: one after the other; under torchrun only fsdp"
    add("--mode", text, mode, choices=("local", "fsdp", "both"))
    add("--num-processes", "without torchrun, 0 for one per GPU or 2 on a CPU", 0, type=count)
    add(
        "--dataset",
        "builtin: drawn digits; mnist: from --data-dir, downloaded if missing",
        "builtin",
        choices=("builtin", "mnist"),
    )
    add("--data-dir", "where MNIST is, or is downloaded to", Path("data"), type=Path)
    add("--num-train-samples", "images to train on, 0 for all", DEFAULTS["num_train_samples"], type=count)

    add("--epochs", "passes over the training images", DEFAULTS["epochs"], type=size)
    add("--batch-size", "images per process and step", DEFAULTS["batch_size"], type=size)
    add("--test-batch-size", "images per process and step in the test", 1000, type=size)
    add("--lr", "learning rate of Adam", 0.001, type=number)
    add("--seed", "of weights, data order and dropout", 1, type=count)

    add("--fsdp-version", "2: fully_shard; 1: FullyShardedDataParallel", 2, type=int, choices=(1, 2))
    add("--min-num-params", "a module with this many parameters becomes a unit", 20_000, type=size)
    add("--print-model", "print the wrapped model once", False, action=flag)
    add("--device", "where to train", "auto", choices=("auto", "cpu", "cuda", "xpu", "mps"))
    add("--num-workers", "processes that load data, per training process", DEFAULTS["num_workers"], type=count)

    add("--save-model", "save the trained networks as safetensors files", False, action=flag)
    add("--output-dir", "for metrics and models", Path("output/mnist_fsdp"), type=Path)

    args = parser.parse_args()
    common.settle(args, DEFAULTS, args.dataset == "builtin")
    if under_torchrun and args.num_processes:
        parser.error("--num-processes is for a start with python; under torchrun --nproc_per_node sets it")
    if under_torchrun and args.mode != "fsdp":
        parser.error(f"--mode {args.mode} trains in one process of its own; start it with python, not with torchrun")
    if args.mode == "local" and args.num_processes > 1:
        parser.error("--num-processes is for FSDP: --mode local trains in one process")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if args.device == "xpu" or (args.device == "auto" and accelerator and accelerator.type == "xpu"):
        parser.error("Intel GPUs need a few changes, which mnist_fsdp_xpu.py has; start that, or add --device cpu")
    default = torch.cuda.device_count() if torch.cuda.is_available() and args.device != "cpu" else 2
    started = int(os.environ.get("WORLD_SIZE", 0))  # by torchrun
    args.fsdp_processes = 1 if args.mode == "local" else started or args.num_processes or default
    args.run_date = common.date_of_run()
    return args


# ---- Model -----------------------------------------------------------------------------------------------------


class ShallowNet(nn.Module):
    """1,199,882 parameters; images (batch, 1, 28, 28) to log-probabilities (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


class DeepNet(nn.Module):
    """94,104,234 parameters, input and output alike. As in the notebook, no activation between the middle layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 9000)
        self.fc1a = nn.Linear(9000, 1000)
        self.fc1b = nn.Linear(1000, 1000)
        self.fc1c = nn.Linear(1000, 1000)
        self.fc1d = nn.Linear(1000, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        x = self.fc1a(self.dropout2(x))
        x = self.fc1b(x)
        x = self.fc1c(x)
        x = self.fc1d(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


# Network: (its class, epochs and images to train on with the built-in digits).
NETWORKS = {
    "shallow": (ShallowNet, 3, 6400),
    "deep": (DeepNet, 1, 1280),  # enough to measure it, too few to teach it much
}


# ---- Data ------------------------------------------------------------------------------------------------------


def draw_digits(count: int, seed: int) -> TensorDataset:
    """`count` digits in Pillow's own font, each placed, scaled, sheared and noised at random, as MNIST's are stored.

    Returns:
        Images (count, 1, 28, 28), normalized, and labels (count,). The same for a seed and a version of Pillow.
    """
    glyphs = []
    for digit in "0123456789":
        picture = Image.new("L", (28, 28))
        ImageDraw.Draw(picture).text((14, 14), digit, fill=255, font=ImageFont.load_default(size=26), anchor="mm")
        glyphs.append(pil_to_tensor(picture) / 255)
    glyphs = torch.stack(glyphs)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = []
    for part in labels.split(1000):
        move = torch.empty(len(part), 2).uniform_(-0.25, 0.25, generator=generator)  # of half the picture's width
        scale = torch.empty(len(part), 1).uniform_(0.7, 1.0, generator=generator)
        shear = torch.empty(len(part), 1).uniform_(-0.3, 0.3, generator=generator)
        rows = torch.cat(
            [1 / scale, shear / scale, move[:, :1], torch.zeros_like(scale), 1 / scale, move[:, 1:]], dim=1
        )
        grid = F.affine_grid(rows.view(-1, 2, 3), [len(part), 1, 28, 28], align_corners=False)
        drawn = F.grid_sample(glyphs[part], grid, align_corners=False)
        noise = 0.1 * torch.randn(drawn.shape, generator=generator)
        images.append(NORMALIZE((drawn + noise).clamp(0, 1)))
    return TensorDataset(torch.cat(images), labels)


def mnist_folder(data_dir: Path) -> Path:
    """The folder with MNIST's files: `data_dir` itself, or the one below it where torchvision puts them."""
    return data_dir if list(data_dir.glob("*-idx?-ubyte*")) else data_dir / "MNIST" / "raw"


class MNIST(datasets.MNIST):
    """torchvision's MNIST, read from either folder."""

    @property
    def raw_folder(self) -> str:
        return str(mnist_folder(Path(self.root)))


def load_mnist(data_dir: Path) -> tuple[Dataset, Dataset]:
    """MNIST's training and test images, downloaded to `data_dir` where they are not there.

    Raises:
        common.UserError: the files are broken, or missing and cannot be downloaded.
    """
    raw = mnist_folder(data_dir)
    missing = []
    for name, _ in MNIST.resources:
        zipped, file = raw / name, raw / name.removesuffix(".gz")
        if zipped.exists() and not file.exists():  # torchvision unpacks only what it has downloaded itself
            partial = file.with_suffix(".partial")
            try:
                with gzip.open(zipped) as source, open(partial, "wb") as target:
                    shutil.copyfileobj(source, target)
                partial.rename(file)
            except (OSError, EOFError) as error:
                partial.unlink(missing_ok=True)
                raise common.UserError(f"{zipped} could not be unpacked ({error})") from error
        missing += [] if file.exists() else [file.name]
    if missing:
        try:
            MNIST(data_dir, download=True)
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise common.UserError(
                f"{raw} holds no {missing[0]} and it could not be downloaded ({reason}); check the network and "
                "--data-dir, or use --dataset builtin"
            ) from error
    transform = transforms.Compose([transforms.ToTensor(), NORMALIZE])
    loaded = []
    for train in (True, False):
        name = "training" if train else "test"
        try:
            dataset = MNIST(data_dir, train=train, transform=transform)
        except Exception as error:  # torchvision's reader fails with whatever a broken file leads it to
            raise common.UserError(f"MNIST's {name} files in {raw} are broken ({error!r}); delete them") from error
        images, labels = dataset.data, dataset.targets
        if len(images) != len(labels) or images.shape[1:] != (28, 28) or len(labels) == 0 or labels.max() > 9:
            raise common.UserError(
                f"the {name} files in {raw} hold images {tuple(images.shape)} and labels {tuple(labels.shape)}, but it "
                "takes as many labels of 0 to 9 as images of 28 x 28; delete the files, or choose another --data-dir"
            )
        loaded.append(dataset)
    return tuple(loaded)


def load_digits(args: argparse.Namespace, count: int) -> tuple[Dataset, Dataset]:
    """The first `count` training images, 0 for all, and the test images."""
    if args.dataset == "builtin":
        return draw_digits(count or 60_000, 2 * args.seed), draw_digits(2000, 2 * args.seed + 1)
    train_set, test_set = load_mnist(args.data_dir)
    return Subset(train_set, range(len(train_set))[: count or None]), test_set


def make_loader(dataset: Dataset, batch_size: int, train: bool, args: argparse.Namespace, world: World) -> DataLoader:
    """This rank's batches; together the ranks see in each step the samples that one process would see.

    In training an incomplete last step is left out; which samples that are changes with every epoch.

    Raises:
        common.UserError: there are too few images for one step.
    """
    sampler = DistributedSampler(dataset, world.world_size, world.rank, shuffle=train, seed=args.seed, drop_last=train)
    if train and len(sampler) < batch_size:
        raise common.UserError(
            f"{len(dataset):,} training images are too few for a batch of {batch_size} in each of {world.world_size} "
            "processes; lower --batch-size or raise --num-train-samples"
        )
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        drop_last=train,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,  # else they are started again for every epoch
        pin_memory=world.device.type != "cpu",
    )


# ---- FSDP ------------------------------------------------------------------------------------------------------

# Two translations of one plan: from the leaves up, a module becomes a unit when its parameters that are in no unit yet
# reach the bound; what remains is the root unit. A unit's parameters are gathered just before it computes.


def shard_with_fsdp2(model: nn.Module, mesh: DeviceMesh, min_num_params: int) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""

    def shard_units(module: nn.Module) -> int:
        """Shard the units in `module`; returns how many of its parameters are in none of them."""
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left += sum(shard_units(child) for child in module.children())
        # FSDP1's policy decides here too: it also knows that nobody calls a ModuleList's forward.
        if size_based_auto_wrap_policy(module, recurse=False, nonwrapped_numel=left, min_num_params=min_num_params):
            fully_shard(module, mesh=mesh)
            return 0
        return left

    for child in model.children():  # not from the model itself: the root is a unit whatever is left for it
        shard_units(child)
    return fully_shard(model, mesh=mesh)


def shard_with_fsdp1(model: nn.Module, mesh: DeviceMesh, min_num_params: int) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: the policy wraps, one flat parameter per unit."""
    on_cpu = mesh.device_type == "cpu"
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params),
        # Units move to the device one by one as they are wrapped; on a CPU it must be named too.
        device_id=torch.device("cpu") if on_cpu else torch.accelerator.current_device_index(),
        use_orig_params=True,  # parameters keep their names and shapes
        device_mesh=mesh,  # state dicts then hold DTensors, as in FSDP2
    )


# ---- Training --------------------------------------------------------------------------------------------------


def train_one_epoch(world: World, model: nn.Module, loader: DataLoader, optimizer, epoch: int) -> tuple[float, float]:
    """Train on one epoch; returns the mean loss over the samples of all ranks, and the seconds. A collective."""
    model.train()
    loader.sampler.set_epoch(epoch)  # without it every epoch has the order of the first
    loss_sum = torch.zeros(1, device=world.device)
    bar = tqdm(loader, desc=f"epoch {epoch}", leave=False, disable=True if world.rank else None)
    began = time.perf_counter()
    for images, labels in bar:
        images, labels = images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
        optimizer.zero_grad()
        # A mean: FSDP averages gradients over ranks, and the mean of means over equal batches is that of the whole.
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()  # stays on the device: .item() would make the host wait in every step
    mean = common.sum_over_ranks(loss_sum)[0] / len(loader) / world.world_size
    if not math.isfinite(mean):
        raise common.UserError(f"the loss is not finite in epoch {epoch}; start again with a lower --lr")
    return mean, time.perf_counter() - began


@torch.no_grad()
def evaluate(world: World, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Mean loss and number of correct answers over the whole test set. A collective."""
    model.eval()
    totals = torch.zeros(2, device=world.device)
    first = world.rank
    for images, labels in loader:
        images, labels = images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
        outputs = model(images)
        # Every rank must take part in every forward pass, so the sampler repeats samples until all have as many. The
        # repeated ones are those past the end, and do not count.
        positions = first + world.world_size * torch.arange(len(labels), device=world.device)
        real = positions < len(loader.dataset)
        losses = F.nll_loss(outputs, labels, reduction="none")
        totals += torch.stack([(losses * real).sum(), ((outputs.argmax(dim=1) == labels) & real).sum()])
        first += world.world_size * len(labels)
    loss_sum, correct = common.sum_over_ranks(totals)
    return loss_sum / len(loader.dataset), round(correct)


def train_network(args, world, metrics, network, epochs, train_loader, test_loader) -> None:
    """Build, shard (in `--mode fsdp`), train and test one network, and report what it took. A collective."""
    # ---- Model, shards, optimizer: the order of these lines matters
    torch.manual_seed(args.seed)  # one seed on every rank: each keeps its shard of the same weights
    model = NETWORKS[network][0]()
    if args.mode == "local":
        model.to(world.device)
    else:
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        model = (shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1)(model, mesh, args.min_num_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)  # after sharding: it must see the shards
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank
    if args.print_model:
        metrics.say(str(model))

    # ---- Epochs
    all_seconds = []
    whose = {"run_date": args.run_date, "device": world.device.type, "network": network, "mode": args.mode}
    whose["processes"] = world.world_size
    samples = len(train_loader) * args.batch_size * world.world_size
    for epoch in range(1, epochs + 1):
        common.reset_peak_memory(world.device)
        train_loss, seconds = train_one_epoch(world, model, train_loader, optimizer, epoch)
        memory = {"peak_memory_gb": common.format_gb(common.peak_memory_bytes(world.device))}
        # Before the test: after a forward pass FSDP2 keeps the root unit gathered, as backward would begin with it.
        state = common.state_bytes(model, optimizer)
        memory["parameters"] = state["parameter_bytes"] // 4  # fp32
        memory["state_bytes"] = sum(state.values())
        test_loss, correct = evaluate(world, model, test_loader)
        tested = {"test_loss": test_loss, "test_correct": correct, "test_accuracy": correct / len(test_loader.dataset)}
        speed = {"seconds": seconds, "samples_per_second": samples / seconds}
        all_seconds.append(seconds)
        metrics.report("epoch", whose | memory, epoch=epoch, train_loss=train_loss, **tested, **speed)

    # ---- Result
    seconds = statistics.median(all_seconds)
    speed = {"seconds_per_epoch": seconds, "samples_per_second": samples / seconds}
    losses = {"train_loss": train_loss, **tested}
    metrics.write("result", **whose, steps_per_epoch=len(train_loader), **losses, **speed, **memory)
    if args.save_model:
        path = args.output_dir / f"mnist-{network}-{args.mode}-{args.run_date}.safetensors"
        common.save_weights(world, model, path)
        metrics.say(f"saved      {path}")


# ---- Main ------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, world: World) -> None:
    common.first_process_first(world, lambda: common.prepare_output_dir(world, args.output_dir))
    metrics = common.Metrics(world, args.output_dir)
    plan = {}
    for network in NETWORKS if args.model == "both" else [args.model]:
        _, epochs, count = NETWORKS[network]
        epochs = epochs if args.epochs == "few" else args.epochs
        plan[network] = epochs, count if args.num_train_samples == "few" else args.num_train_samples
    count = max(count for _, count in plan.values())  # deep's images are the first of shallow's
    train_set, test_set = common.first_process_first(world, lambda: load_digits(args, count))
    test_loader = make_loader(test_set, args.test_batch_size, False, args, world)
    fsdp = f"version {args.fsdp_version}, FULL_SHARD, a unit for every {args.min_num_params:,} parameters or more"
    metrics.start_block(
        args,
        world,
        script=f"mnist_fsdp.py --mode {args.mode}, {args.run_date}, torch {torch.__version__}",
        fsdp=fsdp if args.mode == "fsdp" else "none, one process holds the whole network",
        data=f"{args.dataset}, {len(test_set):,} images to test",
        training=f"batch {args.batch_size} per process, Adam with lr {args.lr}, fp32",
        settings=common.departures(args, DEFAULTS, "the notebook's"),
    )
    parts = {name: Subset(train_set, range(len(train_set))[: count or None]) for name, (_, count) in plan.items()}
    for part in parts.values():  # too few images for the sharded half: say so before the local half, not after it
        make_loader(part, args.batch_size, True, args, world._replace(rank=0, world_size=args.fsdp_processes))
    for network, (epochs, _) in plan.items():
        train_loader = make_loader(parts[network], args.batch_size, True, args, world)
        metrics.say(
            f"{network:<10} epochs: {epochs}, images: {len(parts[network]):,}, steps per epoch: {len(train_loader):,}"
        )
        train_network(args, world, metrics, network, epochs, train_loader, test_loader)
    metrics.say("")


def compare(results: list[dict]) -> None:
    """Print one table and, for a network that was trained both ways, what its numbers say."""
    hidden = ("report", "run_date", "device", "steps_per_epoch", "test_correct")  # to keep the table on a screen
    shown = [{name: value for name, value in result.items() if name not in hidden} for result in results]
    print(common.format_table(shown))
    print(
        "Of the last epoch, time the median epoch's, all without the test. Parameters, memory and state (parameters,\n"
        "gradients and Adam's moments) are what one process holds; GB are 2**30 bytes."
    )
    for network in NETWORKS:
        modes = {row["mode"]: row for row in results if row["network"] == network}
        if len(modes) < 2:
            continue
        local, fsdp = modes["local"], modes["fsdp"]
        count, on_cpu = fsdp["processes"], fsdp["device"] == "cpu"
        state, peak = (f"{fsdp[name] / local[name]:.0%}" for name in ("state_bytes", "peak_memory_gb"))
        speed = fsdp["samples_per_second"] / local["samples_per_second"]
        if count == 1:
            why = "one process shares with nobody, so this is what FSDP's own work costs"
        elif on_cpu and speed < 1:
            why = "the processes share the cores that local training had alone, and communication comes on top"
        elif on_cpu:
            why = f"no cores were added; the optimizer makes 1/{count} of the steps, and beyond a few percent it is "
            why += "the noise of a short run, or other work took the machine during one half: measure again"
        elif speed < 1:
            why = f"{count} devices compute, but a step is too short to hide the communication between them"
        else:
            why = f"{count} devices compute, and communication keeps it from being {count} times"
        weights = [parameter.numel() for parameter in NETWORKS[network][0]().parameters()]
        sentences = {
            "memory": f"each process holds {state} of the state and peaks at {peak} of the memory of local training: "
            f"activations are not sharded, and the largest layer, {max(weights) / sum(weights):.0%} of the network, is "
            "whole in every process while it computes",
            "time": f"FSDP trains {speed:.2f} times as many samples per second: {why}",
            "loss": "FSDP's step takes a batch of every process, so an epoch has "
            f"{fsdp['steps_per_epoch']:,} steps and not {local['steps_per_epoch']:,}: --batch-size divided by {count} "
            "gives it the steps of local training",
        }
        print()
        for subject, sentence in sentences.items():
            print(textwrap.fill(f"{network}, {subject}: {sentence}.", 118))


if __name__ == "__main__":
    args = parse_args()
    for mode in ("local", "fsdp") if args.mode == "both" else (args.mode,):
        args.mode = mode
        # New processes for each half: each has its own peak of memory.
        common.launch(main, args, 1 if mode == "local" else args.fsdp_processes)
    if os.environ.get("RANK", "0") == "0":
        path = args.output_dir / "metrics.jsonl"
        reports = map(json.loads, path.read_text().splitlines())
        compare([r for r in reports if r["report"] == "result" and r["run_date"] == args.run_date])
        print(f"\nmetrics    {path}")
