r"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Trains a Llama from random weights, or any pretrained causal language model further, with FSDP2
(`fully_shard`), under each of FSDP's five strategies. Without flags it needs no download: a tiny
Llama learns Python's own reference.

    python lm_multinode.py                  # one process per GPU, or two on a CPU
    python lm_multinode.py --num-processes 4 --compare-strategies --shards-per-replica 2
    torchrun --nproc_per_node 8 lm_multinode.py --model Qwen/Qwen3-0.6B --dataset c4 \
        --seq-length 1024 --compile         # one node; c4, or your own files
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 \
        --rdzv_backend c10d --rdzv_endpoint HEAD:29500 --max-restarts 3 lm_multinode.py \
        --model 150m --dataset c4 --tokenizer TinyLlama/TinyLlama_v1.1 \
        --sharding-strategy _HYBRID_SHARD_ZERO2 --micro-batch-size 8 --global-batch-size 128 \
        --seq-length 1024 --lr 4e-4 --warmup-steps 1000 --max-steps 88000 \
        --validate-every 1000 --checkpoint-every 500 --resume --compile \
        --output-dir /SHARED/run1   # on every node; /SHARED is a folder that all nodes see

Read `main` first: data, model, `build`, `train_step`. FSDP is in `shard`, `train_step` and
`common.load_weights`. Batch sizes count all processes.

