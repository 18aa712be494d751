"""What do I change to run it on Intel GPUs?

The shallow network of mnist_fsdp.py, sharded over all Intel GPUs of a machine with FSDP2 (`fully_shard`) or FSDP1
(`FullyShardedDataParallel`). Read it beside the other script: in `diff mnist_fsdp.py mnist_fsdp_xpu.py` the lines with
"XPU:" are the answer; the other differences are what the document trains: one network, Adadelta, nothing to compare.

    python mnist_fsdp_xpu.py                                    # one process per Intel GPU
    python mnist_fsdp_xpu.py --device cpu --num-processes 2     # a rehearsal without one: the same but for the device
    torchrun --nproc_per_node 4 mnist_fsdp_xpu.py --dataset mnist --save-model
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 mnist_fsdp_xpu.py

Follows "Fully Sharded Data Parallel (FSDP)" of Intel Extension for PyTorch: Adadelta, a unit for every 100 parameters,
time from the device's own events. Where it departs: PyTorch's XPU build comes first, as Intel's extension has reached
its end of life; the wrap policy is passed (the document builds it and forgets it), every process is seeded (the
document seeds the one that starts them), and one process downloads. It has not run on an Intel GPU, only as rehearsal.
"""

import argparse
import functools
import gzip
import importlib.util
import math
import os
import shutil
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torchvision import datasets, transforms
from torchvision.transforms.functional import pil_to_tensor

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import common
from common import World

# XPU: who provides the device "xpu" and its collectives. PyTorch's XPU build does since 2.8;
# before that two packages of Intel did: they are imported after torch and in this order, and never named again.
if dist.is_xccl_available():
    STACK, BACKEND = "PyTorch's own", "xccl"
