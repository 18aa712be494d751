"""What does FSDP change?

Trains three networks on digits (drawn, without a download), first locally in one process, then sharded
with FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`), and puts speed and memory side by side.

    python mnist_fsdp.py                                    # the whole comparison; a laptop is enough
    python mnist_fsdp.py --model shallow --dataset mnist --num-train-samples 0 --epochs 10 --batch-size 256
    python mnist_fsdp.py --model deep --dataset mnist --num-train-samples 0 --epochs 10 --batch-size 256    # notebook's
    torchrun --nproc_per_node 8 mnist_fsdp.py --model deep  # the sharded half only
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 mnist_fsdp.py

Follows the notebook fsdp_tutorial.ipynb of https://github.com/AllenInstitute/distributed-vae: its shallow network has
1,199,882 parameters, its deep one 94,104,234, most of them in one layer. Where it departs: a third network has equal
layers, each test image counts once (the notebook leaves some out), both halves see the data in the same order,
memory is the peak of training (not read once, before backward), and FSDP2 is the default: FSDP1 is deprecated.
"""

import argparse
import ctypes
import functools
import gc
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torchvision import datasets
from torchvision.transforms.functional import pil_to_tensor

from PIL import Image, ImageDraw, ImageFont

import common

# ---- FSDP ------------------------------------------------------------------------------------------------------


# Two translations of one plan: from the leaves up, a module becomes a unit when its parameters that are in no unit yet
# reach the bound; what remains is the root unit. A unit's parameters are gathered just before it computes.
def shard_with_fsdp2(args, world, mesh, model: nn.Module) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""
    for module in reversed(list(model.modules())[1:]):  # children before parents, without the root
        left = sum(parameter.numel() for parameter in module.parameters() if not isinstance(parameter, DTensor))
        # FSDP1's policy decides here too: it also knows that nobody calls a ModuleList's forward.
        if size_based_auto_wrap_policy(module, False, left, args.min_num_params):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # Intel's oneCCL cannot average on every machine
    return model


def shard_with_fsdp1(args, world, mesh, model: nn.Module) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: the policy wraps, one flat parameter per unit."""
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params),
        device_id=world.device,  # units move to the device one by one as they are wrapped
        use_orig_params=True,  # parameters keep their names and shapes
        device_mesh=mesh,  # state dicts then hold DTensors, as in FSDP2
    )


def train_one_epoch(world, model, loader, optimizer, epoch: int, log) -> float:
    """Mean loss over the samples of all ranks. A collective."""
    model.train()
    loader.sampler.set_epoch(epoch)  # without it every epoch has the order of the first
    loss_sum = torch.zeros((), device=world.device)
    for images, labels in log.bar(loader, f"epoch {epoch}", len(loader)):
        images, labels = images.to(world.device, non_blocking=True), labels.to(world.device, non_blocking=True)
        optimizer.zero_grad()
        # The sum over this rank's batch, as in the document; FSDP averages its gradients over ranks.
        loss = F.nll_loss(model(images), labels, reduction="sum")
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()  # stays on the device: .item() would make the host wait in every step
    mean = common.sum_over_ranks(loss_sum) / (len(loader) * loader.batch_size * world.size)
    if not math.isfinite(mean):
        raise common.UserError(f"the loss is not finite in epoch {epoch}; start again with a lower --lr")
    return mean


# ---- Model and data --------------------------------------------------------------------------------------------
class Residual(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * F.relu(super().forward(F.layer_norm(x, x.shape[-1:])))


class Network(nn.Module):
    """Images (batch, 1, 28, 28) to log-probabilities (batch, 10); `widths` are those of the layers between."""

    def __init__(self, *widths: int, equal_layers: int = 0) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, widths[0])
        equal = (Residual(widths[0], widths[0]) for _ in range(equal_layers))
        rest = (nn.Linear(before, after) for before, after in itertools.pairwise((*widths, 10)))
        self.fc2 = nn.Sequential(*equal, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(self.dropout1(x).flatten(1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


NETWORKS = {
    "layers": functools.partial(Network, 1024, equal_layers=40),  # as in a transformer: no unit is much of the whole
    "deep": functools.partial(Network, 9000, 1000, 1000, 1000, 128),  # the notebook's: no activation between its layers
    "shallow": functools.partial(Network, 128),
}


def draw_digits(count: int, seed: int) -> TensorDataset:
    """`count` digits in Pillow's own font, moved, scaled, sheared and noised at random: images and labels."""
    glyphs = []
    for digit in "0123456789":
        picture = Image.new("L", (28, 28))
        ImageDraw.Draw(picture).text((14, 14), digit, fill=255, font=ImageFont.load_default(size=26), anchor="mm")
        glyphs.append(pil_to_tensor(picture) / 255)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    change = torch.empty(count, 2, 3).uniform_(-0.25, 0.25, generator=generator) + 1.2 * torch.eye(2, 3)
    grid = F.affine_grid(change, [count, 1, 28, 28], align_corners=False)
    images = F.grid_sample(torch.stack(glyphs)[labels], grid, align_corners=False)
    return TensorDataset(images + 0.1 * torch.randn(images.shape, generator=generator), labels)


