r"""What does FSDP change?

Trains three networks on drawn digits: first locally in one process, then sharded with FSDP2
(`fully_shard`) or FSDP1 (`FullyShardedDataParallel`). Prints speed and memory side by side.

    python mnist_fsdp.py                    # the whole comparison; a laptop is enough
    python mnist_fsdp.py --device cpu       # if you have only one GPU
    python mnist_fsdp.py --model shallow deep --dataset mnist --epochs 10 \
        --global-batch-size 256             # the notebook's settings
    torchrun --nproc_per_node 8 mnist_fsdp.py --model deep      # the sharded half only
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
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
                unit.set_force_sum_reduction_for_comms(True)  # oneCCL cannot average everywhere
    return model


def shard_with_fsdp1(args, world, model: nn.Module) -> nn.Module:
    """Collective. Shard with `FullyShardedDataParallel`: top-down, one flat parameter per unit."""
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params)
    return FSDP(
        model,
        auto_wrap_policy=policy,
        device_id=world.device,  # moves unit by unit to the device
        use_orig_params=True,  # keep the parameters visible
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
        loss = F.nll_loss(model(images), labels, reduction="sum")
        # Divide by this rank's images. FSDP averages over ranks, which makes it the mean over all.
        (loss / len(images)).backward()
        optimizer.step()
        loss_sum += loss.detach()  # stays on the device: .item() would make the host wait

    num_samples = num_steps * loader.batch_size * world.size
    return common.sum_over_ranks(loss_sum) / num_samples, num_samples


# ---- Model and data ----------------------------------------------------------------------------


class Residual(nn.Linear):
    """A layer that starts as the identity, so that many in a row learn within a few steps."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Apply the ReLU first: after zero weights, it would pass no gradient on to them.
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
    """Collective. Return images to train on and to test on: drawn ones, or those of MNIST, which
    one process per node downloads."""
    if args.dataset == "builtin":
        return draw_digits(6400, 2 * args.seed), draw_digits(1000, 2 * args.seed + 1)

    def download():
        datasets.MNIST(args.data_dir, download=True)

    common.first_on_node(world, download)
    normalized = []
    for is_train in (True, False):
        digits = datasets.MNIST(args.data_dir, is_train)
        images = (digits.data[:, None] / 255 - 0.1307) / 0.3081
        normalized.append(TensorDataset(images, digits.targets))
    return tuple(normalized)


def make_loader(dataset, batch_size: int, args, world, train: bool) -> DataLoader:
    """Return a loader of this rank's part of the batches. The ranks divide the order that a single
    process would follow, so a step has the same images on any number of processes."""
    sampler = DistributedSampler(
        dataset, world.size, world.rank, shuffle=train, seed=args.seed, drop_last=train
    )
    pin_memory = world.device.type != "cpu"
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=train, pin_memory=pin_memory)


@torch.no_grad()
def evaluate(world, model, loader) -> tuple[float, float]:
    """Collective. Return mean loss and accuracy over the test set. Every image counts once."""
    model.eval()
    totals = torch.zeros(2, device=world.device)
    first = world.rank
    for images, labels in loader:
        labels = labels.to(world.device)
        outputs = model(images.to(world.device))

        # Every rank must take part in every forward, so the sampler repeats some images. Label them
        # -100, which nll_loss ignores and no prediction equals.
        indices = first + world.size * torch.arange(len(labels), device=world.device)
        labels[indices >= len(loader.dataset)] = -100
        totals[0] += F.nll_loss(outputs, labels, reduction="sum")
        totals[1] += (outputs.argmax(dim=1) == labels).sum()
        first += world.size * len(labels)
    loss_sum, correct = common.sum_over_ranks(totals)
    return loss_sum / len(loader.dataset), correct / len(loader.dataset)


# ---- Main --------------------------------------------------------------------------------------


