r"""What does FSDP change?

Trains three networks on drawn digits. Run it twice: without torchrun it trains locally, in one
process; with torchrun, sharded with FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`).
The second run ends with the results of both, side by side.

    python mnist_fsdp.py                                          # local
    torchrun --standalone --nproc_per_node 2 mnist_fsdp.py        # sharded; a laptop is enough
    torchrun --nproc_per_node 8 mnist_fsdp.py --model shallow deep --dataset mnist --epochs 10 \
        --global-batch-size 256                                   # the notebook's settings
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d \
        --rdzv_endpoint HEAD:29500 mnist_fsdp.py

Read `main` first. FSDP is in `shard_with_fsdp2` (or its twin `shard_with_fsdp1`) and
`train_one_epoch`. Batch sizes count all processes.

Follows the notebook fsdp_tutorial.ipynb of https://github.com/AllenInstitute/distributed-vae.
docs/from-the-documents.md lists the differences.
"""

import ctypes
import functools
import gc
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages: faster in virtual machines

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets
from torchvision.transforms.functional import pil_to_tensor

from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save

import common


@dataclass
class Args:
    # Data and model
    model: tuple[Literal["layers", "deep", "shallow"], ...] = ("layers", "deep", "shallow")
    """networks to train"""
    dataset: Literal["builtin", "mnist"] = "builtin"  # drawn digits, or MNIST
    data_dir: Path = Path("data")  # folder for MNIST

    # Training
    epochs: int = 0  # passes over the images; 0: a few steps, see STEPS
    global_batch_size: int = 0  # images per step, on all GPUs; 0: 128, rounded up to divide evenly
    test_batch_size: int = 1000  # test images on a GPU at once
    lr: float = 0.001  # learning rate of Adam
    seed: int = 1  # for weights, data order and dropout

    # FSDP
    fsdp_version: Literal[2, 1] = 2  # 2: fully_shard; 1: FullyShardedDataParallel (deprecated)
    min_num_params: int = 20_000  # size of the smallest unit
    device: str = "auto"  # auto (GPUs, if there are any), cpu, cuda or xpu

    # Output
    output_dir: Path = Path("output/mnist_fsdp")  # use a new folder for each run
    save_model: bool = False  # saving the trained networks
    print_model: bool = False  # print the network with its units


# ---- Networks ----------------------------------------------------------------------------------


class Residual(nn.Linear):
    """A layer that starts as the identity, so that many in a row learn within a few steps."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Apply the ReLU first. Behind zero weights it would see only zeros, where its gradient is
        # zero, so the weights would never learn.
        active = F.relu(F.layer_norm(x, x.shape[-1:]))
        return x + 0.01 * super().forward(active)


class Network(nn.Module):
    """Maps images (batch, 1, 28, 28) to log-probabilities (batch, 10). `widths` are the widths of
    the layers in between."""

    def __init__(self, *widths: int, equal_layers: int = 0, dropout: tuple = (0.25, 0.5)):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(dropout[0])
        self.dropout2 = nn.Dropout(dropout[1])
        self.fc1 = nn.Linear(9216, widths[0])
        layers = [Residual(widths[0], widths[0]) for _ in range(equal_layers)]
        for before, after in itertools.pairwise([*widths, 10]):
            layers.append(nn.Linear(before, after))
        self.fc2 = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


NETWORKS = {
    # As in a transformer, each unit is a small part of the whole. No dropout: each process would
    # draw its own mask. So the losses are the same on any number of processes.
    "layers": functools.partial(Network, 1024, equal_layers=40, dropout=(0, 0)),
    # The notebook's, which has no activation functions between its layers
    "deep": functools.partial(Network, 9000, 1000, 1000, 1000, 128),
    # The notebook's, whose activations are large compared with its parameters
    "shallow": functools.partial(Network, 128),
}
# Steps without --epochs: few, to keep the first run short. In 3 steps `deep` does not learn yet.
STEPS = {"layers": 10, "deep": 3, "shallow": 100}


# ---- FSDP --------------------------------------------------------------------------------------

# FSDP gathers and frees parameters in groups, called units. Both functions below make the same
# units, from the leaves up: a module with at least --min-num-params parameters that are not in a
# unit yet becomes one. Everything else is in the root unit.


def shard_with_fsdp2(args, world, model: nn.Module) -> nn.Module:
    """Collective: every rank must call it. Shard with `fully_shard`: bottom-up, in place, one
    DTensor per parameter."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in reversed(list(model.modules())):  # children before parents, the root last
        sizes = [p.numel() for p in module.parameters() if not isinstance(p, DTensor)]
        # Let FSDP1's policy decide here, too. It skips containers such as ModuleList, because their
        # forward is never called.
        is_large = size_based_auto_wrap_policy(module, False, sum(sizes), args.min_num_params)
        if is_large or module is model:
            unit = fully_shard(module, mesh=mesh)
            if world.device.type == "xpu":
                # On some machines oneCCL cannot average: sum, then divide.
                unit.set_force_sum_reduction_for_comms(True)
    return model


