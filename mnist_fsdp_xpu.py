r"""What do I change to run it on Intel GPUs?

Trains the shallow network of mnist_fsdp.py, sharded over all Intel GPUs of a machine. The comments
that begin with "XPU:" are the answer.

    torchrun --standalone --nproc_per_node 4 mnist_fsdp_xpu.py      # the number of Intel GPUs
    python mnist_fsdp_xpu.py --device cpu                           # a rehearsal without GPUs
    torchrun --nproc_per_node 4 mnist_fsdp_xpu.py --dataset mnist --epochs 10   # Intel's settings
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_id 1 --rdzv_backend c10d \
        --rdzv_endpoint HEAD:29500 mnist_fsdp_xpu.py

XPU: in a fresh environment, first install PyTorch's build for Intel GPUs, then requirements.txt:
    pip install torch torchvision --index-url https://download.pytorch.org/whl/xpu
    pip install -r requirements.txt

Read `main` first. FSDP is in `shard_with_fsdp2` (or its twin `shard_with_fsdp1`) and
`train_one_epoch`. The script has run only as a rehearsal, never on an Intel GPU.

Adadelta, --lr, --global-batch-size, the sum of the losses and --min-num-params 100 are not needs of
XPU, but settings of Intel's page:
https://intel.github.io/intel-extension-for-pytorch/xpu/2.1.10+xpu/tutorials/features/FSDP.html.
docs/from-the-documents.md lists the differences.
"""

import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets
from torchvision.transforms.functional import pil_to_tensor

from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save

import common


@dataclass
class Args:
    # Data
    dataset: Literal["builtin", "mnist"] = "builtin"  # drawn digits, or MNIST
    data_dir: Path = Path("data")  # folder for MNIST

    # Training
    epochs: int = 3  # passes over the images
    global_batch_size: int = 0  # images per step, on all GPUs; 0: 64, rounded up to divide evenly
    test_batch_size: int = 1000  # test images on a GPU at once
    lr: float = 1.0  # learning rate of Adadelta
    gamma: float = 0.7  # factor on the learning rate after each epoch
    seed: int = 1  # for weights, data order and dropout

    # FSDP
    fsdp_version: Literal[2, 1] = 2  # 2: fully_shard; 1: FullyShardedDataParallel (deprecated)
    min_num_params: int = 100  # size of the smallest unit
    device: str = "xpu"  # xpu, or cpu for a rehearsal. XPU: never fall back to the CPU

    # Output
    output_dir: Path = Path("output/mnist_fsdp_xpu")  # use a new folder for each run
    save_model: bool = False  # saving the trained network


# ---- FSDP --------------------------------------------------------------------------------------

# FSDP gathers and frees parameters in groups, called units. Both functions below make the same
# units, from the leaves up: a module with at least --min-num-params parameters that are not in a
# unit yet becomes one. Everything else is in the root unit.


def shard_with_fsdp2(args, world, model: nn.Module) -> nn.Module:
    """Collective: every rank must call it. Shard with `fully_shard`: bottom-up, in place, one
    DTensor per parameter."""
    # XPU: the mesh is on "xpu". FSDP2 moves the model there, without model.to.
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in reversed(list(model.modules())):  # children before parents, the root last
        sizes = [p.numel() for p in module.parameters() if not isinstance(p, DTensor)]
        # Let FSDP1's policy decide here, too. It skips containers such as ModuleList, because their
        # forward is never called.
        is_large = size_based_auto_wrap_policy(module, False, sum(sizes), args.min_num_params)
        if is_large or module is model:
            unit = fully_shard(module, mesh=mesh)
            # XPU: on some machines oneCCL cannot average: sum, then divide.
            unit.set_force_sum_reduction_for_comms(True)
    return model