def load_digits(args, world) -> tuple[Dataset, Dataset]:
    """Images to train on and to test on: drawn, or MNIST's, which one process of a node downloads."""
    if args.dataset == "builtin":
        return draw_digits(args.num_train_samples or 60_000, 2 * args.seed), draw_digits(2000, 2 * args.seed + 1)
    try:
        with common.first_on_node(world):
            parts = [datasets.MNIST(args.data_dir, train, download=True) for train in (True, False)]
    except Exception as error:  # torchvision's reader fails with whatever a broken file leads it to
        raise common.UserError(f"MNIST in {args.data_dir} cannot be read, nor downloaded: {error}") from error
    train, test = (TensorDataset((part.data[:, None] / 255 - 0.1307) / 0.3081, part.targets) for part in parts)
    return Subset(train, range(len(train))[: args.num_train_samples or None]), test


def make_loader(dataset, batch_size: int, args, world, train: bool) -> DataLoader:
    """This rank's batches; together the ranks see in each step the samples that one process would see."""
    sampler = DistributedSampler(dataset, world.size, world.rank, shuffle=train, seed=args.seed, drop_last=train)
    if train and len(sampler) < batch_size:
        raise common.UserError(f"{len(dataset)} images are too few for --batch-size {batch_size} on {world.size} ranks")
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=train, pin_memory=world.device.type != "cpu")


@torch.no_grad()
def evaluate(world, model, loader) -> tuple[float, float]:
    """Mean loss and accuracy over the whole test set, every image once. A collective."""
    model.eval()
    totals, first = torch.zeros(2, device=world.device), world.rank
    for images, labels in loader:
        outputs, labels = model(images.to(world.device)), labels.to(world.device)
        # Every rank must take part in every forward pass, so the sampler repeats samples; those do not count.
        real = first + world.size * torch.arange(len(labels), device=world.device) < len(loader.dataset)
        losses = F.nll_loss(outputs, labels, reduction="none")
        totals += torch.stack([losses[real].sum(), (outputs.argmax(dim=1) == labels)[real].sum()])
        first += world.size * len(labels)
    loss_sum, correct = common.sum_over_ranks(totals)
    return loss_sum / len(loader.dataset), correct / len(loader.dataset)


# ---- Main ------------------------------------------------------------------------------------------------------
def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__)
    count, size, number, flag = common.at_least(0), common.at_least(1), common.at_least(0, float), "store_true"
    add = parser.groups["data and model"].add_argument
    add("--model", default="all", choices=(*NETWORKS, "all"), help="which network")
    add("--dataset", default="builtin", choices=("builtin", "mnist"), help="drawn digits, or MNIST")
    add("--data-dir", default=Path("data"), type=Path, help="where MNIST is, or is downloaded to")
    add("--num-train-samples", default=6400, type=count, help="0 for all; large networks get 1,280 drawn ones")
    add = parser.groups["training"].add_argument
    add("--epochs", default=3, type=size, help="passes over the images; large networks make one over drawn ones")
    add("--batch-size", default=128, type=size, help="images per process and step")
    add("--test-batch-size", default=1000, type=size, help="the same in the test")
    add("--lr", default=0.001, type=number, help="learning rate of Adam")
    add = parser.groups["FSDP"].add_argument
    mode = "fsdp" if "RANK" in os.environ else "both"
    add("--mode", default=mode, choices=("local", "fsdp", "both"), help="both: local, then sharded; torchrun: fsdp")
    add("--fsdp-version", default=2, type=int, choices=(1, 2), help="2: fully_shard; 1: FullyShardedDataParallel")
    add("--min-num-params", default=20_000, type=size, help="a module with this many parameters becomes a unit")
    add("--print-model", action=flag, help="print the network, with its units")
    parser.set_defaults(save_model=False)
    args = parser.parse_args()
    allowed = ("fsdp", "local") if os.environ.get("WORLD_SIZE") == "1" else ("fsdp",)
    if "RANK" in os.environ and args.mode not in allowed:
        parser.error(f"--mode {args.mode} trains in one process of its own; start it with python, not with torchrun")
    args.num_processes = 1 if args.mode == "local" else args.num_processes
    return args


