"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Pretrains a Llama on full sequences of text with FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`), under each
of FSDP's five strategies, or with DiLoCo where links are slow. Without flags it needs no download: a tiny Llama learns
Python's own reference.

    python lm_multinode.py                                  # one process for each GPU, or two on the CPU
    python lm_multinode.py --num-processes 4 --compare-strategies --shards-per-replica 2    # which one is fastest here?
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 \\
        --max-restarts 3 lm_multinode.py --model 150m --dataset c4 --tokenizer mistralai/Mistral-7B-v0.1 \\
        --micro-batch-size 8 --global-batch-size 128 --seq-length 1024 --lr 4e-4 --warmup-steps 1000 \\
        --max-steps 88000 --validate-every 1000 --checkpoint-every 500 --resume \\
        --sharding-strategy HYBRID_SHARD    # the recipe; on every node

Follows "Run Torch FSDP" (https://github.com/PrimeIntellect-ai/docs_example/tree/main/torch_fsdp_example), with the
model, learning rate, warm-up and steps of OpenDiLoCo (arXiv:2407.07852), whose batch is 512 and whose cosine ends at 0.
Where it departs: texts are packed into full sequences (its code pads each to 1,024 tokens), the global batch counts the
processes, gradients are sent after the last micro-batch (its test is inverted), every decoder layer is a unit (not the
whole model), the learning rate has a schedule, FSDP2 is the default.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import math
import re
import time
import warnings
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, IterableDataset

import datasets
import numpy as np
import transformers
from datasets.distributed import split_dataset_by_node
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import common

warnings.filterwarnings("ignore", message=".*`?NO_SHARD`?.*")  # FSDP1 deprecates it; FSDP2 has it, see make_mesh
transformers.logging.disable_progress_bar()

# ---- FSDP: what is sharded over which processes ----------------------------------------------------------------
# Gathered and computed with in, reduced in: many processes add up many small numbers, so in fp32.
PRECISIONS = {"fp32": (torch.float32, torch.float32), "bf16": (torch.bfloat16, torch.float32)}
# FSDP1's names. In FSDP2 each is two facts: the mesh, and reshard_after_forward, which frees parameters after forward
# and gathers them again for backward, except for the root unit. Behind it, what a process sends in a step of m
# micro-batches: n processes, in r replicas of s shards where hybrid; P bytes of parameters, of which L in layers; G of
# gradients. From the least memory in a process to the most, on nodes of 8.
RESHARD = {
    "FULL_SHARD": True,  # ZeRO-3, parameters are gathered for each forward and backward: (n-1)/n (m (P + L) + G)
    "HYBRID_SHARD": True,  # ZeRO-3 in a replica (a node): (s-1)/s (m (P + L) + G) stays in it, 2 (r-1)/r G/s crosses
    "DILOCO": True,  # ZeRO-3 in a replica, which trains by itself; in H steps 2 (r-1)/r W/s cross, W bytes of weights
    "SHARD_GRAD_OP": False,  # ZeRO-2, parameters are gathered once a step: (n-1)/n (P + G)
    "_HYBRID_SHARD_ZERO2": False,  # ZeRO-2 in a replica: (s-1)/s (P + G) stays in it, 2 (r-1)/r G/s crosses
    "NO_SHARD": False,  # DDP, nothing is sharded: 2 (n-1)/n G
}
TWO_LEVELS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "DILOCO")  # replicas, sharded each


def num_shards(args, world) -> int:
    """Over how many processes a model is sharded; the others hold replicas of it."""
    if args.sharding_strategy == "NO_SHARD":
        return 1
    if args.sharding_strategy not in TWO_LEVELS:
        return world.size
    shards = args.shards_per_replica or world.local_size
    if world.size % shards:
        raise common.UserError(f"{world.size} processes cannot form replicas of {shards}; set --shards-per-replica")
    if args.sharding_strategy == "DILOCO" and args.fsdp_version == 1:
        raise common.UserError("DILOCO needs --fsdp-version 2: FSDP1's hybrids reduce over replicas in every step")
    if shards == 1 and args.fsdp_version == 1:
        raise common.UserError("FSDP1 never averages gradients of replicas of one process (pytorch#154888); use FSDP2")
    return shards


