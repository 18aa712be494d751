"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Pretrains a Llama on full sequences of text with FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`), side by
side, under each of FSDP's five strategies. Without flags it needs no download: a tiny Llama learns Python's reference.

    python lm_multinode.py                                              # one process
    torchrun --nproc_per_node 2 lm_multinode.py                         # a laptop: two processes on the CPU
    torchrun --nproc_per_node 8 lm_multinode.py --model 150m --dataset c4 --compare-strategies
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 \\
        --max-restarts 3 lm_multinode.py --model 150m --dataset c4 --checkpoint-every 500 --resume   # on every node

The second command prints, on 2 cores of an AMD EPYC with torch 2.15.0 and transformers 5.23.0 in a minute and a half:

    step      0  validation_loss 7.6621  perplexity 2,126.2
    step    100  validation_loss 5.7476  perplexity  313.4
    step    500  validation_loss 4.5545  perplexity   95.1

Follows "Run Torch FSDP", a tutorial on training over several nodes, with the model and recipe of OpenDiLoCo
(arXiv:2407.07852). Where it departs: texts are packed into full sequences (circulating code pads each text to 1,024
tokens), the global batch counts the processes, every decoder layer is a unit of its own (the code put the whole model
in one), and FSDP2 is the default because FSDP1 is deprecated.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import glob
import json
import math
import os
import statistics
import time
import warnings
import zlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.profiler import profile
from torch.utils.data import DataLoader, IterableDataset

import datasets
import fsspec
import numpy as np
import transformers
from datasets.distributed import split_dataset_by_node
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import common
from common import World

transformers.logging.disable_progress_bar()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warns in the data worker, a forked process
# FSDP1 with nothing to shard says that it is deprecated; the first lines of the output say what is sharded.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`|The `NO_SHARD` sharding strategy is")

TOKENIZER = "mistralai/Mistral-7B-v0.1"  # of 32,000 tokens
CHUNK = 1024  # tokens whose logits exist at once with --chunked-loss: 131 MB for 32,000 tokens in fp32

# Llama shapes: hidden size, width of the feed-forward part, layers, attention heads, their key-value heads, and the
# least size of the vocabulary, which is the tokenizer's where that is larger.
MODELS = {
    "tiny": (128, 352, 2, 4, 4, 0),
    "150m": (1024, 2688, 12, 16, 16, 32_000),  # PrimeIntellect/llama-150m-fresh, 214,983,680 parameters
    "1b": (2048, 5632, 22, 32, 4, 32_000),  # TinyLlama's shape
}

# In which type parameters are gathered and computed with, and in which gradients are reduced. Many processes add up
# many small numbers, and bf16 has 8 bits for them: reduce in fp32. The optimizer updates fp32 shards.
PRECISIONS = {"fp32": (torch.float32, torch.float32), "bf16": (torch.bfloat16, torch.float32)}


class Strategy(NamedTuple):
    fsdp1: ShardingStrategy
    hybrid: bool  # sharded within a replica (by default a node), replicated between replicas
    reshard: bool  # FSDP2's reshard_after_forward: free parameters after forward, gather them again for backward


# What a process sends in a step with n processes, in r replicas of s shards where hybrid; G bytes of gradients as they
# are reduced, P bytes of parameters as they are gathered, m micro-batches. See `bytes_sent_per_step`.
STRATEGIES = {
    # Nothing is sharded (DDP). Sends 2 (n-1)/n G.
    "NO_SHARD": Strategy(ShardingStrategy.NO_SHARD, hybrid=False, reshard=False),
    # ZeRO-2: gradients and optimizer state are; parameters are gathered once a step. Sends (n-1)/n (P + G).
    "SHARD_GRAD_OP": Strategy(ShardingStrategy.SHARD_GRAD_OP, hybrid=False, reshard=False),
    # ZeRO-3: parameters too; gathered for each forward and each backward. Sends (n-1)/n (2 m P + G).
    "FULL_SHARD": Strategy(ShardingStrategy.FULL_SHARD, hybrid=False, reshard=True),
    # ZeRO-3 in a replica: (s-1)/s (2 m P + G) stays in it, the gradients' shards cross: 2 (r-1)/r G/s.
    "HYBRID_SHARD": Strategy(ShardingStrategy.HYBRID_SHARD, hybrid=True, reshard=True),
    # ZeRO-2 in a replica: (s-1)/s (P + G) stays in it, 2 (r-1)/r G/s crosses.
    "_HYBRID_SHARD_ZERO2": Strategy(ShardingStrategy._HYBRID_SHARD_ZERO2, hybrid=True, reshard=False),
}

# Dense bf16 TFLOP/s by a part of the device's name, the makers' figures; the longer name first.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "MI300X": 1307,
}

# What the bare command changes so that it learns in two minutes on two cores: (its own value, the recipe's).
DEFAULTS = {
    "micro_batch_size": (4, 8),
    "global_batch_size": (16, 128),
    "seq_length": (128, 1024),
    "lr": (5e-3, 4e-4),
    "warmup_steps": (20, 1000),
    "max_steps": (500, 88_000),
    "validate_every": (50, 1000),
    "num_validation_texts": (20, 500),  # by --dataset; the others by --model, whether it is tiny
}

# What a checkpoint must share with the run that resumes it, or it would be another run.
MUST_MATCH = (
    *("model", "dataset", "tokenizer", "seq_length", "global_batch_size", "num_validation_texts"),
    *("shuffle_buffer", "lr", "warmup_steps", "max_steps", "seed"),
)


def non_negative_float(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text!r}")
    return value


