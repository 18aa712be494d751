r"""How do I pretrain a language model on many nodes, and which sharding strategy do I pick?

Pretrains a Llama on full sequences of text with FSDP2 (`fully_shard`), under each of FSDP's five
strategies, or with DiLoCo where links are slow. Without flags it needs no download: a tiny Llama
learns Python's own reference.

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
import gc
import json
import math
import re
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
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset

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

# PyTorch's attention, under a name that transformers does not know, so that it makes no mask. Full
# sequences need none: they have no padding, and without a mask this attention is causal by itself.
# Under the known name transformers would look at the positions to see whether a mask is needed, and
# for that the host would wait for the device.
ATTENTION = "causal_sdpa"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)

# ---- FSDP: what is sharded over which processes ------------------------------------------------

# A unit is a group of parameters that FSDP gathers and frees together. Every decoder layer is one.
# Unless embedding and output layer share their weights, two more are the embedding, and the output
# layer with the last norm. What remains is the root unit.

# The dtype to gather parameters and compute in. Gradients are reduced in fp32, as many processes
# add up many small numbers; the optimizer's shards are always fp32.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

# All strategies: FSDP1's names, and DILOCO. In FSDP2 each is two facts: the mesh (see mesh_shape),
# and reshard_after_forward, which frees the layers' parameters after forward and gathers them again
# for backward. Ordered by the memory of a process, roughly the least first.
# docs/multi-node.md has what each of them sends.
RESHARD = {
    "FULL_SHARD": True,  # ZeRO-3: parameters are gathered for each forward and each backward
    "HYBRID_SHARD": True,  # ZeRO-3 in each replica, most often a node; replicas share gradients
    "DILOCO": True,  # ZeRO-3 in each replica; they train alone, and now and then average weights
    "SHARD_GRAD_OP": False,  # ZeRO-2: parameters are gathered once a step
    "_HYBRID_SHARD_ZERO2": False,  # ZeRO-2 in each replica; replicas share gradients
    "NO_SHARD": False,  # DDP: every process has the whole model; all share gradients
}
HYBRIDS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "DILOCO")


def shard(args, world, config) -> nn.Module:
    """The model, each parameter a DTensor of which this process has a shard. A collective: every
    rank must call the function."""
    full_model = None
    if world.rank == 0:
        full_model = load_model(args, config)  # on the CPU
    dist.barrier(world.patient_group)  # the others wait, if need be hours for a download
    model = make_meta_model(config)  # shapes only: the whole model need not fit a device
    layers = prepare_layers(args, model)

    mesh = make_mesh(args, world)
    if args.sharding_strategy == "DILOCO":
        mesh = mesh["shard"]  # FSDP sees this replica only, and sends nothing to the others
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(PRECISIONS[args.precision], torch.float32),
    }
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")

    for layer in layers:
        fully_shard(layer, reshard_after_forward=RESHARD[args.sharding_strategy], **options)
    for modules in embedding_and_head(model):
        # Not freed after forward. Else FSDP would gather both again for backward: the output layer
        # at once, and the embedding for nothing.
        fully_shard(modules, reshard_after_forward=False, **options)
    # The root unit: with tied weights embedding and norm, else nothing. FSDP needs it all the same.
    fully_shard(model, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule) and world.device.type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # oneCCL cannot average everywhere

    common.load_weights(model, full_model, world, args.cpu_offload)
    return model


def make_mesh(args, world):
    """One dimension, to shard over, or two, replicas x shards. A collective."""
    replicas, shards = mesh_shape(args, world)
    is_hybrid = args.sharding_strategy in HYBRIDS
    if replicas == 1 and not is_hybrid:
        return init_device_mesh(world.device.type, (world.size,))

    # Hybrids have both even with one replica: DiLoCo asks for them by name. Ranks next to each
    # other, most often on one node, are the shards of one replica.
    names = ("replicate", "shard")
    return init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=names)


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
    return world.size // shards, shards


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers, which become units. For another architecture change this, and what else
    docs/your-model-and-data.md lists."""
    return list(model.model.layers)


def embedding_and_head(model: nn.Module) -> list[list[nn.Module]]:
    """Two more units: the embedding, and the last norm with the output layer. While one of them is
    gathered or reduced, the layers compute. No units if both have the same weights."""
    if model.config.tie_word_embeddings:
        return []
    return [[model.model.embed_tokens], [model.model.norm, model.lm_head]]


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
    return layers_of(model)  # not `layers`: the wrappers have taken their places