def make_mesh(args, world):
    """The document's `devices_mesh`: one dimension to shard over, or two, replicas x shards."""
    shards = num_shards(args, world)
    if args.sharding_strategy in TWO_LEVELS or (shards < world.size and args.fsdp_version == 2):
        # The last dimension counts fastest: neighbours, on one node, are the shards of a replica.
        shape, names = (world.size // shards, shards), ("replicate", "shard")
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        if hasattr(dist, "set_timeout"):  # before torch 2.15 these groups wait 30 minutes
            for group in mesh.get_all_groups():
                dist.set_timeout(common.TIMEOUT, group)
        return mesh
    return init_device_mesh(world.device.type, (world.size,))


# Two translations of one plan: every decoder layer is a unit; what remains is the root unit: embedding, last norm and
# output layer.
def shard_with_fsdp2(args, world, config) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""
    with common.first_on_node(world):  # the others wait, if need be for a download
        whole = load_model(args, config) if world.rank == 0 else None  # on the CPU
    model = empty_model(config)  # no device ever holds the whole model
    layers = prepare_layers(args, model)
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype), "mesh": make_mesh(args, world)}
    if args.sharding_strategy == "DILOCO":  # FSDP knows of one replica only
        options["mesh"] = options["mesh"]["shard"]
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    for layer in layers:
        fully_shard(layer, reshard_after_forward=RESHARD[args.sharding_strategy], **options)
    fully_shard(model, **options)  # the root stays gathered after forward: backward begins with it
    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # Intel's oneCCL cannot average on every machine
    common.load_weights(model, whole, world, args.cpu_offload)  # memory for its shards, and rank 0's weights in it
    return model


def shard_with_fsdp1(args, world, config) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: top-down through a wrap policy, one flat parameter per unit."""
    with common.first_on_node(world):
        model = load_model(args, config)  # on every rank's CPU; units move to the device one by one as they are wrapped
    layers = prepare_layers(args, model)
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
        sharding_strategy=ShardingStrategy[args.sharding_strategy],
        # Buffers, the frequencies of positions, in fp32: in bf16 far ones look alike.
        mixed_precision=MixedPrecision(param_dtype, reduce_dtype, torch.float32, cast_forward_inputs=True),
        cpu_offload=CPUOffload(offload_params=args.cpu_offload),
        device_id=world.device,
        use_orig_params=True,  # parameters stay apart, for the two groups of the optimizer and for --compile
        device_mesh=make_mesh(args, world),  # checkpoints then hold DTensors, as in FSDP2
    )


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Each becomes a unit. For another architecture this is the place to change."""
    return model.model.layers


def prepare_layers(args, model: nn.Module) -> list[nn.Module]:
    """torch.compile and activation checkpointing, layer by layer and before sharding. Returns the layers."""
    layers = list(layers_of(model))
    for layer in layers if args.compile else ():
        layer.compile()  # FSDP's hooks stay outside the graphs
    if args.activation_checkpointing:  # the wrapper becomes the unit, so that recomputing gathers nothing again
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    return layers_of(model)