def parse_args() -> argparse.Namespace:
    parser = common.ArgumentParser(description="Pretrain a language model with FSDP on one or many nodes.")
    count, size, number = common.non_negative_int, common.positive_int, common.positive_float
    flag, add = argparse.BooleanOptionalAction, parser.add

    add("--model", f"{', '.join(MODELS)}; or a Llama-like model: a Hub name or a local folder", "tiny")
    add("--dataset", "builtin; c4; a path or pattern of C4's format: 'shards/*.json.gz'", "builtin")
    text = "builtin, or a Hub name or folder"
    text += f" (default: the model's own, else builtin for the built-in data, else {TOKENIZER})"
    add("--tokenizer", text, argparse.SUPPRESS)
    add("--num-validation-texts", "texts held out for validation", DEFAULTS["num_validation_texts"], type=size)
    add("--shuffle-buffer", "texts a process reads before it shuffles them", 10_000, type=size)

    add("--max-steps", "optimizer steps", DEFAULTS["max_steps"], type=size)
    add("--micro-batch-size", "sequences a process computes at once", DEFAULTS["micro_batch_size"], type=size)
    add("--global-batch-size", "sequences in a step of all processes", DEFAULTS["global_batch_size"], type=size)
    add("--seq-length", "tokens in a sequence", DEFAULTS["seq_length"], type=size)
    add("--lr", "highest learning rate of AdamW; then a cosine down to a tenth", DEFAULTS["lr"], type=number)
    add("--warmup-steps", "steps until the highest learning rate", DEFAULTS["warmup_steps"], type=count)
    add("--weight-decay", "on matrices only", 0.1, type=non_negative_float)
    add("--max-grad-norm", "clip the norm of all gradients to this", 1.0, type=number)
    add("--seed", "of weights, data order and dropout", 1, type=count)

    add("--fsdp-version", "2: fully_shard; 1: FullyShardedDataParallel", 2, type=int, choices=(1, 2))
    add("--sharding-strategy", "see STRATEGIES in the script", "FULL_SHARD", choices=STRATEGIES)
    text = "processes that share one replica in the hybrid strategies, 0 for those of a node"
    add("--shards-per-replica", text, 0, type=count)
    add("--accumulate-sharded", "hybrids: sum micro-batches in shards: less memory, more traffic", False, action=flag)
    add("--precision", "auto: bf16 if native, else fp32", "auto", choices=("auto", *PRECISIONS))
    add("--activation-checkpointing", "recompute each decoder layer in backward", False, action=flag)
    add("--compile", "torch.compile each decoder layer", False, action=flag)
    add("--chunked-loss", f"compute logits for {CHUNK:,} tokens at a time: less memory", False, action=flag)
    add("--print-model", "print the wrapped model once", False, action=flag)
    add("--device", "where to train", "auto", choices=("auto", "cpu", "cuda", "xpu", "mps"))

    add("--compare-strategies", "measure every strategy here, with this model, and end", False, action=flag)
    add("--compare-steps", "steps to measure for each of them", 5, type=size)
    text = "leave out strategies whose state needs more in a process, 0 for the device's memory"
    add("--memory-limit-gb", text, 0.0, type=non_negative_float)
    add(
        "--peak-tflops",
        "of one device, for MFU; 0: known GPUs by name, measured on a CPU",
        0.0,
        type=non_negative_float,
    )
    add("--profile-steps", "steps to trace for https://ui.perfetto.dev, 0 for none", 0, type=count)

    add("--log-every", "steps between reports", 10, type=size)
    add("--validate-every", "steps between validations", DEFAULTS["validate_every"], type=size)
    add("--sample", "a prompt to continue at the end", "")
    add("--save-model", "export the model as a Hugging Face folder at the end", True, action=flag)
    add("--output-dir", "for metrics, models and checkpoints", Path("output/lm_multinode"), type=Path)
    add("--checkpoint-every", "steps between checkpoints, 0 for none", 0, type=count)
    add("--keep-checkpoints", "how many of the newest to keep", 2, type=size)
    add("--resume", "continue from the newest checkpoint, if there is one", False, action=flag)

    args = parser.parse_args()
    by_dataset = {"num_validation_texts": DEFAULTS["num_validation_texts"]}
    common.settle(args, by_dataset, args.dataset == "builtin")
    common.settle(args, DEFAULTS, args.model == "tiny")
    own = TOKENIZER if args.model in MODELS else args.model
    vars(args).setdefault("tokenizer", "builtin" if args.model in MODELS and args.dataset == "builtin" else own)
    hybrid = STRATEGIES[args.sharding_strategy].hybrid
    if args.shards_per_replica and not (hybrid or args.compare_strategies):
        parser.error(f"--shards-per-replica is for the hybrid strategies, not for {args.sharding_strategy}")
    if args.accumulate_sharded and not (hybrid and args.fsdp_version == 2):
        parser.error("--accumulate-sharded needs --fsdp-version 2 and a hybrid --sharding-strategy")
    return args


# ---- Model -----------------------------------------------------------------------------------------------------


def load_tokenizer(args: argparse.Namespace, world: World) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer: trained on the built-in texts, or read. A collective.

    Raises:
        common.UserError: it cannot be read, or has no token that ends a text.
    """
    if args.tokenizer == "builtin":
        return common.train_tokenizer(world, builtin_texts()[0], vocab_size=2048, append_eos=False)

    def read():
        tokenizer = common.read_pretrained(AutoTokenizer.from_pretrained, "--tokenizer", args.tokenizer, "tokenizer")
        if tokenizer.eos_token_id is None:
            raise common.UserError(f"--tokenizer {args.tokenizer} has no end-of-text token; name another")
        return tokenizer

    return common.first_process_first(world, read)


def load_config(
    args: argparse.Namespace, tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.PretrainedConfig:
    """The shape of the model.

    Raises:
        common.UserError: it cannot be read, or knows fewer tokens than the tokenizer or positions than a sequence.
    """
    num_tokens = len(tokenizer)
    if args.model in MODELS:
        hidden, feed_forward, layers, heads, key_value_heads, vocabulary = MODELS[args.model]
        return LlamaConfig(
            vocab_size=max(vocabulary, num_tokens),
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=args.seq_length,
            rms_norm_eps=1e-5,
            bos_token_id=None,  # texts are joined with nothing but the end-of-text token between them
            eos_token_id=tokenizer.eos_token_id,
        )
    config = common.read_pretrained(AutoConfig.from_pretrained, "--model", args.model, "model configuration")
    if num_tokens > config.vocab_size:
        raise common.UserError(
            f"--tokenizer {args.tokenizer} has {num_tokens:,} tokens and --model {args.model} knows "
            f"{config.vocab_size:,}; leave out --tokenizer"
        )
    if args.seq_length > getattr(config, "max_position_embeddings", math.inf):
        raise common.UserError(
            f"--model {args.model} knows {config.max_position_embeddings:,} positions, less than --seq-length "
            f"{args.seq_length:,}; lower it"
        )
    return config


def skeleton(args: argparse.Namespace, config: transformers.PretrainedConfig, device: torch.device) -> nn.Module:
    """The model on the meta device: shapes, no memory. Only the frequencies of the positions are on `device`."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with device:
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        len(model.model.layers), model.lm_head
    except (ValueError, AttributeError, TypeError) as error:
        raise common.UserError(
            f"--model {args.model} is a {config.model_type}, whose parts are not named like Llama's; "
            "choose a Llama, Mistral or Qwen model"
        ) from error
    return model


