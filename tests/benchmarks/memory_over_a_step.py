"""What one process holds in the course of a training step, and what of; draws docs/memory.svg.

    pip install matplotlib
    python tests/benchmarks/memory_over_a_step.py [--picture docs/memory.svg]

The network of equal layers in mnist_fsdp.py, and a T5 of t5-small's shape, each trained locally, then with FSDP2 under
SHARD_GRAD_OP and FULL_SHARD. In the table only: a Llama whose embedding and output layer are units of their own, as in
lm_multinode.py, and the same Llama with both in the root unit. After every operation of rank 0's second step (the first
makes the optimizer's state) all tensors that are alive are added up. At ten points of the step the sum is compared with
PyTorch's own count of what its allocator has given out in this thread, and the command fails if they differ by more
than 0.1%.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

from memory_tracker import KINDS, Tracker, draw_course
from shared import LLAMA, ROOT, print_table, save_picture
from transformers import LlamaConfig, T5Config

import common
import lm_multinode
import mnist_fsdp
import t5_fsdp

RUNS = (("local", 1), ("SHARD_GRAD_OP", 2), ("FULL_SHARD", 2), ("FULL_SHARD", 4))
MODELS = {"layers": "the 40 equal layers of mnist_fsdp.py", "t5": "a T5 of t5-small's shape"}
LLAMA_RUNS = (("FULL_SHARD", 2), ("FULL_SHARD, all in the root", 2))
POINTS = 10
TOLERANCE = 0.001


class CheckedTracker(Tracker):
    """Also marks ten points of the step, to compare `totals` with the allocator's count there."""

    def __init__(self, model, optimizer, every: int) -> None:
        super().__init__(model, optimizer, at=range(10**9))
        self.every = every

    def __torch_dispatch__(self, *arguments):
        result = super().__torch_dispatch__(*arguments)
        if len(self.totals) % self.every == 0:
            with record_function(f"point {len(self.totals) // self.every}"):
                pass
        return result


def prepare(name: str, strategy: str, world) -> tuple:
    """The model, and a function that computes its loss on one batch."""
    sys.argv = [name] if name == "layers" else [f"{name}.py", "--precision", "fp32"]
    torch.manual_seed(world.rank)
    if name == "layers":
        args, model = mnist_fsdp.parse_args(), mnist_fsdp.NETWORKS["layers"]()
        images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
        model = model if strategy == "local" else mnist_fsdp.shard_with_fsdp2(args, world, model)
        return model, lambda: torch.nn.functional.nll_loss(model(images), labels)
    if name == "llama":
        args = lm_multinode.parse_args()
        if strategy != "FULL_SHARD":
            lm_multinode.ends_of = lambda model: []
        model = lm_multinode.shard_with_fsdp2(args, world, LlamaConfig(**LLAMA, vocab_size=8192))
        tokens = torch.randint(8192, (2, 256))
        return model, lambda: lm_multinode.summed_loss(model, {"input_ids": tokens, "labels": tokens}) / 512
    args = t5_fsdp.parse_args()
    config = T5Config(decoder_start_token_id=0, dropout_rate=0.0)  # t5-small's
    args.sharding_strategy = "FULL_SHARD" if strategy == "local" else strategy
    model = t5_fsdp.load_model(args, config) if strategy == "local" else None
    model = model or t5_fsdp.shard_with_fsdp2(args, world, config)
    tokens = torch.randint(2, 32_000, (2, 256))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, :64]}
    return model, lambda: t5_fsdp.summed_loss(model, batch) / 128


