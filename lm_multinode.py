r"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Trains a Llama from random weights, or a pretrained causal language model further, with FSDP2
(`fully_shard`), under each of FSDP's five strategies. Without flags it needs no download: a tiny
Llama learns Python's own reference.

    torchrun --nproc_per_node 2 lm_multinode.py --device cpu    # without GPUs, or with only one
    torchrun --nproc_per_node gpu lm_multinode.py               # a process for each GPU
    torchrun --nproc_per_node 8 lm_multinode.py --model Qwen/Qwen3-0.6B --dataset c4 \
        --seq-length 1024 --compile         # one node; c4, or your own files
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 \
        --rdzv_backend c10d --rdzv_endpoint HEAD:29500 --max-restarts 3 lm_multinode.py \
        --model 150m --dataset c4 --tokenizer TinyLlama/TinyLlama_v1.1 \
        --sharding-strategy _HYBRID_SHARD_ZERO2 --micro-batch-size 8 --global-batch-size 128 \
        --seq-length 1024 --lr 4e-4 --warmup-steps 1000 --max-steps 88000 \
        --validate-every 1000 --checkpoint-every 500 --resume --compile --layers-per-unit 2 \
        --output-dir /SHARED/run1   # on every node; /SHARED is a folder that all nodes see

Read `main` first: data, model, `build`, `train_step`. FSDP is in `shard`, `train_step` and
`common.fill_shards`.