def initial_values(index: int, shape: torch.Size, std: float, seed: int, device: torch.device) -> torch.Tensor:
    """Whole parameter number `index`: the same on every rank and for any number of ranks."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)  # RMSNorm
    generator = torch.Generator(device).manual_seed(seed * 100_000 + index)
    return torch.empty(shape, device=device).normal_(0, std, generator=generator)


def return_chunked_loss(model: nn.Module) -> None:
    """Let the model's forward return the summed loss when it gets `targets`, from logits that never exist as a whole.

    Chunks of tokens go through output layer and cross-entropy one by one, and again in backward. It must be in forward,
    where FSDP gathers the root unit with the output layer's weight. PyTorch's own F.linear_cross_entropy (2.13) spares
    the second pass, but in bf16 its sum was off by 1 to 5 percent on a CPU with torch 2.15.
    """
    forward = model.forward

    @functools.wraps(forward)  # generate() looks at its parameters
    def forward_or_loss(*args, targets: torch.Tensor | None = None, **kwargs):
        if targets is None:
            return forward(*args, **kwargs)
        hidden = model.model(*args, **kwargs).last_hidden_state.flatten(0, 1)
        chunks = zip(hidden.split(CHUNK), targets.flatten().split(CHUNK), strict=True)
        return sum(torch.utils.checkpoint.checkpoint(loss_of_chunk, *chunk, use_reentrant=False) for chunk in chunks)

    def loss_of_chunk(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), targets, ignore_index=-100, reduction="sum")

    model.forward = forward_or_loss


def build(args: argparse.Namespace, world: World, config: transformers.PretrainedConfig) -> tuple:
    """The sharded model and its optimizer. The order of these lines matters. A collective."""
    model = skeleton(args, config, world.device)
    is_matrix = [parameter.dim() > 1 for parameter in model.parameters()]  # FSDP1 will make all of them flat
    layer_class = type(model.model.layers[0])
    if args.chunked_loss:
        return_chunked_loss(model)
    if args.activation_checkpointing:  # inside the units, so that recomputing needs no gathering of its own
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer_class))
    if args.compile:
        for layer in model.modules():
            if isinstance(layer, layer_class):
                layer.compile()  # layer by layer: FSDP's hooks stay outside the graphs
    initialize = functools.partial(initial_values, std=config.initializer_range, seed=args.seed, device=world.device)
    shard = shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1
    model = shard(model, make_mesh(args, world), args, initialize)
    if args.model not in MODELS:  # rank 0 reads the weights and sends one parameter at a time
        # fp32, whatever the files hold: FSDP keeps fp32 shards for the optimizer and casts what it gathers.
        read = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
        read = functools.partial(common.read_pretrained, read, "--model", args.model, "weights")
        weights = common.first_process_first(world, lambda: read().state_dict() if world.rank == 0 else {})
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=broadcast)
    pairs = list(zip(model.parameters(), is_matrix, strict=True))
    groups = [
        {"params": [parameter for parameter, matrix in pairs if matrix], "weight_decay": args.weight_decay},
        {"params": [parameter for parameter, matrix in pairs if not matrix], "weight_decay": 0.0},
    ]
    # After sharding: it must see the shards.
    return model, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


# ---- Data ------------------------------------------------------------------------------------------------------


def builtin_texts() -> tuple[list[str], list[str]]:
    """Pieces of Python's language reference, of about 2,000 characters: to train on, and every tenth held out."""
    from pydoc_data.topics import topics

    pieces, piece, seen = [], "", set()
    for topic in sorted(topics.values(), key=len, reverse=True):
        for paragraph in (text.strip("\n") for text in topic.split("\n\n")):
            if paragraph not in seen:  # topics repeat each other: what is held out must not be learned elsewhere
                seen.add(paragraph)
                piece += paragraph + "\n\n"
            if len(piece) > 2000:
                pieces.append(piece)
                piece = ""
    held_out = pieces[::10]
    del pieces[::10]
    return pieces, held_out


def read_records(shards: list[str], skip: int = 0, skip_in: str = "") -> Iterator[dict]:
    """Yield {"text": text} for each line of C4's files, None for a broken record; without the first `skip` of a file.

    Raises:
        common.UserError: a file cannot be read to its end, or no record in it has a text.
    """
    for shard in shards:
        lines = good = 0
        try:
            with fsspec.open(shard, "rb", compression="infer") as file:
                for line in file:
                    lines += 1
                    try:
                        text = json.loads(line)["text"]
                    except (ValueError, KeyError, TypeError):
                        text = None
                    good += isinstance(text, str)
                    if shard != skip_in or lines > skip:
                        yield {"text": text if isinstance(text, str) else None}
        except (OSError, EOFError, zlib.error) as error:
            raise common.UserError(f"{shard} is broken after {lines:,} records ({error}); get it again") from error
        if good == 0:
            raise common.UserError(f"{shard}: none of its {lines:,} records has a field 'text'; C4's format has one")