def build(args, world, config) -> tuple:
    """The sharded model and its optimizer, which must see the shards."""
    model = (shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1)(args, world, config)
    norms, matrices = [], []  # norms and biases
    for name, parameter in model.named_parameters():
        (norms if re.search(r"norm|\.ln_|bias$", name) else matrices).append(parameter)
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def train_step(args, world, model, optimizer, batches) -> tuple[torch.Tensor, dict]:
    """One step. Returns this rank's summed loss and the gradient norm, on the device, and the place in its data."""
    micro_batches = args.global_batch_size // (args.micro_batch_size * world.size)
    loss_sum, tokens = torch.zeros((), device=world.device), args.global_batch_size * args.seq_length
    optimizer.zero_grad()
    for number in range(1, micro_batches + 1):
        batch, place = next(batches)
        # Only the last micro-batch sends gradients (FSDP1's no_sync); ZeRO-2 keeps its parameters until then.
        is_last = number == micro_batches
        if args.fsdp_version == 2:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last or RESHARD[args.sharding_strategy])
        # One process has nothing to send; there FSDP1's no_sync fails in bf16 with tied weights.
        waits = args.fsdp_version == 1 and not is_last and world.size > 1
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = summed_loss(model, batch)
            # FSDP averages gradients over ranks. Multiplied by their number and divided by all tokens of the step, that
            # is the gradient of the mean over the global batch, as if one process held it.
            (loss * world.size / tokens).backward()
        loss_sum += loss.detach()
    if args.fsdp_version == 2:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    else:
        norm = model.clip_grad_norm_(1.0)  # nn.utils would see this rank's shards only
    optimizer.step()
    return torch.stack([loss_sum, norm.to(world.device)]), place


class Outer:
    """DiLoCo's outer optimizer (arXiv:2311.08105): SGD with Nesterov momentum on what all replicas share."""

    def __init__(self, args, world, model) -> None:
        mesh = make_mesh(args, world)
        self.args, self.group, self.replica = args, mesh.get_group("replicate"), mesh.get_local_rank("replicate")
        self.own_replica = mesh.get_group("shard")
        self.weights = [parameter.detach().to_local() for parameter in model.parameters()]  # views of its shards
        self.shared = [weight.clone() for weight in self.weights]
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        """What replicas moved by, on average, is the gradient; all start again from where it leads. A collective."""
        for weight, shared, momentum in zip(self.weights, self.shared, self.momentum, strict=True):
            moved = (shared - weight).to(PRECISIONS[self.args.outer_precision][0])
            dist.all_reduce(moved, group=self.group)
            gradient = moved.to(shared.dtype) / dist.get_world_size(self.group)
            momentum.mul_(self.args.outer_momentum).add_(gradient)
            shared.sub_(self.args.outer_lr * (gradient + self.args.outer_momentum * momentum))
            weight.copy_(shared)