Follows "Run Torch FSDP"
(https://github.com/PrimeIntellect-ai/docs_example/tree/main/torch_fsdp_example).
docs/from-the-documents.md lists the differences, docs/multi-node.md where the last --lr is from.
docs/your-model-and-data.md says what to change where.
"""

import copy
import ctypes
import itertools
import math
import os
import random
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

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
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

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

transformers.logging.disable_progress_bar()


@dataclass
class Args:
    # Data and model
    model: str = "tiny"  # random weights: tiny, 150m, 1b to 70b (MODELS); or a Hub name or folder
    dataset: str = "builtin"  # builtin; c4; .txt, .csv, .jsonl or .parquet files; Hub name
    text_column: str = "text"  # column with the texts
    tokenizer: str = ""  # for random weights: Hub name or folder; else a new one is trained
    num_validation_texts: int = 500  # to validate on, at most; 5% of all texts are held out
    seq_length: int = 128  # tokens in a sequence

    # Training
    max_steps: int = 500  # optimizer steps; the learning rate decays until the last one
    global_batch_size: int = 0  # sequences per step on all GPUs; 0: 16, rounded up to divide evenly
    micro_batch_size: int = 4  # sequences on a GPU at once; out of memory? try 2, then 1
    lr: float = 0.0  # peak; 0: the model's row in MODELS, or 2e-5 if pretrained
    warmup_steps: int = 20  # steps up to the peak learning rate
    weight_decay: float = 0.1  # for matrices; biases and norms have none
    seed: int = 1  # for weights, data order and dropout

    # FSDP
    sharding_strategy: Literal[
        "FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD"
    ] = "FULL_SHARD"
    """roughly from least to most memory"""
    shards_per_replica: int = 0  # for the hybrids; 0: the processes of a node
    layers_per_unit: int = 1  # decoder layers gathered at once; 2: faster if they are small
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 if the GPU supports it
    cpu_offload: bool = False  # keep shards on the CPU: least memory, slow
    activation_checkpointing: bool = False  # recompute each layer: less memory, slower
    compile: bool = False  # torch.compile layers and loss: faster after a slow start
    gradient_sync: Literal["every", "last"] = "every"  # micro-batch that reduces; last: more memory
    device: str = "auto"  # auto (GPUs, if there are any), cpu, cuda or xpu

    # Output
    output_dir: Path = Path("output/lm_multinode")  # use a new folder for each run
    save_model: bool = True  # saving the trained model
    log_every: int = 25  # steps between printed lines, after that of step 1
    validate_every: int = 50  # steps between validations; 0: never
    checkpoint_every: int = 0  # steps between checkpoints; 0: only when a signal stops the run
    resume: bool = False  # continue from the newest checkpoint, if there is one
    peak_tflops: float = 0.0  # peak of one GPU in bf16 (H100: 989), to print MFU


# To continue a run, --resume needs these to be the same: they choose the samples of a step.
MUST_MATCH = "model tokenizer seq_length global_batch_size seed".split()

# ---- FSDP --------------------------------------------------------------------------------------

# Each rank keeps a shard, a slice of the rows, of every fp32 parameter, of its gradient and of its
# two moments. FSDP gathers parameters in groups, called units: each decoder layer is one. While a
# unit computes, the rank has a temporary copy of its parameters, in --precision. Larger units
# (--layers-per-unit) cost the host less time, but more memory. The embedding and the output layer
# are units, too, unless they share their weights. Everything else is in the root unit.

# FSDP2 has no strategies. Each of FSDP1's is a mesh (see mesh_shape) and one boolean,
# reshard_after_forward. True: a layer's parameters are freed after its forward and gathered again
# for its backward. False: they are gathered at the first forward of a step, kept through all of its
# micro-batches, and freed after the last backward. docs/multi-node.md lists what each one sends.
RESHARD = {
    "FULL_SHARD": True,  # ZeRO-3
    "HYBRID_SHARD": True,  # ZeRO-3 inside each replica, usually a node; replicas average gradients
    "SHARD_GRAD_OP": False,  # ZeRO-2
    "_HYBRID_SHARD_ZERO2": False,  # ZeRO-2 inside each replica; replicas average gradients
    "NO_SHARD": False,  # like DDP: each process is a replica, whose only shard is the whole model
}


def mesh_shape(args, world) -> tuple[int, int]:
    """Return the number of replicas of the model, and the number of shards of each replica."""
    if args.sharding_strategy == "NO_SHARD":
        return world.size, 1
    if args.sharding_strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return 1, world.size
    shards = args.shards_per_replica or world.local_world_size
    common.check(
        world.size % shards == 0,
        f"--shards-per-replica {shards} does not divide {world.size}, the number of processes",
    )
    return world.size // shards, shards


# The dtype for gathering parameters and computing. Gradients are always reduced in fp32, because a
# bf16 sum over many processes loses small values. The optimizer's shards are fp32, too.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(args, world, full_model, meta_model) -> nn.Module:
    """Collective: every rank must call it. Return a sharded copy of the model. Its parameters are
    DTensors, and each rank holds a shard of every one.

    full_model: the model with its weights, on rank 0 only. meta_model: a copy whose parameters have
    shapes but no memory.
    """
    # 1. Begin on the meta device, so that no device has to hold the whole model.
    model = copy.deepcopy(meta_model)
    layers = prepare_layers(args, model)

    # 2. Shard each unit, the root last.
    replicas, shards = mesh_shape(args, world)
    if replicas == 1:
        mesh = init_device_mesh(world.device.type, (shards,))
    else:
        # Neighboring ranks, usually those of one node, are the shards of one replica.
        names = ("replicate", "shard")
        mesh = init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=names)
    dtype = PRECISIONS[args.precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")

    reshard = RESHARD[args.sharding_strategy]
    for first in range(0, len(layers), args.layers_per_unit):
        unit = layers[first : first + args.layers_per_unit]
        fully_shard(unit, reshard_after_forward=reshard, **options)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head.weight is not embedding.weight:
        # The embedding's backward does not read its weights: do not gather them again.
        fully_shard(embedding, reshard_after_forward=reshard, **options)
        embedding.set_unshard_in_backward(False)
        # Backward begins with the output layer: keep it gathered after forward.
        fully_shard(head, reshard_after_forward=False, **options)
    # The root unit: all other parameters. By default they, too, stay gathered after forward.
    fully_shard(model, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            # On some machines oneCCL cannot average: sum, then divide.
            module.set_force_sum_reduction_for_comms(True)

    # 3. Allocate this rank's shards, and copy rank 0's weights into them.
    common.fill_shards(model, full_model, world, args.cpu_offload)
    return model


def prepare_layers(args, model: nn.Module) -> list[nn.Module]:
    """Apply --compile and --activation-checkpointing to the decoder layers, before sharding. Return
    them: each will be a unit."""
    names = model._no_split_modules  # transformers' names of the classes of layers
    if args.activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in names)
        names = [CheckpointWrapper.__name__]  # from here on, the wrappers are the layers

    layers = [module for module in model.modules() if type(module).__name__ in names]
    common.check(layers, f"transformers does not name the layers of {type(model).__name__}")
    if args.compile:  # after wrapping: then recomputing needs less
        for layer in layers:
            # In place. FSDP's hooks stay outside the graphs: they are marked for the compiler.
            layer.compile()
        cross_entropy.compile()  # then it makes no fp32 copy of the logits
    return layers


def build(args, world, config) -> tuple:
    """Collective. Return the sharded model, a copy without memory for `common.export`, and the
    optimizer."""
    full_model = None
    meta_model = None
    if world.rank == 0:
        full_model = load_model(args, config)  # on the CPU
        meta_model = common.meta_copy(full_model)
    meta_model = common.from_rank0(meta_model)
    model = shard(args, world, full_model, meta_model)

    # After sharding: the optimizer must get the shards. A shard keeps the number of dimensions.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others}]
    options = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    return model, meta_model, torch.optim.AdamW(groups, **options)


def train_step(args, world, model, optimizer, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective. Make one optimizer step, in micro-batches.

    tokens: this rank's part of the global batch, int64 of shape (sequences, --seq-length + 1).

    Returns two scalars: the loss in nats, summed over this rank's targets, and the norm of all
    gradients before clipping. They are tensors, because reading their values would make the host
    wait for the device.
    """
    # Every label is a target: here, in `validate` and in the printed mean. If some are -100, count
    # only the others, as docs/recipes/lm-labels.diff does.
    global_targets = args.global_batch_size * args.seq_length
    loss_sum = torch.zeros((), device=world.device)
    optimizer.zero_grad()
    micro_batches = tokens.split(args.micro_batch_size)
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1

        # Reduce gradients to shards after every micro-batch. With --gradient-sync last (FSDP1's
        # no_sync), every rank keeps those of the whole model until the last one.
        model.set_requires_gradient_sync(is_last or args.gradient_sync == "every")
        # Between replicas, average the shards once.
        model.set_requires_all_reduce(is_last)
        # Wait for the reductions only after the last micro-batch.
        model.set_is_last_backward(is_last)
        # Under ZeRO-2, parameters stay gathered until the last micro-batch.
        model.set_reshard_after_backward(is_last or RESHARD[args.sharding_strategy])
        loss = summed_loss(model, micro_batch[:, :-1], micro_batch[:, 1:])
        # FSDP divides gradients by the number of ranks. Undo that, and divide by the number of
        # targets on all ranks: the gradient of the mean over the global batch, as in one process.
        (loss * world.size / global_targets).backward()
        loss_sum += loss.detach()

    # A DTensor sums its square over the shards of all ranks: both calls are collectives.
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    return loss_sum, grad_norm


def summed_loss(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Collective, like every forward of a sharded model. Both arguments are int64 of shape
    (sequences, length); a label is the token that follows. Return the cross-entropy in nats, summed
    over all labels that are not -100."""
    # Give the model no labels: it would shift them once more.
    output = model(input_ids=input_ids, use_cache=False)

    return cross_entropy(output.logits, labels)


class CrossEntropy(nn.Module):
    """A module, because --compile compiles it in place, when the arguments are known."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


cross_entropy = CrossEntropy()

# ---- Model -------------------------------------------------------------------------------------

# Llamas with random weights. Add a row for your own size.
MODELS = {
    # width (a multiple of heads), feed-forward width, layers, heads (a multiple of the next),
    # key-value heads, and the peak learning rate
    "tiny": (128, 352, 2, 4, 4, 5e-3),
    "150m": (1024, 2688, 12, 16, 16, 4e-4),  # PrimeIntellect/llama-150m-fresh
    "1b": (2048, 5632, 22, 32, 4, 4e-4),  # TinyLlama
    # The next three are Llama 2's (arXiv:2307.09288), as in its config.json files on the Hub.
    "7b": (4096, 11008, 32, 32, 32, 3e-4),
    "13b": (5120, 13824, 40, 40, 40, 3e-4),
    "70b": (8192, 28672, 80, 64, 8, 1.5e-4),
}

# PyTorch's attention (SDPA) under another name, for which transformers builds no mask. Packed
# sequences have no padding. Without a mask SDPA is causal, which is all they need. Under its usual
# name, transformers would read the positions on the host to decide whether it needs a mask. If you
# add a mask, switch off cuDNN's attention, as `main` of t5_fsdp.py does.
ATTENTION = "causal_sdpa"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)

# Types of pretrained models for which tests/test_models.py has shown that this attention gives the
# losses of transformers' own. To train another one, add it here and there.
TESTED = "gpt2 gpt_neox opt phi llama mistral qwen2 qwen3 olmo2 gemma3_text lfm2".split()


def load_config(args, tokenizer):
    """Return the config of --model. Raises UserError if this script cannot train the model."""
    if args.model in MODELS:
        width, feed_forward, layers, heads, key_value_heads, _ = MODELS[args.model]
        return LlamaConfig(
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            rms_norm_eps=1e-5,
            vocab_size=64 * math.ceil(len(tokenizer) / 64),  # fast on tensor cores
            max_position_embeddings=args.seq_length,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            attn_implementation=ATTENTION,
        )

    config = common.read_pretrained(AutoConfig, args.model, attn_implementation=ATTENTION)
    kind = config.model_type
    common.check(kind in TESTED, f"--model {args.model} is of type {kind}; tested are {TESTED}")
    # ATTENTION ignores sliding windows, so a sequence must fit into one.
    limits = (config.max_position_embeddings, getattr(config, "sliding_window", None))
    longest = min(filter(None, limits))
    message = f"--model {args.model}: --seq-length can be {longest} at most"
    common.check(args.seq_length <= longest, message)
    sees_later = getattr(config, "use_bidirectional_attention", False)
    message = f"--model {args.model} is not a causal language model: it also sees later tokens"
    common.check(getattr(config, "is_causal", True) and not sees_later, message)
    common.check(not hasattr(config, "quantization_config"), f"--model {args.model} is quantized")
    if kind == "opt":
        config.layerdrop = 0.0  # otherwise each rank would skip different layers
    return config


def load_model(args, config) -> nn.Module:
    """Load the model on the CPU, in fp32: FSDP keeps fp32 shards for the optimizer."""
    torch.manual_seed(args.seed)
    if args.model in MODELS:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = common.load_pretrained(AutoModelForCausalLM, args.model, config)
    # Often the padding token is EOS, and nn.Embedding would never train its row.
    model.get_input_embeddings().padding_idx = None
    return model


# ---- Data --------------------------------------------------------------------------------------

# A step takes the same number of sequences from every *stream* of texts, and the ranks divide the
# streams among them. With 16 streams a step is the same on 1, 2, 4, 8 and 16 processes, and a run
# can resume on any of these.
MAX_STREAMS = 16
CHARACTERS_AT_ONCE = 2_000_000  # that a stream tokenizes, at most, and the text that exceeds them


def open_texts(args) -> datasets.IterableDataset:
    """Return the rows of --dataset, unread. Other processes get them by pickle: use no lambdas."""
    if args.dataset == "builtin":  # paragraphs of Python's own reference
        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        texts = sorted({text.strip() for text in paragraphs if len(text) > 200})
        random.Random(0).shuffle(texts)
        return datasets.Dataset.from_dict({args.text_column: texts}).to_iterable_dataset()
    try:
        builder = common.open_dataset("allenai/c4:en" if args.dataset == "c4" else args.dataset)
        builder.config.sample_by = "paragraph"  # in .txt files empty lines separate texts
        builder.config.on_mixed_types = None  # in JSON one number would change the type of all
        files = builder.config.data_files["train"]
        random.Random(args.seed).shuffle(files)
        if builder.name == "csv":
            options = {"files": files}
            rows = datasets.IterableDataset.from_generator(common.read_csv, gen_kwargs=options)
        else:
            rows = builder.as_streaming_dataset(split="train")
            builder.info.features = rows.info.features = None  # files may have other columns, too
        columns = list(next(iter(rows), {}))
    except Exception as error:  # each reader raises its own kind
        raise common.UserError(f"--dataset {args.dataset}: {error.__cause__ or error}") from error
    message = f"--dataset {args.dataset} has no column {args.text_column}, only {columns}"
    common.check(args.text_column in columns, message)
    return rows.select_columns([args.text_column])


def is_held_out(text: str) -> bool:
    """Whether a text is one of the 5% to validate on. This depends only on its content."""
    return zlib.crc32(text.encode()) % 20 == 0


def are_trained_on(texts: list[str | None]) -> list[bool]:
    return [bool(text) and not text.isspace() and not is_held_out(text) for text in texts]


def sample_texts(args, rows, num_to_train) -> tuple:
    """Read the beginning of the dataset. Return a list of `num_to_train` texts to train on, and one
    of --num-validation-texts that are held out, or fewer if there are not so many."""
    to_train = []
    held_out = {}  # a dict keeps their order, and each one once
    num_characters = 0
    # Shuffling mixes ten files at a time.
    for row in rows.shuffle(args.seed, buffer_size=100):
        text = row[args.text_column]
        message = f"column {args.text_column} holds {type(text).__name__}, not texts"
        common.check(isinstance(text, str | None), message)
        if are_trained_on([text])[0]:
            to_train.append(text)
        elif text and not text.isspace():
            held_out[text] = True
        num_characters += len(text or "")
        enough = len(to_train) >= num_to_train and len(held_out) >= args.num_validation_texts
        if enough or (held_out and num_characters > 3e7):  # 30 million
            break
    message = f"--dataset {args.dataset} has too few texts; in .txt files empty lines separate them"
    common.check(to_train and held_out, message)
    return to_train[:num_to_train], list(held_out)[: args.num_validation_texts]


def tokenize(texts: list[str], tokenizer) -> list[int]:
    """Return the tokens of some texts in a row, each text with EOS at its end."""
    token_lists = tokenizer(texts, verbose=False)["input_ids"]
    for tokens in token_lists:
        if tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
    return list(itertools.chain.from_iterable(token_lists))


def cut(tokens: list[int], length: int) -> list[list[int]]:
    """Cut tokens into sequences of `length` + 1 tokens: inputs, and labels that are one further.
    The last token of a sequence is the first one of the next. Nothing is padded."""
    return [tokens[first : first + length + 1] for first in range(0, len(tokens) - length, length)]


def read_stream(args, rows, tokenizer, index, num_streams, position):
    """Yield the sequences of stream `index`, without end, and the position after each of them."""
    rows = rows.filter(are_trained_on, input_columns=[args.text_column], batched=True).repeat(None)
    # With very many files (`datasets` calls them shards), every stream reads its own. A few may
    # differ in size, so all streams read all of them, and take turns.
    strategy = "shards" if rows.num_shards >= max(512, num_streams) else "examples"
    rows = split_dataset_by_node(rows, index, num_streams, strategy)

    # A position holds what makes the sequences of the current texts again. rows: where the reader
    # was before these texts. rest: tokens left over from earlier texts, too few for a sequence.
    # used: how many sequences of these texts have been yielded. window: how many characters these
    # texts have, about 125 sequences of plain text, which are tokenized at once, then shuffled.
    window = min(max(100_000, 500 * args.seq_length), CHARACTERS_AT_ONCE)
    first = window * (1 + index % MAX_STREAMS) // MAX_STREAMS  # or all would tokenize in one step
    position = position or {"rows": rows.state_dict(), "rest": [], "used": 0, "window": first}
    # Keep this state: until the first row is read, state_dict() would be that of the beginning.
    rows.load_state_dict(position["rows"])
    texts = []
    num_characters = 0
    for row in rows:
        texts.append(row[args.text_column])
        num_characters += len(texts[-1])
        if num_characters < position["window"]:
            continue
        tokens = position["rest"] + tokenize(texts, tokenizer)
        sequences = cut(tokens, args.seq_length)
        rest = tokens[len(sequences) * args.seq_length :]
        # Neighbors are often parts of one text. The sum is a seed that differs from batch to batch.
        random.Random(hash((args.seed, sum(tokens)))).shuffle(sequences)
        for used in range(position["used"], len(sequences)):
            yield sequences[used], {**position, "used": used + 1}
        position = {"rows": rows.state_dict(), "rest": rest, "used": 0, "window": window}
        texts = []
        num_characters = 0


def count_passes(position: dict) -> int:
    """How often a stream has come to the end of its texts, before the current ones."""
    state = position["rows"]
    while "repeat_index" not in state:  # the state of `repeat` is further inside
        state = state["examples_iterable"]
    return state["repeat_index"]


class StepBatches(IterableDataset):
    """Yields the sequences of this rank for one step, and the positions of its streams after it."""

    def __init__(self, args, world, rows, tokenizer, positions):
        if positions is None:
            num_streams = math.gcd(args.global_batch_size, MAX_STREAMS)
            if num_streams % world.size != 0:  # then as many as possible, to resume on more
                counts = range(world.size, max(MAX_STREAMS, world.size) + 1, world.size)
                num_streams = max(n for n in counts if args.global_batch_size % n == 0)
            positions = [None] * num_streams
        num_streams = len(positions)
        common.check(
            num_streams % world.size == 0,
            f"resume on a number of processes that divides {num_streams}, not on {world.size}",
        )
        self.num_sequences = args.global_batch_size // num_streams  # per stream and step
        own = torch.arange(num_streams).chunk(world.size)[world.rank].tolist()  # neighbors
        self.streams = [(args, rows, tokenizer, i, num_streams, positions[i]) for i in own]

    def __iter__(self):
        streams = [read_stream(*stream) for stream in self.streams]
        while True:
            parts = [[next(stream) for _ in range(self.num_sequences)] for stream in streams]
            sequences = [sequence for part in parts for sequence, _ in part]
            yield np.array(sequences), [part[-1][1] for part in parts]


def protect_worker(_worker):
    """Make a worker ignore stop signals, because the current step still needs it. It ends together
    with the training process."""
    for signum in common.STOPS:
        signal.signal(signum, signal.SIG_IGN)
    # PR_SET_PDEATHSIG: Linux kills the worker when the training process ends, however it ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def batches_on_device(args, world, rows, tokenizer, positions):
    """Start a worker process that tokenizes ahead. Return an iterator over this rank's sequences of
    each step, on its device, and the positions of its streams after the step. `positions`: a list
    of those of all streams, to continue from; None: begin.

    Call it before `build`. The worker is a fork: it would keep a copy of all weights and moments on
    the CPU that a step rewrites. And it tokenizes while the model is made.
    """
    # The worker tokenizes with as many threads as this process has. If this has used some, which
    # the fork would not copy, tokenizers notices it, and the worker uses none.
    os.environ.pop("TOKENIZERS_PARALLELISM", None)  # with "true" it would wait for them
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))
    loader = DataLoader(
        StepBatches(args, world, rows, tokenizer, positions),
        batch_size=None,  # each item is a step
        num_workers=1,  # two would both yield every step
        prefetch_factor=16,  # steps to prepare ahead
        # Send NumPy arrays, through a pipe. Tensors would go through /dev/shm, small in Docker.
        collate_fn=tuple,
        pin_memory=world.device.type != "cpu",  # a thread receives steps while this one trains
        worker_init_fn=protect_worker,
        # Linux would take the fork server of Python 3.14 for the worker's parent.
        multiprocessing_context="fork",
    )
    steps = iter(loader)  # forks
    return ((common.to_device(sequences, world.device), after) for sequences, after in steps)