COLUMNS = {"network": "7s", "mode": "5s", "processes": "9d", "state_gb": "8.3f", "peak_gb": "7.2f", "epoch": "5d"}
COLUMNS |= {"loss": "7.4f", "test_loss": "9.4f", "accuracy": "8.4f", "samples/s": "9,.0f"}
LEAST = "processes epoch"


def main(args, world) -> None:
    log = common.Log(world.rank, args.output_dir, LEAST, **COLUMNS)
    train_set, test_set = load_digits(args, world)
    fsdp = f"FSDP{args.fsdp_version} FULL_SHARD" if args.mode == "fsdp" else "no FSDP"
    log.say(f"run      {common.describe_run(world)}, {fsdp}")
    log.say(f"data     {args.dataset}, {len(train_set):,} images to train on, {len(test_set):,} to test")
    networks = NETWORKS if args.model == "all" else [args.model]
    for network in networks:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in NETWORKS[network]().parameters())
        log.say(f"{network:<8} {common.describe_size(count, world.size, world)}")
    for network in networks:
        few = args.dataset == "builtin" and network != "shallow"
        images = train_set
        if few:  # enough steps to measure it, too few to teach it much
            count = max(1280, 4 * args.batch_size * world.size)
            images = Subset(train_set, range(min(count, len(train_set))))
        train_loader = make_loader(images, args.batch_size, args, world, train=True)
        test_loader = make_loader(test_set, args.test_batch_size, args, world, train=False)
        if sys.platform == "linux":
            # M_MMAP_THRESHOLD: freed tensors leave the process, so that its peak counts what it holds. This takes time,
            # and the shallow network's activations are large beside its parameters.
            ctypes.CDLL(None).mallopt(-3, 2**25 if network == "shallow" else 2**16)
        torch.manual_seed(args.seed)  # one seed on every rank: each keeps its shard of the same weights
        model = NETWORKS[network]()
        if args.mode == "local":
            model.to(world.device)
        else:
            mesh = init_device_mesh(world.device.type, (world.size,))
            model = (shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1)(args, world, mesh, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)  # after sharding: of the shards
        torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank
        if args.print_model:
            log.say(str(model))
        for epoch in range(1, 2 if few else args.epochs + 1):
            common.peak_memory(world.device)
            began = time.perf_counter()
            loss = train_one_epoch(world, model, train_loader, optimizer, epoch, log)
            row = {"samples/s": len(train_loader) * args.batch_size * world.size / (time.perf_counter() - began)}
            row |= {"state_gb": common.state_gb(model, optimizer)} | common.peak_memory(world.device)
            row["test_loss"], row["accuracy"] = evaluate(world, model, test_loader)
            log.row(network=network, mode=args.mode, processes=world.size, epoch=epoch, loss=loss, **row)
        if args.save_model:
            common.export(model, None, args.output_dir / f"{network}-{args.mode}", world)
        del model, optimizer
        gc.collect()  # FSDP's objects refer to each other in circles


if __name__ == "__main__":
    args, command = parse_args(), sys.argv
    if args.mode != "both":
        common.run(main, args)
    else:  # each half in processes of its own: each has its own peak of memory, and leaves a GPU empty
        log = common.Log(0, args.output_dir, LEAST, **COLUMNS)
        old = len(log.path.read_text().splitlines())
        for mode in ("local", "fsdp"):
            sys.argv = [*command, "--mode", mode]
            common.run(main, parse_args(), apart=True)
        rows = [json.loads(line) for line in log.path.read_text().splitlines()[old:]]
        last = {(row["network"], row["mode"]): row for row in rows}
        log.say("\nThe last epoch of each, side by side:")
        for row in sorted(last.values(), key=lambda row: list(NETWORKS).index(row["network"])):
            log.row(write=False, **row)
        log.say(f"\nmetrics  {log.path}")
