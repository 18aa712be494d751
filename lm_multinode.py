"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Pretrains a Llama on full sequences of text with FSDP2 (`fully_shard`) or FSDP1
(`FullyShardedDataParallel`), under each of FSDP's five strategies, or with DiLoCo where links are
slow. Without flags it needs no download: a tiny Llama learns Python's own reference.

    python lm_multinode.py                  # one process for each GPU, or two on the CPU
    python lm_multinode.py --num-processes 4 --compare-strategies --shards-per-replica 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d \\
        --rdzv_endpoint HEAD:29500 --max-restarts 3 lm_multinode.py \\
        --model 150m --dataset c4 --tokenizer mistralai/Mistral-7B-v0.1 \\
        --sharding-strategy HYBRID_SHARD --micro-batch-size 8 --global-batch-size 128 \\
        --seq-length 1024 --num-workers 2 --lr 4e-4 --warmup-steps 1000 --max-steps 88000 \\
        --validate-every 1000 --checkpoint-every 500 --resume   # the recipe; on every node

Follows "Run Torch FSDP"
(https://github.com/PrimeIntellect-ai/docs_example/tree/main/torch_fsdp_example), with the model,
learning rate, warm-up and steps of OpenDiLoCo (arXiv:2407.07852), whose batch is 512 and whose
cosine ends at 0. Where it departs: texts are packed into full sequences (its code pads each to
1,024 tokens), the global batch counts the processes, gradients are sent after the last micro-batch
(its test is inverted), every decoder layer is a unit (not the whole model), the learning rate has
a schedule, FSDP2 is the default.
"""

import contextlib
import gc
import itertools
import json
import math
import re
import statistics
import time
import warnings
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import datasets
import numpy as np
import transformers
from datasets.distributed import split_dataset_by_node
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common

# FSDP1 deprecates NO_SHARD. FSDP2 has it, see make_mesh.
warnings.filterwarnings("ignore", message=".*`?NO_SHARD`?.*")
transformers.logging.disable_progress_bar()

# PyTorch's attention, under a name for which transformers makes no mask. Full sequences need none.
# To find that out it would look into the positions, and the host would wait for the device, in
# every forward.
ATTENTION = "causal_sdpa"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)

# ---- FSDP: what is sharded over which processes ------------------------------------------------

# The dtype to gather parameters and compute in, and the dtype to reduce gradients in: many
# processes add up many small numbers, so in fp32. The optimizer's shards are always fp32.
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
}

# FSDP1's names. In FSDP2 each is two facts: the mesh, and reshard_after_forward, which frees
# parameters after forward and gathers them again for backward, except for the root unit.
#
# Each comment ends with the bytes that a process sends in a step: m micro-batches, n processes, r
# replicas of s shards each, P bytes of parameters, L of them in layers, G bytes of gradients.
# Ordered by the memory of a process, least first, on one or two nodes of 8.
RESHARD = {
    # ZeRO-3, parameters are gathered for each forward and backward: (n-1)/n (m (P + L) + G)
    "FULL_SHARD": True,
    # ZeRO-3 in a replica (a node): (s-1)/s (m (P + L) + G) stays in it, 2 (r-1)/r G/s crosses
    "HYBRID_SHARD": True,
    # ZeRO-3 in a replica, which trains by itself: in H steps 2 (r-1)/r W/s cross, W of weights
    "DILOCO": True,
    # ZeRO-2, parameters are gathered once a step: (n-1)/n (P + G)
    "SHARD_GRAD_OP": False,
    # ZeRO-2 in a replica: (s-1)/s (P + G) stays in it, 2 (r-1)/r G/s crosses
    "_HYBRID_SHARD_ZERO2": False,
    # DDP, nothing is sharded: 2 (n-1)/n G
    "NO_SHARD": False,
}
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "DILOCO")

# Two translations of one plan: every decoder layer is a unit, and so are the embedding and the
# output layer, unless they share their weights, which then belong to the root unit.


def shard_with_fsdp2(args, world, config) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""
    whole = None
    with common.first_on_node(world):  # the others wait, for a download if need be
        if world.rank == 0:
            whole = load_model(args, config)  # on the CPU
    model = empty_model(config)  # no device ever holds the whole model
    layers = prepare_layers(args, model)

    mesh = make_mesh(args, world)
    if args.sharding_strategy == "DILOCO":
        mesh = mesh["shard"]  # FSDP knows of one replica only
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype),
    }
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")

    for layer in layers:
        fully_shard(layer, reshard_after_forward=RESHARD[args.sharding_strategy], **options)
    for modules in ends_of(model):  # they stay gathered from forward to backward, as the root does
        fully_shard(modules, reshard_after_forward=False, **options)
    fully_shard(model, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # oneCCL cannot average everywhere

    load_weights(args, world, model, whole)
    return model


def shard_with_fsdp1(args, world, config) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: top-down, one flat parameter per unit."""
    with common.first_on_node(world):
        model = load_model(args, config)  # on every rank's CPU; FSDP moves it unit by unit
    units = prepare_layers(args, model)
    for modules in ends_of(model):
        units.append(modules[-1])  # one module is one unit, so the last norm is in the root unit

    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    return FSDP(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        sharding_strategy=ShardingStrategy[args.sharding_strategy],
        mixed_precision=MixedPrecision(
            param_dtype,
            reduce_dtype,
            buffer_dtype=torch.float32,  # frequencies of positions: in bf16 far ones look alike
            cast_forward_inputs=True,
        ),
        cpu_offload=CPUOffload(args.cpu_offload),
        device_id=world.device,
        use_orig_params=True,  # parameters stay apart, for two optimizer groups and --compile
        device_mesh=make_mesh(args, world),  # checkpoints hold DTensors, as in FSDP2
    )


def make_mesh(args, world):
    """The document's `devices_mesh`: one dimension to shard over, or two, replicas x shards."""
    replicas, shards = mesh_shape(args, world)
    is_hybrid = args.sharding_strategy in HYBRIDS
    if not is_hybrid and (replicas == 1 or args.fsdp_version == 1):
        return init_device_mesh(world.device.type, (world.size,))

    # The last dimension counts fastest: neighbours, on one node, are the shards of a replica.
    names = ("replicate", "shard")
    mesh = init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=names)
    if hasattr(dist, "set_timeout"):  # before torch 2.15 these groups wait 30 minutes
        for group in mesh.get_all_groups():
            dist.set_timeout(common.TIMEOUT, group)
    return mesh