def measure(name: str, strategy: str, world, result: Path) -> None:
    """One process of a run; rank 0 writes what it held."""
    model, loss_of = prepare(name, strategy, world)
    for unit in model.modules() if strategy == "SHARD_GRAD_OP" else ():
        if isinstance(unit, FSDPModule) and unit is not model:
            unit.set_reshard_after_forward(False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(mode=None) -> None:
        optimizer.zero_grad()
        loss = loss_of()
        ends.append(len(mode.totals) if mode else 0)
        loss.backward()
        ends.append(len(mode.totals) if mode else 0)
        del loss
        optimizer.step()

    ends: list[int] = []
    step()
    if world.rank > 0:  # these only take part
        step()
        step()
        return torch.distributed.destroy_process_group()
    with CheckedTracker(model, optimizer, every=10**9) as counting:  # how many operations a step has
        step(counting)
    ends.clear()
    tracker = CheckedTracker(model, optimizer, every=len(counting.totals) // POINTS)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, tracker:
        step(tracker)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    given, at_points = 0, []
    here = next(event.start_thread_id() for event in events if event.name() == "point 1")
    for event in events:
        # gloo's threads make copies of what they send, and free them.
        given += event.nbytes() if event.name() == "[memory]" and event.start_thread_id() == here else 0
        if event.name().startswith("point "):
            at_points.append(given)
    # The allocator's count begins with the profiler, so changes since the first point are compared.
    totals = tracker.totals[tracker.every - 1 :: tracker.every]
    pairs = zip(totals, at_points, strict=True)
    off = max(abs((total - totals[0]) - (count - at_points[0])) / total for total, count in pairs)
    rows = [list(kinds.values()) for kinds in tracker.kinds.values()]
    result.write_text(json.dumps({"rows": rows, "ends": ends, "off": off}))
    torch.distributed.destroy_process_group()


def draw(results: dict, picture: Path) -> None:
    """A row of panels for each model, a panel for each run."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "memory", "font.size": 9, "path.simplify": True}
    size = {"figsize": (11, 5.4), "sharey": "row", "layout": "constrained"}
    figure, panels = pyplot.subplots(len(MODELS), len(RUNS), **size)
    for line, (model, words) in zip(panels, MODELS.items(), strict=True):
        for panel, run in zip(line, RUNS, strict=True):
            draw_course(panel, results[model, run]["rows"], results[model, run]["ends"])
            processes = f"{run[1]} process{'es' if run[1] > 1 else ''}"
            panel.set_title(f"{run[0]}, {processes}\n", fontsize=9)
        line[0].set_ylabel(f"{words}\nGB of one process")
        line[0].set_ylim(0, 1.12 * max(torch.tensor(results[model, run]["rows"]).sum(1).max() for run in RUNS) / 2**30)
    figure.supxlabel("operations of one training step: forward, backward, optimizer", fontsize=9)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.patch.set_facecolor("white")  # readable on a dark page, too
    save_picture(figure, picture)
    # A tenth of a pixel is enough for the lines.
    text = re.sub(r"^([ML] \d+\.\d)\d*( \d+\.\d)\d* *$", r"\1\2", picture.read_text(), flags=re.MULTILINE)
    picture.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "memory.svg")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # for the processes: model, strategy, result
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure[:2], common.setup(None), Path(options.measure[2]))
        sys.exit()
    found, table = {}, []
    with tempfile.TemporaryDirectory() as folder:
        runs = [(model, run) for model in MODELS for run in RUNS] + [("llama", run) for run in LLAMA_RUNS]
        for model, run in runs:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run[1])]
            command += [__file__, "--measure", model, run[0], f"{folder}/result"]
            subprocess.run([sys.executable, *command], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            result = found[model, run] = json.loads(Path(folder, "result").read_text())
            highest = max(result["rows"], key=sum)
            table.append({"model": model, "run": run[0], "processes": run[1], "peak GB": sum(highest) / 2**30})
            table[-1] |= {kind: held / 2**30 for kind, held in zip(KINDS, highest, strict=True)}
            table[-1]["off from the allocator"] = f"{result['off']:.2%}"
    print_table(table)
    draw(found, options.picture)
    sys.exit(3 if any(result["off"] > TOLERANCE for result in found.values()) else 0)