def summed_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    """Cross-entropy summed over all targets that are not -100, 0-d."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")


# ---- Model and data --------------------------------------------------------------------------------------------
MODELS = {  # hidden size, width of the feed-forward part, layers, attention heads, their key-value heads
    "tiny": (128, 352, 2, 4, 4),
    "150m": (1024, 2688, 12, 16, 16),  # PrimeIntellect/llama-150m-fresh
    "1b": (2048, 5632, 22, 32, 4),  # TinyLlama's shape
}
# Dense bf16, by what a device's name contains; the first that fits.
PEAK_TFLOPS = {"GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989}
PEAK_TFLOPS |= {"A100": 312, "L40S": 362, "MI300X": 1307}


def load_model(args, config) -> nn.Module:
    """The model on this process's CPU, in fp32: FSDP keeps fp32 shards for the optimizer and casts what it gathers."""
    if args.model not in MODELS:
        return AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=torch.float32).train()
    torch.manual_seed(args.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def empty_model(config) -> nn.Module:
    """The model on the meta device: shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load_config_and_tokenizer(args, world, source) -> tuple:
    """Those of a pretrained model, or of one of `MODELS` with any tokenizer."""
    try:
        with common.first_on_node(world):
            config = None if args.model in MODELS else AutoConfig.from_pretrained(args.model)
            if config:
                layers_of(empty_model(config))
            name = args.tokenizer or (args.model if config else None)
            tokenizer = AutoTokenizer.from_pretrained(name) if name else None
    except (OSError, ValueError, AttributeError) as error:
        names = f"--model {args.model} or --tokenizer {args.tokenizer}"
        way = "; then run `hf auth login`, or take another --tokenizer" if "gated" in str(error) else ""
        raise common.UserError(f"{names} cannot be used: {error}{way}") from error
    if not tokenizer:
        some = (row["text"] for row in source.take(2000))
        tokenizer = common.train_tokenizer(texts_of(some, args.text_column), 2048, append_eos=False)
    if not config:
        hidden, width, layers, heads, kv_heads = MODELS[args.model]
        shape = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": len(tokenizer)}
        special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        config = LlamaConfig(**shape, **special, max_position_embeddings=args.seq_length, rms_norm_eps=1e-5)
    if len(tokenizer) > config.vocab_size or args.seq_length > config.max_position_embeddings:
        raise common.UserError(f"--model {args.model} has too few tokens for --tokenizer or positions for --seq-length")
    return config, tokenizer


def load_texts(args) -> tuple[datasets.IterableDataset, list[str]]:
    """JSON records, one a line, as a stream that knows its place; and the texts held out for validation."""
    name, column, load = args.dataset[0], args.text_column, functools.partial(datasets.load_dataset, streaming=True)
    if name == "c4":
        files = "hf://datasets/allenai/c4/en/c4-{}.*.json.gz"
        parts = (load("text", data_files=files.format(part), split="train") for part in ("train", "validation"))
        return next(parts), list(texts_of((row["text"] for row in next(parts).take(args.num_validation_texts)), column))
    if re.search(r"\.jsonl?(\.\w+)?$", name):  # as text: a broken line is then ours to leave out
        whole = load("text", data_files=args.dataset, split="train")
    else:
        if name == "builtin":
            parts = sorted({part.strip() for topic in topics.values() for part in topic.split("\n\n")})
            rows = datasets.Dataset.from_dict({column: [part for part in parts if len(part) > 200]})
            whole = rows.to_iterable_dataset(num_shards=64)
        elif name.endswith(".parquet"):
            whole = load("parquet", data_files=args.dataset, split="train")
        elif Path(name).is_dir():
            raise common.UserError(f"--dataset {name} is a folder; name its files, as in --dataset '{name}/*.json.gz'")
        else:
            whole = load(*name.split(":"), split="train")
        whole = whole.map(to_record, fn_kwargs={"column": column}).select_columns(["text"])
    held_out = whole.filter(is_held_out).take(args.num_validation_texts)
    return whole.filter(is_for_training), list(texts_of((row["text"] for row in held_out), column))


# What the DataLoader's worker calls is not local, nor a lambda: where workers are not forked (macOS, Python 3.14), it
# arrives there as a pickle.
def to_record(row: dict, column: str) -> dict:
    """A row of any dataset as the JSON record that C4 would have for it."""
    return {"text": json.dumps({column: row.get(column)})}


def is_held_out(row: dict) -> bool:
    """5% of the records, chosen by content: one that comes twice is on one side."""
    return zlib.crc32(row["text"].encode()) % 20 == 0


def is_for_training(row: dict) -> bool:
    return not is_held_out(row)


def is_own(row: dict, number: int, rank: int, world_size: int) -> bool:
    """Every n-th record is this rank's."""
    return number % world_size == rank


@contextlib.contextmanager
def readable(args):
    """Names the dataset when reading it fails; a worker's error comes with its traceback."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise common.UserError(f"--dataset {' '.join(args.dataset)}: {str(error).strip().splitlines()[-1]}") from error


def texts_of(lines, column: str):
    """The texts of JSON records; broken ones are left out."""
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            yield json.loads(line)[column] + ""  # a TypeError where it is no text


def pack(rows: dict, numbers: list[int], args, tokenizer, seed: list[int]) -> dict:
    """Shuffle a block of texts and join them end to end, cut into full sequences: nothing is padded."""
    texts = [text + tokenizer.eos_token for text in texts_of(rows["text"], args.text_column)] or [""]
    np.random.default_rng([*seed, numbers[0]]).shuffle(texts)
    tokens = np.concatenate(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]).astype(int)
    length = args.seq_length
    end = max(0, len(tokens) - 1) // length * length  # every token is also a target, across sequences too
    return {"input_ids": tokens[:end].reshape(-1, length), "labels": tokens[1 : end + 1].reshape(-1, length)}


class Batches(IterableDataset):
    """Endless micro-batches of this rank's own texts, each with the place behind it, where a resumed run goes on."""

    def __init__(self, args, world, source, tokenizer, place: dict) -> None:
        self.args, self.rank, self.tokenizer, self.place = args, world.rank, tokenizer, place
        self.own = split_dataset_by_node(source, world.rank, world.size)
        if source.num_shards % world.size:  # it would step over packed sequences, not over texts
            share = {"rank": world.rank, "world_size": world.size}
            self.own = source.filter(is_own, with_indices=True, fn_kwargs=share)

    def __iter__(self):
        args, place = self.args, self.place
        for number in itertools.count(place.get("pass", 0)):  # at the end of its texts it starts over in another order
            options = {"args": args, "tokenizer": self.tokenizer, "seed": [args.seed, self.rank, number]}
            packed = self.own.map(pack, True, batched=True, batch_size=500, remove_columns=["text"], fn_kwargs=options)
            packed = packed.with_format("numpy")
            if "at" in place:
                packed.load_state_dict(place["at"])
            batch = None
            for batch in packed.iter(args.micro_batch_size, drop_last_batch=True):
                yield batch, {"pass": number, "at": packed.state_dict()}
            if batch is None and "at" not in place:
                raise ValueError("too few texts for a micro-batch in each process")
            place = {}


def load(args, world, source, tokenizer, place: dict):
    """Yield `Batches` on this rank's device. A worker process packs ahead."""
    batches = Batches(args, world, source, tokenizer, place)
    options = {"worker_init_fn": common.ignore_sigterm, "num_workers": 1, "prefetch_factor": 8}
    pinned = world.device.type != "cpu"  # else the host waits for each copy
    loader = DataLoader(batches, batch_size=None, generator=torch.Generator(), pin_memory=pinned, **options)
    with readable(args):
        for batch, behind in loader:
            yield {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}, behind


@torch.no_grad()
def validate(args, world, model, sequences: torch.Tensor, log) -> dict[str, float]:
    """Mean loss over all `sequences` (count, seq_length + 1), on any number of ranks. A collective."""
    model.eval()
    total = torch.zeros(2, device=world.device)
    padded = math.ceil(len(sequences) / world.size) * world.size  # every rank must take part in every forward pass
    parts = torch.arange(world.rank, padded, world.size).split(args.micro_batch_size)
    for part in log.bar(parts, "validate", len(parts)):
        some = sequences[part % len(sequences)].to(world.device)
        labels = some[:, 1:].masked_fill((part >= len(sequences)).to(world.device)[:, None], -100)
        total += torch.stack([summed_loss(model, {"input_ids": some[:, :-1], "labels": labels}), (labels >= 0).sum()])
    model.train()
    loss, tokens = common.sum_over_ranks(total)
    return {"val_loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700))}


# ---- Main ------------------------------------------------------------------------------------------------------
def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, checkpoints=True)
    count, size, number, flag = common.at_least(0), common.at_least(1), common.at_least(0, float), "store_true"
    add = parser.groups["data and model"].add_argument
    name = common.hub_or_folder
    add("--model", default="tiny", type=name, help=f"{', '.join(MODELS)}; or a Llama-like one: a Hub name or a folder")
    add("--dataset", default=["builtin"], nargs="+", help="builtin; c4; .json.gz, .jsonl or .parquet files; a Hub name")
    add("--text-column", default="text", help="of the dataset")
    add("--tokenizer", type=name, help="a Hub name or folder; else the model's own, or one trained on the first texts")
    add("--num-validation-texts", default=500, type=size, help="held out of the dataset, at most")
    add("--seq-length", default=128, type=size, help="tokens in a sequence: fewer take less memory")
    add = parser.groups["training"].add_argument
    add("--max-steps", default=500, type=size, help="steps of the optimizer")
    add("--micro-batch-size", default=4, type=size, help="sequences in a process at once")
    add("--global-batch-size", default=0, type=count, help="sequences in a step of all processes; 0: 16 or a few more")
    add("--lr", default=5e-3, type=number, help="highest learning rate; a cosine takes it down to a tenth")
    add("--warmup-steps", default=20, type=count, help="steps to the highest learning rate")
    add("--weight-decay", default=0.1, type=number, help="of matrices, not of norms")
    add = parser.groups["FSDP"].add_argument
    add("--fsdp-version", default=2, type=int, choices=(1, 2), help="2: fully_shard; 1: FullyShardedDataParallel")
    add("--sharding-strategy", default="FULL_SHARD", choices=RESHARD, metavar="NAME", help=", ".join(RESHARD))
    add("--shards-per-replica", default=0, type=count, help="processes of a replica in hybrids; 0: a node's")
    add("--local-steps", default=50, type=size, help="of DILOCO, between synchronizations; the paper: 500")
    add("--outer-lr", default=0.7, type=number, help="of DILOCO's outer SGD; 1, with momentum 0, averages")
    add("--outer-momentum", default=0.9, type=number, help="of DILOCO's outer SGD, Nesterov's")
    add("--outer-precision", default="fp32", choices=PRECISIONS, help="in which DILOCO sends what weights moved by")
    add("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 where native, else fp32")
    add("--cpu-offload", action=flag, help="keep shards on the CPU and update them there: least memory, slow")
    add("--activation-checkpointing", action=flag, help="recompute each layer in backward: less memory, slower")
    add("--compile", action=flag, help="torch.compile each layer: a slow start, then faster")
    add = parser.groups["processes and output"].add_argument
    add("--compare-strategies", action=flag, help="time a few steps under every strategy, and end")
    add("--peak-tflops", default=0.0, type=number, help="TFLOP/s of one device, for MFU; 0: known GPUs'")
    add("--validate-every", default=50, type=size, help="steps between validations")
    return parser.parse_args()


def learning_rate(args, step: int) -> float:
    """Of step 1, 2, ...: a linear warm-up, then a cosine down to a tenth at the last step."""
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (step / args.warmup_steps if done < 0 else 0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def flops_share(args, world, config) -> float:
    """The share of all peak FLOP/s (MFU) that one token/s is, by PaLM's appendix B (arXiv:2204.02311); 0: unknown.

    Unlike PaLM's, it leaves out the parameters of an embedding that only looks up.
    """
    num_parameters = empty_model(config).num_parameters()
    num_parameters -= 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size  # the lookup's
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_size * args.seq_length
    flops = 6 * num_parameters + attention
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else ""
    peak = args.peak_tflops or next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), 0)
    return flops / (peak * 1e12 * world.size) if peak else 0.0


