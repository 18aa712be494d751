r"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Pretrains a Llama on full sequences of text with FSDP2 (`fully_shard`), under each of FSDP's five
strategies. Without flags it needs no download: a tiny Llama learns Python's own reference.

    python lm_multinode.py                  # one process for each GPU, or two on the CPU
    python lm_multinode.py --num-processes 4 --compare-strategies --shards-per-replica 2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d \
        --rdzv_endpoint HEAD:29500 --max-restarts 3 lm_multinode.py \
        --model 150m --dataset c4 --tokenizer mistralai/Mistral-7B-v0.1 \
        --sharding-strategy _HYBRID_SHARD_ZERO2 --micro-batch-size 8 --global-batch-size 128 \
        --seq-length 1024 --lr 4e-4 --warmup-steps 1000 --max-steps 88000 \
        --validate-every 1000 --checkpoint-every 500 --resume --compile \
        --output-dir /SHARED/run1           # on every node; /SHARED is a folder that all share

Follows "Run Torch FSDP"
(https://github.com/PrimeIntellect-ai/docs_example/tree/main/torch_fsdp_example). The last command
mixes two sources: the batch of 128 is that of this page, while learning rate, warm-up and steps are
OpenDiLoCo's (arXiv:2407.07852), which has a batch of 512. Nobody has run them together. The `150m`
has 149 million parameters in its layers, and 215 million with the vocabulary of that tokenizer.

Where it departs: texts are packed into full sequences (its code pads each to 1,024 tokens), the
global batch is that of all processes, gradients are sent after the last micro-batch (its code, by
mistake, sends them after each but the last), every decoder layer is sharded by itself (not the
model as a whole), the learning rate has a schedule, and the strategies, which have FSDP1's names,
are made with FSDP2 (t5_fsdp.py has both versions).
"""

import contextlib
import copy
import functools
import gc
import itertools
import json
import math
import os
import random
import re
import statistics
import time
import warnings
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

import datasets
import numpy as np
import transformers
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common

# FSDP2 warns that a wrapped module returns a view, which must not be modified in place. No code
# here modifies it.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
transformers.logging.disable_progress_bar()
# Each file is opened by itself, which is no download to count. Errors are raised: no need to log.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
datasets.logging.set_verbosity(datasets.logging.CRITICAL)

# PyTorch's attention, under a name that transformers does not know, so that it makes no mask. Full
# sequences need none: they have no padding, and without a mask this attention is causal by itself.
# Under the known name transformers would look at the positions to see whether a mask is needed, and
# for that the host would wait for the device.
ATTENTION = "causal_sdpa"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)

# ---- FSDP: what is sharded over which processes ------------------------------------------------

# A unit is a group of parameters that FSDP gathers and frees together. Every decoder layer is one.
# Unless they share their weights, the embedding and the output layer are two more. What remains is
# the root unit.

# The dtype to gather parameters and compute in. Gradients are reduced in fp32, as many processes
# add up many small numbers; the optimizer's shards are always fp32.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

# All strategies, by FSDP1's names. In FSDP2 each is two facts: the mesh (see mesh_shape), and
# reshard_after_forward, which frees the layers' parameters after forward and gathers them again for
# backward. Ordered by the memory of a process, roughly the least first. docs/multi-node.md has what
# each of them sends.
RESHARD = {
    "FULL_SHARD": True,  # ZeRO-3: parameters are gathered for each forward and each backward
    "HYBRID_SHARD": True,  # ZeRO-3 in each replica, most often a node; replicas share gradients
    "SHARD_GRAD_OP": False,  # ZeRO-2: parameters are gathered once a step
    "_HYBRID_SHARD_ZERO2": False,  # ZeRO-2 in each replica; replicas share gradients
    "NO_SHARD": False,  # DDP: every process has the whole model; all share gradients
}
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def shard(args, world, full_model, meta_model) -> nn.Module:
    """A copy of the model, each parameter a DTensor of which this process has a shard. A
    collective: every rank must call the function.

    full_model: rank 0's, with the weights. meta_model: shapes only, so that the whole model need
    not fit a device.
    """
    model = copy.deepcopy(meta_model)
    layers = prepare_layers(args, model)

    replicas, shards = mesh_shape(args, world)
    options = {
        "mesh": make_mesh(world.device.type, replicas, shards),
        "mp_policy": MixedPrecisionPolicy(PRECISIONS[args.precision], torch.float32),
        "shard_placement_fn": lambda parameter: choose_dimension(parameter, shards),
    }
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")

    for layer in layers:
        fully_shard(layer, reshard_after_forward=RESHARD[args.sharding_strategy], **options)
    for module in embedding_and_head(model):
        # Not freed after forward: backward begins with the output layer, and for the embedding it
        # needs no parameters.
        fully_shard(module, reshard_after_forward=False, **options)
    fully_shard(model, **options)  # the root unit: all other parameters

    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # oneCCL cannot average everywhere

    common.load_weights(model, full_model, world, args.cpu_offload)
    return model


def choose_dimension(parameter: nn.Parameter, shards: int) -> Shard | None:
    """The dimension to shard: the first, FSDP's default. But all experts of a layer are one
    parameter, whose first dimension is their number. FSDP would pad 8 experts to 16 on 16
    processes, and half of these would hold nothing. So each expert's rows are cut instead."""
    if parameter.ndim == 3 and parameter.size(0) % shards > 0 and parameter.size(1) % shards == 0:
        return Shard(1)
    return None


@functools.cache  # else --compare-strategies would make the same process groups again
def make_mesh(device_type: str, replicas: int, shards: int):
    """One dimension, to shard over, or two, replicas x shards. A collective."""
    if replicas == 1:
        return init_device_mesh(device_type, (shards,))
    # Ranks next to each other, most often on one node, are the shards of one replica.
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def mesh_shape(args, world) -> tuple[int, int]:
    """How many replicas of the model there are, and over how many processes each is sharded."""
    if args.sharding_strategy == "NO_SHARD":
        return world.size, 1
    if args.sharding_strategy not in HYBRIDS:
        return 1, world.size

    shards = args.shards_per_replica or world.local_size
    if world.size % shards != 0:
        raise common.UserError(
            f"{world.size} processes cannot form replicas of {shards}; choose a"
            f" --shards-per-replica that divides {world.size}"
        )
    return world.size // shards, shards


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers, which become units: what transformers never splits over devices. Zamba names
    layers inside others, too, and BERT what holds its embedding, which the output layer may share.
    """
    names = model._no_split_modules or ()
    embedding = model.get_input_embeddings()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if layer not in inner and embedding not in layer.modules()]


def embedding_and_head(model: nn.Module) -> list[nn.Module]:
    """Two more units. While one of them is gathered or reduced, the layers compute. No units if
    both have the same weights."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    return [] if head.weight is embedding.weight else [embedding, head]


def prepare_layers(args, model: nn.Module) -> list[nn.Module]:
    """What --compile and --activation-checkpointing do to the layers, and to the loss. To be called
    before sharding. Returns the units."""
    layers = layers_of(model)
    if args.compile:
        for layer in layers:
            layer.compile()  # FSDP's hooks stay outside the graphs
        # The loss is a module, too, see CrossEntropy. Compiled, it makes no fp32 copies of logits.
        cross_entropy.compile()

    if args.activation_checkpointing:
        # FSDP goes around these wrappers, as prepare_layers comes before sharding.
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
        return [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    return layers


def build(args, world, full_model, meta_model):
    """The sharded model and its optimizer, which must see the shards. A collective."""
    model = shard(args, world, full_model, meta_model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": args.weight_decay}
    return model, torch.optim.AdamW(trained, fused=True, **options)


def train_step(args, world, model, optimizer, micro_batches) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the optimizer. `micro_batches` are this rank's part of the global batch. A
    collective.

    Returns this rank's summed loss and the gradient norm, as tensors: to read a number would make
    the host wait for the device.
    """
    global_targets = args.global_batch_size * args.seq_length
    replicas, _ = mesh_shape(args, world)
    loss_sum = torch.zeros((), device=world.device)
    optimizer.zero_grad()
    for number, micro_batch in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)

        if args.sharding_strategy in HYBRIDS and replicas > 1:
            # Inside each replica gradients are reduced to shards after every micro-batch, whatever
            # --gradient-sync says. Between replicas the shards are summed after the last one.
            model.set_requires_all_reduce(is_last)
        else:
            # Until gradients are reduced, each process keeps those of the whole model.
            model.set_requires_gradient_sync(is_last or args.gradient_sync == "every")
        # Until the last one ZeRO-2's parameters stay gathered.
        model.set_reshard_after_backward(is_last or RESHARD[args.sharding_strategy])
        loss = summed_loss(model, micro_batch)
        # FSDP divides gradients by the number of ranks. Undo that, and divide by all targets: the
        # gradient of the mean over the global batch, as if one process held it.
        (loss * world.size / global_targets).backward()
        loss_sum += loss.detach()

    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    return loss_sum, grad_norm


def summed_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    """Cross-entropy, summed over all targets that are not -100: one number. A collective, as every
    forward of a sharded model is."""
    output = model(input_ids=batch["input_ids"], use_cache=False)
    return cross_entropy(output.logits, batch["labels"])


class CrossEntropy(nn.Module):
    """Summed where a label is not -100. A module, so that --compile can compile it."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


cross_entropy = CrossEntropy()


# ---- Model and data ----------------------------------------------------------------------------

# What --model trains from random weights. Vocabulary and positions are set later.
MODELS = {
    "tiny": LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        rms_norm_eps=1e-5,
    ),
    "150m": LlamaConfig(  # PrimeIntellect/llama-150m-fresh
        hidden_size=1024,
        intermediate_size=2688,
        num_hidden_layers=12,
        num_attention_heads=16,
        rms_norm_eps=1e-5,
    ),
    "1b": LlamaConfig(  # TinyLlama's shape
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
    ),
    "7b": LlamaConfig(  # Llama 2's
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        rms_norm_eps=1e-5,
    ),
}


def load_model(args, config) -> nn.Module:
    """The model on this process's CPU, in fp32: FSDP keeps fp32 shards for the optimizer."""
    torch.manual_seed(args.seed)
    if args.model in MODELS:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = common.load_pretrained(
            AutoModelForCausalLM, args.model, "weights", config=config, dtype=torch.float32
        )
    return model.train()  # a pretrained one comes in eval()


def make_meta_model(config) -> nn.Module:
    """The model on the meta device: shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load_data(args, checkpoint: Path | None) -> tuple:
    """The files of the dataset, sequences to validate on, the model's config, and the tokenizer:
    one that was trained is that of the checkpoint."""
    is_pretrained = args.model not in MODELS
    config = None
    tokenizer = None
    if is_pretrained:
        config = load_config(args)
    if args.tokenizer or is_pretrained:
        tokenizer = common.load_tokenizer(args.tokenizer or args.model)
        if tokenizer.eos_token_id is None:
            raise common.UserError("the tokenizer has no EOS token, which ends each text")
        # Of the added tokens only EOS counts: for that of images Gemma 3's embedding has no row.
        num_tokens = max(tokenizer.vocab_size, tokenizer.eos_token_id + 1)
        if is_pretrained and num_tokens > config.vocab_size:
            raise common.UserError(
                f"--model {args.model} knows {config.vocab_size} tokens, and the tokenizer has"
                f" {num_tokens}; choose the model's own --tokenizer"
            )

    files, to_train, held_out = load_texts(args)
    if tokenizer is None and checkpoint:
        tokenizer = common.load_tokenizer(checkpoint)
    elif tokenizer is None:
        tokenizer = common.train_tokenizer(to_train[:2000], vocab_size=2048, append_eos=False)
    if config is None:
        config = copy.deepcopy(MODELS[args.model])
        config.vocab_size = 64 * math.ceil(len(tokenizer) / 64)  # fast on tensor cores
        config.bos_token_id = None
        config.eos_token_id = tokenizer.eos_token_id
        config.max_position_embeddings = args.seq_length
        config._attn_implementation = ATTENTION

    validation_set = pack(tokenize(held_out, tokenizer), args.seq_length)
    if len(validation_set["labels"]) == 0:
        raise common.UserError(
            f"{len(held_out)} held-out texts do not fill one sequence; use more or longer texts, or"
            " a lower --seq-length"
        )
    return files, validation_set, config, tokenizer


def load_config(args):
    """Of a pretrained --model. Raises UserError where the script cannot train such a model."""
    config = common.load_pretrained(AutoConfig, args.model, "config")
    config._attn_implementation = ATTENTION
    try:
        text_config = config.get_text_config()
        model = make_meta_model(config)
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        [first, *_] = re.split(r"\.\s", str(error).strip())
        raise common.UserError(
            f"--model {args.model} is no causal language model that transformers runs with SDPA:"
            f" {first}"
        ) from error

    reason = None
    if text_config is not config:
        reason = f"has other parts beside text: take a model of type {text_config.model_type}"
    elif not layers_of(model):
        reason = "has no layers to shard: transformers does not name them"
    elif not all(getattr(module, "is_causal", True) for module in model.modules()):
        reason = "also looks at later tokens: it is no causal language model"
    elif getattr(config, "attn_logit_softcapping", None):  # older transformers leave the cap out
        reason = "caps the scores of attention, for which SDPA has no way"
    # ATTENTION ignores windows: a sequence must fit into one.
    limits = ("max_position_embeddings", "sliding_window", "attention_chunk_size")
    longest = min(getattr(config, name, None) or math.inf for name in limits)
    if args.seq_length > longest:
        reason = f"takes a --seq-length of {longest} at most"
    if reason:
        raise common.UserError(f"--model {args.model} {reason}")
    return config


# The files that are read, and those of a folder that are not to be trained on, by their names.
FORMATS = re.compile(r"\.(json|parquet)l?(\.(gz|bz2|xz|zst))?$", re.I)
HELD_BACK = re.compile(r"/(test|val|valid|validation|dev|eval)(-\d+-of-\d+)?\.[^/]*$", re.I)


class DataFile(NamedTuple):
    """A file of texts, or of a Parquet file one of its groups of rows."""

    kind: str
    path: str
    size: float = 1  # in bytes where it is on this disk; the Hub's files are mostly of one size
    group: int = 0
    num_groups: int = 1


@contextlib.contextmanager
def naming(source: str):
    """Any error becomes one sentence that names what is read."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or "it is empty"  # StopIteration, of datasets
        raise common.UserError(f"cannot read {source}: {reason}") from error


def find_files(args) -> list[DataFile]:
    """The files of --dataset. Raises UserError where it is not found."""
    name = "allenai/c4:en" if args.dataset == "c4" else args.dataset
    if name == "builtin":
        return [DataFile("builtin", "builtin")]

    card = Path(name, "README.md")
    has_card = card.exists() and card.read_bytes().startswith(b"---")  # which names its files
    is_folder = os.path.isdir(name) and not has_card
    with naming(f"--dataset {name} (.jsonl, .json, .parquet, a folder, or a name on the Hub)"):
        if is_folder:
            builder = datasets.load_dataset_builder("json", data_files=f"{name}/**")
        elif FORMATS.search(name):
            builder = datasets.load_dataset_builder("json", data_files=name)
        else:
            builder = datasets.load_dataset_builder(*name.split(":"))
        paths = builder.config.data_files["train"]

    files = []
    for path in paths:
        ending = FORMATS.search(path)
        if is_folder and (not ending or HELD_BACK.search(path)):
            continue
        kind = ending[1].lower() if ending else builder.name
        files.append(DataFile(kind, path, os.path.getsize(path) if os.path.exists(path) else 1))
    if streams_of_a_file(args, files) == 1:
        return files

    # Several streams would read the same ones. Of Parquet files each can have groups of rows.
    groups = []
    for file in files:
        num_groups = 1
        if file.kind == "parquet":
            with naming(file.path):
                num_groups = open_file(file).reshard().num_shards
        part = file._replace(size=file.size / num_groups, num_groups=num_groups)
        groups += [part._replace(group=number) for number in range(num_groups)]
    return groups


def streams_of_a_file(args, files: list[DataFile]) -> int:
    """How many streams share files, which each of them then reads: so few that no file is more than
    an eighth of their part of the data, or all. So a file weighs what it holds, about."""
    num_streams = args.global_batch_size // args.micro_batch_size
    sizes = [file.size for file in files]
    for sharing in range(1, num_streams):
        eighth = sum(sizes) * sharing / num_streams / 8
        if num_streams % sharing == 0 and max(sizes, default=0) <= eighth:
            return sharing
    return num_streams


def open_file(file: DataFile) -> datasets.IterableDataset:
    if file.kind == "builtin":
        return datasets.Dataset.from_dict({"text": builtin_texts()}).to_iterable_dataset()
    # By itself, so that its columns need not be those of other files. Nor need all rows be as the
    # first ones, from which datasets concludes the features of a .jsonl file.
    builder = datasets.load_dataset_builder(file.kind, data_files=file.path)
    rows = builder.as_streaming_dataset(split="train")
    builder.info.features = None
    rows.info.features = None
    if file.num_groups > 1:
        rows = rows.reshard().shard(file.num_groups, file.group)
    return rows


def builtin_texts() -> list[str]:
    """Paragraphs of Python's own reference."""
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return sorted({text.strip() for text in paragraphs if len(text) > 200})


def read_file(file: DataFile, column: str, position: dict | None = None):
    """Yield 32 rows at a time: their texts, how many rows they are, and the position after them.
    Raises UserError."""
    with naming(file.path):
        dataset = open_file(file)
        if position:
            dataset.load_state_dict(position)
        for rows in dataset.iter(32):
            if column not in rows:
                raise common.UserError(f"it has no column {column}, but {', '.join(rows)}")
            texts = [text for text in rows[column] if isinstance(text, str) and text.strip()]
            yield texts, len(rows[column]), dataset.state_dict()


def is_held_out(text: str) -> bool:
    """5% of the texts, by content: one that comes twice is on one side."""
    return zlib.crc32(text.encode()) % 20 == 0


def load_texts(args) -> tuple[list[DataFile], list[str], list[str]]:
    """The files of the dataset, its first texts to train on, and those held out to validate."""
    files = find_files(args)
    to_train = []
    held_out = []
    num_rows = 0
    more = ""
    read = (read_file(file, args.text_column) for file in files)
    for texts, count, _ in itertools.chain.from_iterable(read):
        num_rows += count
        for text in texts:
            side = held_out if is_held_out(text) else to_train
            side.append(text)
        if len(held_out) >= args.num_validation_texts and len(to_train) >= 2000:
            more = "more than "  # it need not read on
            break
    if not held_out:
        raise common.UserError(
            f"--dataset {args.dataset} has too few texts in column {args.text_column} to hold some"
            f" out: {len(to_train)} in {len(files)} files"
        )

    if dist.get_rank() == 0:
        names = list(dict.fromkeys(Path(file.path).name for file in files))
        listed = ", ".join(names[:5] + ["..."] * (len(names) > 5))
        print(f"dataset  {args.dataset}, files: {len(names):,} ({listed})", flush=True)
        num_texts = len(to_train) + len(held_out)
        sharing = streams_of_a_file(args, files)
        rest = f"{num_rows - num_texts:,} rows without one; {sharing} streams read each file"
        print(f"texts    {more}{num_texts:,}, {rest}", flush=True)
    return files, to_train, held_out[: args.num_validation_texts]


def tokenize(texts: list[str], tokenizer) -> list[list[int]]:
    """With the special tokens that the tokenizer gives a text, and EOS at its end."""
    token_lists = tokenizer(texts, verbose=False)["input_ids"]
    for tokens in token_lists:
        if tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
    return token_lists


def pack(token_lists: list[list[int]], length: int) -> dict:
    """Texts end to end, cut into full sequences, of which it returns arrays: nothing is padded."""
    tokens = np.concatenate(token_lists).astype(int)
    # Labels are shifted here: the target of a token is the next one, also across sequences. The
    # model would shift them again, so it does not get them.
    end = (len(tokens) - 1) // length * length
    return {
        "input_ids": tokens[:end].reshape(-1, length),
        "labels": tokens[1 : end + 1].reshape(-1, length),
    }


def read_texts(args, files: list[DataFile], number: int, position: list):
    """Yield texts of stream `number`, some at a time and pass after pass, and the position after
    them.

    The streams that share files have every n-th text of them. Each goes through them in an order of
    its own, so that kinds of texts mix.
    """
    num_streams = args.global_batch_size // args.micro_batch_size
    sharing = streams_of_a_file(args, files)
    dealt = random.Random(args.seed).sample(files, len(files))
    of_stream = dealt[number // sharing :: num_streams // sharing]
    order = random.Random(number).sample(range(len(of_stream)), len(of_stream))

    turn, in_file, num_before = position  # num_before: texts of this file
    last_turn = turn + len(order)
    while turn <= last_turn:
        index = order[turn % len(order)]
        for texts, _, after in read_file(of_stream[index], args.text_column, in_file):
            texts = [text for text in texts if not is_held_out(text)]
            # By `index`, or of small files the same streams would have most.
            start = (number - index - num_before) % sharing
            num_before += len(texts)
            if start < len(texts):
                last_turn = turn + len(order)
                yield texts[start::sharing], [turn, after, num_before]
        turn += 1
        in_file = None
        num_before = 0
    raise common.UserError("there are fewer texts than micro-batches in a step")


def read_sequences(args, files: list[DataFile], tokenizer, number: int, position: str | None):
    """Yield the sequences of stream `number`, each with the position after it. They come in blocks
    of 64 or more, in each of which texts are shuffled and packed."""
    sharing = streams_of_a_file(args, files)
    layout = f"{len(files)} files, or groups of rows, each read by {sharing} streams"
    start = json.dumps([[0, None, 0], 0, 0, layout])
    after_texts, block, num_done, layout_before = json.loads(position or start)
    if layout != layout_before:
        raise common.UserError(
            f"the run had {layout_before}, and now there are {layout}; choose another --output-dir"
        )
    texts_of_stream = read_texts(args, files, number, after_texts)
    while True:
        before_block = after_texts
        token_lists = []
        num_tokens = 0
        while num_tokens <= 64 * args.seq_length:
            texts, after_texts = next(texts_of_stream)
            for tokens in tokenize(texts, tokenizer):
                token_lists.append(tokens)
                num_tokens += len(tokens)
        np.random.default_rng([args.seed, number, block]).shuffle(token_lists)
        sequences = pack(token_lists, args.seq_length)
        for row in range(num_done, len(sequences["labels"])):
            # In 32 bits: the worker sends it through shared memory, of which Docker gives little.
            sequence = {name: rows[row].astype("int32") for name, rows in sequences.items()}
            after = json.dumps([before_block, block, row + 1, layout])
            yield sequence | {"position": after}
        block += 1
        num_done = 0


class Sequences(IterableDataset):
    """Those of this rank, step after step: in each a micro-batch of each of its streams.

    So a step has the same sequences on any number of processes, and a run may go on with more or
    fewer of them.
    """

    def __init__(self, args, world, files: list[DataFile], tokenizer, positions: list[str] | None):
        num_streams = args.global_batch_size // args.micro_batch_size
        self.streams = []
        for number in range(world.rank, num_streams, world.size):
            position = positions[number] if positions else None
            self.streams.append((args, files, tokenizer, number, position))
        self.micro_batch_size = args.micro_batch_size

    def __iter__(self):
        streams = [read_sequences(*arguments) for arguments in self.streams]
        while True:
            for stream in streams:
                yield from itertools.islice(stream, self.micro_batch_size)


def steps_on_device(args, world, files: list[DataFile], tokenizer, positions: list[str] | None):
    """Yield for each step this rank's micro-batches, on its device, and the positions of its
    streams after it, where a resumed run goes on. A worker process packs ahead.

    positions: of all streams, to go on from.
    """
    size = args.micro_batch_size
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # true hangs in a forked worker
    loader = DataLoader(
        Sequences(args, world, files, tokenizer, positions),
        batch_size=args.global_batch_size // world.size,
        num_workers=1,  # not 2: both would give every step
        pin_memory=world.device.type != "cpu",  # else the host waits for each copy
        **common.WORKERS,
    )
    for step in loader:
        positions = step.pop("position")  # after each sequence
        for name, tensor in step.items():
            step[name] = tensor.to(world.device, non_blocking=True).long()
        micro_batches = []
        for first in range(0, len(positions), size):
            rows = slice(first, first + size)
            micro_batches.append({name: tensor[rows] for name, tensor in step.items()})
        yield micro_batches, positions[size - 1 :: size]


@torch.no_grad()
def validate(args, world, model, sequences: dict, log, step: int):
    """Print the mean loss over all held-out sequences, on any number of ranks. A collective."""
    # Every rank takes part in every forward pass, and all parts are as large, for which --compile
    # makes one graph. Numbers past the end wrap round to the first sequences, and do not count.
    count = len(sequences["labels"])
    of_all_ranks = args.micro_batch_size * world.size
    padded = math.ceil(count / of_all_ranks) * of_all_ranks
    numbers = torch.arange(world.rank, padded, world.size).split(args.micro_batch_size)

    model.eval()
    totals = torch.zeros(2, device=world.device)  # summed loss, targets
    for part in log.bar(numbers, "validate", len(numbers)):
        inputs = torch.from_numpy(sequences["input_ids"])[part % count]
        labels = torch.from_numpy(sequences["labels"])[part % count]
        labels[part >= count] = -100  # in a copy, which indexing by a tensor makes
        batch = {"input_ids": inputs.to(world.device), "labels": labels.to(world.device)}
        totals[0] += summed_loss(model, batch)
        totals[1] += (batch["labels"] != -100).sum()
    model.train()

    loss_sum, num_targets = common.sum_over_ranks(totals)
    val_loss = loss_sum / num_targets
    perplexity = math.exp(min(val_loss, 700))
    log.metrics({"step": step, "val_loss": val_loss, "perplexity": perplexity})


# ---- Which strategy is fastest here? ------------------------------------------------------------

# Dense bf16, by the words in a device's name; if several entries fit, the last counts.
PEAK_TFLOPS = {
    "A100": 312,
    "L40S": 362,
    "MI300X": 1307,
    "H100": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H200": 989,
    "H200 NVL": 835,
    "B200": 2250,
    "GB200": 2500,
}


def mfu_per_token_per_second(args, world, meta_model) -> float:
    """What a token costs, as a share of what all GPUs can compute in a second. Multiplied by
    tokens/s it is MFU, Model FLOPs Utilization. 0 where either is unknown.

    By PaLM's appendix B (arXiv:2204.02311) backward costs twice what forward does. PyTorch counts
    forward's products on shapes alone; of experts those that a token uses.
    """
    peak_tflops = args.peak_tflops
    if peak_tflops == 0 and world.device.type == "cuda":
        device_name = torch.cuda.get_device_name()
        for name, tflops in PEAK_TFLOPS.items():
            if re.search(rf"\b{name}\b", device_name):  # whole words: not A100 in "RTX A1000"
                peak_tflops = tflops
    if peak_tflops == 0:
        return 0.0

    model = copy.deepcopy(meta_model)
    model.set_experts_implementation("batched_mm")  # has shapes that do not depend on numbers
    tokens = torch.ones(1, args.seq_length, dtype=torch.long, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, use_cache=False)
    except RuntimeError:  # a few models read numbers all the same
        return 0.0
    flops_per_token = 3 * counter.get_total_flops() / args.seq_length
    return flops_per_token / (peak_tflops * 1e12 * world.size)


def compare_strategies(args, world, full_model, meta_model, log, steps, mfu_per_speed: float):
    """Time a few steps under each strategy, with this model on these machines. A collective."""
    for strategy in RESHARD:
        args.sharding_strategy = strategy
        common.peak_gib(world.device)  # counts anew from here
        model, optimizer = build(args, world, full_model, meta_model)
        times = []
        for _ in log.bar(range(7), strategy, 7):
            start = time.perf_counter()
            micro_batches, _ = next(steps)
            loss_sum, _ = train_step(args, world, model, optimizer, micro_batches)
            loss_sum.item()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[2:])  # the first two allocate, compile and fill queues

        speed = args.global_batch_size * args.seq_length / seconds
        record = {
            "strategy": strategy,
            "tokens/s": speed,
            "state_gib": common.state_gib(model, optimizer),
            "peak_gib": common.peak_gib(world.device),
        }
        if mfu_per_speed > 0:
            record["mfu"] = speed * mfu_per_speed
        log.metrics(record)
        del model, optimizer
        gc.collect()  # FSDP's objects refer to each other in circles
        if world.device.type != "cpu":
            torch.accelerator.empty_cache()


# ---- Main --------------------------------------------------------------------------------------

# --resume refuses a checkpoint if one of these flags differs. Any other may change.
MUST_MATCH = (
    "model dataset text_column tokenizer seq_length global_batch_size micro_batch_size lr"
    " warmup_steps weight_decay max_steps seed"
).split()


def learning_rate(args, step: int, num_steps: int) -> float:
    """A linear warm-up, then a cosine down to a tenth. `step` counts from 1 to `num_steps`."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    done = (step - args.warmup_steps) / max(1, num_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def parse_args():
    parser = common.make_parser(__doc__)
    at_least_0 = common.at_least(0)
    at_least_1 = common.at_least(1)
    number = common.at_least(0, float)

    add = parser.add_argument_group("data and model").add_argument
    add("--model", default="tiny", help="tiny, 150m, 1b, 7b; or pretrained: a Hub name, a folder")
    add("--dataset", default="builtin", help="builtin; c4; Hub; .jsonl[.gz], .parquet; '*.jsonl'")
    add("--text-column", default="text", help="of the dataset")
    add("--tokenizer", help="Hub name or folder; else the model's, or one trained on the texts")
    add("--num-validation-texts", default=500, type=at_least_1, help="at most, held out")
    add("--seq-length", default=128, type=at_least_1, help="tokens in a sequence")

    add = parser.add_argument_group("training").add_argument
    add("--max-steps", default=500, type=at_least_1, help="steps of the optimizer")
    add("--micro-batch-size", default=4, type=at_least_1, help="sequences in a process at once")
    add(
        "--global-batch-size",
        default=0,
        type=at_least_0,
        help="sequences in a step; 0: the first multiple of micro-batch x processes from 16 on",
    )
    add(
        "--lr",
        default=0.0,
        type=number,
        help="the highest; 0: 5e-3 for tiny, 4e-4 for 150m, 1b, 7b; 2e-5 for a pretrained model",
    )
    add("--warmup-steps", default=20, type=at_least_0, help="steps to the highest learning rate")
    add("--weight-decay", default=0.1, type=number, help="of all weights")

    add = parser.add_argument_group("FSDP").add_argument
    switch = {"action": "store_true"}
    add("--sharding-strategy", default="FULL_SHARD", choices=RESHARD, help="see the README")
    add("--shards-per-replica", default=0, type=at_least_0, help="hybrids; 0: processes of a node")
    add("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 on new GPUs")
    add("--cpu-offload", **switch, help="keep shards on the CPU: least memory, slow")
    add("--activation-checkpointing", **switch, help="recompute each layer: less memory, slower")
    add("--compile", **switch, help="torch.compile each layer, and the loss: a slow start")
    add(
        "--gradient-sync",
        default="last",
        choices=("last", "every"),
        help="the micro-batches of a step that reduce gradients; every: less memory, more to send",
    )

    group = parser.add_argument_group("processes and output")
    common.add_run_flags(group)
    common.add_checkpoint_flags(group)
    add = group.add_argument
    add("--compare-strategies", **switch, help="time each strategy, and end")
    add("--peak-tflops", default=0.0, type=number, help="of a device, for MFU; 0: of known GPUs")
    add("--validate-every", default=50, type=at_least_0, help="steps between validations; 0: never")

    args = parser.parse_args()
    if args.lr == 0:
        args.lr = 4e-4 if args.model in MODELS else 2e-5
        if args.model == "tiny":
            args.lr = 5e-3
    return args


def is_due(args, step: int, every: int) -> bool:
    """Every so many steps, and after the last one; never if `every` is 0."""
    return every > 0 and (step % every == 0 or step == args.max_steps)


def main(args, world):
    log = common.Log(world, args.output_dir)
    model_folder = args.output_dir / "model"
    checkpoint = None
    if not args.compare_strategies:
        checkpoint = common.find_checkpoint(args, model_folder)
    args.precision = common.choose_precision(args.precision, world.device)
    smallest_batch = args.micro_batch_size * world.size
    if args.global_batch_size == 0:
        args.global_batch_size = math.ceil(16 / smallest_batch) * smallest_batch
    if args.global_batch_size % smallest_batch != 0:
        raise common.UserError(
            f"--global-batch-size must be a multiple of --micro-batch-size times {world.size}"
            " processes"
        )
    replicas, shards = mesh_shape(args, world)

    # Data
    data = common.first_on_node(world, lambda: load_data(args, checkpoint))
    files, validation_set, config, tokenizer = data
    step_tokens = args.global_batch_size * args.seq_length  # of all ranks
    num_sequences = len(validation_set["labels"])
    log.print(f"data     {step_tokens:,} tokens in a step, {num_sequences} sequences to validate")

    # Model
    full_model = None
    if world.rank == 0:
        full_model = load_model(args, config)  # on the CPU
    meta_model = make_meta_model(config)
    common.untie(meta_model, full_model, world)
    log.print(f"model    {args.model}, {common.describe_state(meta_model, shards)}")
    mfu_per_speed = mfu_per_token_per_second(args, world, meta_model)
    if args.compare_strategies:
        log.print(f"fsdp     every strategy, {args.precision}")
        steps = steps_on_device(args, world, files, tokenizer, None)
        compare_strategies(args, world, full_model, meta_model, log, steps, mfu_per_speed)
        return
    mesh = f"{replicas} x {shards} (replicas x shards)"
    log.print(f"fsdp     {args.sharding_strategy}, {mesh}, {args.precision}")
    model, optimizer = build(args, world, full_model, meta_model)
    del full_model

    # Where the last run stopped
    step = 0
    positions = None
    if checkpoint:
        progress = common.load_checkpoint(checkpoint, args, MUST_MATCH, model, optimizer)
        step = progress["step"]
        positions = progress["positions"]
        log.print(f"resumed  from step {step} of {args.max_steps}")
    elif args.validate_every > 0:
        validate(args, world, model, validation_set, log, step)

    # Train
    stop = common.StopRequest()
    loss_sum = torch.zeros((), device=world.device)  # since the last line
    last_logged = step
    start = time.perf_counter()

    numbers = range(step + 1, args.max_steps + 1)
    steps = steps_on_device(args, world, files, tokenizer, positions)
    for step in log.bar(numbers, "train", len(numbers)):
        lr = learning_rate(args, step, args.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        micro_batches, positions = next(steps)
        # A resumed run draws the same dropout; each rank draws its own. Not before next(steps): the
        # DataLoader draws a seed when it starts.
        torch.manual_seed(hash((args.seed, step, world.rank)))
        step_loss, grad_norm = train_step(args, world, model, optimizer, micro_batches)
        loss_sum += step_loss

        stop_now = stop.on_any_rank()
        save_now = stop_now or is_due(args, step, args.checkpoint_every)
        validate_now = is_due(args, step, args.validate_every)
        if save_now or validate_now or is_due(args, step, args.log_every):
            num_tokens = step_tokens * (step - last_logged)
            loss = common.sum_over_ranks(loss_sum) / num_tokens  # waits for the device
            speed = num_tokens / (time.perf_counter() - start)
            record = {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm.item(),
                "lr": lr,
                "tokens/s": speed,
                "peak_gib": common.peak_gib(world.device),
            }
            if mfu_per_speed > 0:
                record["mfu"] = speed * mfu_per_speed
            log.metrics(record)
            loss_sum.zero_()
            last_logged = step

            if save_now:
                gathered = [None] * world.size
                dist.all_gather_object(gathered, positions)
                # Rank 0 has streams 0, n, 2n, ..., rank 1 has streams 1, n + 1, ...
                in_order = [position for nth in zip(*gathered, strict=True) for position in nth]
                progress = {"step": step, "positions": in_order}
                common.save_checkpoint(
                    args.output_dir, progress, args, model, optimizer, tokenizer, world
                )
            if stop_now and step < args.max_steps:
                log.print(f"stopped  at step {step}, all is saved: go on with --resume")
                return
            if validate_now:
                validate(args, world, model, validation_set, log, step)
            start = time.perf_counter()  # without the time of saving and validation

    saved = "not saved"
    if args.save_model:
        common.export(model, meta_model, tokenizer, model_folder, world)
        saved = f"{model_folder}, in place of any before it"
    log.print(f"metrics  {log.path}, run {log.run}")
    log.print(f"model    {saved}")


if __name__ == "__main__":
    common.run(main, parse_args())