def mesh_shape(args, world) -> tuple[int, int]:
    """How many replicas of the model there are, and over how many processes each is sharded."""
    if args.sharding_strategy == "NO_SHARD":
        return world.size, 1
    if args.sharding_strategy not in HYBRIDS:
        return 1, world.size

    shards = args.shards_per_replica or world.local_size
    if world.size % shards != 0:
        raise common.UserError(
            f"{world.size} processes cannot form replicas of {shards}; set --shards-per-replica"
        )
    if shards == 1 and args.fsdp_version == 1:
        raise common.UserError(
            "FSDP1 never averages gradients of replicas of one process (pytorch#154888); use FSDP2"
        )
    return world.size // shards, shards


def load_weights(args, world, model: nn.Module, whole: nn.Module | None) -> None:
    """Give a model on the meta device its memory, and what rank 0's `whole` one holds."""
    model.to_empty(device="cpu" if args.cpu_offload else world.device)
    weights = whole.state_dict() if whole else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)

    # to_empty has emptied the buffers, and a state dict does not hold them all (positions, for
    # example), nor the settings of generate().
    others = [None, None]
    if world.rank == 0:
        others = [list(whole.buffers()), whole.generation_config]
    dist.broadcast_object_list(others)
    buffers, model.generation_config = others
    for empty, buffer in zip(model.buffers(), buffers, strict=True):
        empty.data = buffer.to(world.device)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Each becomes a unit. docs/your-model-and-data.md has what else another architecture needs."""
    return list(model.model.layers)


def ends_of(model: nn.Module) -> list[list[nn.Module]]:
    """Two more units: the embedding, and the last norm with the output layer. While one of them is
    gathered or reduced, the layers compute. None if both have the same weights."""
    if model.config.tie_word_embeddings:
        return []
    return [[model.model.embed_tokens], [model.model.norm, model.lm_head]]


def prepare_layers(args, model: nn.Module) -> list[nn.Module]:
    """Compile the layers, and recompute them in backward, before sharding. Returns the units."""
    layers = layers_of(model)
    if args.compile:
        for layer in layers:
            layer.compile()  # FSDP's hooks stay outside the graphs

    if args.activation_checkpointing:
        # The wrapper becomes the unit, so that recomputing gathers nothing again.
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    return layers_of(model)


def build(args, world, config):
    """The sharded model and its optimizer, which must see the shards."""
    if args.fsdp_version == 2:
        model = shard_with_fsdp2(args, world, config)
    else:
        model = shard_with_fsdp1(args, world, config)

    decay = []
    no_decay = []  # norms and biases
    for name, parameter in model.named_parameters():
        if re.search(r"norm|\.ln_|bias$", name):
            no_decay.append(parameter)
        else:
            decay.append(parameter)
    groups = [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def train_step(args, world, model, optimizer, batches) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """One step of the optimizer on this rank's part of the global batch.

    Returns this rank's summed loss and the gradient norm, both on the device (reading a number
    would wait for it), and the position in this rank's data.
    """
    num_micro_batches = args.global_batch_size // (args.micro_batch_size * world.size)
    global_targets = args.global_batch_size * args.seq_length

    loss_sum = torch.zeros((), device=world.device)
    optimizer.zero_grad()
    for number in range(num_micro_batches):
        micro_batch, data_position = next(batches)
        is_last = number == num_micro_batches - 1

        with gradient_sync(args, world, model, is_last):
            loss = summed_loss(model, micro_batch)
            # FSDP divides gradients by the number of ranks. Undo that, and divide by all targets:
            # the gradient of the mean over the global batch, as if one process held it.
            (loss * world.size / global_targets).backward()
        loss_sum += loss.detach()

    if args.fsdp_version == 2:
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    else:
        grad_norm = model.clip_grad_norm_(1.0)  # nn.utils would see this rank's shards only
    optimizer.step()
    return loss_sum, grad_norm, data_position


def gradient_sync(args, world, model, is_last: bool):
    """The context of a micro-batch: only the last one sends gradients, and until then ZeRO-2
    keeps its parameters."""
    if args.fsdp_version == 2:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last or RESHARD[args.sharding_strategy])
        return contextlib.nullcontext()
    # One process has nothing to send, and there no_sync fails in bf16 with tied weights.
    if is_last or world.size == 1:
        return contextlib.nullcontext()
    return model.no_sync()


class OuterOptimizer:
    """DiLoCo's (arXiv:2311.08105): SGD with Nesterov momentum on what all replicas share."""

    def __init__(self, args, world, model) -> None:
        mesh = make_mesh(args, world)
        self.args = args
        self.replicas = mesh.get_group("replicate")
        self.own_replica = mesh.get_group("shard")
        self.number = mesh.get_local_rank("replicate")
        # Of this rank's shards. The weights are views: to write into them is to change the model.
        self.weights = [parameter.detach().to_local() for parameter in model.parameters()]
        self.shared = [weight.clone() for weight in self.weights]
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        """How far the replicas have moved, on average, is the gradient; all of them continue from
        where it leads. A collective."""
        dtype = PRECISIONS[self.args.outer_precision][0]
        beta = self.args.outer_momentum
        moved = []
        for weight, shared in zip(self.weights, self.shared, strict=True):
            moved.append((shared - weight).to(dtype).flatten())

        # At once: on a slow network each all-reduce would cost a round trip.
        all_moved = torch.cat(moved)
        dist.all_reduce(all_moved, group=self.replicas)
        sums = all_moved.split([weight.numel() for weight in self.weights])

        tensors = zip(self.weights, self.shared, self.momentum, sums, strict=True)
        for weight, shared, momentum, total in tensors:
            gradient = total.view_as(shared).to(shared.dtype) / self.replicas.size()
            momentum.mul_(beta).add_(gradient)
            shared.sub_(self.args.outer_lr * (gradient + beta * momentum))
            weight.copy_(shared)

    def state(self) -> dict:
        """What a checkpoint needs of it, by name."""
        return {"shared": dict(enumerate(self.shared)), "momentum": dict(enumerate(self.momentum))}