def load_data(args, checkpoint: Path | None) -> tuple:
    """Return rows, tokenizer, sequences to validate on, and a checksum of the first texts."""
    common.check(
        args.model in MODELS or not args.tokenizer,
        f"--model {args.model} has its own tokenizer; leave out --tokenizer",
    )
    # Tokenize without threads here: they would not survive the fork of the worker.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = open_texts(args)
    if args.model in MODELS and not args.tokenizer and not checkpoint:
        vocab_size, num_texts = (2048, 2000) if args.model == "tiny" else (32_000, 50_000)
        to_train, held_out = sample_texts(args, rows, num_texts)
        tokenizer = common.train_tokenizer(to_train, vocab_size, append_eos=False)
    else:
        to_train, held_out = sample_texts(args, rows, 1000)
        name = checkpoint or args.tokenizer or args.model
        tokenizer = common.read_pretrained(AutoTokenizer, name)
    common.check(tokenizer.eos_token, "the tokenizer has no EOS to end texts with")
    common.print_lost_text(tokenizer, to_train[:1000])

    tokens = tokenize(held_out, tokenizer)
    sequences = cut(tokens, args.seq_length)
    message = f"held-out texts have {len(tokens)} tokens; use more texts, or a lower --seq-length"
    common.check(sequences, message)
    checksum = common.checksum(to_train[:1000], rows.num_shards)
    return rows, tokenizer, torch.tensor(sequences), checksum


