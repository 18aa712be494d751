"""One training step for each setting, and what FSDP did in it. Run under torchrun; rank 0 prints JSON."""

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from transformers import T5Config, T5ForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import t5_fsdp

PREFETCHES = {  # how the profiler names them
    "FullyShardedDataParallel._pre_backward_prefetch": "pre",
    "FullyShardedDataParallel._post_backward_prefetch": "post",
    "FSDP::backward_prefetch for": "pre",
}
POSITIONS = torch.arange(1000) / 7


class WithBuffers(T5ForConditionalGeneration):
    """A T5 with what other models have: values that are neither trained nor part of a state dict."""

    def __init__(self, config):
        super().__init__(config)
        for module in (self, self.encoder.block[1]):
            module.register_buffer("positions", POSITIONS.clone(), persistent=False)


def observe(world, *arguments):
    """Parameters gathered, and why, and bytes saved for backward, in one step."""
    sys.argv = ["t5_fsdp.py", "--precision", "fp32", *arguments]
    args, loads = t5_fsdp.parse_args(), []
    shape = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "num_layers": 2, "dropout_rate": 0.0}
    config = T5Config(vocab_size=512, decoder_start_token_id=0, **shape)
    t5_fsdp.load_model = lambda *arguments: loads.append(arguments) or load_model(*arguments)
    shard = t5_fsdp.shard_with_fsdp2 if args.fsdp_version == 2 else t5_fsdp.shard_with_fsdp1
    model = shard(args, world, config)
    # Not full_state_dict: before torch 2.14 FSDP1's crashes on a CPU.
    weights = {name: shard.full_tensor() for name, shard in get_model_state_dict(model).items()}
    ids = torch.arange(2, 66).reshape(2, 32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :16].contiguous()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = t5_fsdp.summed_loss(model, batch)
        with torch.profiler.record_function("BACKWARD"):
            loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    events = profiler.events()
    backward = next(event.time_range.start for event in events if event.name == "BACKWARD")
    kinds = ("c10d::allgather_", "c10d::_allgather_base_")
    gathers = [event.time_range.start for event in events if event.name in kinds]

    def cause(time):
        """Which prefetch a gather belongs to, or "need" when it was made for the unit that waits for it."""
        for event in events:
            for name, kind in PREFETCHES.items():
                if event.name.startswith(name) and event.time_range.start <= time <= event.time_range.end:
                    return kind
        return "need"

    every_rank = {
        "loads": len(loads),
        "buffers": [buffer.tolist() == POSITIONS.tolist() for buffer in model.buffers()],
        "state_gb": common.state_gb(model, optimizer),
        "offloads": [
            type(module._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
            for module in model.modules()
            if isinstance(module, FSDPModule)
        ],
    }
    dist.all_gather_object(ranks := [None] * world.size, every_rank)
    shards = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    dist.all_gather_object(local_sizes := [None] * world.size, sum(shard.numel() for shard in shards))
    offloads = every_rank.pop("offloads")
    return {
        "offloads": offloads,
        "parameters": sum(local_sizes),
        "checksum": sum(weight.double().sum().item() for weight in weights.values()),
        "tied": torch.equal(weights["shared.weight"], weights["lm_head.weight"]),
        "saved_bytes": sum(saved.values()),
        "forward_gathers": sum(time < backward for time in gathers),
        "backward_gathers": sorted(cause(time) for time in gathers if time > backward),
    } | {name: [rank[name] for rank in ranks] for name in every_rank}


world = common.setup(None)
t5_fsdp.AutoModelForSeq2SeqLM = SimpleNamespace(from_config=lambda config, dtype: WithBuffers(config))
load_model = t5_fsdp.load_model
results = [observe(world, *arguments) for arguments in json.loads(sys.argv[1])]
if world.rank == 0:
    print(json.dumps(results))
gc.collect()
dist.destroy_process_group()
