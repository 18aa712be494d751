"""A small Llama learns to count: `torchrun --nproc_per_node 2 docs/minimal.py`.

With only one GPU, use CPUs: `CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node 2 docs/minimal.py`.
Without the 16 lines marked FSDP it is a loop for one process.
"""

import gc  # FSDP

import torch
import torch.distributed as dist  # FSDP
from torch.distributed.fsdp import fully_shard  # FSDP

from transformers import LlamaConfig, LlamaForCausalLM


def main():
    dist.init_process_group()  # FSDP: torchrun has numbered the processes
    rank, size = dist.get_rank(), dist.get_world_size()  # FSDP: this process's number, of how many
    if torch.accelerator.is_available():  # FSDP
        torch.accelerator.set_device_index(dist.get_node_local_rank())  # FSDP: a GPU for each

    torch.manual_seed(0)  # the same weights and data in every process
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
    for layer in model.model.layers:  # FSDP
        fully_shard(layer)  # FSDP: gather the parameters of this layer only while it computes
    fully_shard(model)  # FSDP: all others; moves the model, and later its inputs, to the GPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: it gets the shards

    for step in range(1, 21):
        starts = torch.randint(100, (16, 1))
        batch = (starts + torch.arange(64)) % 100  # 16 sequences that count up
        batch = batch[rank::size]  # FSDP: this process's part
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()  # averages over the processes, if there are several
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean_loss = loss.detach()
        dist.all_reduce(mean_loss.div_(size))  # FSDP: the mean over all processes
        if step % 10 == 0:
            if rank > 0:  # FSDP
                continue  # FSDP: one process prints
            print(f"step {step} | loss {mean_loss.item():.4f}")


main()
gc.collect()  # FSDP: free the model first, or the next line may abort
dist.destroy_process_group()  # FSDP