elif all(map(importlib.util.find_spec, ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"))):
    import intel_extension_for_pytorch  # noqa: F401  the device
    import oneccl_bindings_for_pytorch  # noqa: F401  the collectives

    STACK, BACKEND = "Intel Extension for PyTorch and oneCCL Bindings", "ccl"
else:
    STACK, BACKEND = "none", None

# What the bare command changes so that it ends after a minute on two cores: (its own value, the document's).
DEFAULTS = {
    "epochs": (3, 10),
    "num_train_samples": (6400, 0),
    "num_workers": (0, 2),  # the images are in memory already, and workers would take cores from the network
}

# FSDP1 on one process says that there is nothing to shard; the first lines of the output say so too.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")

# Mean and standard deviation of MNIST's pixels.
NORMALIZE = transforms.Normalize((0.1307,), (0.3081,))


def parse_args() -> argparse.Namespace:
    parser = common.ArgumentParser(description="Train on digits with FSDP on Intel GPUs.")
    count, size, number = common.non_negative_int, common.positive_int, common.positive_float
    flag, add = argparse.BooleanOptionalAction, parser.add
    under_torchrun = "RANK" in os.environ

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
    add("--batch-size", "images per process and step", 64, type=size)
    add("--test-batch-size", "images per process and step in the test", 1000, type=size)
    add("--lr", "learning rate of Adadelta", 1.0, type=number)
    add("--gamma", "factor on the learning rate after each epoch", 0.7, type=number)
    add("--seed", "of weights, data order and dropout", 1, type=count)

    add("--fsdp-version", "2: fully_shard; 1: FullyShardedDataParallel", 2, type=int, choices=(1, 2))
    add("--min-num-params", "a module with this many parameters becomes a unit", 100, type=size)
    add("--print-model", "print the wrapped model once", True, action=flag)
    add("--device", "cpu is a rehearsal", "xpu", choices=("xpu", "cpu"))
    add("--num-workers", "processes that load data, per training process", DEFAULTS["num_workers"], type=count)

    add("--save-model", "save the trained network as a safetensors file", False, action=flag)
    add("--output-dir", "for metrics and models", Path("output/mnist_fsdp_xpu"), type=Path)

    args = parser.parse_args()
    common.settle(args, DEFAULTS, args.dataset == "builtin")
    if under_torchrun and args.num_processes:
        parser.error("--num-processes is for a start with python; under torchrun --nproc_per_node sets it")
    # XPU: no silent fallback to the CPU.
    if args.device == "xpu" and not (BACKEND and torch.xpu.is_available()):
        parser.error(
            f"torch {torch.__version__} finds no Intel GPU; install Intel's GPU driver and PyTorch's XPU build (pip "
            "install torch torchvision --index-url https://download.pytorch.org/whl/xpu), or rehearse on the CPU with: "
            "python mnist_fsdp_xpu.py --device cpu --num-processes 2"
        )
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
    fully_shard(model, mesh=mesh)
    # XPU: Intel's oneCCL has no averaging reduction, which FSDP2 uses unless told not to.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


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


def train_network(args, world, metrics, train_loader, test_loader) -> None:
    """Build, shard, train and test the network, and report what it took. A collective."""
    # ---- Model, shards, optimizer: the order of these lines matters
    torch.manual_seed(args.seed)  # one seed on every rank: each keeps its shard of the same weights
    model = ShallowNet()
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    model = (shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1)(model, mesh, args.min_num_params)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)  # after sharding: it must see the shards
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank
    if args.print_model:
        metrics.say(str(model))

    # ---- Epochs
    on_xpu = world.device.type == "xpu"
    began = time.perf_counter()
    if on_xpu:  # XPU: time from the device's own clock
        start, end = (torch.xpu.Event(enable_timing=True) for _ in range(2))
        start.record()
    samples = len(train_loader) * args.batch_size * world.world_size
    for epoch in range(1, args.epochs + 1):
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
        report = {"epoch": epoch, "train_loss": train_loss, **tested, **speed, **memory}
        metrics.report("epoch", **report)
        scheduler.step()

    # ---- Result
    elapsed = time.perf_counter() - began
    if on_xpu:
        end.record()
        torch.xpu.synchronize()  # an event has no time before the device has come to it
        elapsed = start.elapsed_time(end) / 1000
    metrics.write("result", run_date=args.run_date, processes=world.world_size, elapsed_seconds=elapsed, **report)
    metrics.say(f"elapsed    {elapsed:.2f} s by {'XPU events' if on_xpu else 'the clock of the CPU'}")
    if args.save_model:
        path = args.output_dir / f"mnist-shallow-fsdp-{args.run_date}.safetensors"
        common.save_weights(world, model, path)
        metrics.say(f"saved      {path}")


# ---- Main ------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, world: World) -> None:
    common.first_process_first(world, lambda: common.prepare_output_dir(world, args.output_dir))
    metrics = common.Metrics(world, args.output_dir)
    train_set, test_set = common.first_process_first(world, lambda: load_digits(args, args.num_train_samples))
    test_loader = make_loader(test_set, args.test_batch_size, False, args, world)
    train_loader = make_loader(train_set, args.batch_size, True, args, world)
    metrics.start_block(
        args,
        world,
        script=f"mnist_fsdp_xpu.py, {args.run_date}, torch {torch.__version__}",
        stack=STACK if args.device == "xpu" else "a rehearsal on the CPU; on Intel GPUs here: " + STACK,
        fsdp=f"version {args.fsdp_version}, FULL_SHARD, a unit for every {args.min_num_params:,} parameters or more",
        data=f"{args.dataset}, {len(train_set):,} images to train on, {len(test_set):,} to test",
        training=f"{args.epochs} epochs, batch {args.batch_size} per process, Adadelta with lr {args.lr}, gamma "
        f"{args.gamma}, fp32",
        settings=common.departures(args, DEFAULTS, "the document's"),
    )
    train_network(args, world, metrics, train_loader, test_loader)
    metrics.say(f"metrics    {metrics.path}")


if __name__ == "__main__":
    args = parse_args()
    rehearsal = args.device == "cpu"  # XPU: else one process per GPU, and the backend of its stack
    processes = args.num_processes or (2 if rehearsal else torch.xpu.device_count())
    common.launch(main, args, processes, None if rehearsal else BACKEND)