def shard_with_fsdp1(args, world, model: nn.Module) -> nn.Module:
    """Collective. Shard with `FullyShardedDataParallel`: top-down, one flat parameter per unit."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params)
    return FSDP(
        model,
        auto_wrap_policy=policy,
        device_id=world.device,  # moves unit by unit to the device
        use_orig_params=True,  # parameters() returns the original ones, views of the flat one
        # With a mesh, state dicts hold DTensors, as with FSDP2.
        device_mesh=init_device_mesh(world.device.type, (world.size,)),
    )


def train_one_epoch(world, model, loader, optimizer, epoch: int, num_steps: int, log):
    """Collective, like every forward of a sharded model. Train on the first `num_steps` batches of
    an epoch. Returns the mean loss over the samples of all ranks, and their number."""
    model.train()
    loader.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
    loss_sum = torch.zeros((), device=world.device)
    batches = itertools.islice(loader, num_steps)
    for images, labels in log.bar(batches, f"epoch {epoch}", num_steps):
        images = images.to(world.device, non_blocking=True)
        labels = labels.to(world.device, non_blocking=True)

        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)  # the mean over this rank's images
        loss.backward()  # FSDP averages the gradients over all ranks
        optimizer.step()
        loss_sum += loss.detach() * len(images)  # .item() would make the host wait for the device

    num_samples = num_steps * loader.batch_size * world.size
    return common.sum_over_ranks(loss_sum) / num_samples, num_samples


# ---- Data --------------------------------------------------------------------------------------


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


HEAD = "network | processes  | state     | peak     | test loss | accuracy | samples/s"


def describe(row: dict) -> str:
    """Format the record of an epoch as a line of the table below HEAD."""
    return (
        f"{row['network']:7} | {row['mode']:5} x {row['processes']:<2}"
        f" | {row['state_gib']:.3f} GiB | {row['peak_gib']:4.2f} GiB"
        f" | {row['test_loss']:9.4f} | {row['accuracy']:8.4f} | {row['samples/s']:9,.0f}"
    )


def main(args, world):
    mode = "fsdp" if "RANK" in os.environ else "local"  # with torchrun, or without
    if world.device.type == "cpu" and sys.platform == "linux":
        # Return freed blocks of 1 MB or more to Linux at once, so that the peak counts only what
        # training holds. This costs speed. (-3 is M_MMAP_THRESHOLD in malloc.h.)
        ctypes.CDLL(None).mallopt(-3, 1_000_000)
    log = common.Log(world, args.output_dir)
    train_set, test_set = load_digits(args, world)
    log.print(
        f"data     {args.dataset}, {len(train_set):,} images to train on, {len(test_set):,} to test"
    )
    common.divide_batch(args, world, default=128)
    loader = make_loader(args, world, train_set)
    for network in args.model:
        with torch.device("meta"):
            meta_model = NETWORKS[network]()
        log.print(f"{network:8} {common.describe_state(meta_model, world.size)}")
    log.print(HEAD)

    for network in args.model:
        steps_left = args.epochs * len(loader) or STEPS[network]
        torch.manual_seed(args.seed)  # the same on all ranks: they shard the same weights
        model = NETWORKS[network]()
        if mode == "local":
            model.to(world.device)
        elif args.fsdp_version == 2:
            model = shard_with_fsdp2(args, world, model)
        else:
            model = shard_with_fsdp1(args, world, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)  # of the shards
        torch.manual_seed(args.seed + 1 + world.rank)  # each rank draws its own dropout
        if args.print_model:
            log.print(str(model))

        for epoch in itertools.count(1):
            num_steps = min(steps_left, len(loader))
            steps_left -= num_steps
            common.reset_peak(world.device)
            start = time.perf_counter()
            loss, num_samples = train_one_epoch(
                world, model, loader, optimizer, epoch, num_steps, log
            )
            seconds = time.perf_counter() - start
            peak_gib = common.peak_gib(world.device)
            # Measure before evaluate, which leaves the root unit gathered.
            state_gib = common.state_gib(model, optimizer)
            test_loss, accuracy = evaluate(args, world, model, test_set)
            row = {
                "network": network,
                "mode": mode,
                "processes": world.size,
                "state_gib": state_gib,
                "peak_gib": peak_gib,
                "epoch": epoch,
                "loss": loss,
                "test_loss": test_loss,
                "accuracy": accuracy,
                "samples/s": num_samples / seconds,
            }
            log.print(describe(row))
            log.write(row)
            if steps_left == 0:
                break

        if args.save_model:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=options)  # a collective; full on rank 0
            folder = args.output_dir / f"{network}-{mode}"
            if world.rank == 0:
                folder.mkdir(exist_ok=True)
                (folder / "model.safetensors").write_bytes(save(weights))
        del model, optimizer
        gc.collect()  # FSDP's objects form reference cycles

    log.print(f"metrics  {log.path}")
    if mode == "fsdp" and log.is_rank0:
        rows = {}
        for line in log.path.read_text().splitlines():
            row = json.loads(line)
            rows[list(NETWORKS).index(row["network"]), row["mode"] == "fsdp"] = describe(row)
        log.print(f"\nThe last runs in this folder\n\n{HEAD}")
        for _, row in sorted(rows.items()):
            log.print(row)


if __name__ == "__main__":
    common.run(main, common.parse_args(Args, __doc__))
