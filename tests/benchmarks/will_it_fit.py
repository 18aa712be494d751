"""Prints the table of docs/will-it-fit.md: the state that each process holds, for models of known shapes.

    python tests/benchmarks/will_it_fit.py

The tests compare `state_bytes` with what real runs held, and the table with the page.
"""

import torch

import transformers
from shared import print_table

import lm_multinode

SHARDS = (1, 4, 8, 64)
T5 = {"t5-base": (768, 3072, 12, 12, 64), "t5-3b": (1024, 16384, 24, 32, 128), "t5-11b": (1024, 65536, 24, 128, 128)}
LLAMAS = {
    "150m": lm_multinode.MODELS["150m"],
    "1b": lm_multinode.MODELS["1b"],
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def state_bytes(num_parameters: int, strategy: str, processes: int, replica: int = 8) -> float:
    """Bytes that a process holds of parameters, gradients and AdamW's moments, all in fp32; `replica` is its size."""
    shards = {"NO_SHARD": 1, "FULL_SHARD": processes, "SHARD_GRAD_OP": processes}.get(strategy, min(replica, processes))
    return (24 if strategy == "DILOCO" else 16) * num_parameters / shards


def count_parameters() -> dict[str, int]:
    """Of each model, from its shape."""
    models = {}
    with torch.device("meta"):
        for name, (hidden, width, layers, heads, each) in T5.items():
            shape = {"d_model": hidden, "d_ff": width, "num_layers": layers, "num_heads": heads, "d_kv": each}
            models[name] = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
        for name, shape in LLAMAS.items():
            config = transformers.LlamaConfig(vocab_size=32_000, **shape)
            models[name] = transformers.LlamaForCausalLM(config)
    return {name: model.num_parameters() for name, model in models.items()}


def rows():
    """Yield those of the table, in GB of 2**30 bytes, by the number of shards."""
    for name, count in count_parameters().items():
        row = {"model": name, "parameters": f"{count:,}"}
        yield row | {f"{n}": f"{state_bytes(count, 'FULL_SHARD', n) / 2**30:.2f}" for n in SHARDS}


if __name__ == "__main__":
    print_table(rows())