def load_texts(args: argparse.Namespace, world: World) -> tuple[datasets.IterableDataset, list[str]]:
    """This run's texts as a stream, of which every process takes a part, and those held out for validation.

    Raises:
        common.UserError: there is no such data, or not enough for every process.
    """
    if args.dataset == "builtin":
        texts, held_out = builtin_texts()

        def each(texts):
            return ({"text": text} for text in texts)

        source = datasets.IterableDataset.from_generator(each, gen_kwargs={"texts": texts})  # each text is a shard
    elif args.dataset == "c4":
        try:
            source, validation = (
                datasets.load_dataset("allenai/c4", "en", split=split, streaming=True).select_columns("text")
                for split in ("train", "validation")
            )
            held_out = [record["text"] for record in validation.take(args.num_validation_texts)]
        except Exception as error:  # the Hub, the network, proxies: each has its own
            reason = str(error).strip().splitlines()[0]
            raise common.UserError(
                f"--dataset c4 could not be read from the Hugging Face Hub ({reason}); check the network, or give the "
                "path of local files"
            ) from error
    else:
        shards = sorted(glob.glob(args.dataset))
        if not shards:
            raise common.UserError(f"--dataset {args.dataset}: no such file; builtin and c4 need none")
        if world.local_rank == 0:
            for shard in shards:  # before training, not hours into it
                if all(record["text"] is None for record in islice(read_records([shard]), 100)):
                    raise common.UserError(
                        f"{shard}: none of its first records has a field 'text'; C4's format has one"
                    )
        first = [record["text"] for record in islice(read_records(shards[:1]), args.num_validation_texts + 1)]
        if len(first) <= args.num_validation_texts:
            raise common.UserError(
                f"{shards[0]} has only {len(first)} records, and --num-validation-texts {args.num_validation_texts} "
                "holds out as many from the first file; lower it"
            )
        held_out = [text for text in first[:-1] if text]
        source = datasets.IterableDataset.from_generator(
            read_records, gen_kwargs={"shards": shards, "skip": args.num_validation_texts, "skip_in": shards[0]}
        )
    if source.num_shards < world.world_size:
        raise common.UserError(
            f"--dataset {args.dataset} has {source.num_shards} files for {world.world_size} processes, and each needs "
            "one of its own; split the files, or start fewer processes"
        )
    return source, held_out[: args.num_validation_texts]


def tokenize(tokenizer: transformers.PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """The tokens of each text, with the end-of-text token behind them."""
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array([*text, tokenizer.eos_token_id]) for text in tokens]


START = {"passes": 0, "block": 0, "source": None, "text": 0, "token": 0, "skipped": 0}


class PackedTexts(IterableDataset):
    """Endless micro-batches of full sequences: texts are joined end to end and cut, so nothing is padded.

    Every process has its own texts and never runs out: at the end it starts over in another order, so ranks cannot
    disagree on whether there is a next batch. With each batch comes the position behind it, from which another
    PackedTexts goes on exactly: datasets' own shuffle buffer would forget what it held. So texts are shuffled in
    blocks, and a position names the block and the place in it.
    """

    def __init__(self, source, tokenizer, args: argparse.Namespace, world: World, position: dict) -> None:
        self.source, self.tokenizer, self.args, self.world = source, tokenizer, args, world
        self.position = position

    def tokenized_texts(self) -> Iterator[tuple[dict, int, np.ndarray]]:
        """Yield the position of each text from `self.position` on, the records skipped until then, and its tokens."""
        at = {**self.position, "token": 0}
        while True:
            source = split_dataset_by_node(self.source, self.world.rank, self.world.world_size)
            if at["source"]:
                source.load_state_dict(at["source"])
            records = iter(source)
            found = False
            while True:
                block = [record["text"] for record in islice(records, self.args.shuffle_buffer)]
                if not block:
                    break
                skipped = at["skipped"] + block.count(None)
                block = [text for text in block if text]
                found = found or bool(block)
                seed = [self.args.seed, self.world.rank, at["passes"], at["block"]]
                order = np.random.default_rng(seed).permutation(len(block)).tolist()
                for begin in range(at["text"], len(order), 64):
                    some = order[begin : begin + 64]
                    tokens = tokenize(self.tokenizer, [block[i] for i in some])
                    for number, text in enumerate(tokens, begin):
                        yield {**at, "text": number}, skipped, text
                # Not before the first block: a source that was given a state does not tell it until it is read.
                at = {**at, "source": source.state_dict(), "block": at["block"] + 1, "text": 0, "skipped": skipped}
            if not found and at["block"] == 0:
                raise common.UserError(f"rank {self.world.rank} finds no text in its part of --dataset")
            at = {**START, "passes": at["passes"] + 1, "skipped": at["skipped"]}

    def __iter__(self) -> Iterator[dict]:
        batch, length = self.args.micro_batch_size, self.args.seq_length
        pending: deque[tuple[dict, int, np.ndarray]] = deque()
        total, offset = 0, self.position["token"]  # tokens pending, and those of the first text that are used up
        try:
            for text in self.tokenized_texts():
                pending.append(text)
                total += len(text[-1])
                while total - offset > batch * length:
                    # One more than the inputs: every token is also a target, across sequences too.
                    some = np.concatenate([tokens for *_, tokens in pending])[offset : offset + batch * length + 1]
                    offset += batch * length
                    while offset >= len(pending[0][-1]):
                        total -= len(pending[0][-1])
                        offset -= len(pending.popleft()[-1])
                    position, skipped, _ = pending[0]
                    yield {
                        "input_ids": some[:-1].reshape(batch, length),
                        "labels": some[1:].reshape(batch, length),
                        "position": {**position, "token": offset},
                        "skipped": skipped,
                    }
        except common.UserError as error:
            yield {"error": str(error)}  # raised here, it would arrive as a traceback


def load_batches(texts: PackedTexts, world: World, num_ahead: int) -> Iterator[dict]:
    """Yield this rank's micro-batches on its device: (micro_batch_size, seq_length) each, with the position behind.

    A worker process reads and tokenizes `num_ahead` of them ahead. One, because two would need two positions.
    """
    loader = DataLoader(
        texts,
        batch_size=None,
        num_workers=1,
        prefetch_factor=num_ahead,
        pin_memory=world.device.type != "cpu",
        worker_init_fn=common.ignore_signals,
        generator=torch.Generator(),  # else it draws from the global one
    )
    for batch in loader:
        if "error" in batch:
            raise common.UserError(batch["error"])
        for name in ("input_ids", "labels"):
            batch[name] = batch[name].to(world.device, non_blocking=True)
        yield batch


# ---- FSDP ------------------------------------------------------------------------------------------------------


def mesh_shape(args: argparse.Namespace, world: World) -> tuple[int, int]:
    """Replicas and shards in each.

    Raises:
        common.UserError: the processes cannot be divided so, or FSDP1 would not average gradients.
    """
    if args.sharding_strategy == "NO_SHARD":
        return world.world_size, 1
    if not STRATEGIES[args.sharding_strategy].hybrid:
        return 1, world.world_size
    shards = args.shards_per_replica or world.local_world_size
    if world.world_size % shards:
        raise common.UserError(
            f"{world.world_size} processes cannot be divided into replicas of {shards}; set --shards-per-replica to a "
            f"divisor of {world.world_size}"
        )
    if args.fsdp_version == 1 and shards == 1:
        raise common.UserError(
            f"{args.sharding_strategy} with one shard in each replica: FSDP1 would never average the gradients and "
            "each process would train a model of its own (pytorch#154888); use --fsdp-version 2, NO_SHARD, or more "
            "--shards-per-replica"
        )
    return world.world_size // shards, shards