Follows "Run Torch FSDP"
(https://github.com/PrimeIntellect-ai/docs_example/tree/main/torch_fsdp_example).
docs/from-the-documents.md lists the differences, and where the last command's numbers come from.
docs/your-model-and-data.md says what to change where.
"""

import copy
import functools
import gc
import itertools
import math
import os
import random
import statistics
import time
import zlib
from pathlib import Path
from pydoc_data.topics import topics

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
from torch.utils.data import DataLoader, IterableDataset, default_convert
from torch.utils.flop_counter import FlopCounterMode

import datasets
import numpy as np
import transformers
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import common

transformers.logging.disable_progress_bar()

# ---- FSDP: what is sharded over which processes ------------------------------------------------

# FSDP gathers and frees parameters in groups, called units. Each decoder layer is a unit. The
# embedding and the output layer are units, too, unless they share their weights. Everything else is
# in the root unit.

# The dtype for gathering parameters and computing. Gradients are always reduced in fp32, because a
# bf16 sum over many processes loses small values. The optimizer's shards are fp32, too.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

# FSDP2 has no strategies. Each of FSDP1's is a mesh (see mesh_shape) and one boolean,
# reshard_after_forward. True frees the layers' parameters after forward and gathers them again for
# backward. The strategies are sorted by memory per process, roughly from low to high.
# docs/multi-node.md lists what each of them sends.
RESHARD = {
    "FULL_SHARD": True,  # ZeRO-3: parameters are gathered for each forward and each backward
    "HYBRID_SHARD": True,  # ZeRO-3 inside each replica, usually a node; replicas average gradients
    "SHARD_GRAD_OP": False,  # ZeRO-2: parameters are gathered once per step
    "_HYBRID_SHARD_ZERO2": False,  # ZeRO-2 inside each replica; replicas average gradients
    "NO_SHARD": False,  # DDP: every process has the whole model; all average gradients
}
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def shard(args, world, full_model, meta_model) -> nn.Module:
    """Collective: every rank must call it. Return a sharded copy of the model. Its parameters are
    DTensors, and each rank holds a shard of every one.

    full_model: the model with its weights, on rank 0 only. meta_model: the same model with shapes
    only.
    """
    # 1. Begin with shapes on the meta device, so that no device has to hold the whole model.
    model = copy.deepcopy(meta_model)
    layers = prepare_layers(args, model)

    # 2. Shard each unit, the root last.
    replicas, shards = mesh_shape(args, world)
    options = {
        "mesh": make_mesh(world.device.type, replicas, shards),
        "mp_policy": MixedPrecisionPolicy(PRECISIONS[args.precision], torch.float32),
    }
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")

    reshard = RESHARD[args.sharding_strategy]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head.weight is not embedding.weight:
        # The embedding's backward does not read its weights: do not gather them again.
        fully_shard(embedding, reshard_after_forward=reshard, **options)
        embedding.set_unshard_in_backward(False)
        # Backward begins with the output layer: keep it gathered after forward.
        fully_shard(head, reshard_after_forward=False, **options)
    fully_shard(model, **options)  # the root unit: all other parameters

    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # oneCCL cannot average everywhere

    # 3. Allocate this rank's shards, and copy rank 0's weights into them.
    common.load_weights(model, full_model, world, args.cpu_offload)
    return model


@functools.cache  # so that --compare-strategies does not create the same process groups again
def make_mesh(device_type: str, replicas: int, shards: int):
    """Collective. A mesh with one dimension to shard over, or with two: replicas x shards."""
    if replicas == 1:
        return init_device_mesh(device_type, (shards,))
    # Neighboring ranks, usually those of one node, are the shards of one replica.
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def mesh_shape(args, world) -> tuple[int, int]:
    """Return the number of replicas of the model, and the number of shards of each replica."""
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
    """Return the layers, which become units: the modules that transformers never splits over
    devices. Leaves out layers inside layers (Zamba) and one with the embedding in it (BERT)."""
    names = model._no_split_modules or ()
    embedding = model.get_input_embeddings()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    nested = {module for layer in layers for module in layer.children()}
    return [layer for layer in layers if layer not in nested and embedding not in layer.modules()]


def prepare_layers(args, model: nn.Module) -> list[nn.Module]:
    """Apply --compile and --activation-checkpointing to the layers, before sharding. Return the
    units."""
    layers = layers_of(model)
    if args.compile:
        for layer in layers:
            # In place. It compiles `forward`, so FSDP's hooks stay outside the graphs.
            layer.compile()
        cross_entropy.compile()  # then it makes no fp32 copy of the logits

    if args.activation_checkpointing:
        # From here on, the wrappers are the units.
        apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
        return [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    return layers


def build(args, world, full_model, meta_model):
    """Collective. Return the sharded model and its optimizer, which must get the shards."""
    model = shard(args, world, full_model, meta_model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def train_step(args, world, model, optimizer, micro_batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective. Make one optimizer step.

    micro_batches: this rank's part of the global batch. Each is {input_ids, labels}, int64 of shape
    (at most --micro-batch-size, --seq-length).

    Returns two scalars: the loss in nats, summed over this rank's targets, and the norm of all
    gradients before clipping. They are tensors, because reading their values would make the host
    wait for the device.
    """
    global_targets = args.global_batch_size * args.seq_length
    loss_sum = torch.zeros((), device=world.device)
    optimizer.zero_grad()
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1

        # Reduce gradients to shards after every micro-batch. With --gradient-sync last (FSDP1's
        # no_sync), every rank keeps those of the whole model until the last one.
        model.set_requires_gradient_sync(is_last or args.gradient_sync == "every")
        # Between replicas, average the shards once.
        model.set_requires_all_reduce(is_last)
        # Under ZeRO-2, parameters stay gathered until the last micro-batch.
        model.set_reshard_after_backward(is_last or RESHARD[args.sharding_strategy])
        loss, balance = summed_loss(model, micro_batch)
        # FSDP divides gradients by the number of ranks. Undo that, and divide by the number of
        # targets on all ranks: the gradient of the mean over the global batch, as in one process.
        ((loss + balance) * world.size / global_targets).backward()
        loss_sum += loss.detach()

    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    return loss_sum, grad_norm


def summed_loss(model: nn.Module, batch: dict) -> tuple:
    """Collective, like every forward of a sharded model.

    batch: {input_ids, labels}, int64 of shape (sequences, length). Labels are already shifted.

    Returns two scalars: the cross-entropy in nats, summed over all targets that are not -100, and a
    balancing loss to add in training. A model with experts has one if its config sets
    `output_router_logits`. It keeps all experts in use.
    """
    output = model(input_ids=batch["input_ids"], use_cache=False)
    balance = 0.0
    if getattr(output, "aux_loss", None) is not None:  # a mean over the targets
        num_targets = (batch["labels"] != -100).sum()
        balance = model.config.router_aux_loss_coef * output.aux_loss * num_targets
    elif getattr(model.config, "output_router_logits", False):
        raise common.UserError(
            "--model has no loss that balances its experts; in its config.json, set"
            " output_router_logits to false"
        )
    return cross_entropy(output.logits, batch["labels"]), balance


class CrossEntropy(nn.Module):
    """A module, because --compile compiles it in place, when the arguments are known."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


cross_entropy = CrossEntropy()


# ---- Model and data ----------------------------------------------------------------------------

# How texts become sequences: docs/your-model-and-data.md explains streams and blocks.
MAX_STREAMS = 8  # unless there are more processes
TEXTS_PER_STREAM = 12  # at least: a hash divides them, and no stream should get none
FILES_PER_GROUP = 8  # at least, counted as files of the largest one's size
PIECES_PER_BLOCK = 100

# PyTorch's attention (SDPA) under our own name, so that transformers builds no mask. Packed
# sequences have no padding. Without a mask SDPA is causal, which is all they need. Under its usual
# name, transformers would read the positions on the host to decide whether it needs a mask.
ATTENTION = "causal_sdpa"


def causal_sdpa(module, query, key, value, attention_mask, **options):
    if attention_mask is not None:  # one of the model's own, which may not be causal
        raise common.UserError("--model builds its own attention mask, which does not work here")
    return sdpa_attention_forward(module, query, key, value, None, **options)


AttentionInterface.register(ATTENTION, causal_sdpa)

# Llamas that --model trains from random weights. Add a row for your own size, and set its --lr.
# The vocabulary is the tokenizer's; without --tokenizer, one of 32,000 tokens (tiny: 2,048) is
# trained on the texts.
MODELS = {
    # width (a multiple of heads), feed-forward width, layers, heads (a multiple of the next), and
    # key-value heads
    "tiny": (128, 352, 2, 4, 4),
    "150m": (1024, 2688, 12, 16, 16),  # PrimeIntellect/llama-150m-fresh
    "1b": (2048, 5632, 22, 32, 4),  # TinyLlama
    # The next three are Llama 2's (arXiv:2307.09288), as in its config.json files on the Hub.
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "70b": (8192, 28672, 80, 64, 8),
}


def load_model(args, config) -> nn.Module:
    """Load the model on the CPU, in fp32: FSDP keeps fp32 shards for the optimizer."""
    torch.manual_seed(args.seed)
    if args.model in MODELS:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return common.load_pretrained(AutoModelForCausalLM, args.model, config)


def make_meta_model(config) -> nn.Module:
    """Return the model on the meta device, where tensors have shapes but no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Often the padding token is EOS, and nn.Embedding would never train its row.
    model.get_input_embeddings().padding_idx = None
    return model


def load_config(args, tokenizer) -> PretrainedConfig:
    """Load the config of --model. Raises UserError if this script cannot train the model."""
    if args.model in MODELS:
        width, feed_forward, layers, heads, key_value_heads = MODELS[args.model]
        if width % heads or heads % key_value_heads:
            raise common.UserError(
                f"MODELS: {args.model} needs a width that is a multiple of its {heads} heads, and"
                f" these must be a multiple of its {key_value_heads} key-value heads"
            )
        num_tokens = 1 + max(tokenizer.get_vocab().values())
        return LlamaConfig(
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            rms_norm_eps=1e-5,
            vocab_size=64 * math.ceil(num_tokens / 64),  # fast on tensor cores
            max_position_embeddings=args.seq_length,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            attn_implementation=ATTENTION,
        )

    config = common.load_config(args.model, ATTENTION)
    if hasattr(config, "aux_loss_coef"):  # JetMoE's name
        config.router_aux_loss_coef = config.aux_loss_coef
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)  # otherwise each rank would skip different layers
    text_config = config.get_text_config()
    if text_config is not config:
        raise common.UserError(
            f"--model {args.model} is not a text-only model; use one of type"
            f" {text_config.model_type}"
        )
    try:
        model = make_meta_model(copy.deepcopy(config))
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise common.UserError(
            f"--model {args.model}: transformers cannot build it: {error}"
        ) from error

    reason = None
    if not layers_of(model):
        reason = "cannot be sharded: transformers does not name its layers"
    elif not all(getattr(module, "is_causal", True) for module in model.modules()):
        reason = "is not a causal language model: it also sees later tokens"
    elif hasattr(config, "index_topk"):  # DeepSeek V3.2, GLM-5
        reason = "selects the tokens that it attends to, which SDPA cannot do"
    elif getattr(config, "attn_logit_softcapping", None):  # older transformers ignore the cap
        reason = "caps its attention scores, which SDPA cannot do"
    # ATTENTION ignores sliding windows, so a sequence must fit into one.
    limits = ("max_position_embeddings", "sliding_window", "attention_chunk_size")
    longest = min(getattr(config, name, None) or math.inf for name in limits)
    if args.seq_length > longest:
        reason = f"allows a --seq-length of {longest} at most"
    # Special tokens that the tokenizer does not put into texts may lack a row in the embedding, as
    # the image token of Gemma 3 does.
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    in_texts = {*tokenizer.get_vocab().values()} - special
    num_tokens = 1 + max(*in_texts, *tokenizer("a")["input_ids"], tokenizer.eos_token_id)
    if num_tokens > config.vocab_size:
        reason = (
            f"has a vocabulary of {config.vocab_size}, but the tokenizer has {num_tokens} tokens"
        )
    if reason:
        raise common.UserError(f"--model {args.model} {reason}")
    return config


