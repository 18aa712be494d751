"""Run a script's main() several times in one launch, to spare the tests the start of Python for each setting.

torchrun --nproc_per_node N tests/run_many.py t5_fsdp '[["--lr", "1"], ["--lr", "2"]]' [SWITCH ...]
"""

import functools
import gc
import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo import lookup_backend
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))
import common


def train_tokenizer_once():
    """Training is deterministic: for the same texts once is enough."""
    train_tokenizer, trained = common.train_tokenizer, {}

    def train_once(texts, *options, **more):
        key = (*texts, *options, *more.items())
        if key not in trained:
            trained[key] = train_tokenizer(key[: len(key) - len(options) - len(more)], *options, **more)
        return trained[key]

    common.train_tokenizer = train_once


def record_shards(script):
    """Also write the sum of each of a rank's own shards; the last time stays."""
    validate = script.validate

    def record_and_validate(args, world, model, *rest):
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        sums = torch.stack([p.detach().double().sum() for p in shards])
        torch.save(sums, args.output_dir / f"shards-{world.rank}.pt")
        return validate(args, world, model, *rest)

    script.validate = record_and_validate


def make_a_loss_infinite(script):
    """The fifth time that rank 2 trains on a batch."""
    summed_loss, calls = script.summed_loss, []

    def infinite_once(model, batch, *options):
        if torch.is_grad_enabled():
            calls.append(None)
        infinite = dist.get_rank() == 2 and len(calls) == 5
        return summed_loss(model, batch) * (float("inf") if infinite else 1)

    script.summed_loss = infinite_once


def capture_graphs_only():
    """--compile captures and runs graphs, but makes no machine code of them."""
    run_graph = lookup_backend("aot_eager")

    def count_graph(graph, inputs):
        print("graph captured", file=sys.stderr, flush=True)
        return run_graph(graph, inputs)

    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend=count_graph)


def run_out_of_memory(script):
    """A step of rank 1 does not fit under SHARD_GRAD_OP; the other ranks wait for it."""
    train_step = script.train_step

    def too_large(args, *arguments):
        if args.sharding_strategy == "SHARD_GRAD_OP" and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return train_step(args, *arguments)

    script.train_step = too_large


class Collectives(TorchDispatchMode):
    """Counts collectives over all processes, by the training step that they belong to or follow, and the bytes that are
    gathered and reduced inside the second step: in the first the root unit is still gathered from the validation."""

    def __init__(self):
        super().__init__()
        self.step, self.in_step, self.counts, self.bytes = 0, False, {}, {}

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.namespace == "c10d":
            groups = [a for a in arguments if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            if dist.ProcessGroup.unbox(groups[0]).size() == dist.get_world_size():
                self.counts[self.step] = self.counts.get(self.step, 0) + 1
            if self.in_step and self.step == 2:
                name = operator._schema.name.removeprefix("c10d::").strip("_")
                tensors = [
                    a for argument in arguments[:2] for a in (argument if isinstance(argument, list) else [argument])
                ]
                largest = max(t.nbytes for t in tensors if torch.is_tensor(t))  # whole, not one process's part
                self.bytes[name] = self.bytes.get(name, 0) + largest
        return operator(*arguments, **(options or {}))


def count_collectives(script):
    """Write what `Collectives` counts on this rank to collectives-RANK.json."""
    train_step, main = script.train_step, script.main

    def counted_main(args, world):
        mode = Collectives()

        def counted_step(*arguments):
            mode.step += 1
            mode.in_step = True
            result = train_step(*arguments)
            mode.in_step = False
            return result

        script.train_step = counted_step
        with mode:
            main(args, world)
        counts = {"steps": mode.counts, "bytes": mode.bytes}
        (args.output_dir / f"collectives-{world.rank}.json").write_text(json.dumps(counts))

    script.main = counted_main


def run_all(name, settings, switches):
    script = importlib.import_module(name)
    accelerator = None
    if "on-accelerator" in switches:
        accelerator = common.find_accelerator("auto")
    world = common.setup(accelerator)
    torch.set_float32_matmul_precision("highest")  # no TF32: the tests compare with a CPU
    torch.backends.cudnn.allow_tf32 = False
    train_tokenizer_once()
    if "no-dropout" in switches:
        torch.nn.Dropout.forward = lambda self, x: x  # each rank has its own dropout: parity needs none
    if "record-shards" in switches:
        record_shards(script)
    if "infinite-loss" in switches:
        make_a_loss_infinite(script)
    if "graphs-only" in switches:
        capture_graphs_only()
    if "out-of-memory" in switches:
        run_out_of_memory(script)
    if "count-collectives" in switches:
        count_collectives(script)
    gc.freeze()  # the many objects of the imports: going through them each time takes longer than a small run
    for arguments in settings:
        sys.argv = [f"{script.__name__}.py", *arguments]
        try:
            script.main(script.parse_args(), world)
        except common.UserError as error:
            common.fail(str(error))
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":  # a worker that is not forked imports this file
    run_all(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
