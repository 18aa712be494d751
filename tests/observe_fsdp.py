"""One training step for each setting, and what FSDP did in it. Run under torchrun; rank 0 prints JSON."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import t5_fsdp


def observe(world, *arguments):
    """Parameters gathered, and why, and bytes saved for backward, in one step."""
    sys.argv = ["t5_fsdp.py", "--precision", "fp32", *arguments]
    args = t5_fsdp.parse_args()
    config = t5_fsdp.builtin_config(vocab_size=512)
    model = t5_fsdp.load_model(args, config, world)
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    model, _ = t5_fsdp.build(args, world, model)
    weights = common.full_state_dict(model)
    checksum = sum(weight.double().sum().item() for weight in weights.values())
    tied = bool(weights) and torch.equal(weights["shared.weight"], weights["lm_head.weight"])
    ids = torch.arange(2, 66).reshape(2, 32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :16].contiguous()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = t5_fsdp.summed_loss(model, batch)
        with torch.profiler.record_function("BACKWARD"):
            loss.backward()
    events = profiler.events()
    backward = next(event.time_range.start for event in events if event.name == "BACKWARD")
    gathers = [
        event.time_range.start for event in events if event.name in ("c10d::allgather_", "c10d::_allgather_base_")
    ]
    prefetches = {
        "FullyShardedDataParallel._pre_backward_prefetch": "pre",
        "FullyShardedDataParallel._post_backward_prefetch": "post",
        "FSDP::backward_prefetch for": "pre",
    }

    def cause(time):
        """Which prefetch a gather belongs to, or "need" when it was made for the unit that waits for it."""
        for event in events:
            for name, kind in prefetches.items():
                if event.name.startswith(name) and event.time_range.start <= time <= event.time_range.end:
                    return kind
        return "need"

    return {
        "on_meta": on_meta,
        "checksum": checksum,
        "tied": tied,
        "saved_bytes": sum(saved.values()),
        "forward_gathers": sum(time < backward for time in gathers),
        "backward_gathers": sorted(cause(time) for time in gathers if time > backward),
    }


world = common.setup_distributed("cpu")
results = [observe(world, *arguments) for arguments in json.loads(sys.argv[1])]
on_meta = [None] * world.world_size
dist.all_gather_object(on_meta, [result["on_meta"] for result in results])
if world.rank == 0:
    print(json.dumps({"results": results, "on_meta": on_meta}))
gc.collect()
dist.destroy_process_group()