def load_data(args, checkpoint: Path | None) -> tuple:
    """Return the texts, the sequences to validate on and the tokenizer."""
    texts = Texts(args)
    to_train, held_out = first_texts(args, texts)

    if checkpoint or args.tokenizer or args.model not in MODELS:
        tokenizer = common.load_tokenizer(checkpoint or args.tokenizer or args.model)
    else:
        vocab_size = 2048 if args.model == "tiny" else 32_000
        tokenizer = common.train_tokenizer(to_train, vocab_size, append_eos=False)
    if tokenizer.eos_token_id is None:
        raise common.UserError("the tokenizer has no EOS token to end texts with")

    validation_set = default_convert(pack(tokenize(held_out, tokenizer), args.seq_length))
    if len(validation_set["labels"]) == 0:
        raise common.UserError(
            f"{len(held_out)} held-out texts do not fill one sequence; use more or longer texts, or"
            " a lower --seq-length"
        )
    # With few texts, use fewer streams, so that none is empty.
    texts.max_streams = min(MAX_STREAMS, len(set(to_train)) // TEXTS_PER_STREAM)
    # The checksum shows whether the data is the same on all nodes, and after a resume.
    content = [(Path(path).name, texts.sizes[path]) for path in texts.paths]
    texts.checksum = zlib.crc32(repr([content, to_train]).encode())
    return texts, validation_set, tokenizer


class Texts:
    """The files of --dataset and their reader. Raises UserError if they cannot be read."""

    def __init__(self, args):
        self.column = args.text_column
        self.builder = None  # the built-in texts need none
        self.paths = [args.dataset]
        self.sizes = {args.dataset: 2**30}
        if args.dataset == "builtin":
            return

        name = "allenai/c4:en" if args.dataset == "c4" else args.dataset
        readers = {"txt": "text", "json": "json", "jsonl": "json", "parquet": "parquet"}
        try:
            self.builder = common.open_dataset(name, readers, args.output_dir)
        except Exception as error:  # each reader raises its own kind
            raise common.UserError(f"--dataset {name}: {error}") from error
        self.paths = list(self.builder.config.data_files["train"])
        self.sizes = {}  # in bytes; 1 GiB for files that are not on this disk
        for path in self.paths:
            self.sizes[path] = os.path.getsize(path) if os.path.exists(path) else 2**30

    def read(self, paths: list[str]):
        """Yield the texts of some files that are not empty."""
        if self.builder is None:
            yield from builtin_texts()
            return
        for row in common.read_rows(self.builder, paths, [self.column]):
            text = row[self.column]
            if text and not text.isspace():
                yield text


def builtin_texts() -> list[str]:
    """Paragraphs of Python's own reference."""
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    texts = sorted({text.strip() for text in paragraphs if len(text) > 200})
    random.Random(0).shuffle(texts)
    return texts


def is_held_out(text: str) -> bool:
    """Whether a text is one of the 5% to validate on. This depends only on its content."""
    return zlib.crc32(text.encode()) % 20 == 0


def first_texts(args, texts: Texts) -> tuple[list[str], list[str]]:
    """Return the first texts to train on, and at most --num-validation-texts held-out ones, each
    once. Ten readers take turns, because files often differ in content."""
    num_to_train = 2000
    if args.model in MODELS and args.model != "tiny" and not args.tokenizer:
        num_to_train = 50_000  # to train a tokenizer on
    paths = random.Random(args.seed).sample(texts.paths, len(texts.paths))
    to_train = []
    held_out = {}  # a dict keeps their order
    num_characters = 0
    readers = [texts.read(paths[first::10]) for first in range(min(10, len(paths)))]
    for text in itertools.chain.from_iterable(itertools.zip_longest(*readers)):
        if text is None:  # this reader has ended
            continue
        if is_held_out(text):
            held_out[text] = True
        else:
            to_train.append(text)
        num_characters += len(text)
        is_enough = len(to_train) >= num_to_train and len(held_out) >= args.num_validation_texts
        if is_enough or (num_characters > 1e8 and to_train and held_out):
            break
    if not to_train or not held_out:
        raise common.UserError(
            f"--dataset {args.dataset} has too few texts: {len(to_train) + len(held_out)} (in .txt"
            " files, empty lines separate them)"
        )
    return to_train[:num_to_train], list(held_out)[: args.num_validation_texts]


def tokenize(texts: list[str], tokenizer) -> list[list[int]]:
    """Return token ids, with the special tokens that the tokenizer adds, and EOS at the end."""
    # split_special_tokens: "</s>" in a text is not an EOS
    token_lists = tokenizer(texts, split_special_tokens=True, verbose=False)["input_ids"]
    for tokens in token_lists:
        if tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
    return token_lists


def pack(token_lists: list[list[int]], length: int) -> dict:
    """Concatenate texts and cut them into full sequences. Nothing is padded.

    Returns input_ids and labels, int64 arrays of shape (sequences, length).
    """
    tokens = np.concatenate(token_lists).astype(int)
    # Shift the labels here, across sequences. The model gets no labels: it would shift them again.
    end = (len(tokens) - 1) // length * length
    return {
        "input_ids": tokens[:end].reshape(-1, length),
        "labels": tokens[1 : end + 1].reshape(-1, length),
    }


def make_stream(args, texts: Texts, tokenizer, index: int, num_streams: int):
    """Return stream `index` as a `datasets.IterableDataset`. It yields sequences without end, and
    its `state_dict()` is its position in the data."""
    # The streams form groups, and every group has its own files. Make as many groups as possible.
    # The streams of a group read the same files, and a hash divides the texts among them.
    sizes = texts.sizes.values()
    num_groups = 1
    for count in range(2, num_streams + 1):
        if num_streams % count == 0 and sum(sizes) >= count * FILES_PER_GROUP * max(sizes):
            num_groups = count
    streams_per_group = num_streams // num_groups
    index_in_group, group = divmod(index, num_groups)
    paths = random.Random(args.seed).sample(texts.paths, len(texts.paths))[group::num_groups]
    random.Random(index).shuffle(paths)  # so that a step mixes different files
    file_lists = []  # each of at least 1 MB, because files can be very small
    size = math.inf
    for path in paths:
        if size > 1e6:
            file_lists.append([])
            size = 0
        file_lists[-1].append(path)
        size += texts.sizes[path]

    def is_mine(text: str) -> bool:
        # is_held_out uses the remainder of 20.
        is_my_part = zlib.crc32(text.encode()) // 20 % streams_per_group == index_in_group
        return is_my_part and not is_held_out(text)

    def read_lists(file_lists: list[list[str]]):
        """Yield lists of texts, with enough characters for a sequence, if there are so many."""
        texts_of_list = []
        num_characters = 0
        for text in filter(is_mine, texts.read(itertools.chain(*file_lists))):
            texts_of_list.append(text)
            num_characters += len(text)
            if num_characters > max(16_000, 4 * args.seq_length):
                yield {"texts": texts_of_list}
                texts_of_list = []
                num_characters = 0
        if texts_of_list:
            yield {"texts": texts_of_list}

    def cut(lists: list[list[str]]) -> dict:
        """Tokenize texts, and cut their tokens into pieces of at most one sequence."""
        tokens = np.concatenate(tokenize(lists[0], tokenizer)).astype(int)
        ends = range(args.seq_length, len(tokens), args.seq_length)
        return {"tokens": np.split(tokens, ends)}

    def pack_block(pieces: list[np.ndarray], indices: list[int]) -> dict:
        """Pack some pieces in their order, so that each text stays whole. Shuffle the sequences."""
        sequences = pack(pieces, args.seq_length)
        count = len(sequences["labels"])
        if count == 0:
            raise common.UserError("too few texts: use more texts, or a lower --seq-length")
        order = random.Random(hash((args.seed, index, indices[0]))).sample(range(count), count)
        return {name: array[order] for name, array in sequences.items()}

    # A block is a number of pieces, because texts can be very long or short. Repeat before packing:
    # then each pass has different blocks, in a different order.
    lists = datasets.IterableDataset.from_generator(
        read_lists, gen_kwargs={"file_lists": file_lists}
    )
    options = {"batched": True, "batch_size": 1, "remove_columns": ["texts"]}
    pieces = lists.repeat(None).map(cut, input_columns=["texts"], **options)
    options = {"batched": True, "batch_size": PIECES_PER_BLOCK, "remove_columns": ["tokens"]}
    return pieces.map(pack_block, input_columns=["tokens"], with_indices=True, **options)


class StepBatches(IterableDataset):
    """Yields the sequences of this rank for one step, and the positions of its streams after it.

    A step takes the same number of sequences from every stream, and the ranks divide the streams
    among them. So a step is the same on any number of processes, and a run can resume on more or
    fewer.
    """

    def __init__(self, args, world, texts: Texts, tokenizer, positions: list[dict] | None):
        if positions:
            num_streams = len(positions)
        else:
            # As many as possible, so that a resumed run can have more processes. But no more than
            # MAX_STREAMS or one per rank, because every stream reads all files of its group.
            most = max(world.size, texts.max_streams)
            counts = range(world.size, most + 1, world.size)
            num_streams = max(count for count in counts if args.global_batch_size % count == 0)
        if num_streams % world.size != 0:
            raise common.UserError(
                f"{world.size} processes cannot divide the {num_streams} streams of texts that the"
                f" run began with; resume on a number that divides {num_streams}"
            )
        self.num_sequences = args.global_batch_size // num_streams  # per stream and step
        self.streams_of_rank = range(world.rank, num_streams, world.size)
        self.positions = positions
        self.make_stream = functools.partial(
            make_stream, args, texts, tokenizer, num_streams=num_streams
        )

    def __iter__(self):
        streams = []
        for index in self.streams_of_rank:
            stream = self.make_stream(index)
            if self.positions:
                stream.load_state_dict(self.positions[index])
            streams.append(stream)
        iterators = [iter(stream) for stream in streams]
        while True:
            sequences = []
            for iterator in iterators:
                sequences += itertools.islice(iterator, self.num_sequences)
            if len(sequences) < self.num_sequences * len(iterators):
                return  # a stream has no texts
            arrays = {name: np.stack([one[name] for one in sequences]) for name in sequences[0]}
            yield arrays, [stream.state_dict() for stream in streams]


def batches_on_device(args, world, texts: Texts, tokenizer, positions: list[dict] | None):
    """Yield this rank's micro-batches of each step, on its device, and the positions of its streams
    after the step. A worker process packs ahead.

    positions: of all streams, to continue from; None: begin.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise a forked worker hangs
    loader = DataLoader(
        StepBatches(args, world, texts, tokenizer, positions),
        batch_size=None,  # each item is a step
        num_workers=1,  # two would both yield every step
        collate_fn=tuple,  # changes nothing; the default would make tensors
        pin_memory=world.device.type != "cpu",  # a thread receives steps while this one trains
        **common.WORKER_OPTIONS,
    )
    for arrays, positions in loader:
        sequences = common.to_device(arrays, world.device)
        micro_batches = []
        for first in range(0, len(sequences["labels"]), args.micro_batch_size):
            part = slice(first, first + args.micro_batch_size)
            micro_batches.append({name: tensor[part] for name, tensor in sequences.items()})
        yield micro_batches, positions
    raise common.UserError("too few texts: one of the streams of texts has none")


def gather_positions(world, positions: list[dict]) -> list[dict]:
    """Collective. Return the positions of all streams, given those of this rank."""
    gathered = [None] * world.size
    dist.all_gather_object(gathered, positions)
    # Rank 0 has streams 0, n, 2n, ..., rank 1 has streams 1, n + 1, ...
    return list(itertools.chain.from_iterable(zip(*gathered, strict=True)))


@torch.no_grad()
def validate(args, world, model, sequences: dict, log, step: int):
    """Collective. Print the mean loss per token, in nats, over all held-out sequences.

    sequences: {input_ids, labels}, int64 of shape (sequences, --seq-length), the same on all ranks.
    """
    # Every rank must take part in every forward. And if all batches have the same size, --compile
    # makes only one graph. So repeat the first sequences at the end. Labels of -100 exclude these.
    count = len(sequences["labels"])
    num_at_once = args.micro_batch_size * world.size
    padded = math.ceil(count / num_at_once) * num_at_once
    parts = torch.arange(world.rank, padded, world.size).split(args.micro_batch_size)

    model.eval()
    totals = torch.zeros(2, device=world.device)  # summed loss, targets
    for part in log.bar(parts, "validate", len(parts)):
        batch = {name: tensor[part % count] for name, tensor in sequences.items()}  # copies
        batch["labels"][part >= count] = -100
        batch = {name: tensor.to(world.device) for name, tensor in batch.items()}
        loss, _ = summed_loss(model, batch)
        totals[0] += loss
        totals[1] += (batch["labels"] != -100).sum()
    model.train()

    loss_sum, num_targets = common.sum_over_ranks(totals)
    val_loss = loss_sum / num_targets
    perplexity = math.exp(min(val_loss, 700))
    log.metrics({"step": step, "val_loss": val_loss, "perplexity": perplexity})


# ---- Which strategy is fastest here? ------------------------------------------------------------


def mfu_per_token_per_second(args, world, meta_model) -> float:
    """Return MFU (Model FLOPs Utilization) divided by tokens/s: the FLOPs of one token over the
    peak FLOP/s of all GPUs. 0 if either is unknown.

    As in appendix B of PaLM (arXiv:2204.02311), backward costs twice as much as forward. PyTorch
    counts the FLOPs of forward by shapes. An expert counts if a token uses it.
    """
    if args.peak_tflops == 0:
        return 0.0

    model = copy.deepcopy(meta_model)
    model.set_experts_implementation("batched_mm")  # its shapes do not depend on the routing
    tokens = torch.ones(1, args.seq_length, dtype=torch.long, device="meta")
    try:
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, use_cache=False)
    except RuntimeError:  # a few models read values, which meta tensors do not have
        return 0.0
    flops_per_token = 3 * counter.get_total_flops() / args.seq_length
    return flops_per_token / (args.peak_tflops * 1e12 * world.size)


def compare_strategies(args, world, full_model, meta_model, log, batches, mfu_per_speed: float):
    """Collective. Time a few training steps under each strategy, with this model on these GPUs."""
    for strategy in RESHARD:
        args.sharding_strategy = strategy
        common.reset_peak(world.device)
        model, optimizer = build(args, world, full_model, meta_model)
        times = []
        for _ in log.bar(range(7), strategy, 7):
            start = time.perf_counter()
            micro_batches, _ = next(batches)
            loss_sum, _ = train_step(args, world, model, optimizer, micro_batches)
            loss_sum.item()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[2:])  # the first two also allocate and compile

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
        gc.collect()  # FSDP's objects form reference cycles
        if world.device.type != "cpu":
            torch.accelerator.empty_cache()


# ---- Main --------------------------------------------------------------------------------------

# --resume requires these flags to be the same. Together with the dataset, they choose the data of a
# step.
MUST_MATCH = ("model", "tokenizer", "seq_length", "global_batch_size", "seed")


def learning_rate(args, step: int) -> float:
    """Return a rate that warms up linearly, then decays by a cosine to a tenth. `step` counts
    from 1."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def parse_args():
    parser = common.make_parser(__doc__)
    at_least_0 = common.at_least(0)
    at_least_1 = common.at_least(1)
    at_least_0_float = common.at_least(0, float)

    add = parser.add_argument_group("data and model").add_argument
    add("--model", default="tiny", help=f"{', '.join(MODELS)}; or pretrained: Hub name or folder")
    add(
        "--dataset",
        default="builtin",
        help="builtin; c4; files (.txt, .json, .jsonl, .parquet, also compressed); folder; URL; Hub"
        " name",
    )
    add("--text-column", default="text", help="column with the texts")
    add(
        "--tokenizer",
        help="Hub name or folder; else the model's, or a new one of up to 32,000 tokens",
    )
    add("--num-validation-texts", default=500, type=at_least_1, help="texts held out, at most")
    add("--seq-length", default=128, type=at_least_1, help="tokens in a sequence")

    add = parser.add_argument_group("training").add_argument
    add("--max-steps", default=500, type=at_least_1, help="optimizer steps")
    add(
        "--micro-batch-size", default=4, type=at_least_1, help="sequences on a GPU at once, at most"
    )
    add(
        "--global-batch-size",
        default=0,
        type=at_least_0,
        help="sequences in a step, over all GPUs; 0: 16, or the next multiple of the processes",
    )
    add(
        "--lr",
        default=0.0,
        type=at_least_0_float,
        help="peak learning rate; 0: 5e-3 for tiny, 4e-4 for other sizes, 2e-5 if pretrained",
    )
    add("--warmup-steps", default=20, type=at_least_0, help="steps up to the peak learning rate")
    add(
        "--weight-decay",
        default=0.1,
        type=at_least_0_float,
        help="for matrices; biases and norms have none",
    )

    add = parser.add_argument_group("FSDP").add_argument
    switch = {"action": "store_true"}
    add(
        "--sharding-strategy",
        default="FULL_SHARD",
        choices=RESHARD,
        help="what is sharded over which processes, from least to most memory",
    )
    add(
        "--shards-per-replica",
        default=0,
        type=at_least_0,
        help="for the hybrids; 0: the processes of a node",
    )
    add(
        "--precision",
        default="auto",
        choices=("auto", *PRECISIONS),
        help="auto: bf16 if the GPU supports it, else fp32",
    )
    add("--cpu-offload", **switch, help="keep shards on the CPU: least memory, slow")
    add("--activation-checkpointing", **switch, help="recompute each layer: less memory, slower")
    add("--compile", **switch, help="torch.compile layers and loss: faster after a slow start")
    add(
        "--gradient-sync",
        default="every",
        choices=("every", "last"),
        help="micro-batches that reduce gradients; last: less traffic, far more memory",
    )

    group = parser.add_argument_group("processes and output")
    common.add_run_flags(group)
    common.add_checkpoint_flags(group)
    add = group.add_argument
    add("--compare-strategies", **switch, help="time each strategy, then exit")
    add(
        "--peak-tflops",
        default=0.0,
        type=at_least_0_float,
        help="peak of one GPU in bf16 (H100: 989), to print MFU",
    )
    add("--validate-every", default=50, type=at_least_0, help="steps between validations; 0: never")

    args = parser.parse_args()
    if args.lr == 0:
        args.lr = 4e-4 if args.model in MODELS else 2e-5
        if args.model == "tiny":
            args.lr = 5e-3
    return args


def is_due(args, step: int, every: int) -> bool:
    """Whether something that happens every N steps, and after the last one, is due at `step`."""
    return every > 0 and (step % every == 0 or step == args.max_steps)


def main(args, world):
    log = common.Log(world, args.output_dir)
    args.precision = common.choose_precision(args.precision, world.device)
    common.divide_batch(args, world, default=16)
    replicas, shards = mesh_shape(args, world)
    model_folder = args.output_dir / "model"
    checkpoint = None
    if not args.compare_strategies:
        checkpoint = common.find_checkpoint(args, MUST_MATCH, model_folder)

    # Data
    texts, validation_set, tokenizer = common.first_on_node(
        world, lambda: load_data(args, checkpoint)
    )
    config = common.first_on_node(world, lambda: load_config(args, tokenizer))
    checksum = common.check_data(texts.checksum, config, checkpoint)
    dtype = config.dtype  # of the saved model; building the model sets it to fp32
    names = ", ".join(Path(path).name for path in texts.paths[:3])
    log.print(f"dataset  {args.dataset}: {names}; files: {len(texts.paths):,}")
    step_tokens = args.global_batch_size * args.seq_length  # of all ranks
    num_sequences = len(validation_set["labels"])
    log.print(
        f"data     {step_tokens:,} tokens in a step, {num_sequences} sequences to validate on"
    )

    # Model
    full_model = None
    if world.rank == 0:
        full_model = load_model(args, config)  # on the CPU
    meta_model = make_meta_model(config)
    common.untie(meta_model, full_model, world)  # where the checkpoint holds two tensors
    vocabulary = f"vocabulary of {config.vocab_size:,}"
    log.print(f"model    {args.model}, {vocabulary}, {common.describe_state(meta_model, shards)}")
    mfu_per_speed = mfu_per_token_per_second(args, world, meta_model)  # 0 without --peak-tflops
    if args.compare_strategies:
        log.print(f"fsdp     every strategy, {args.precision}")
        batches = batches_on_device(args, world, texts, tokenizer, None)
        compare_strategies(args, world, full_model, meta_model, log, batches, mfu_per_speed)
        return
    mesh = f"{replicas} x {shards} (replicas x shards)"
    log.print(f"fsdp     {args.sharding_strategy}, {mesh}, {args.precision}")
    model, optimizer = build(args, world, full_model, meta_model)
    del full_model

    # Where the last run stopped
    step = 0
    positions = None  # of the streams of texts
    if checkpoint:
        progress = common.load_checkpoint(checkpoint, model, optimizer)
        step = progress["step"]
        positions = progress["positions"]
        if step > args.max_steps:
            raise common.UserError(f"{checkpoint} is beyond --max-steps {args.max_steps}")
        log.print(f"resumed  from step {step} of {args.max_steps}")
    elif args.validate_every > 0:
        validate(args, world, model, validation_set, log, step)

    # Train
    common.note_stops()
    loss_sum = torch.zeros((), device=world.device)  # since the last printed line
    last_logged = step
    start = time.perf_counter()

    remaining = range(step + 1, args.max_steps + 1)
    batches = batches_on_device(args, world, texts, tokenizer, positions)
    for step in log.bar(remaining, "train", len(remaining)):
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        micro_batches, positions = next(batches)
        # Dropout must be the same after a resume, and differ between ranks. Seed after
        # next(batches), because a DataLoader draws a random number when it starts. Hash only
        # numbers: the hash of a string differs in each process.
        torch.manual_seed(hash((args.seed, step, world.rank)))
        any_rank_stops = common.ask_for_stops()  # a signal after this counts in the next step
        step_loss, grad_norm = train_step(args, world, model, optimizer, micro_batches)
        loss_sum += step_loss

        stop_now = any_rank_stops()
        save_now = stop_now or is_due(args, step, args.checkpoint_every)
        validate_now = is_due(args, step, args.validate_every)
        if save_now or validate_now or is_due(args, step, args.log_every):
            num_tokens = step_tokens * (step - last_logged)
            loss = common.sum_over_ranks(loss_sum) / num_tokens  # waits for the device
            speed = num_tokens / (time.perf_counter() - start)
            record = {  # printed as common.FORMATS says
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
            common.reset_peak(world.device)
            loss_sum.zero_()
            last_logged = step

            if save_now:
                progress = {
                    "step": step,
                    "positions": gather_positions(world, positions),
                    "checksum": checksum,
                }
                common.save_checkpoint(progress, args, model, optimizer, tokenizer)
            if stop_now:
                log.print(f"stopped  at step {step}, checkpoint saved: continue with --resume")
                return
            if validate_now:
                validate(args, world, model, validation_set, log, step)
            start = time.perf_counter()  # do not count saving and validation

    saved = "not saved"
    if args.save_model:
        common.export(model, meta_model, dtype, tokenizer, model_folder, world)
        saved = f"{model_folder} (replaces any earlier one)"
    log.print(f"metrics  {log.path}, run {log.run}")
    log.print(f"model    {saved}")


if __name__ == "__main__":
    common.run(main, parse_args())
