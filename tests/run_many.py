"""Run a script's main() several times in one launch, to spare the tests the start of Python for each setting.

torchrun --nproc_per_node N tests/run_many.py t5_fsdp '[["--lr", "1"], ["--lr", "2"]]'
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

sys.path.insert(0, str(Path(__file__).parent.parent))
import common

script = importlib.import_module(sys.argv[1])
world = common.setup(None)  # on the CPU
train_tokenizer, trained = common.train_tokenizer, {}


def train_once(texts, *options, **more):
    """Training is deterministic: for the same texts once is enough."""
    key = (*texts, *options, *more.items())
    if key not in trained:
        trained[key] = train_tokenizer(key[: len(key) - len(options) - len(more)], *options, **more)
    return trained[key]


common.train_tokenizer = train_once
if "no-dropout" in sys.argv:
    torch.nn.Dropout.forward = lambda self, x: x  # each rank has its own dropout: parity needs none
if "record-shards" in sys.argv:
    validate = script.validate

    def record_shards(args, world, model, *rest):
        """Also write the sum of each of this rank's own shards; the last time stays."""
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        sums = torch.stack([p.detach().double().sum() for p in shards])
        torch.save(sums, args.output_dir / f"shards-{world.rank}.pt")
        return validate(args, world, model, *rest)

    script.validate = record_shards
if "infinite-loss" in sys.argv:
    summed_loss, calls = script.summed_loss, []

    def infinite_once(model, batch, *options):
        """The fifth time that rank 2 trains on a batch."""
        if torch.is_grad_enabled():
            calls.append(None)
        return summed_loss(model, batch) * (float("inf") if world.rank == 2 and len(calls) == 5 else 1)

    script.summed_loss = infinite_once
if "graphs-only" in sys.argv:
    run_graph = lookup_backend("aot_eager")

    def count_graph(graph, inputs):
        print("graph captured", file=sys.stderr, flush=True)
        return run_graph(graph, inputs)

    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend=count_graph)
if "out-of-memory" in sys.argv:
    train_step = script.train_step

    def too_large(args, *arguments):
        """A step that does not fit under FULL_SHARD."""
        if args.sharding_strategy == "FULL_SHARD":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return train_step(args, *arguments)

    script.train_step = too_large
gc.freeze()  # the many objects of the imports: going through them each time takes longer than a small run
for arguments in json.loads(sys.argv[2]):
    sys.argv = [f"{script.__name__}.py", *arguments]
    try:
        script.main(script.parse_args(), world)
    except common.UserError as error:
        common.fail(str(error))
    gc.collect()
dist.destroy_process_group()