def build(args, world, config):
    """The sharded model and its optimizer, which must see the shards. A collective."""
    model = shard(args, world, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": args.weight_decay}
    return model, torch.optim.AdamW(trained, fused=True, **options)


def train_step(args, world, model, optimizer, batches) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """One step of the optimizer on this rank's part of the global batch. A collective.

    Returns this rank's summed loss and the gradient norm, as tensors: to read a number would make
    the host wait for the device; and the position in this rank's data.
    """
    num_micro_batches = args.global_batch_size // (args.micro_batch_size * world.size)
    global_targets = args.global_batch_size * args.seq_length

    loss_sum = torch.zeros((), device=world.device)
    optimizer.zero_grad()
    for number in range(num_micro_batches):
        micro_batch, data_position = next(batches)
        is_last = number == num_micro_batches - 1

        # Only the last micro-batch sends gradients. Until then each process keeps those of all
        # parameters, under every strategy, and ZeRO-2's parameters stay gathered.
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last or RESHARD[args.sharding_strategy])
        loss = summed_loss(model, micro_batch)
        # FSDP divides gradients by the number of ranks. Undo that, and divide by all targets: the
        # gradient of the mean over the global batch, as if one process held it. (With DILOCO FSDP
        # divides by a replica's ranks only. That leaves a factor, the number of replicas: it is the
        # mean over the replica's own targets, global_targets / replicas.)
        (loss * world.size / global_targets).backward()
        loss_sum += loss.detach()

    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    return loss_sum, grad_norm, data_position


