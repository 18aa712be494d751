"""Run a script's main() several times in one launch, to spare the tests the start of Python for each setting.

torchrun --nproc_per_node N tests/run_many.py t5_fsdp '[["--lr", "1"], ["--lr", "2"]]'
"""

import gc
import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import common

script = importlib.import_module(sys.argv[1])
world = common.setup_distributed("cpu")
if "no-dropout" in sys.argv:
    torch.nn.Dropout.forward = lambda self, x: x  # each rank has its own dropout: parity needs none
if "record-shards" in sys.argv:
    export = common.export_model

    def record_shards(world, model, whole, tokenizer, folder):
        """Also write the sum of each of this rank's own shards, next to the model."""
        export(world, model, whole, tokenizer, folder)
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        torch.save(torch.stack([p.detach().double().sum() for p in shards]), folder.parent / f"shards-{world.rank}.pt")

    common.export_model = record_shards
gc.freeze()  # the many objects of the imports: going through them each time takes longer than a small run
for arguments in json.loads(sys.argv[2]):
    sys.argv = [f"{script.__name__}.py", *arguments]
    script.main(script.parse_args(), world)
    gc.collect()
dist.destroy_process_group()