def make_mesh(args: argparse.Namespace, world: World) -> DeviceMesh:
    """The processes as FSDP wants them: one dimension to shard over, or two, replicas x shards."""
    replicas, shards = mesh_shape(args, world)
    if replicas == 1 and not STRATEGIES[args.sharding_strategy].hybrid:
        return init_device_mesh(world.device.type, (shards,), mesh_dim_names=("shard",))
    if args.sharding_strategy == "NO_SHARD" and args.fsdp_version == 1:
        return init_device_mesh(world.device.type, (replicas,), mesh_dim_names=("replicate",))
    # The last dimension counts fastest: neighbours, on one node, are the shards of a replica.
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


# Two translations of one plan: every decoder layer is a unit; what remains is the root unit: embedding, last norm and
# output layer. `initialize(index, shape)` gives a whole parameter, of which each process keeps its shard.


def shard_with_fsdp2(model: nn.Module, mesh: DeviceMesh, args: argparse.Namespace, initialize) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""
    strategy = STRATEGIES[args.sharding_strategy]
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=strategy.reshard, **options)
    fully_shard(model, **options)  # the root stays gathered after forward: backward begins with it
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.device_type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # Intel's oneCCL cannot average
    rotary_emb, model.model.rotary_emb = model.model.rotary_emb, None  # it has real values, which no checkpoint holds
    model.to_empty(device=mesh.device_type)  # this rank's shards, on the device
    model.model.rotary_emb = rotary_emb
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            whole = initialize(index, parameter.shape)
            own = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(own.to_local())  # None: everybody has the whole, nothing is sent
    register_fsdp_forward_method(model, "generate")  # the root gathers its parameters for generate() as for forward()
    return model