class OuterOptimizer:
    """DiLoCo's (arXiv:2311.08105): SGD with Nesterov momentum on what all replicas share. To make
    one is a collective."""

    def __init__(self, args, world, model):
        mesh = make_mesh(args, world)
        self.args = args
        self.shard_group = mesh.get_group("shard")  # the ranks of this replica
        # The ranks, one in each replica, that hold the same part of each parameter as this one.
        self.replicate_group = mesh.get_group("replicate")
        self.replica_number = mesh.get_local_rank("replicate")
        # This rank's shards, as views: to write into them is to change the model.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.weights = [parameter.detach().to_local() for parameter in trained]
        self.synced = self.flat_weights()  # as last synchronized: the same in all replicas
        self.momentum = torch.zeros_like(self.synced)

    def flat_weights(self) -> torch.Tensor:
        """A copy in one tensor: on a slow network each all-reduce would cost a round trip."""
        return torch.cat([weight.flatten() for weight in self.weights])

    @torch.no_grad()
    def step(self):
        """The outer gradient is the weights of the last synchronization, minus the mean of what the
        replicas have now. One step with it gives what all of them go on from. A collective."""
        beta = self.args.outer_momentum
        gradient = self.synced - self.flat_weights()
        dist.all_reduce(gradient, group=self.replicate_group)
        gradient.div_(self.replicate_group.size())
        self.momentum.mul_(beta).add_(gradient)
        gradient.add_(self.momentum, alpha=beta)
        self.synced.sub_(gradient, alpha=self.args.outer_lr)

        parts = self.synced.split([weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            weight.copy_(part.view_as(weight))

    def state(self) -> dict:
        """`extra` and `replica` for `common`'s save_checkpoint and load_checkpoint. There replicas
        count from 1: number 0 is a run without DiLoCo."""
        tensors = {"synced": self.synced, "momentum": self.momentum}
        return {"extra": tensors, "replica": 1 + self.replica_number}


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
        model = AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=torch.float32)
    return model.train()  # a pretrained one comes in eval()


def make_meta_model(config) -> nn.Module:
    """The model on the meta device: shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load_config_and_tokenizer(args, world, source) -> tuple:
    """Those of a pretrained model, or of one of `MODELS` with any tokenizer. A collective."""
    is_pretrained = args.model not in MODELS
    tokenizer_name = args.tokenizer or (args.model if is_pretrained else None)
    options = {"local_files_only": world.local_rank != 0}  # one process of a node asks the Hub
    if is_pretrained:
        common.check_path("--model", args.model)
    if tokenizer_name:
        common.check_path("--tokenizer", tokenizer_name)
    try:
        with common.first_on_node(world):
            if is_pretrained:
                config = AutoConfig.from_pretrained(args.model, **options)
            if tokenizer_name:
                tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, **options)
    except (OSError, ValueError) as error:
        message = f"--model {args.model} or --tokenizer {tokenizer_name} cannot be read: {error}"
        if "gated" in message:
            message += "; then run `hf auth login`, or choose another"
        raise common.UserError(message) from error

    if not tokenizer_name:  # a small one, of the first texts, which rank 0 reads
        trained = [None]
        if world.rank == 0:
            texts = [row["text"] for row in source.take(2000)]
            trained = [common.train_tokenizer(texts, vocab_size=2048, append_eos=False)]
        dist.broadcast_object_list(trained, group=world.patient_group)
        [tokenizer] = trained
    if tokenizer.eos_token is None:
        raise common.UserError(f"the tokenizer of {tokenizer_name} has no end-of-text token")
    if not is_pretrained:
        config = copy.deepcopy(MODELS[args.model])
        config.vocab_size = 64 * math.ceil(len(tokenizer) / 64)  # fast on tensor cores
        config.bos_token_id = None
        config.eos_token_id = tokenizer.eos_token_id
        config.max_position_embeddings = args.seq_length
    config._attn_implementation = ATTENTION
    check_config(args, config, tokenizer)
    return config, tokenizer


def check_config(args, config, tokenizer):
    """Raise UserError where this script cannot train such a model on these sequences."""
    try:
        model = make_meta_model(config)
        layers_of(model)  # raises AttributeError where such a part is missing
        embedding_and_head(model)
    except (ValueError, AttributeError) as error:
        raise common.UserError(
            f"--model {args.model} has other parts than this script expects ({error});"
            " docs/your-model-and-data.md says what to change"
        ) from error

    # ATTENTION ignores sliding windows: a sequence must fit into one.
    window = getattr(config, "sliding_window", None) or math.inf
    longest = min(window, config.max_position_embeddings)
    if len(tokenizer) > config.vocab_size or args.seq_length > longest:
        raise common.UserError(
            f"--model {args.model} takes a --tokenizer of {config.vocab_size} tokens at most, and a"
            f" --seq-length of {longest}"
        )


# These functions are not inside of others, because they are pickled: rank 0 sends them to all ranks
# (see main), and on macOS each rank sends them to the workers of its DataLoader.


def is_own(row: dict, number: int, rank: int, size: int) -> bool:
    """Each rank has every n-th row."""
    return number % size == rank


def read_lines(rows: dict, column: str) -> dict:
    """The rows of JSON lines. Broken ones are left out."""
    texts = []
    for line in rows["text"]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(line)[column]
            json.dumps(text, ensure_ascii=False).encode()  # fails for half a surrogate pair
            texts.append(text)
    return {"text": texts}


def choose_texts(rows: dict, column: str, held_out: bool) -> dict:
    """5% of the texts are held out, by content: one that comes twice is on one side."""
    texts = []
    for text in rows[column]:
        if isinstance(text, str) and (zlib.crc32(text.encode()) % 20 == 0) == held_out:
            texts.append(text)
    return {"text": texts}


def builtin_texts() -> list[str]:
    """Paragraphs of Python's own reference."""
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return sorted({text.strip() for text in paragraphs if len(text) > 200})


def load_texts(args) -> tuple[datasets.IterableDataset, list[str]]:
    """A stream of texts that knows its position, and those that are held out to validate.

    It lists the dataset's files and reads the first. Only rank 0 calls it: if all processes of a
    large run asked the Hub, it would refuse most of them.
    """
    for path in args.dataset:
        common.check_path("--dataset", path)
    name = args.dataset[0]
    column = args.text_column
    is_json = all(re.search(r"\.jsonl?(\.\w+)?$", path) for path in args.dataset)
    is_parquet = all(path.endswith(".parquet") for path in args.dataset)
    if len(args.dataset) > 1 and not (is_json or is_parquet):
        raise ValueError("several must be files of one kind: .jsonl or .parquet")
    stream = {"split": "train", "streaming": True}
    if name == "builtin":
        rows = datasets.Dataset.from_dict({column: builtin_texts()})
        rows = rows.to_iterable_dataset(num_shards=64)
    elif is_json:  # as text: of a broken line the json reader makes an error
        rows = datasets.load_dataset("text", data_files=args.dataset, **stream)
    elif is_parquet:
        rows = datasets.load_dataset("parquet", data_files=args.dataset, **stream)
    elif Path(name).is_file():
        raise ValueError("it is none of .json, .jsonl, .json.gz, .jsonl.gz, .parquet")
    else:
        hub_name = "allenai/c4:en" if name == "c4" else name
        rows = datasets.load_dataset(*hub_name.split(":"), **stream)

    raw_rows = rows
    if is_json:
        rows = rows.map(read_lines, batched=True, fn_kwargs={"column": column})
        column = "text"
    rows = rows.select_columns([column])
    sides = []
    for is_held_out in (False, True):
        options = {"column": column, "held_out": is_held_out}
        sides.append(
            rows.map(choose_texts, batched=True, remove_columns=[column], fn_kwargs=options)
        )
    source, held_out = sides
    validation = [row["text"] for row in held_out.take(args.num_validation_texts)]
    if not validation:
        first = [str(row)[:200] for row in raw_rows.take(1)]
        raise ValueError(
            f"too few texts in --text-column {args.text_column}; it begins with {first}"
        )
    return source, validation


@contextlib.contextmanager
def name_dataset_in_errors(args):
    """Errors in reading the dataset become UserErrors that name it. A worker's error has a whole
    traceback as its text, of which the last line counts."""
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
        cause = common.last_line(error)
        raise common.UserError(f"--dataset {' '.join(args.dataset)}: {cause}") from error


def pack(rows: dict, indices: list[int], args, tokenizer, seed: list[int]) -> dict:
    """Shuffle a block of texts and join them end to end, cut into full sequences: nothing is
    padded. indices: numbers of the texts in the stream, of which the first seeds the shuffle."""
    texts = [text + tokenizer.eos_token for text in rows["text"]]
    np.random.default_rng([*seed, indices[0]]).shuffle(texts)
    token_lists = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = np.concatenate(token_lists).astype(int)

    # Labels are shifted here: the target of a token is the next one, also across sequences. The
    # model would shift them again, so it does not get them.
    length = args.seq_length
    num_sequences = (len(tokens) - 1) // length
    if num_sequences == 0:
        raise ValueError(
            f"{len(texts)} texts do not fill one sequence; use more texts or a lower --seq-length"
        )
    end = num_sequences * length
    return {
        "input_ids": tokens[:end].reshape(num_sequences, length),
        "labels": tokens[1 : end + 1].reshape(num_sequences, length),
    }


class Batches(IterableDataset):
    """Micro-batches, each with the position after it, where a resumed run goes on."""

    def __init__(self, args, sequences: datasets.IterableDataset):
        self.args = args
        self.sequences = sequences

    def __iter__(self):
        try:
            for rows in self.sequences.iter(self.args.micro_batch_size):
                batch = {name: np.stack(rows[name]) for name in rows}
                yield batch, self.sequences.state_dict()
        except UnicodeDecodeError as error:  # a worker cannot hand this kind to its parent
            raise ValueError(str(error)) from error
        # `repeat` ends only where a whole pass has no text.
        raise ValueError("too few texts for each process to have one")


def batches_on_device(args, world, source, tokenizer, position: dict | None):
    """Yield micro-batches of this rank's own texts, pass after pass, on its device, each with the
    position after it. A worker process packs ahead."""
    if source.num_shards % world.size == 0:  # 64 files on 8 processes: each reads 8 of them
        own = split_dataset_by_node(source, world.rank, world.size)
    else:
        # 3 files on 8 processes: each reads all, and keeps every eighth text. (With
        # `split_dataset_by_node` each would pack all texts, and then keep every eighth batch.)
        options = {"rank": world.rank, "size": world.size}
        own = source.filter(is_own, with_indices=True, fn_kwargs=options)
    options = {"args": args, "tokenizer": tokenizer, "seed": [args.seed, world.rank]}
    sequences = own.repeat(None).map(
        pack,
        with_indices=True,  # they go on from pass to pass, so each shuffle has another seed
        batched=True,
        batch_size=500,
        remove_columns=["text"],
        fn_kwargs=options,
    )
    sequences.load_state_dict(position)

    loader = DataLoader(
        Batches(args, sequences),
        batch_size=None,
        num_workers=1,  # not 2: `IterableDataset.iter` would give every batch to both
        prefetch_factor=8,
        pin_memory=world.device.type != "cpu",  # else the host waits for each copy
        # DataLoader draws a seed. Drawn from the global generator it would change dropout after a
        # resume.
        generator=torch.Generator(),
    )
    with name_dataset_in_errors(args):
        for batch, position in common.start_workers(loader):
            for name, tensor in batch.items():
                batch[name] = tensor.to(world.device, non_blocking=True)
            yield batch, position


@torch.no_grad()
def validate(args, world, model, sequences: dict, log, step: int):
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
        labels[part >= count] = -100  # in a copy, which indexing by a tensor makes
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
    tokens/s it is MFU, Model FLOPs Utilization. 0 where the peak is unknown.

    By PaLM's appendix B (arXiv:2204.02311). An embedding counts only if it is also the output
    layer, because looking up computes nothing.
    """
    peak_tflops = args.peak_tflops
    if peak_tflops == 0 and world.device.type == "cuda":
        device_name = torch.cuda.get_device_name()
        for name, tflops in PEAK_TFLOPS.items():
            if re.search(rf"\b{name}\b", device_name):  # whole words: not A100 in "RTX A1000"
                peak_tflops = tflops
    if peak_tflops == 0:
        return 0.0

    config = meta_model.config
    num_parameters = meta_model.num_parameters(exclude_embeddings=not config.tie_word_embeddings)
    head_size = getattr(config, "head_dim", None)
    if head_size is None:
        head_size = config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    attention = 12 * config.num_hidden_layers * width * args.seq_length
    return (6 * num_parameters + attention) / (peak_tflops * 1e12 * world.size)


def compare_strategies(args, world, config, log, batches, mfu_per_speed: float):
    """Time a few steps under each strategy, with this model on these machines. A collective."""
    for strategy in RESHARD:
        args.sharding_strategy = strategy
        replicas, shards = mesh_shape(args, world)
        common.reset_peak_memory(world.device)
        try:
            seconds, state_gib = time_steps(args, world, config, log, batches)
        except torch.OutOfMemoryError as error:
            # Other processes may now wait for this one: nothing can follow.
            raise common.UserError(
                f"{strategy} runs out of memory; most strategies after it need more"
            ) from error

        speed = args.global_batch_size * args.seq_length / seconds
        memory = common.peak_memory(world.device)
        line = (
            f"{strategy:19} | {replicas:2} x {shards:2} | {speed:9,.0f} tokens/s"
            f" | {seconds:7.3f} s | state {state_gib:.4f} GiB | {memory['peak_gib']:.2f} GiB"
        )
        record = {"tokens/s": speed, "step_seconds": seconds, "state_gib": state_gib, **memory}
        if mfu_per_speed > 0:
            record["mfu"] = speed * mfu_per_speed
            line += f" | mfu {record['mfu']:.3g}"
        log.write(strategy=strategy, replicas=replicas, shards=shards, **record)
        log.print(line)
        gc.collect()  # FSDP's objects refer to each other in circles
        if world.device.type != "cpu":
            torch.accelerator.empty_cache()


def time_steps(args, world, config, log, batches) -> tuple[float, float]:
    """Seconds of a step, and the GiB of state that this process holds. A collective."""
    model, optimizer = build(args, world, config)
    times = []
    for _ in log.bar(range(7), args.sharding_strategy, 7):
        start = time.perf_counter()
        loss_sum, _, _ = train_step(args, world, model, optimizer, batches)
        loss_sum.item()  # waits for the device
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[2:])  # the first two allocate, compile and fill queues
    state_gib = common.state_gib(model, optimizer)

    if args.sharding_strategy == "DILOCO":
        optimizer.zero_grad()  # as in main
        outer = OuterOptimizer(args, world, model)
        outer.step()  # sets up communication
        outer.synced.sum().item()  # waits for the device
        start = time.perf_counter()
        outer.step()
        outer.synced.sum().item()
        seconds += (time.perf_counter() - start) / args.local_steps
        state_gib += (outer.synced.nbytes + outer.momentum.nbytes) / 2**30
    return seconds, state_gib


# ---- Main --------------------------------------------------------------------------------------

# --resume refuses a checkpoint if one of these flags differs. Any other may change, but not from
# DILOCO to another strategy, or back. (DILOCO also needs as many replicas and shards as before: see
# `resume`.)
MUST_MATCH = (
    "model dataset text_column tokenizer seq_length global_batch_size lr warmup_steps max_steps"
    " seed local_steps outer_lr outer_momentum"
).split()


def learning_rate(args, step: int, num_steps: int) -> float:
    """A linear warm-up, then a cosine down to a tenth. `step` counts from 1 to `num_steps`."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    done = (step - args.warmup_steps) / max(1, num_steps - args.warmup_steps)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def parse_args():
    parser = common.Parser(__doc__)
    at_least_0 = common.non_negative_int
    at_least_1 = common.positive_int
    number = common.non_negative_float

    add = parser.add_argument_group("data and model").add_argument
    add("--model", default="tiny", help="tiny, 150m, 1b, 7b; or pretrained: a Hub name, a folder")
    add("--dataset", default=["builtin"], nargs="+", help="builtin; c4; Hub; .jsonl[.gz], .parquet")
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
    add("--lr", default=0.0, type=number, help="the highest; 0: 5e-3 for tiny, 4e-4 for others")
    add("--warmup-steps", default=20, type=at_least_0, help="steps to the highest learning rate")
    add("--weight-decay", default=0.1, type=number, help="of all weights")

    add = parser.add_argument_group("FSDP").add_argument
    switch = {"action": "store_true"}
    add("--sharding-strategy", default="FULL_SHARD", choices=RESHARD, help="see the README")
    add("--shards-per-replica", default=0, type=at_least_0, help="hybrids; 0: processes of a node")
    add("--local-steps", default=50, type=at_least_1, help="of DILOCO, between synchronizations")
    add("--outer-lr", default=0.7, type=number, help="of DILOCO; 1 with momentum 0 averages")
    add("--outer-momentum", default=0.9, type=number, help="of DILOCO, Nesterov's")
    add("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 on new GPUs")
    add("--cpu-offload", **switch, help="keep shards on the CPU: least memory, slow")
    add("--activation-checkpointing", **switch, help="recompute each layer: less memory, slower")
    add("--compile", **switch, help="torch.compile each layer, and the loss: a slow start")

    group = parser.add_argument_group("processes and output")
    common.add_run_flags(group)
    common.add_checkpoint_flags(group)
    add = group.add_argument
    add("--compare-strategies", **switch, help="time each strategy, and end")
    add("--peak-tflops", default=0.0, type=number, help="of a device, for MFU; 0: of known GPUs")
    add("--validate-every", default=50, type=at_least_0, help="steps between validations; 0: never")

    args = parser.parse_args()
    if args.lr == 0:
        args.lr = 5e-3 if args.model == "tiny" else 4e-4
    return args


def is_due(args, step: int, every: int) -> bool:
    """Every so many steps, and after the last one; never if `every` is 0."""
    return every > 0 and (step % every == 0 or step == args.max_steps)


def resume(
    args, world, checkpoint, model, optimizer, outer_state: dict, log
) -> tuple[int, dict | None]:
    """Load a checkpoint. Returns the step after which it was saved, and this rank's position in the
    data. A collective."""
    progress = common.read_progress(checkpoint, args, MUST_MATCH)
    if outer_state and progress["mesh"] != list(mesh_shape(args, world)):
        raise common.UserError(
            f"{checkpoint} has other replicas or shards; DILOCO cannot resume it"
        )
    common.load_checkpoint(checkpoint, model, optimizer, world, **outer_state)
    log.print(f"resumed  from step {progress['step']}")
    if progress["step"] >= args.max_steps:
        log.print("         no step is left; to train on, start anew with a higher --max-steps")

    positions = progress["data_positions"]
    if len(positions) != world.size:
        log.print(f"         saved by {len(positions)} processes: the data begins anew")
        return progress["step"], None
    return progress["step"], positions[world.rank]


def main(args, world):
    log = common.Log(world, args.output_dir)
    checkpoint = None
    if not args.compare_strategies:
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
    source_and_held_out = [None, None]
    with name_dataset_in_errors(args):
        if world.rank == 0:
            source_and_held_out = list(load_texts(args))
        # The source is a stream. What is sent is its list of files and its functions, not its texts
        # (except those of the small `builtin`).
        dist.broadcast_object_list(source_and_held_out, group=world.patient_group)
        source, held_out = source_and_held_out
        config, tokenizer = load_config_and_tokenizer(args, world, source)
        # As one block, number 0: in the same order in every run
        validation_set = pack({"text": held_out}, [0], args, tokenizer, seed=[0])
    count = len(validation_set["labels"])
    log.print(
        f"data     {args.dataset[0]}, {source.num_shards} files, {count} sequences to validate"
    )

    # Model
    replicas, shards = mesh_shape(args, world)
    meta_model = make_meta_model(config)
    extra_bytes = 8 if args.sharding_strategy == "DILOCO" else 0  # synced weights, their momentum
    state = common.describe_state(meta_model, shards, world, args.cpu_offload, extra_bytes)
    log.print(f"model    {args.model}, {state}")
    log.print(
        f"fsdp     {args.sharding_strategy},"
        f" replicas x shards: {replicas} x {shards}, {args.precision}"
    )
    mfu_per_speed = mfu_per_token_per_second(args, world, meta_model)
    if args.compare_strategies:
        batches = batches_on_device(args, world, source, tokenizer, None)
        compare_strategies(args, world, config, log, batches, mfu_per_speed)
        return
    model, optimizer = build(args, world, config)
    outer = None
    outer_state = {}
    if args.sharding_strategy == "DILOCO":
        outer = OuterOptimizer(args, world, model)
        outer_state = outer.state()

    # Where the last run stopped
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank
    first = 0
    position = None
    if checkpoint:
        first, position = resume(args, world, checkpoint, model, optimizer, outer_state, log)
    elif args.validate_every > 0:
        validate(args, world, model, validation_set, log, step=0)
    batches = batches_on_device(args, world, source, tokenizer, position)

    # Train
    sync_every = 1  # all processes wait for each other after so many steps
    log_group = None
    when_to_stop = "after this step"
    if outer:
        sync_every = args.local_steps
        log_group = outer.shard_group  # a line shows the first replica
        when_to_stop = f"after the next step that is a multiple of {sync_every}"
    stop = common.StopRequest(world, when_to_stop)
    step_tokens = args.global_batch_size * args.seq_length  # of all ranks
    totals = torch.zeros(2, device=world.device)  # since the last line: summed loss, its tokens
    last_logged = first
    start = time.perf_counter()

    steps = range(first + 1, args.max_steps + 1)
    for step in log.bar(steps, "train", len(steps)):
        lr = learning_rate(args, step, args.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum, grad_norm, position = train_step(args, world, model, optimizer, batches)
        totals[0] += loss_sum
        totals[1] += step_tokens / world.size

        # A step at which all processes meet. Without DiLoCo every step is one. With it, replicas
        # wait for each other in between only to save a checkpoint.
        at_sync_step = is_due(args, step, sync_every)
        if outer and at_sync_step:
            optimizer.zero_grad()  # makes room for the outer gradient
            outer.step()
        stop_now = at_sync_step and stop.on_any_rank()
        # With --checkpoint-every 0 nothing else saves at the end of a resumed run, and the next
        # --resume would make the same steps again.
        ends_resumed_run = checkpoint is not None and step == args.max_steps
        save_now = stop_now or ends_resumed_run or is_due(args, step, args.checkpoint_every)
        # DiLoCo's replicas are the same model only where they have just synchronized.
        validate_now = at_sync_step and is_due(args, step, args.validate_every)
        log_now = save_now or validate_now or is_due(args, step, args.log_every)

        if log_now:
            all_loss, num_tokens = common.sum_over_ranks(totals, log_group)
            speed = step_tokens * (step - last_logged) / (time.perf_counter() - start)
            mfu = {"mfu": speed * mfu_per_speed} if mfu_per_speed > 0 else {}
            log.step(step, all_loss / num_tokens, grad_norm.item(), lr, speed, **mfu)
            totals.zero_()
            last_logged = step

        if save_now:
            positions = [None] * world.size
            dist.all_gather_object(positions, position)
            progress = {
                "step": step,
                "data_positions": positions,
                "mesh": mesh_shape(args, world),
                "settings": vars(args),
            }
            common.save_checkpoint(
                args.output_dir, progress, model, optimizer, world, **outer_state
            )
        if stop_now and step < args.max_steps:
            log.print_stopped(step)
            return
        if validate_now:
            validate(args, world, model, validation_set, log, step)
        if log_now:
            start = time.perf_counter()  # without the time of saving and validation

    if args.save_model:
        common.export(model, meta_model, tokenizer, args.output_dir / "model", world)
    log.print(f"metrics  {log.path}, run {log.run}")
    log.print(f"model    {args.output_dir / 'model' if args.save_model else 'not saved'}")


if __name__ == "__main__":
    common.run(main, parse_args())