@torch.no_grad()
def validate(args, world, model, sequences, log, step: int):
    """Collective. Print the mean loss per token, in nats, over all held-out sequences: int64 of
    shape (sequences, --seq-length + 1), the same on all ranks."""
    # Every rank must take part in every forward. And if all batches have the same size, --compile
    # makes only one graph. So repeat the first sequences at the end. Labels of -100 exclude these.
    count = len(sequences)
    num_at_once = args.micro_batch_size * world.size
    padded = math.ceil(count / num_at_once) * num_at_once
    parts = torch.arange(world.rank, padded, world.size).split(args.micro_batch_size)

    model.eval()
    loss_sum = torch.zeros((), device=world.device)
    for part in log.bar(parts, "validate"):
        tokens = sequences[part % count]
        labels = tokens[:, 1:].clone()
        labels[part >= count] = -100
        loss_sum += summed_loss(model, tokens[:, :-1].to(world.device), labels.to(world.device))
    model.train()

    val_loss = common.sum_over_ranks(loss_sum) / (count * args.seq_length)
    perplexity = math.exp(min(val_loss, 700))
    log.metrics({"step": step, "val_loss": val_loss, "perplexity": perplexity})


# ---- Main --------------------------------------------------------------------------------------


def mfu_per_token_per_second(args, world, meta_model) -> float:
    """Return MFU (Model FLOPs Utilization) divided by tokens/s: the FLOPs of one token over the
    peak FLOP/s of all GPUs. 0 if the peak is unknown. PyTorch counts the FLOPs of forward. Backward
    has twice as many, as in appendix B of PaLM (arXiv:2204.02311)."""
    if args.peak_tflops == 0:
        return 0.0
    tokens = torch.ones(1, args.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(meta_model).to("meta")(input_ids=tokens, use_cache=False)
    flops_per_token = 3 * counter.get_total_flops() / args.seq_length
    return flops_per_token / (args.peak_tflops * 1e12 * world.size)


def learning_rate(args, step: int) -> float:
    """Warm up linearly, then decay by a cosine to a tenth. `step` counts from 1."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def is_due(args, step: int, every: int) -> bool:
    """Whether something that happens every N steps, and after the last one, is due at `step`."""
    return every > 0 and (step % every == 0 or step == args.max_steps)


def main(args, world):
    log = common.Log(world, args.output_dir)
    args.precision = common.choose_precision(args.precision, world.device)
    common.divide_batch(args, world, default=16)
    args.lr = args.lr or (MODELS[args.model][-1] if args.model in MODELS else 2e-5)
    replicas, shards = mesh_shape(args, world)
    model_folder = args.output_dir / "model"
    checkpoint, progress = common.find_checkpoint(args, model_folder)

    # Data
    rows, tokenizer, validation_set, checksum = common.first_on_node(
        world, lambda: load_data(args, checkpoint)
    )
    step_tokens = args.global_batch_size * args.seq_length  # of all ranks
    common.say(f"data     {args.dataset}, {rows.num_shards:,} file(s), {step_tokens:,} tokens/step")
    config = common.first_on_node(world, lambda: load_config(args, tokenizer))
    must_match = common.check_same(args, MUST_MATCH, checksum, config, progress)

    # Where the run stands: the steps done, and the positions of all streams
    step = progress.get("step", 0)
    batches = batches_on_device(args, world, rows, tokenizer, progress.get("positions"))

    # Model
    model, meta_model, optimizer = build(args, world, config)
    vocabulary = f"vocabulary of {config.vocab_size:,}"
    common.say(f"model    {args.model}, {vocabulary}, {common.describe_state(meta_model, shards)}")
    mfu_per_speed = mfu_per_token_per_second(args, world, meta_model)  # 0 without --peak-tflops
    mesh = f"{replicas} x {shards} (replicas x shards)"
    common.say(f"fsdp     {args.sharding_strategy}, {mesh}, {args.precision}")

    if checkpoint:
        common.load_checkpoint(checkpoint, model, optimizer)
        common.say(f"resumed  from step {step} of {args.max_steps}")
    elif args.validate_every:
        validate(args, world, model, validation_set, log, step)

    # Train
    common.note_stops()
    loss_sum = torch.zeros((), device=world.device)  # since the last printed line
    last_logged = step
    passes = min(map(count_passes, progress.get("positions", [])), default=0)  # as printed
    start = time.perf_counter()
    waited = 0.0

    remaining = range(step + 1, args.max_steps + 1)
    for step in log.bar(remaining, "train"):
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        before = time.perf_counter()
        tokens, own_positions = next(batches)
        waited += time.perf_counter() - before
        # Dropout must be equal after a resume, and differ between ranks.
        torch.manual_seed(args.seed + step * world.size + world.rank)
        any_rank_stops = common.ask_for_stops()  # a signal after this counts in the next step
        step_loss, grad_norm = train_step(args, world, model, optimizer, tokens)
        loss_sum += step_loss

        stop_now = any_rank_stops()
        save_now = stop_now or is_due(args, step, args.checkpoint_every)
        validate_now = is_due(args, step, args.validate_every)
        if save_now or validate_now or step == 1 or is_due(args, step, args.log_every):
            num_tokens = step_tokens * (step - last_logged)
            loss = common.sum_over_ranks(loss_sum) / num_tokens  # waits for the device
            seconds = time.perf_counter() - start
            speed = num_tokens / seconds
            record = {
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm.item(),
                "lr": lr,
                "tokens/s": speed,
                "per_gpu": speed / world.size,
                "peak_gib": common.peak_gib(world.device),
                "waited": waited / seconds,  # for data
            }
            if mfu_per_speed > 0:
                record["mfu"] = speed * mfu_per_speed
            log.metrics(record)
            common.reset_peak(world.device)
            loss_sum.zero_()
            last_logged = step
            fewest = torch.tensor(min(map(count_passes, own_positions)))
            dist.all_reduce(fewest, dist.ReduceOp.MIN)
            if fewest > passes:
                passes = fewest.item()
                common.say(f"data     all texts were read at least {passes} time(s)")

            if save_now:
                gathered = [None] * world.size
                dist.all_gather_object(gathered, own_positions)
                positions = list(itertools.chain.from_iterable(gathered))
                progress = {"step": step, "positions": positions, "must_match": must_match}
                common.save_checkpoint(progress, args, model, optimizer, tokenizer)
            if stop_now:  # without the validation that may be due, and without the export
                common.say(f"stopped  at step {step}, checkpoint saved: continue with --resume")
                return
            if validate_now:
                validate(args, world, model, validation_set, log, step)
            start = time.perf_counter()  # do not count saving and validation
            waited = 0.0

    common.say(f"metrics  {log.path}, run {log.run}")
    if args.save_model:
        common.export(model, meta_model, tokenizer, model_folder, world)
        common.say(f"model    {model_folder}")


if __name__ == "__main__":
    common.run(main, common.parse_args(Args, __doc__))
