"""Run commands on the CPU, one after another, each as far as its first training step.

torchrun --nproc_per_node 8 tests/first_step.py FOLDER '[["t5_fsdp", "--lr", "1"], ["mnist_fsdp"]]'

The commands are called in FOLDER, which has small models and files under the names that they use.
Models that the scripts make themselves are made small here.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import datasets

sys.path.insert(0, str(Path(__file__).parent.parent))
import common

DONE = "first step done"


class FirstStep(BaseException):
    """The optimizer has made a step. No `except Exception` of a script takes it for an error."""


def end_the_run(*_) -> None:
    raise FirstStep


# ---- Small models and little data ----------------------------------------------------------------
class SmallNetwork(nn.Module):
    """In place of MNIST's networks: images (batch, 1, 28, 28) to log-probabilities (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).log_softmax(dim=1)


def draw_nothing(count: int, seed: int) -> TensorDataset:
    """As many images as the script asks for, but empty ones: to draw them takes longer."""
    return TensorDataset(torch.zeros(count, 1, 28, 28), torch.zeros(count, dtype=torch.long))


def configure_small(config_class, **options):
    """The shape of conftest.make_model's T5, with one layer in each half."""
    shape = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 1}
    return config_class(**options | shape)


def generate_a_little(generate, args, *arguments):
    """Summaries of two tokens at most: models with random weights do not know when to end."""
    short = argparse.Namespace(**vars(args) | {"max_target_length": 2})
    return generate(short, *arguments)


def load_in_this_process(data_loader, *arguments, **options):
    """No worker beside each process, which would prepare batches for later steps."""
    alone = {"num_workers": 0, "prefetch_factor": None, "worker_init_fn": None}
    return data_loader(*arguments, **options | alone)


def load_local_files(load_dataset, path, *names, **options):
    """C4 is in the folder `c4`."""
    files = options.get("data_files")
    if str(files).startswith("hf://"):
        options["data_files"] = files.replace("hf://datasets/allenai/c4/en", "c4")
    return load_dataset(path, *names, **options)


def load_few_articles(load_articles, name, *options):
    """The first of the built-in articles are in a file: to make all of them takes longer."""
    return load_articles("builtin.csv" if name == "builtin" else name, *options)


def make_common_small() -> None:
    # `auto` may choose bf16, where oneDNN takes long to prepare each shape.
    common.choose_precision = lambda name, device: "fp32" if name == "auto" else name
    common.load_articles = functools.partial(load_few_articles, common.load_articles)
    datasets.load_dataset = functools.partial(load_local_files, datasets.load_dataset)


@functools.cache
def import_small(name: str):
    """A script that makes small models, under the names of its large ones."""
    script = importlib.import_module(name)
    script.DataLoader = functools.partial(load_in_this_process, script.DataLoader)
    if hasattr(script, "Network"):
        script.Network = SmallNetwork
        script.draw_digits = draw_nothing
    if hasattr(script, "NETWORKS"):
        script.NETWORKS = dict.fromkeys(script.NETWORKS, SmallNetwork)
    if hasattr(script, "MODELS"):
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        script.MODELS = dict.fromkeys(script.MODELS, shape | {"num_attention_heads": 2})
    if hasattr(script, "T5Config"):
        script.T5Config = functools.partial(configure_small, script.T5Config)
        script.generate = functools.partial(generate_a_little, script.generate)
    return script


# ---- One command after another -------------------------------------------------------------------
def once(kept: dict, key: tuple, function, *arguments, **options):
    """What a function returned for an earlier command with the same data."""
    if key not in kept:
        kept[key] = function(*arguments, **options)
    return kept[key]


def call(script, world, kept: dict) -> None:
    """The script with the flags in sys.argv."""
    args = script.parse_args()
    names = ("dataset", "text_column", "num_validation_texts")
    data = str([getattr(args, name, None) for name in names])
    with contextlib.ExitStack() as patches:
        for module, name in ((common, "train_tokenizer"), (script, "load_texts")):
            if hasattr(module, name):
                keep = functools.partial(once, kept, (script, name, data), getattr(module, name))
                patches.enter_context(mock.patch.object(module, name, keep))
        script.main(args, world)


def run_to_first_step(world, name: str, flags: list[str], kept: dict) -> None:
    """Rank 0 says when all ranks have made it. An error of one of them ends all."""
    began = time.monotonic()
    sys.argv = [f"{name}.py", *flags]
    try:
        call(import_small(name), world, kept)
        common.fail("it ended without a training step", code=1)
    except FirstStep:
        pass
    except common.UserError as error:
        common.fail(" ".join(str(error).split()))
    except Exception:
        common.fail(traceback.format_exc(), code=1)
    gc.collect()  # FSDP's objects refer to each other in circles
    dist.barrier()
    if world.rank == 0:
        command = " ".join(sys.argv)
        print(f"{DONE} after {time.monotonic() - began:.1f} s: {command}", flush=True)


def keep_memory() -> None:
    """What is freed stays in the process, which is faster: glibc's M_TRIM_THRESHOLD, M_MMAP_MAX."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**30)
        libc.mallopt(-4, 0)


def main() -> None:
    _, folder, commands = sys.argv
    os.chdir(folder)
    world = common.setup(None)  # on the CPU, also where there is a GPU
    make_common_small()
    register_optimizer_step_post_hook(end_the_run)
    keep_memory()
    gc.freeze()  # else each collection would go through all that was imported
    kept = {}
    for name, *flags in json.loads(commands):
        run_to_first_step(world, name, flags, kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