def parse_args():
    parser = common.make_parser(__doc__)
    at_least_0 = common.at_least(0)
    at_least_1 = common.at_least(1)

    add = parser.add_argument_group("data and model").add_argument
    add("--model", default=list(NETWORKS), choices=NETWORKS, nargs="+", help="networks to train")
    add("--dataset", default="builtin", choices=("builtin", "mnist"), help="drawn digits, or MNIST")
    add("--data-dir", default=Path("data"), type=Path, help="folder for MNIST")

    add = parser.add_argument_group("training").add_argument
    add(
        "--epochs",
        default=0,
        type=at_least_0,
        help="passes over the images; 0: a few steps, see STEPS",
    )
    add(
        "--global-batch-size",
        default=0,
        type=at_least_0,
        help="images in a step, over all GPUs; 0: 128, or the next multiple of the processes",
    )
    add("--test-batch-size", default=1000, type=at_least_1, help="test images on a GPU at once")
    add("--lr", default=0.001, type=common.at_least(0, float), help="learning rate of Adam")

    add = parser.add_argument_group("FSDP").add_argument
    add("--mode", choices=("local", "fsdp"), help="run only one half; torchrun runs fsdp")
    add(
        "--fsdp-version",
        default=2,
        type=int,
        choices=(1, 2),
        help="2: fully_shard; 1: FullyShardedDataParallel (deprecated)",
    )
    add("--min-num-params", default=20_000, type=at_least_1, help="size of the smallest unit")
    add("--print-model", action="store_true", help="print the network with its units")

    common.add_run_flags(parser.add_argument_group("processes and output"))
    parser.set_defaults(save_model=False)
    args = parser.parse_args()
    if args.mode is None and "RANK" in os.environ:
        args.mode = "fsdp"
    if args.mode == "local":
        if "RANK" in os.environ or args.num_processes > 1:
            parser.error("--mode local is one process: omit torchrun and --num-processes")
        args.num_processes = 1
    return args


HEAD = "network | processes  | state     | peak     | test loss | accuracy | samples/s"


def describe(row: dict) -> str:
    """Format the record of an epoch as a line of the table below HEAD."""
    return (
        f"{row['network']:7} | {row['mode']:5} x {row['processes']:<2}"
        f" | {row['state_gib']:.3f} GiB | {row['peak_gib']:4.2f} GiB"
        f" | {row['test_loss']:9.4f} | {row['accuracy']:8.4f} | {row['samples/s']:9,.0f}"
    )


def main(args, world):
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
    train_loader = make_loader(
        train_set, args.global_batch_size // world.size, args, world, train=True
    )
    test_loader = make_loader(test_set, args.test_batch_size, args, world, train=False)
    if len(train_loader) == 0:
        raise common.UserError(
            f"{len(train_set)} images are fewer than --global-batch-size {args.global_batch_size}"
        )
    for network in args.model:
        with torch.device("meta"):
            meta_model = NETWORKS[network]()
        log.print(f"{network:8} {common.describe_state(meta_model, world.size)}")
    log.print(HEAD)

    for network in args.model:
        steps_left = args.epochs * len(train_loader) or STEPS[network]
        torch.manual_seed(args.seed)  # the same on all ranks: they shard the same weights
        model = NETWORKS[network]()
        if args.mode == "local":
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
            num_steps = min(steps_left, len(train_loader))
            steps_left -= num_steps
            common.reset_peak(world.device)
            start = time.perf_counter()
            loss, num_samples = train_one_epoch(
                world, model, train_loader, optimizer, epoch, num_steps, log
            )
            seconds = time.perf_counter() - start
            peak_gib = common.peak_gib(world.device)
            # Measure before evaluate, which leaves the root unit gathered.
            state_gib = common.state_gib(model, optimizer)
            test_loss, accuracy = evaluate(world, model, test_loader)
            row = {
                "network": network,
                "mode": args.mode,
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
            folder = args.output_dir / f"{network}-{args.mode}"
            if world.rank == 0:
                folder.mkdir(exist_ok=True)
                (folder / "model.safetensors").write_bytes(save(weights))
        del model, optimizer
        gc.collect()  # FSDP's objects form reference cycles


def compare_both_halves(args):
    """Run each half in its own processes, so that each has its own peak of memory. Then print the
    last epoch of each network side by side."""
    start = time.perf_counter()
    # Use large pages: in a virtual machine, it is slow to get returned memory again.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # If a flag comes twice, the last one counts.
    local = ["--mode", "local", "--num-processes", "1"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise that half would stay
    local_half = subprocess.run([sys.executable, *sys.argv, *local])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if local_half.returncode != 0:
        sys.exit(local_half.returncode)
    args.mode = "fsdp"
    common.run(main, args)

    path = args.output_dir / "metrics.jsonl"
    last_rows = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        last_rows[row["network"], row["mode"]] = row

    print("\n" + HEAD)
    for network in args.model:
        for mode in ("local", "fsdp"):
            print(describe(last_rows[network, mode]))
    print(f"\nmetrics  {path}")
    print(f"total    {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    args = parse_args()
    if args.mode is None:
        compare_both_halves(args)
    else:
        common.run(main, args)