def shard_with_fsdp1(args, world, model: nn.Module) -> nn.Module:
    """Collective. Shard with `FullyShardedDataParallel`: top-down, one flat parameter per unit."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params)
    return FSDP(
        model,
        auto_wrap_policy=policy,
        # XPU: "xpu:0", "xpu:1", ... Without it the model stays on the CPU, and forward fails.
        device_id=world.device,
        use_orig_params=True,  # parameters() returns the original ones, views of the flat one
        # With a mesh, state dicts hold DTensors, as with FSDP2.
        device_mesh=init_device_mesh(world.device.type, (world.size,)),
    )


def train_one_epoch(world, model, loader, optimizer, epoch: int, log) -> tuple[float, int]:
    """Collective, like every forward of a sharded model. Returns the mean loss over the samples of
    all ranks, and their number."""
    model.train()
    loader.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
    loss_sum = torch.zeros((), device=world.device)
    for images, labels in log.bar(loader, f"epoch {epoch}", len(loader)):
        images = images.to(world.device, non_blocking=True)
        labels = labels.to(world.device, non_blocking=True)

        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels, reduction="sum")
        # Use the sum, as Intel's page does: Adadelta learns faster from it than from the mean. FSDP
        # averages over ranks. Undo that, for the sum over the images of all ranks.
        (loss * world.size).backward()
        optimizer.step()
        loss_sum += loss.detach()  # stays on the device: .item() would make the host wait

    num_samples = len(loader) * loader.batch_size * world.size
    return common.sum_over_ranks(loss_sum) / num_samples, num_samples


# ---- Model and data ----------------------------------------------------------------------------


class Network(nn.Module):
    """Maps images (batch, 1, 28, 28) to log-probabilities (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def draw_digits(count: int, seed: int) -> TensorDataset:
    """Draw `count` digits in Pillow's own font, then move, scale and shear them, and add noise.
    Returns images and labels."""
    font = ImageFont.load_default(size=26)
    glyphs = []
    for digit in "0123456789":
        picture = Image.new("L", (28, 28))
        ImageDraw.Draw(picture).text((14, 14), digit, fill=255, font=font, anchor="mm")
        glyphs.append(pil_to_tensor(picture) / 255)

    torch.manual_seed(seed)
    labels = torch.randint(10, (count,))
    change = torch.empty(count, 2, 3).uniform_(-0.25, 0.25) + 1.2 * torch.eye(2, 3)
    grid = F.affine_grid(change, [count, 1, 28, 28], align_corners=False)
    images = F.grid_sample(torch.stack(glyphs)[labels], grid, align_corners=False)
    return TensorDataset(images + 0.1 * torch.randn_like(images), labels)


def load_digits(args, world) -> tuple[TensorDataset, TensorDataset]:
    """Collective. Return images and labels to train on and to test on: drawn ones, or those of
    MNIST, which one process per node downloads."""
    if args.dataset == "builtin":
        return draw_digits(6400, 2 * args.seed), draw_digits(1000, 2 * args.seed + 1)

    normalized = []
    for is_train in (True, False):
        read = functools.partial(datasets.MNIST, args.data_dir, is_train, download=True)
        digits = common.first_on_node(world, read)
        images = (digits.data[:, None] / 255 - 0.1307) / 0.3081
        normalized.append(TensorDataset(images, digits.targets))
    return tuple(normalized)


def make_loader(args, world, dataset) -> DataLoader:
    """Return a loader of this rank's part of each batch. The ranks divide the order that a single
    process would follow, so a step has the same images on any number of processes."""
    common.check(
        len(dataset) >= args.global_batch_size,
        f"{len(dataset)} images are fewer than --global-batch-size {args.global_batch_size}",
    )
    sampler = DistributedSampler(dataset, world.size, world.rank, seed=args.seed, drop_last=True)
    return DataLoader(
        dataset,
        args.global_batch_size // world.size,
        sampler=sampler,
        drop_last=True,
        pin_memory=world.device.type != "cpu",
    )


@torch.no_grad()
def evaluate(args, world, model, dataset) -> tuple[float, float]:
    """Collective. Return mean loss and accuracy over all images."""
    images, labels = dataset.tensors
    count = len(labels)
    # Every rank must take part in every forward. So repeat the first images at the end. Labels of
    # -100 exclude these: nll_loss ignores them, and no prediction equals them.
    padded = math.ceil(count / world.size) * world.size
    model.eval()
    totals = torch.zeros(2, device=world.device)
    for part in torch.arange(world.rank, padded, world.size).split(args.test_batch_size):
        outputs = model(images[part % count].to(world.device))
        targets = torch.where(part < count, labels[part % count], -100).to(world.device)
        totals[0] += F.nll_loss(outputs, targets, reduction="sum")
        totals[1] += (outputs.argmax(dim=1) == targets).sum()
    loss_sum, correct = common.sum_over_ranks(totals)
    return loss_sum / count, correct / count


# ---- Main --------------------------------------------------------------------------------------


def main(args, world):
    # XPU: `common.setup` has set the device, as torch.xpu.set_device does. Its backend is "xccl",
    # which replaces "ccl".
    log = common.Log(world, args.output_dir)
    train_set, test_set = load_digits(args, world)
    common.divide_batch(args, world, default=64)
    loader = make_loader(args, world, train_set)
    log.print(
        f"data     {args.dataset}, {len(train_set):,} images to train on, {len(test_set):,} to test"
    )

    torch.manual_seed(args.seed)  # the same on all ranks: they shard the same weights
    model = Network()
    log.print(f"model    {common.describe_state(model, world.size)}")
    if args.fsdp_version == 2:
        model = shard_with_fsdp2(args, world, model)
    else:
        model = shard_with_fsdp1(args, world, model)
    log.print(str(model))  # with its units
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)  # of the shards
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    torch.manual_seed(args.seed + 1 + world.rank)  # each rank draws its own dropout

    # XPU: measure time with the device's own clock.
    if world.device.type == "xpu":
        first_event = torch.xpu.Event(enable_timing=True)
        last_event = torch.xpu.Event(enable_timing=True)
        first_event.record()

    for epoch in range(1, args.epochs + 1):
        common.reset_peak(world.device)
        start = time.perf_counter()
        loss, num_samples = train_one_epoch(world, model, loader, optimizer, epoch, log)
        speed = num_samples / (time.perf_counter() - start)
        memory = {
            "peak_gib": common.peak_gib(world.device),
            "state_gib": common.state_gib(model, optimizer),
        }
        test_loss, accuracy = evaluate(args, world, model, test_set)
        record = {
            "epoch": epoch,
            "loss": loss,
            "test_loss": test_loss,
            "accuracy": accuracy,
            "samples/s": speed,
        }
        log.metrics(record)
        scheduler.step()
    log.metrics(memory)

    # XPU: an event has no time until the device has reached it.
    if world.device.type == "xpu":
        last_event.record()
        torch.xpu.synchronize()
        log.print(f"elapsed  {first_event.elapsed_time(last_event) / 1000:.2f} s by XPU events")

    if args.save_model:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)  # a collective; full on rank 0
        if world.rank == 0:
            (args.output_dir / "model.safetensors").write_bytes(save(weights))
    log.print(f"metrics  {log.path}")


if __name__ == "__main__":
    common.run(main, common.parse_args(Args, __doc__))