def summed_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    """Cross-entropy, summed over all targets that are not -100, 0-d."""
    output = model(input_ids=batch["input_ids"], use_cache=False)
    logits = output.logits.float().flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


# ---- Model and data ----------------------------------------------------------------------------

MODELS = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "150m": {  # PrimeIntellect/llama-150m-fresh
        "hidden_size": 1024,
        "intermediate_size": 2688,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "1b": {  # TinyLlama's shape
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


def load_model(args, config) -> nn.Module:
    """The model on this process's CPU, in fp32: FSDP keeps fp32 shards for the optimizer."""
    if args.model in MODELS:
        torch.manual_seed(args.seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=torch.float32)
    return model.train()  # it comes in eval()


def empty_model(config) -> nn.Module:
    """The model on the meta device: shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load_config_and_tokenizer(args, world, source) -> tuple:
    """Those of a pretrained model, or of one of `MODELS` with any tokenizer."""
    is_pretrained = args.model not in MODELS
    tokenizer_name = args.tokenizer
    if is_pretrained and not tokenizer_name:
        tokenizer_name = args.model
    try:
        with common.first_on_node(world):
            if is_pretrained:
                config = AutoConfig.from_pretrained(args.model, attn_implementation=ATTENTION)
                empty = empty_model(config)
                layers_of(empty)
                ends_of(empty)
            if tokenizer_name:
                tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    except (OSError, ValueError, AttributeError) as error:
        message = f"--model {args.model} or --tokenizer {args.tokenizer} cannot be used: {error}"
        if "gated" in message:
            message += "; then run `hf auth login`, or take another --tokenizer"
        raise common.UserError(message) from error

    if not tokenizer_name:
        records = [row["text"] for row in source.take(2000)]
        texts = texts_of(records, args.text_column)
        tokenizer = common.train_tokenizer(texts, vocab_size=2048, append_eos=False)
    if not is_pretrained:
        config = LlamaConfig(
            **MODELS[args.model],
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=args.seq_length,
            rms_norm_eps=1e-5,
            attn_implementation=ATTENTION,
        )
    if len(tokenizer) > config.vocab_size or args.seq_length > config.max_position_embeddings:
        raise common.UserError(
            f"--model {args.model} has too few tokens for --tokenizer or positions for --seq-length"
        )
    window = getattr(config, "sliding_window", None)
    if window and window < args.seq_length:  # ATTENTION has none
        raise common.UserError(
            f"--model {args.model} attends to {window} tokens only; --seq-length must not be longer"
        )
    return config, tokenizer


C4_TRAIN = "hf://datasets/allenai/c4/en/c4-train.*.json.gz"
C4_VALIDATION = "hf://datasets/allenai/c4/en/c4-validation.*.json.gz"

# What a DataLoader's worker calls is not local, nor a lambda: where workers are not forked (macOS,
# Python 3.14), it arrives there as a pickle.


def is_held_out(row: dict) -> bool:
    """5% of the records, chosen by content: one that comes twice is on one side."""
    return zlib.crc32(row["text"].encode()) % 20 == 0


def is_for_training(row: dict) -> bool:
    return not is_held_out(row)


def is_own(row: dict, number: int, share: int, num_shares: int) -> bool:
    """Of n shares of the texts each has every n-th record."""
    return number % num_shares == share


def to_record(row: dict, column: str) -> dict:
    """A row of any dataset as the JSON record that C4 would have for it."""
    return {"text": json.dumps({column: row.get(column)})}


def builtin_texts(args) -> datasets.IterableDataset:
    """Paragraphs of Python's own reference."""
    paragraphs = set()
    for topic in topics.values():
        for paragraph in topic.split("\n\n"):
            paragraphs.add(paragraph.strip())
    texts = sorted(text for text in paragraphs if len(text) > 200)
    rows = datasets.Dataset.from_dict({args.text_column: texts})
    return rows.to_iterable_dataset(num_shards=64)


def load_texts(args) -> tuple[datasets.IterableDataset, list[str]]:
    """JSON records: a stream that knows its position, and those that are held out to validate."""
    name = args.dataset[0]
    is_json = re.search(r"\.jsonl?(\.\w+)?$", name)
    stream = {"split": "train", "streaming": True}
    if name == "builtin":
        rows = builtin_texts(args)
    elif name == "c4" or is_json:
        # As text, so that a broken line is ours to leave out.
        files = C4_TRAIN if name == "c4" else args.dataset
        rows = datasets.load_dataset("text", data_files=files, **stream)
    elif name.endswith(".parquet"):
        rows = datasets.load_dataset("parquet", data_files=args.dataset, **stream)
    elif Path(name).is_dir():
        raise common.UserError(
            f"--dataset {name} is a folder; name its files, as in --dataset '{name}/*.json.gz'"
        )
    else:
        rows = datasets.load_dataset(*name.split(":"), **stream)

    if name == "c4":
        source = rows
        held_out = datasets.load_dataset("text", data_files=C4_VALIDATION, **stream)
    else:
        if not is_json:
            rows = rows.map(to_record, fn_kwargs={"column": args.text_column})
            rows = rows.select_columns(["text"])
        source = rows.filter(is_for_training)
        held_out = rows.filter(is_held_out)
    return source, [row["text"] for row in held_out.take(args.num_validation_texts)]


@contextlib.contextmanager
def name_dataset_in_errors(args):
    """For errors in reading it. A worker's comes with its traceback: the last line counts."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        cause = str(error).strip().splitlines()[-1]
        raise common.UserError(f"--dataset {' '.join(args.dataset)}: {cause}") from error


def texts_of(records, column: str) -> list[str]:
    """The texts of JSON records. Broken ones are left out."""
    texts = []
    for record in records:
        try:
            text = json.loads(record)[column]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(text, str):
            texts.append(text)
    return texts


def pack(rows: dict, numbers: list[int], args, tokenizer, seed: list[int]) -> dict:
    """Shuffle the texts of a block of records and join them end to end, cut into full sequences:
    nothing is padded. `numbers` are the records'."""
    texts = texts_of(rows["text"], args.text_column) or [""]
    texts = [text + tokenizer.eos_token for text in texts]
    np.random.default_rng([*seed, numbers[0]]).shuffle(texts)
    token_lists = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = np.concatenate(token_lists).astype(int)

    # Every token is also a target, across sequences too.
    length = args.seq_length
    num_sequences = max(0, len(tokens) - 1) // length
    end = num_sequences * length
    return {
        "input_ids": tokens[:end].reshape(num_sequences, length),
        "labels": tokens[1 : end + 1].reshape(num_sequences, length),
    }


class Batches(IterableDataset):
    """Endless micro-batches, each with the position after it, where a resumed run goes on.

    Every worker of every rank has texts of its own. positions: one for each worker of this rank.
    next_worker: the one whose turn it is.
    """

    def __init__(
        self, args, world, source, tokenizer, positions: list[dict], next_worker: int
    ) -> None:
        self.args = args
        self.world = world
        self.source = source
        self.tokenizer = tokenizer
        self.positions = positions
        self.next_worker = next_worker

    def __iter__(self):
        # A DataLoader takes a micro-batch from each worker in turn, and always begins with 0.
        num_workers = len(self.positions)
        worker = get_worker_info().id if get_worker_info() else 0
        worker = (worker + self.next_worker) % num_workers

        share = self.world.rank * num_workers + worker
        num_shares = self.world.size * num_workers
        if self.source.num_shards % num_shares == 0:
            own = split_dataset_by_node(self.source, share, num_shares)
        else:  # of other numbers of files, that function would divide packed sequences, not texts
            options = {"share": share, "num_shares": num_shares}
            own = self.source.filter(is_own, with_indices=True, fn_kwargs=options)

        first_pass = self.positions[worker].get("pass", 0)
        position = self.positions[worker].get("at")
        for number in itertools.count(first_pass):  # each pass has another order
            options = {
                "args": self.args,
                "tokenizer": self.tokenizer,
                "seed": [self.args.seed, share, number],
            }
            packed = own.map(
                pack,
                with_indices=True,
                batched=True,
                batch_size=500,
                remove_columns=["text"],
                fn_kwargs=options,
            )
            packed = packed.with_format("numpy")
            if position:
                packed.load_state_dict(position)

            is_empty = position is None
            for batch in packed.iter(self.args.micro_batch_size, drop_last_batch=True):
                yield batch, {"pass": number, "at": packed.state_dict()}
                is_empty = False
            if is_empty:
                raise ValueError("too few texts for a micro-batch in each worker of each process")
            position = None


def batches_on_device(args, world, source, tokenizer, data_position: dict):
    """Yield `Batches` on this rank's device, each with the data position of this rank after it.
    Worker processes pack ahead."""
    # A new run has the data position {}, a new pass {"pass": 1}: the same for each worker.
    positions = data_position.get("workers", [data_position] * args.num_workers)
    worker = data_position.get("next_worker", 0)
    loader = DataLoader(
        Batches(args, world, source, tokenizer, positions, worker),
        batch_size=None,
        num_workers=args.num_workers,
        worker_init_fn=common.ignore_sigterm,
        prefetch_factor=8,
        pin_memory=world.device.type != "cpu",  # else the host waits for each copy
        generator=torch.Generator(),  # the global one is dropout's: resuming would not be exact
    )
    with name_dataset_in_errors(args):
        for batch, position in loader:
            for name, tensor in batch.items():
                batch[name] = tensor.to(world.device, non_blocking=True)

            positions = positions.copy()  # the caller may still have the last list
            positions[worker] = position
            worker = (worker + 1) % args.num_workers
            yield batch, {"workers": positions, "next_worker": worker}


@torch.no_grad()
def validate(args, world, model, sequences: dict, log, step: int) -> None:
    """Print the mean loss over all held-out sequences, on any number of ranks. A collective."""
    # Every rank takes part in every forward pass: numbers past the end wrap round to the first
    # sequences, and do not count.
    count = len(sequences["labels"])
    padded = math.ceil(count / world.size) * world.size
    numbers = torch.arange(world.rank, padded, world.size).split(args.micro_batch_size)

    model.eval()
    totals = torch.zeros(2, device=world.device)  # summed loss, targets
    for part in log.bar(numbers, "validate", len(numbers)):
        inputs = torch.from_numpy(sequences["input_ids"])[part % count]
        labels = torch.from_numpy(sequences["labels"])[part % count]
        labels[part >= count] = -100
        batch = {"input_ids": inputs.to(world.device), "labels": labels.to(world.device)}
        totals[0] += summed_loss(model, batch)
        totals[1] += (batch["labels"] != -100).sum()
    model.train()

    loss_sum, num_targets = common.sum_over_ranks(totals)
    val_loss = loss_sum / num_targets
    perplexity = math.exp(min(val_loss, 700))
    log.write(step=step, val_loss=val_loss, perplexity=perplexity)
    log.print(f"step {step:6,} | val_loss {val_loss:.4f} | perplexity {perplexity:,.1f}")


# ---- Which strategy is fastest here? ------------------------------------------------------------

# Dense bf16, by what a device's name contains; the first that fits.
PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "MI300X": 1307,
}


def mfu_per_token_per_second(args, world, config) -> float:
    """The share of all peak FLOP/s (MFU) that one token/s is; 0 where the peak is unknown.

    By PaLM's appendix B (arXiv:2204.02311), but without the parameters of an embedding that only
    looks up.
    """
    peak_tflops = args.peak_tflops
    if peak_tflops == 0 and world.device.type == "cuda":
        device_name = torch.cuda.get_device_name()
        known = [tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name]
        peak_tflops = known[0] if known else 0
    if peak_tflops == 0:
        return 0.0

    num_parameters = empty_model(config).num_parameters()
    if not config.tie_word_embeddings:
        num_parameters -= config.vocab_size * config.hidden_size
    head_size = getattr(config, "head_dim", None)
    if head_size is None:
        head_size = config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    attention = 12 * config.num_hidden_layers * width * args.seq_length
    return (6 * num_parameters + attention) / (peak_tflops * 1e12 * world.size)


def compare_strategies(args, world, config, log, load_from_start) -> None:
    """Time a few steps under each strategy, with this model on these machines."""
    share = mfu_per_token_per_second(args, world, config)
    for strategy in RESHARD:
        if strategy == "DILOCO" and args.fsdp_version == 1:
            continue
        args.sharding_strategy = strategy
        replicas, shards = mesh_shape(args, world)
        common.peak_memory(world.device)
        try:
            seconds, state_gb = time_steps(args, world, config, log, load_from_start())
        except torch.OutOfMemoryError as error:
            # Other processes may now wait for this one: nothing can follow.
            raise common.UserError(
                f"{strategy} runs out of memory; what follows takes more in most cases"
            ) from error

        speed = args.global_batch_size * args.seq_length / seconds
        memory = common.peak_memory(world.device)
        line = (
            f"{strategy:19} | {replicas:2} x {shards:2} | {speed:9,.0f} tokens/s"
            f" | {seconds:7.3f} s | state {state_gb:.4f} GB | {memory['peak_gb']:.2f} GB"
        )
        record = {"tokens/s": speed, "step_seconds": seconds, "state_gb": state_gb, **memory}
        if share > 0:
            record["mfu"] = speed * share
            line += f" | mfu {speed * share:.1%}"
        log.write(strategy=strategy, replicas=replicas, shards=shards, **record)
        log.print(line)
        gc.collect()  # FSDP's objects refer to each other in circles
        if world.device.type != "cpu":
            torch.accelerator.empty_cache()


def time_steps(args, world, config, log, batches) -> tuple[float, float]:
    """Seconds of a step, and the GB of state that this process holds."""
    model, optimizer = build(args, world, config)
    times = []
    for _ in log.bar(range(7), args.sharding_strategy, 7):
        start = time.perf_counter()
        loss_sum, _, _ = train_step(args, world, model, optimizer, batches)
        loss_sum.item()  # waits for the device
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[2:])  # the first two allocate, compile and fill queues
    state_gb = common.state_gb(model, optimizer)

    if args.sharding_strategy == "DILOCO":
        outer = OuterOptimizer(args, world, model)
        outer.step()  # sets up communication
        outer.shared[0].sum().item()  # waits for the device
        start = time.perf_counter()
        outer.step()
        outer.shared[0].sum().item()
        seconds += (time.perf_counter() - start) / args.local_steps
        state_gb *= 1.5  # six numbers for each parameter, in place of four
    return seconds, state_gb


