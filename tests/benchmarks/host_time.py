"""Where the host's time goes in a training step, in milliseconds by part. A GPU waits if the host is slower than it.

    python tests/benchmarks/host_time.py [--device cuda]

It has t5-base's layers and 150m's; on a CPU they are so narrow that computing costs little. On a GPU the clock shows
when the host has started all kernels, not when these end. Each variant is a process; they take turns, and the table has
the medians of all steps. All ranks but one are fake. Parts do not overlap: `layers` are forward and backward alone.
"""

import argparse
import collections
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import shared
from transformers import LlamaConfig, T5Config

from inside import MODULES, parse, world_of

# Ranks, or 0 for no FSDP, and flags
VARIANTS = {"without FSDP": (0,), "1 rank": (1,), "8 ranks": (8,), "8 ranks, compiled": (8, "--compile")}
VARIANTS["8 ranks, compiled, units of 4"] = (8, "--compile", "--layers-per-unit", 4)


class Parts:
    """Adds up the seconds of each part of a step. A part that runs inside another counts only for itself."""

    def __init__(self):
        self.seconds = collections.Counter()
        self.running = ["rest"]
        self.last = time.perf_counter()

    def switch(self):
        before, self.last = self.last, time.perf_counter()
        self.seconds[self.running[-1]] += self.last - before

    def watch(self, owner, attribute, name):
        """Count every call of a function as a part."""
        function = getattr(owner, attribute)

        def watched(*arguments, **options):
            self.switch()
            self.running.append(name)
            result = function(*arguments, **options)
            self.switch()
            self.running.pop()
            return result

        setattr(owner, attribute, watched)


def config_and_batch(is_t5, is_real, device):
    """A config with small or real widths, and one micro-batch of random tokens."""
    count, length, target = (16, 512, 152) if is_real else (1, 16, 8)
    draw = functools.partial(torch.randint, 1, 1000, device=device)
    if is_t5:
        widths = {"d_model": 768, "d_kv": 64, "d_ff": 3072} if is_real else {"d_model": 24, "d_kv": 2, "d_ff": 32}
        config = T5Config(**widths, num_layers=12, num_heads=12, vocab_size=2048, decoder_start_token_id=0)
        mask = torch.ones(count, length, device=device)
        return config, {"input_ids": draw(mask.shape), "attention_mask": mask, "labels": draw((count, target))}
    width, inner = (1024, 2688) if is_real else (32, 32)
    options = {"num_hidden_layers": 12, "num_attention_heads": 16, "attn_implementation": "causal_sdpa"}
    config = LlamaConfig(hidden_size=width, intermediate_size=inner, vocab_size=2048, **options)
    return config, draw((count, 1 + 2 * length))


def measure(options):
    """Run one variant. Prints a dictionary for each step: the milliseconds of each part."""
    name, variant = options.case
    ranks, *extra_flags = VARIANTS[variant]
    script = MODULES[name]
    is_real = options.device == "cuda"
    flags = ("--precision", "bf16" if is_real else "fp32", "--micro-batch-size", 16, "--device", options.device)
    args = parse(name, *flags, *extra_flags)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    world = world_of(size=max(1, ranks))._replace(device=device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world.size)
    is_t5 = name == "t5_fsdp.py"
    config, batch = config_and_batch(is_t5, is_real, device)
    args.global_batch_size = world.size * len(batch["labels"] if is_t5 else batch)
    if ranks:
        model, _, optimizer = script.build(args, world, config)
        train_step = functools.partial(script.train_step, args, world, model, optimizer, batch)
    else:
        model = script.load_model(args, config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def train_step():
            optimizer.zero_grad()
            rows = (batch,) if is_t5 else (batch[:, :-1], batch[:, 1:])
            script.summed_loss(model, *rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    parts = Parts()
    for owner, attribute, name in (
        (torch.Tensor, "backward", "layers"),
        (script, "summed_loss", "layers"),
        (torch.nn.utils, "clip_grad_norm_", "clipping"),
        (optimizer, "step", "optimizer"),
        *((FSDPParamGroup, name, name) for name in ("unshard", "wait_for_unshard", "reshard", "post_backward")),
        *((FSDPParamGroup, name, "other hooks") for name in ("pre_forward", "post_forward", "pre_backward")),
    ):
        parts.watch(owner, attribute, name)

    for step in range(5 + options.steps):
        if is_real:
            torch.cuda.synchronize()
        parts.switch()
        parts.seconds.clear()
        train_step()
        parts.switch()
        if step >= 5:  # after a warm-up
            print(json.dumps({name: 1000 * seconds for name, seconds in parts.seconds.items()}), flush=True)


def rows(options):
    steps = collections.defaultdict(list)
    for _, *case in itertools.product(range(options.turns), ("t5_fsdp.py", "lm_multinode.py"), VARIANTS):
        command = [sys.executable, __file__, *sys.argv[1:], "--case", *case]
        finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        steps[", ".join(case)] += [json.loads(line) for line in finished.stdout.splitlines() if line[0] == "{"]
    names = dict.fromkeys(name for of_case in steps.values() for step in of_case for name in step)
    for case, of_case in steps.items():
        row = {"case": case, "step": statistics.median(sum(step.values()) for step in of_case)}
        yield row | {name: statistics.median(step.get(name, 0.0) for step in of_case) for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="steps that count, in each turn")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # for the process of one variant
    options = parser.parse_args()
    if options.case:
        measure(options)
    else:
        print(f"{shared.MACHINE}, {options.device}\n")
        shared.print_table(rows(options))