def wait_for_device(world) -> None:
    """Before a clock is read: on a device, work goes on after the call that asked for it has returned."""
    if world.device.type != "cpu":
        torch.accelerator.synchronize()


def compare_strategies(args, world, config, load_from_start) -> None:
    """Train a few steps under each strategy with this model on these machines; each row comes once it is known."""
    columns = {"strategy": "19s", "replicas": "8d", "shards": "6d", "tokens/s": "10,.0f", "mfu": "6.1%"}
    columns |= {"step_seconds": "7.3f", "state_gb": "8.4f", "peak_gb": "7.2f"}
    log = common.Log(world.rank, args.output_dir, "step_seconds mfu", **columns)
    share = flops_share(args, world, config)
    strategies = [name for name in RESHARD if name != "DILOCO" or args.fsdp_version == 2]
    for args.sharding_strategy in strategies:
        shards = num_shards(args, world)
        row = {"strategy": args.sharding_strategy, "replicas": world.size // shards, "shards": shards}
        common.peak_memory(world.device)
        model, optimizer, batches, times = None, None, None, []
        try:
            model, optimizer = build(args, world, config)
            batches = load_from_start()
            for _ in log.bar(range(7), args.sharding_strategy, 7):  # the first two allocate, compile and fill queues
                began = time.perf_counter()
                train_step(args, world, model, optimizer, batches)[0].tolist()  # waits for the device
                times.append(time.perf_counter() - began)
            seconds, state = sorted(times[2:])[2], common.state_gb(model, optimizer)
            if args.sharding_strategy == "DILOCO":
                outer = Outer(args, world, model)
                outer.step()  # sets up communication
                wait_for_device(world)
                began = time.perf_counter()
                outer.step()
                wait_for_device(world)
                seconds += (time.perf_counter() - began) / args.local_steps
                state += 2 * sum(shared.nbytes for shared in outer.shared) / 2**30
            speed = args.global_batch_size * args.seq_length / seconds
            row |= {"tokens/s": speed, "step_seconds": seconds, "state_gb": state}
            row |= {"mfu": speed * share} if share else {}
        except torch.OutOfMemoryError as error:  # other processes may now wait for this one: nothing can follow
            message = f"{args.sharding_strategy} runs out of memory, and what follows takes more"
            raise common.UserError(message) from error
        log.row(**row, **common.peak_memory(world.device))
        del model, optimizer, batches
        gc.collect()
        if world.device.type != "cpu":
            torch.accelerator.empty_cache()


def main(args, world) -> None:
    columns = {"step": "7,d", "loss": "7.4f", "val_loss": "8.4f", "perplexity": "10,.1f", "grad_norm": "9.3f"}
    columns |= {"lr": "8.2e", "tokens/s": "10,.0f", "mfu": "6.1%", "peak_gb": "7.2f"}
    log = common.Log(world.rank, args.output_dir, "grad_norm lr", **columns)
    log.say(f"run      {common.describe_run(world)}")
    checkpoints = common.find_checkpoints(args.output_dir, args.resume)
    args.precision = common.choose_precision(args.precision, world.device)
    if args.sharding_strategy == "DILOCO" and args.validate_every % args.local_steps:
        raise common.UserError("--validate-every must be a multiple of --local-steps: DILOCO shares weights only then")
    smallest = args.micro_batch_size * world.size
    args.global_batch_size = args.global_batch_size or math.ceil(16 / smallest) * smallest
    if args.global_batch_size % smallest:
        raise common.UserError(
            f"--global-batch-size must be a multiple of --micro-batch-size times {world.size} processes"
        )
    with readable(args):
        source, held_out = load_texts(args)
        if not held_out:
            raise ValueError(f"no such file, or too few texts in --text-column {args.text_column} to hold some out")
    config, tokenizer = load_config_and_tokenizer(args, world, source)
    packed = pack({"text": [json.dumps({args.text_column: text}) for text in held_out]}, [0], args, tokenizer, [0])
    sequences = torch.from_numpy(np.concatenate([packed["input_ids"], packed["labels"][:, -1:]], axis=1))
    if not len(sequences):
        raise common.UserError("the held-out texts are less than one sequence; use more texts or a lower --seq-length")
    shards = num_shards(args, world)
    if shards == 1:
        common.refuse_fsdp1_offload(args)
    fsdp = f"FSDP{args.fsdp_version}, {args.sharding_strategy}, replicas x shards: {world.size // shards} x {shards}"
    log.say(f"fsdp     {fsdp}, {args.precision}")
    num_parameters, copies = empty_model(config).num_parameters(), 6 if args.sharding_strategy == "DILOCO" else 4
    log.say(f"model    {args.model}, {common.describe_size(num_parameters, shards, world, copies, args.cpu_offload)}")
    log.say(f"data     {args.dataset[0]}, {source.num_shards} files, {len(sequences)} sequences to validate")
    if args.compare_strategies:
        return compare_strategies(args, world, config, lambda: load(args, world, source, tokenizer, {}))
    model, optimizer = build(args, world, config)
    outer = Outer(args, world, model) if args.sharding_strategy == "DILOCO" else None
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed; dropout, if the model has it, one per rank
    progress = {"step": 0, "places": [{}] * world.size, "device": world.device.type}
    fixed = ("model", "dataset", "seq_length", "global_batch_size", "lr", "warmup_steps", "max_steps", "seed")
    if outer:
        args.shards_per_replica = num_shards(args, world)
        fixed += ("sharding_strategy", "shards_per_replica", "local_steps", "outer_lr", "outer_momentum")
    settings = {name: getattr(args, name) for name in fixed}  # a resumed run must have the same
    progress |= common.load_checkpoint(checkpoints, model, optimizer, settings, world, outer) | {"settings": vars(args)}
    if progress["step"]:
        log.say(f"resumed  from step {progress['step']}")
    if progress["device"] != world.device.type:
        log.say(f"         saved on {progress['device']}: dropout, if the model has it, draws anew")
        progress["device"] = world.device.type
    if (before := len(progress["places"])) != world.size:
        log.say(f"         saved by {before} processes: the place in the data is lost, a new pass begins")
        progress["places"] = [{"pass": 1 + max(place.get("pass", 0) for place in progress["places"])}] * world.size
    stop = common.StopRequest()
    share, first = flops_share(args, world, config), progress["step"] + 1
    batches = load(args, world, source, tokenizer, progress["places"][world.rank])
    if progress["step"] == 0:
        log.row(step=0, **validate(args, world, model, sequences, log))
    loss_sum, steps, began = torch.zeros((), device=world.device), 0, time.perf_counter()
    for step in log.bar(range(first, args.max_steps + 1), "train", args.max_steps + 1 - first):
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        result, place = train_step(args, world, model, optimizer, batches)
        loss_sum += result[0]  # stays on the device: reading a number would make the host wait in every step
        steps += 1
        ends = step == args.max_steps
        meets = not outer or ends or step % args.local_steps == 0  # DILOCO's replicas wait for each other only then
        if outer and meets:
            outer.step()
        stops = meets and stop.on_any_rank()
        saves = stops or (args.checkpoint_every and (ends or step % args.checkpoint_every == 0))
        validates = ends or step % args.validate_every == 0
        if saves or validates or step % args.log_every == 0:
            tokens = steps * args.global_batch_size * args.seq_length
            # Of all ranks; under DILOCO of this replica's: the row shows the first.
            group, share_of_all = (outer.own_replica, shards / world.size) if outer else (None, 1)
            sums = torch.stack([loss_sum / tokens, result[1] / world.size]) / share_of_all
            loss, norm = common.sum_over_ranks(sums, group)
            if not math.isfinite(loss):  # before saving: the newest checkpoint must stay usable
                raise common.UserError(f"the loss is not finite at step {step}; start again with a lower --lr")
            speed = tokens / (time.perf_counter() - began)
            row = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens/s": speed}
            row |= {"mfu": speed * share} if share else {}
            log.row(step=step, **row, **common.peak_memory(world.device))
            if saves:
                progress["step"], progress["places"] = step, [None] * world.size
                dist.all_gather_object(progress["places"], place)
                common.save_checkpoint(args.output_dir, model, optimizer, progress, world, outer)
            if stops:
                return log.say(f"stopped  on request at step {step}, all saved; --resume goes on")
            if validates:
                log.row(step=step, **validate(args, world, model, sequences, log))
            loss_sum, steps, began = loss_sum.zero_(), 0, time.perf_counter()
    if args.save_model:
        common.export(model, tokenizer, args.output_dir / "model", world)
    log.say(f"\nmetrics  {log.path}, run {log.run}")
    log.say(f"model    {args.output_dir / 'model' if args.save_model else 'not saved'}")


if __name__ == "__main__":
    common.run(main, parse_args())