# ---- Main --------------------------------------------------------------------------------------

# --resume refuses a checkpoint if one of these flags differs. Any other may change.
MUST_MATCH = (
    "model",
    "dataset",
    "text_column",
    "tokenizer",
    "seq_length",
    "global_batch_size",
    "num_workers",
    "lr",
    "warmup_steps",
    "max_steps",
    "seed",
)
MUST_MATCH_DILOCO = (
    *MUST_MATCH,
    "sharding_strategy",
    "shards_per_replica",
    "local_steps",
    "outer_lr",
    "outer_momentum",
)


def learning_rate(args, step: int) -> float:
    """Of step 1, 2, ...: a linear warm-up, then a cosine down to a tenth at the last step."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def parse_args():
    parser = common.Parser(__doc__)
    count = common.non_negative_int
    size = common.positive_int
    number = common.non_negative_float

    add = parser.add_argument_group("data and model").add_argument
    add("--model", default="tiny", help="tiny, 150m, 1b; or a Llama-like one: a Hub name, a folder")
    add("--dataset", default=["builtin"], nargs="+", help="builtin; c4; Hub; .jsonl[.gz], .parquet")
    add("--text-column", default="text", help="of the dataset")
    add("--tokenizer", help="Hub name or folder; else the model's, or one trained on the texts")
    add("--num-validation-texts", default=500, type=size, help="held out of the dataset, at most")
    add("--seq-length", default=128, type=size, help="tokens in a sequence")
    add("--num-workers", default=1, type=size, help="processes per rank that pack texts")

    add = parser.add_argument_group("training").add_argument
    add("--max-steps", default=500, type=size, help="steps of the optimizer")
    add("--micro-batch-size", default=4, type=size, help="sequences in a process at once")
    add("--global-batch-size", default=0, type=count, help="of all processes; 0: 16 or a few more")
    add("--lr", default=5e-3, type=number, help="the highest; a cosine takes it down to a tenth")
    add("--warmup-steps", default=20, type=count, help="steps to the highest learning rate")
    add("--weight-decay", default=0.1, type=number, help="of matrices, not of norms")

    add = parser.add_argument_group("FSDP").add_argument
    switch = {"action": "store_true"}
    add("--fsdp-version", default=2, type=int, choices=(1, 2), help="2: fully_shard; 1: the class")
    add("--sharding-strategy", default="FULL_SHARD", choices=RESHARD, help="see the README")
    add("--shards-per-replica", default=0, type=count, help="of hybrids; 0: a node's processes")
    add("--local-steps", default=50, type=size, help="of DILOCO, between synchronizations")
    add("--outer-lr", default=0.7, type=number, help="of DILOCO; 1, with momentum 0, averages")
    add("--outer-momentum", default=0.9, type=number, help="of DILOCO, Nesterov's")
    add("--outer-precision", default="fp32", choices=PRECISIONS, help="in which DILOCO sends")
    add(
        "--precision", default="auto", choices=("auto", *PRECISIONS), help="bf16: gradients in fp32"
    )
    add("--cpu-offload", **switch, help="keep shards on the CPU: least memory, slow")
    add("--activation-checkpointing", **switch, help="recompute each layer: less memory, slower")
    add("--compile", **switch, help="torch.compile each layer: a slow start, then faster")

    group = parser.add_argument_group("processes and output")
    common.add_run_flags(group)
    common.add_checkpoint_flags(group)
    add = group.add_argument
    add("--compare-strategies", **switch, help="time each strategy, and end")
    add("--peak-tflops", default=0.0, type=number, help="of one device, for MFU; 0: known GPUs'")
    add("--validate-every", default=50, type=size, help="steps between validations")

    args = parser.parse_args()
    if args.sharding_strategy == "DILOCO":
        if args.fsdp_version == 1:
            parser.error("DILOCO needs --fsdp-version 2: FSDP1's hybrids reduce in every step")
        if args.validate_every % args.local_steps != 0:
            parser.error(
                "--validate-every must be a multiple of --local-steps: DILOCO shares weights only"
                " then"
            )
    return args


def main(args, world) -> None:
    log = common.Log(world, args.output_dir)
    log.print(f"run      {common.describe_run(world)}")
    checkpoint = common.find_checkpoint(args.output_dir, args.resume)
    args.precision = common.choose_precision(args.precision, world.device)
    smallest_batch = args.micro_batch_size * world.size
    if args.global_batch_size == 0:
        args.global_batch_size = math.ceil(16 / smallest_batch) * smallest_batch
    if args.global_batch_size % smallest_batch != 0:
        raise common.UserError(
            f"--global-batch-size must be a multiple of --micro-batch-size times {world.size}"
            " processes"
        )

    # Data
    with name_dataset_in_errors(args):
        source, held_out = load_texts(args)
        if not texts_of(held_out, args.text_column):
            raise ValueError(
                f"no such file, or too few texts in --text-column {args.text_column} to hold some"
                " out"
            )
    config, tokenizer = load_config_and_tokenizer(args, world, source)
    sequences = pack({"text": held_out}, [0], args, tokenizer, seed=[0])
    num_sequences = len(sequences["labels"])
    if num_sequences == 0:
        raise common.UserError(
            "the held-out texts are less than one sequence; use more texts or a lower --seq-length"
        )
    log.print(
        f"data     {args.dataset[0]}, {source.num_shards} files,"
        f" {num_sequences} sequences to validate"
    )

    # Model
    uses_diloco = args.sharding_strategy == "DILOCO"
    replicas, shards = mesh_shape(args, world)
    if shards == 1:
        common.refuse_fsdp1_offload(args)
    num_parameters = empty_model(config).num_parameters()
    bytes_each = 24 if uses_diloco else 16
    size = common.check_that_it_fits(num_parameters, shards, world, args.cpu_offload, bytes_each)
    log.print(f"model    {args.model}, {size}")
    log.print(
        f"fsdp     FSDP{args.fsdp_version}, {args.sharding_strategy},"
        f" replicas x shards: {replicas} x {shards}, {args.precision}"
    )
    if args.compare_strategies:

        def load_from_start():
            return batches_on_device(args, world, source, tokenizer, {})

        compare_strategies(args, world, config, log, load_from_start)
        return
    model, optimizer = build(args, world, config)

    # DiLoCo's replicas train apart: a line shows the first one, and a checkpoint holds each.
    outer = None
    log_group = None
    must_match = MUST_MATCH
    diloco_state = {}
    if uses_diloco:
        outer = OuterOptimizer(args, world, model)
        log_group = outer.own_replica
        must_match = MUST_MATCH_DILOCO
        diloco_state = {"extra": outer.state(), "replica": 1 + outer.number}
        args.shards_per_replica = shards

    # Where the last run stopped
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank
    progress = {"step": 0, "data_positions": [{}] * world.size, "device": world.device.type}
    if checkpoint:
        progress = common.read_progress(checkpoint, args, must_match)
        if uses_diloco and len(progress["data_positions"]) != world.size:
            raise common.UserError(
                f"{checkpoint} was made by more or fewer processes, which DILOCO's replicas cannot"
                " join"
            )
        common.load_checkpoint(checkpoint, model, optimizer, world, **diloco_state)
        log.print(f"resumed  from step {progress['step']}")
    data_positions = progress["data_positions"]
    if len(data_positions) != world.size:
        log.print(
            f"         saved by {len(data_positions)} processes: the position in the data is lost,"
            " a new pass begins"
        )
        passes = [worker.get("pass", 0) for each in data_positions for worker in each["workers"]]
        data_positions = [{"pass": max(passes) + 1}] * world.size
    if progress["device"] != world.device.type:
        log.print(
            f"         saved on {progress['device']}: dropout, if the model has it, draws anew"
        )

    # Train
    stop = common.StopRequest()
    share = mfu_per_token_per_second(args, world, config)
    batches = batches_on_device(args, world, source, tokenizer, data_positions[world.rank])
    step = progress["step"]
    if step == 0:
        validate(args, world, model, sequences, log, step)

    step_tokens = args.global_batch_size * args.seq_length  # of all ranks
    totals = torch.zeros(2, device=world.device)  # since the last line: summed loss, its tokens
    last_logged = step
    start = time.perf_counter()
    steps = range(step + 1, args.max_steps + 1)
    for step in log.bar(steps, "train", len(steps)):
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum, grad_norm, data_position = train_step(args, world, model, optimizer, batches)
        totals[0] += loss_sum
        totals[1] += step_tokens / world.size

        is_last = step == args.max_steps
        stop_now = stop.answered()
        replicas_meet = outer is None or is_last or step % args.local_steps == 0
        if outer and replicas_meet:
            outer.step()
        if replicas_meet:  # DiLoCo's replicas wait for each other only here
            stop.ask()
        save_now = args.checkpoint_every > 0 and (is_last or step % args.checkpoint_every == 0)
        save_now = save_now or stop_now
        validate_now = is_last or step % args.validate_every == 0
        log_now = save_now or validate_now or step % args.log_every == 0

        if log_now:
            all_loss, num_tokens = common.sum_over_ranks(totals, log_group)
            loss = all_loss / num_tokens
            if not math.isfinite(loss):  # before it is saved: checkpoints stay usable
                raise common.UserError(
                    f"the loss is not finite at step {step}; start again with a lower --lr"
                )
            speed = step_tokens * (step - last_logged) / (time.perf_counter() - start)
            norm = grad_norm.item()
            memory = common.peak_memory(world.device)
            line = (
                f"step {step:6,} | loss {loss:.4f} | grad_norm {norm:.3f} | lr {lr:.2e}"
                f" | {speed:9,.0f} tokens/s | {memory['peak_gb']:.2f} GB"
            )
            record = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "tokens/s": speed}
            if share > 0:
                record["mfu"] = speed * share
                line += f" | mfu {speed * share:.1%}"
            log.print(line)
            log.write(**record, **memory)
            totals.zero_()
            last_logged = step

        if save_now:
            dist.all_gather_object(data_positions, data_position)
            progress = {
                "step": step,
                "data_positions": data_positions,
                "device": world.device.type,
                "settings": vars(args),
            }
            common.save_checkpoint(
                args.output_dir, progress, model, optimizer, world, **diloco_state
            )
        if stop_now and not is_last:
            log.print(f"stopped  on request at step {step}, all saved; --resume goes on")
            return
        if validate_now:
            validate(args, world, model, sequences, log, step)
        if log_now:
            start = time.perf_counter()

    # Export
    if args.save_model:
        common.export(model, tokenizer, args.output_dir / "model", world)
    log.print(f"metrics  {log.path}, run {log.run}")
    log.print(f"model    {args.output_dir / 'model' if args.save_model else 'not saved'}")


if __name__ == "__main__":
    common.run(main, parse_args())