def shard_with_fsdp1(model: nn.Module, mesh: DeviceMesh, args: argparse.Namespace, initialize) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: top-down through a wrap policy, one flat parameter per unit."""
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    units = set(model.model.layers)
    numbers = {parameter: index for index, parameter in enumerate(model.parameters())}
    made = {}

    def materialize(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:  # an output layer can share the embedding's
                made[parameter] = nn.Parameter(initialize(numbers[parameter], parameter.shape))
            setattr(module, name, made[parameter])

    on_cpu = mesh.device_type == "cpu"
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units),
        sharding_strategy=STRATEGIES[args.sharding_strategy].fsdp1,
        mixed_precision=MixedPrecision(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            buffer_dtype=torch.float32,  # frequencies of positions: in bf16, far positions would look alike
            cast_forward_inputs=True,  # every unit casts its inputs, as in FSDP2; FSDP1 by default only the root
        ),
        # On a CPU the device must be named too.
        device_id=torch.device("cpu")
        if on_cpu
        else torch.device(mesh.device_type, torch.accelerator.current_device_index()),
        param_init_fn=materialize,  # unit by unit: no process ever holds the whole model
        use_orig_params=True,  # parameters stay apart, for the two groups of the optimizer and for --compile
        device_mesh=mesh,  # checkpoints then hold DTensors, as in FSDP2
    )


def bytes_sent_per_step(args: argparse.Namespace, world: World, config: transformers.PretrainedConfig) -> tuple:
    """Bytes that one process sends in an optimizer step, and bytes that leave its node.

    Of ring algorithms: an all-gather or reduce-scatter of B bytes over n processes sends (n-1)/n B from each, an
    all-reduce 2 (n-1)/n B. A ring leaves a node once, so a node sends for each ring what one of its processes does.
    """
    replicas, shards = mesh_shape(args, world)
    strategy = STRATEGIES[args.sharding_strategy]
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    model = skeleton(args, config, torch.device("meta"))
    layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    root = sum(parameter.numel() for parameter in model.parameters()) - layers
    # After its forward FULL_SHARD frees the layers but not the root, with which backward begins.
    gathered = args.accumulation * (2 * layers + root) if strategy.reshard else layers + root
    scatters = args.accumulation if args.accumulate_sharded else 1
    ring = 2 if world.backend == "gloo" else 1  # gloo has no reduce-scatter: PyTorch all-reduces and drops the rest
    gradients = (layers + root) * reduce_dtype.itemsize
    in_replica = (shards - 1) / shards * (gathered * param_dtype.itemsize + ring * scatters * gradients)
    between = 2 * (replicas - 1) / replicas * gradients / shards
    if world.world_size == world.local_world_size:
        return in_replica + between, 0.0
    leaves_node = in_replica if shards > world.local_world_size else 0.0
    return in_replica + between, leaves_node + between * min(shards, world.local_world_size)


# ---- Training --------------------------------------------------------------------------------------------------


# Of one rank since the last report: loss sum, first step whose loss is not finite.
EMPTY_WINDOW = (0.0, math.inf)


@dataclasses.dataclass
class Progress:
    """Where training stands, the same on every rank. Saved in each checkpoint."""

    run_date: str
    step: int = 0  # optimizer steps since the start
    steps_since_report: int = 0


def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor], chunked: bool = False) -> torch.Tensor:
    """Cross-entropy summed over the tokens of a batch that have a target: a 0-d tensor."""
    if chunked:
        return model(input_ids=batch["input_ids"], use_cache=False, targets=batch["labels"])
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    targets = batch["labels"].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=-100, reduction="sum")


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Of step 1, 2, ...: a linear warm-up, then a cosine down to a tenth at the last step."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train_step(args, world, model, optimizer, batches) -> tuple[torch.Tensor, torch.Tensor, dict, float]:
    """One optimizer step. Returns this rank's summed loss, the gradient norm, the last batch, and seconds of waiting.

    Tensors stay on the device: reading a number (.item()) would make the host wait in every step.
    """
    strategy = STRATEGIES[args.sharding_strategy]
    tokens = args.global_batch_size * args.seq_length
    loss_sum, waited = torch.zeros((), device=world.device), 0.0
    optimizer.zero_grad()
    for number in range(1, args.accumulation + 1):
        began = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - began
        # ---- Only the last micro-batch sends gradients. The others sum theirs up in full size, or, when accumulating
        # sharded, reduced within the replica. Both lines must come before forward.
        is_last = number == args.accumulation
        if args.fsdp_version == 2:
            model.set_requires_gradient_sync(is_last or args.accumulate_sharded)
            model.set_requires_all_reduce(is_last)
            model.set_reshard_after_backward(is_last or strategy.reshard)  # ZeRO-2 gathers parameters once a step
        with model.no_sync() if args.fsdp_version == 1 and not is_last else contextlib.nullcontext():
            loss = summed_loss(model, batch, args.chunked_loss)
            # FSDP averages gradients over ranks. Times world_size and over all tokens of the step, that average is the
            # gradient of the mean over the global batch, as if one process held it.
            (loss * world.world_size / tokens).backward()
        loss_sum += loss.detach()
    if args.fsdp_version == 2:
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # a sum still to be made over ranks
    else:
        norm = model.clip_grad_norm_(args.max_grad_norm)  # nn.utils would see this rank's shards only
    optimizer.step()
    return loss_sum, norm, batch, waited


@torch.no_grad()
def evaluate(args, world, model, sequences) -> float:
    """Mean loss over all targets in `sequences`, (count, seq_length + 1), on any number of ranks. A collective."""
    model.eval()
    total = torch.zeros((), device=world.device)
    size = args.micro_batch_size * world.world_size
    for step in sequences.split(size):
        own = step[world.rank :: world.world_size]
        batch = own if len(own) else step[:1]  # a rank that finds none left must still take part in the collectives
        batch = {"input_ids": batch[:, :-1].to(world.device), "labels": batch[:, 1:].to(world.device)}
        if not len(own):
            batch["labels"] = torch.full_like(batch["labels"], -100)
        total += summed_loss(model, batch, args.chunked_loss)
    model.train()
    [loss_sum] = common.sum_over_ranks(total[None])
    return loss_sum / sequences[:, 1:].numel()


@torch.compiler.set_stance("force_eager")  # with --compile: a graph for every length is not worth it
@torch.no_grad()
def continue_prompt(args, world, model, tokenizer) -> str:
    """The prompt of --sample and what follows. A collective: every forward pass gathers shards from all ranks."""
    model.eval()
    torch.manual_seed(args.seed)  # the same draws on every rank
    tokens = tokenizer(args.sample, add_special_tokens=False, return_tensors="pt")["input_ids"].to(world.device)
    # FSDP1 gathers the root unit in its own forward(), which generate() of the module inside does not call.
    whole_root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    with whole_root if args.fsdp_version == 1 else contextlib.nullcontext():
        generate = model.module.generate if args.fsdp_version == 1 else model.generate
        options = {"do_sample": True, "top_k": 50, "max_new_tokens": 64, "synced_gpus": True}
        tokens = generate(tokens, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id, **options)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


# ---- Speed -----------------------------------------------------------------------------------------------------


def flops_per_token(args: argparse.Namespace, config: transformers.PretrainedConfig, num_parameters: int) -> float:
    """Model FLOPs of training on one token, after PaLM (arXiv:2204.02311, appendix B): 6 N + 12 L H S.

    N is the number of parameters without the embedding, whose lookup multiplies nothing, L the layers, H the width of
    the attention and S the tokens of a sequence. What activation checkpointing computes again does not count.
    """
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * args.seq_length
    return 6 * (num_parameters - embedding) + attention


def peak_flops(args: argparse.Namespace, world: World) -> float | None:
    """FLOP/s that a process could reach: of the known device, or measured with matrix products on a CPU; else None."""
    if args.peak_tflops:
        return args.peak_tflops * 1e12
    if world.device.type != "cpu":
        name = torch.get_device_module(world.device).get_device_name(world.device)
        known = [tflops for part, tflops in PEAK_TFLOPS.items() if part in name]
        return known[0] * 1e12 if known and args.precision == "bf16" else None
    a = torch.ones(1024, 1024, dtype=PRECISIONS[args.precision][0])
    times = []
    dist.barrier()  # all processes at once: they share the cores while they train, too
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / statistics.median(times)


def compare_strategies(args, world, config, load, metrics, tokens_to_mfu) -> None:
    """Train a few steps under each strategy; print one table, and which to pick.

    Args:
        load: called for each strategy, gives micro-batches from the first on.
        tokens_to_mfu: from tokens per second, or None if the peak of the device is not known.
    """
    if world.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_world_size
    else:
        memory = torch.get_device_module(world.device).mem_get_info(world.device)[1]
    limit = args.memory_limit_gb * 2**30 or memory
    num_parameters = sum(parameter.numel() for parameter in skeleton(args, config, world.device).parameters())
    # A group of its own with a short timeout: if only one rank ran out of memory, the others wait in a collective.
    votes = dist.new_group(backend="gloo", timeout=timedelta(minutes=3))
    rows = []
    for name, strategy in STRATEGIES.items():
        own = argparse.Namespace(**vars(args))
        own.sharding_strategy = name
        own.accumulate_sharded = args.accumulate_sharded and strategy.hybrid
        try:
            replicas, shards = mesh_shape(own, world)
        except common.UserError as error:
            metrics.say(f"left out   {error}")
            continue
        if strategy.hybrid and replicas == 1:
            metrics.say(f"left out   {name}: with one replica it is its counterpart without replicas")
            continue
        state = 16 * num_parameters / shards  # in fp32: parameter, gradient and Adam's two moments
        if state > limit:
            metrics.say(
                f"left out   {name}: a process needs {common.format_gb(state)} GB for its state alone and may use "
                f"{common.format_gb(limit)}"
            )
            continue
        common.reset_peak_memory(world.device)
        model = optimizer = batches = None
        times, fits = [], 1.0
        try:
            model, optimizer = build(own, world, config)
            batches = load()
            for step in range(args.compare_steps + 2):  # the first two allocate, compile and fill queues
                began = time.perf_counter()
                train_step(own, world, model, optimizer, batches)
                if world.device.type != "cpu":
                    torch.get_device_module(world.device).synchronize()
                if step >= 2:
                    times.append(time.perf_counter() - began)
            held = sum(common.state_bytes(model, optimizer).values())
        except torch.OutOfMemoryError:
            fits = 0.0
        vote = torch.tensor(fits)
        dist.all_reduce(vote, dist.ReduceOp.MIN, votes)
        peak = common.peak_memory_bytes(world.device)
        del model, optimizer, batches
        gc.collect()
        if vote.item() == 0:
            metrics.say(f"left out   {name}: out of memory")
            continue
        seconds = statistics.median(times)
        tokens_per_second = args.global_batch_size * args.seq_length / seconds
        sent, leaves_node = bytes_sent_per_step(own, world, config)
        row = {"strategy": name, "replicas_x_shards": f"{replicas} x {shards}", "tokens_per_second": tokens_per_second}
        row |= {"mfu": tokens_to_mfu(tokens_per_second) if tokens_to_mfu else "unknown", "step_seconds": seconds}
        row |= {"state_gb": common.format_gb(held), "peak_memory_gb": common.format_gb(peak)}
        row |= {"sent_gb_per_step": sent / 2**30, "leaves_node_gb_per_step": leaves_node / 2**30}
        metrics.write("strategy", **row, all_step_seconds=times)
        rows.append(row)
    fitting = [row for row in rows if row["peak_memory_gb"] * 2**30 <= limit]
    if not fitting:
        raise common.UserError(
            f"no strategy fits into {common.format_gb(limit)} GB; try --activation-checkpointing, a smaller "
            "--micro-batch-size, or more processes"
        )
    metrics.say("\n" + common.format_table(rows))
    metrics.say("A process's state, peak memory and bytes sent, by the formula in the script; GB are 2**30 bytes.\n")
    best = max(fitting, key=lambda row: row["tokens_per_second"])
    least = min(fitting, key=lambda row: row["state_gb"])
    which = "leaves_node_gb_per_step" if world.world_size > world.local_world_size else "sent_gb_per_step"
    where = "between nodes" if which.startswith("leaves") else "between processes"
    quietest = min(fitting, key=lambda row: row[which])
    speed = best["tokens_per_second"] / min(row["tokens_per_second"] for row in fitting)
    if best[which] <= 1.01 * quietest[which]:
        why = f"it sends the least {where}"
    else:
        why = f"{quietest['strategy']} sends less {where}, but here that does not decide"
    metrics.say(
        f"fastest    {best['strategy']}: {best['tokens_per_second']:,.0f} tokens/s, {speed:.2f} times the slowest; "
        f"{why}. State in a process: {best['state_gb']} GB; {least['strategy']} has the least, {least['state_gb']} GB"
    )


# ---- Main ------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, world: World) -> None:
    stop_requests = common.StopRequests(world)
    args.precision = common.choose_precision(args.precision, world.device)
    at_once = args.micro_batch_size * world.world_size
    if args.global_batch_size % at_once:
        below = args.global_batch_size // at_once * at_once
        nearest = f"{below} or {below + at_once}" if below else f"{at_once}"
        raise common.UserError(
            f"--global-batch-size {args.global_batch_size} cannot be divided into micro-batches of "
            f"{args.micro_batch_size} on {world.world_size} processes; {nearest} can"
        )
    args.accumulation = args.global_batch_size // at_once
    if world.device.type == "cpu" and not args.compare_strategies:  # whose memory would count in the next one's peak
        # Logits and their gradients are blocks of hundreds of MB in every micro-batch. Keep those too, -1: for good.
        common.tune_malloc({common.M_MMAP_MAX: 0, common.M_TRIM_THRESHOLD: -1})
    mesh_shape(args, world)
    must_match = {name: getattr(args, name) for name in MUST_MATCH}
    common.first_process_first(world, lambda: common.prepare_output_dir(world, args.output_dir))
    checkpoint = None
    if not args.compare_strategies:
        checkpoint = common.find_checkpoint(world, args.output_dir, args.resume, must_match)
    metrics = common.Metrics(world, args.output_dir)

    # ---- Tokenizer, data, shape of the model
    tokenizer = load_tokenizer(args, world)
    source, held_out = common.first_process_first(world, lambda: load_texts(args, world))
    tokens = np.concatenate(tokenize(tokenizer, held_out))
    count = (len(tokens) - 1) // args.seq_length
    if count == 0:
        raise common.UserError(
            f"the texts held out for validation have {len(tokens):,} tokens, less than one sequence; raise "
            "--num-validation-texts or lower --seq-length"
        )
    validation = torch.from_numpy(tokens)[: count * args.seq_length + 1].unfold(0, args.seq_length + 1, args.seq_length)
    config = common.first_process_first(world, lambda: load_config(args, tokenizer))
    whole = common.first_process_first(world, lambda: skeleton(args, config, torch.device("cpu")))
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    embeddings = {whole.get_input_embeddings().weight, whole.get_output_embeddings().weight}
    flops, peak = flops_per_token(args, config, num_parameters), peak_flops(args, world)

    def tokens_to_mfu(tokens_per_second: float) -> float:
        return tokens_per_second * flops / (peak * world.world_size)

    def load(position: dict = START) -> Iterator[dict]:
        return load_batches(PackedTexts(source, tokenizer, args, world, position), world, 2 * args.accumulation)

    # ---- What runs
    strategy = "every strategy in turn" if args.compare_strategies else args.sharding_strategy
    replicas, shards = mesh_shape(args, world)
    param_dtype, reduce_dtype = (str(dtype).removeprefix("torch.") for dtype in PRECISIONS[args.precision])
    extras = [
        name
        for name in ("activation_checkpointing", "compile", "chunked_loss", "accumulate_sharded")
        if getattr(args, name)
    ]
    run_date = common.date_of_run()
    uneven = source.num_shards % world.world_size and args.dataset != "builtin"
    metrics.start_block(
        args,
        world,
        script=f"lm_multinode.py, {run_date}, torch {torch.__version__}, transformers {transformers.__version__}",
        fsdp=f"version {args.fsdp_version}, {strategy}, "
        + ("" if args.compare_strategies else f"replicas x shards: {replicas} x {shards}, ")
        + ", ".join([f"{config.num_hidden_layers} layers and the root", *extras]),
        precision=f"{args.precision}: compute in {param_dtype}, reduce gradients in {reduce_dtype}, update in float32",
        model=f"{args.model}, {num_parameters:,} parameters, "
        f"{num_parameters - sum(weight.numel() for weight in embeddings):,} without embeddings",
        data=f"{args.dataset}, {source.num_shards:,} {'texts' if args.dataset == 'builtin' else 'files'}, "
        f"{validation.shape[0]:,} sequences to validate, "
        f"tokenizer {args.tokenizer} of {len(tokenizer):,} tokens",
        reading=f"every process reads all files and keeps one text in {world.world_size}: faster with a multiple of "
        f"{world.world_size} files"
        if uneven
        else None,
        step=f"{args.global_batch_size} sequences of {args.seq_length} tokens: {args.accumulation} micro-batches of "
        f"{args.micro_batch_size} on each process",
        speed=f"{flops / 1e6:,.1f} MFLOP a token; peak of a process: "
        + (f"{peak / 1e12:,.3f} TFLOP/s" if peak else "unknown, so no MFU: give --peak-tflops"),
        settings=common.departures(args, DEFAULTS, "the recipe's"),
        warm_up=f"the run ends before its {args.warmup_steps:,} steps of warm-up do: --warmup-steps sets fewer"
        if args.warmup_steps > args.max_steps
        else None,
        resumed=checkpoint and str(checkpoint),
    )
    if args.compare_strategies:
        compare_strategies(args, world, config, load, metrics, tokens_to_mfu if peak else None)
        return

    # ---- Model, resume
    model, optimizer = build(args, world, config)
    if args.print_model:
        metrics.say(str(model))
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout, if there is any, has one per rank
    progress, position = Progress(run_date), START
    window = torch.tensor(EMPTY_WINDOW, device=world.device)
    if checkpoint:
        rank_state = {"window": window, **common.random_states(world.device)}
        saved = common.load_checkpoint(checkpoint, model, optimizer, rank_state, world)
        common.set_random_states(world.device, rank_state)
        progress = Progress(**saved["progress"])
        position = saved["positions"][world.rank] if saved["world_size"] == world.world_size else None
        if position is None:
            position = {**START, "passes": 1 + max(own["passes"] for own in saved["positions"])}
            progress.steps_since_report = 0
            metrics.say(
                f"           saved by {saved['world_size']} processes: the place in the data is lost, a new pass begins"
            )
    batches = load(position)

    def save() -> None:
        positions = [None] * world.world_size
        dist.all_gather_object(positions, position)
        state = {"progress": dataclasses.asdict(progress), "must_match": must_match, "positions": positions}
        folder = args.output_dir / "checkpoints"
        tensors = {"window": window, **common.random_states(world.device)}
        common.save_checkpoint(folder, progress.step, model, optimizer, tensors, state, world, args.keep_checkpoints)

    def validate() -> None:
        loss = evaluate(args, world, model, validation)
        fields = {"validation_loss": loss, "perplexity": math.exp(min(loss, 700))}
        metrics.report("validation", step=progress.step, **fields)

    if progress.step == 0:
        validate()  # what the model can do before training
    profiler, trace = contextlib.nullcontext(), args.output_dir / "trace.json"
    if args.profile_steps and world.rank == 0:
        profiler = profile(
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=args.profile_steps, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(trace)),
        )

    # ---- Steps
    common.reset_peak_memory(world.device)
    seconds = waited = steps = 0
    began = time.perf_counter()
    with profiler:
        bar = tqdm(
            range(progress.step + 1, args.max_steps + 1),
            initial=progress.step,
            total=args.max_steps,
            disable=True if world.rank else None,  # None: only when the output is not a terminal
        )
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step)
            loss_sum, grad_norm, batch, wait = train_step(args, world, model, optimizer, batches)
            position = batch["position"]
            progress.step = step
            progress.steps_since_report += 1
            steps, waited = steps + 1, waited + wait
            bad_step = torch.where(torch.isfinite(loss_sum), math.inf, float(step))
            window = torch.stack([window[0] + loss_sum, torch.minimum(window[1], bad_step)])
            stops = stop_requests.any_rank()
            is_last = step == args.max_steps
            reports = is_last or step % args.log_every == 0
            saves = stops or (args.checkpoint_every and (is_last or step % args.checkpoint_every == 0))
            if reports or saves:
                extra = torch.tensor([waited, float(batch["skipped"])], device=world.device)
                rows = common.gather_over_ranks(torch.cat([window, extra]))
                common.check_losses(rows[:, 1])  # before saving: the newest checkpoint must stay usable
            seconds += time.perf_counter() - began
            if reports:
                rate = steps * args.global_batch_size * args.seq_length / seconds
                tokens = progress.steps_since_report * args.global_batch_size * args.seq_length
                fields = {"train_loss": rows[:, 0].sum().item() / tokens, "grad_norm": grad_norm.item()}
                fields |= {"learning_rate": learning_rate(args, step), "tokens_per_second": rate}
                if peak:
                    fields["mfu"] = tokens_to_mfu(rate)
                fields["data_wait_percent"] = 100 * rows[:, 2].max().item() / seconds
                fields["peak_memory_gb"] = common.format_gb(common.peak_memory_bytes(world.device))
                fields["tokens_seen"] = step * args.global_batch_size * args.seq_length
                skipped = int(rows[:, 3].sum())
                if skipped:
                    fields["broken_records_skipped"] = skipped
                with tqdm.external_write_mode():
                    metrics.report("step", step=step, **fields)
                window = torch.tensor(EMPTY_WINDOW, device=world.device)
                progress.steps_since_report, seconds, waited, steps = 0, 0.0, 0.0, 0
            if is_last or step % args.validate_every == 0:
                with tqdm.external_write_mode():
                    validate()
            if saves:
                save()
            if stops and not is_last:
                metrics.say(f"stopped    by SIGTERM at step {step}, all saved; the same command with --resume goes on")
                return
            if isinstance(profiler, profile):
                profiler.step()
            began = time.perf_counter()

    # ---- Result
    if args.sample:
        text = continue_prompt(args, world, model, tokenizer)
        metrics.write("sample", prompt=args.sample, text=text)
        metrics.say(f"\nsample     {text}\n")
    if args.save_model:
        folder = args.output_dir / f"lm-{progress.run_date}-step-{progress.step}"
        common.export_model(world, model, whole, tokenizer, folder)
        metrics.say(f"model      {folder} (load it with from_pretrained)")
    if args.profile_steps and trace.exists():  # it takes two steps more than it records
        metrics.say(f"trace      {trace} (open it in https://ui.perfetto.dev)")
    metrics.say(f"metrics    {metrics.path}")


if __name__ == "__main__":
    common.launch(main, parse_args())
