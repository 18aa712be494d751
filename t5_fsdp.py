"""How do I fine-tune a real transformer with every FSDP feature that matters?

Fine-tunes T5 to summarize WikiHow articles, sharded over processes with FSDP2 (`fully_shard`) or FSDP1
(`FullyShardedDataParallel`), side by side. Without flags it needs no download: a small T5 learns built-in articles.

    python t5_fsdp.py                                                   # one process
    torchrun --nproc_per_node 2 t5_fsdp.py                              # a laptop: two processes on the CPU
    torchrun --nproc_per_node 8 t5_fsdp.py --model google-t5/t5-base --dataset data/wikihowAll.csv
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 t5_fsdp.py
    torchrun --nproc_per_node 8 t5_fsdp.py ... --checkpoint-every 500 --resume      # run again after any stop

The second command prints, on 2 cores of an AMD EPYC with torch 2.15.0 and transformers 5.23.0 in about two minutes:

    epoch      0  step      0  validation_loss 7.8383  rouge1      0  rouge2      0  rougeL      0
    epoch      1  step    250  train_loss 1.0873  validation_loss 0.3349  rouge1 0.9253  rouge2 0.7410  rougeL 0.6536
    epoch      4  step  1,000  train_loss 0.0313  validation_loss 0.0239  rouge1 1.0000  rouge2 0.9922  rougeL 0.9896
    reference  Fry the tomatoes. Slice the apples.
    summary    Fry the tomatoes. Slice the apples.

Follows PyTorch's tutorial "Advanced Model Training with Fully Sharded Data Parallel (FSDP)". Where it departs: losses
are means over real target tokens (the tutorial counts dictionary keys and learns padding), validation counts every
sample once, the best model is a Hugging Face folder, and FSDP2 is the default because FSDP1 is deprecated.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import shutil
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import pyarrow.compute as pc
import transformers
from rouge_score.rouge_scorer import RougeScorer
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Block

import common
from common import World

# FSDP2 warns that a block's output is a view, which nobody may write into. T5's stacks do not.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
# FSDP1 on one process says that there is nothing to shard; the first lines of the output say so too.
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
transformers.logging.disable_progress_bar()

# T5 was pretrained on many tasks, each named at the start of its input; a model trained here ignores it.
SOURCE_PREFIX = "summarize: "

# The tutorial's four policies: in which type parameters are gathered and computed with, and in which type
# gradients are reduced. The optimizer always updates fp32 shards.
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),  # half the bytes on the wire; needs hardware that computes in bf16
    "fp16": (torch.float16, torch.float16),  # for V100-class GPUs; small gradients vanish, so the loss is scaled
    "grad-bf16": (torch.float32, torch.bfloat16),  # where only the network is the bottleneck
}

# Strategy: (FSDP1's name, FSDP2's reshard_after_forward).
STRATEGIES = {
    "FULL_SHARD": (ShardingStrategy.FULL_SHARD, True),  # ZeRO-3: parameters are gathered for forward and for backward
    "SHARD_GRAD_OP": (ShardingStrategy.SHARD_GRAD_OP, False),  # ZeRO-2: kept in between; less traffic, more memory
}

# When the next unit's parameters are gathered in backward.
BACKWARD_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,  # before this unit's gradients: overlaps most, holds two units
    "post": BackwardPrefetch.BACKWARD_POST,  # after them: overlaps less, holds less (FSDP1 only)
    "none": None,  # not before they are needed: least memory, no overlap
}

# What the bare command changes so that it learns in two minutes on two cores: (its own value, the tutorial's).
DEFAULTS = {
    "epochs": (4, 2),
    "batch_size": (16, 4),
    "test_batch_size": (32, 4),
    "lr": (1e-3, 2e-3),
    "gamma": (0.8, 0.7),
    "num_train_samples": (8000, 1500),  # by --dataset; the others by --model
}

# What a checkpoint must share with the run that resumes it, or it would be another run.
MUST_MATCH = (
    *("model", "dataset", "text_column", "summary_column", "num_train_samples"),
    *("max_source_length", "max_target_length", "seed", "lr", "gamma"),
)


def parse_args() -> argparse.Namespace:
    parser = common.ArgumentParser(description="Fine-tune T5 for summarization with FSDP.")
    count, size, number = common.non_negative_int, common.positive_int, common.positive_float
    flag, add = argparse.BooleanOptionalAction, parser.add

    add("--model", "builtin, or any T5: a Hub name or a local folder", "builtin")
    add("--dataset", "builtin; a .csv, .jsonl or .parquet file; a Hub dataset id", "builtin")
    add("--text-column", "column that holds the articles", "text")
    add("--summary-column", "column that holds their summaries", "headline")
    add("--num-train-samples", "articles to train on, 0 for all", DEFAULTS["num_train_samples"], type=count)
    add("--num-validation-samples", "articles to validate on, 0 for all", 300, type=count)
    add("--max-source-length", "tokens kept of an article", 512, type=size)
    add("--max-target-length", "tokens kept of a summary, and generated at most", 150, type=size)

    add("--epochs", "passes over the training articles", DEFAULTS["epochs"], type=size)
    add("--max-steps", "stop after this many steps, 0 for all epochs", 0, type=count)
    add("--batch-size", "articles per process and step", DEFAULTS["batch_size"], type=size)
    add("--test-batch-size", "articles per process and step in validation", DEFAULTS["test_batch_size"], type=size)
    add("--group-by-length", "fill a step with articles of similar length", True, action=flag)
    add("--lr", "learning rate of AdamW", DEFAULTS["lr"], type=number)
    add("--gamma", "factor on the learning rate after each epoch", DEFAULTS["gamma"], type=number)
    add("--max-grad-norm", "clip the norm of all gradients to this", 1.0, type=number)
    add("--seed", "of weights, data order and dropout", 1, type=count)

    add("--fsdp-version", "2: fully_shard; 1: FullyShardedDataParallel", 2, type=int, choices=(1, 2))
    add("--sharding-strategy", "FULL_SHARD is ZeRO-3, SHARD_GRAD_OP ZeRO-2", "FULL_SHARD", choices=STRATEGIES)
    add(
        "--precision",
        "auto: bf16 if native, else fp32; grad-bf16: gradients only",
        "auto",
        choices=("auto", *PRECISIONS),
    )
    add("--backward-prefetch", "post needs --fsdp-version 1", "pre", choices=BACKWARD_PREFETCH)
    add("--activation-checkpointing", "recompute each T5Block in backward", False, action=flag)
    add("--compile", "torch.compile each T5Block", False, action=flag)
    add("--print-model", "print the wrapped model once", False, action=flag)
    add("--device", "where to train", "auto", choices=("auto", "cpu", "cuda", "xpu", "mps"))

    add("--run-validation", "loss and ROUGE before training and after each epoch", True, action=flag)
    add("--num-rouge-samples", "validation articles to summarize for ROUGE, 0 for none", 64, type=count)
    add("--track-memory", "report peak memory and the bytes of this rank's shards", True, action=flag)
    add("--save-model", "export the best model as a Hugging Face folder", True, action=flag)
    add("--log-every", "steps between reports", 25, type=size)
    add("--output-dir", "for metrics, models and checkpoints", Path("output/t5_fsdp"), type=Path)
    add("--checkpoint-every", "steps between checkpoints, 0 for none", 0, type=count)
    add("--keep-checkpoints", "how many of the newest to keep", 2, type=size)
    add("--resume", "continue from the newest checkpoint, if there is one", False, action=flag)

    args = parser.parse_args()
    by_dataset = {"num_train_samples": DEFAULTS["num_train_samples"]}
    common.settle(args, by_dataset, args.dataset == "builtin")
    common.settle(args, DEFAULTS, args.model == "builtin")
    if args.fsdp_version == 2 and args.backward_prefetch == "post":
        parser.error("--backward-prefetch post needs --fsdp-version 1: FSDP2 has pre (its default) and none")
    return args


# ---- Model -----------------------------------------------------------------------------------------------------


def load_config_and_tokenizer(name: str) -> tuple[T5Config, PreTrainedTokenizerBase]:
    """Read the configuration and tokenizer of a pretrained T5.

    Raises:
        common.UserError: nothing is found under that name, or it is not a T5.
    """
    config = common.read_pretrained(AutoConfig.from_pretrained, "--model", name, "model configuration")
    if config.model_type != "t5":
        raise common.UserError(
            f"--model {name} is a {config.model_type}, not a T5; this script shards T5Blocks, so choose a T5 or FLAN-T5"
        )
    return config, common.read_pretrained(AutoTokenizer.from_pretrained, "--model", name, "tokenizer")


def builtin_config(vocab_size: int) -> T5Config:
    """The shape of the built-in model: a T5 of about 0.8 million parameters."""
    return T5Config(
        vocab_size=vocab_size,
        d_model=128,
        d_kv=16,
        num_heads=8,  # many small heads learn the order of the steps; four of 32 do not in this time
        d_ff=256,
        num_layers=2,
        dropout_rate=0.0,  # it never sees an article often enough to memorize it
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def skeleton(config: T5Config, own_output_layer: bool) -> T5ForConditionalGeneration:
    """The model on the meta device: shapes, no memory."""
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
        if own_output_layer:
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def load_model(args: argparse.Namespace, config: T5Config, world: World) -> T5ForConditionalGeneration:
    """The model: with its weights on rank 0, as a skeleton on every other rank. A collective."""
    model = common.first_process_first(world, lambda: load_weights(args, config) if world.rank == 0 else None)
    # The output layer of T5 is its embedding, FLAN-T5 has one of its own. transformers tells them apart by the weights
    # alone, the configurations look the same: without this the other ranks would build another model than rank 0.
    own_output_layer = [model and model.lm_head.weight is not model.shared.weight]
    dist.broadcast_object_list(own_output_layer)
    return model or skeleton(config, own_output_layer[0])


def load_weights(args: argparse.Namespace, config: T5Config) -> T5ForConditionalGeneration:
    """The model on this process's CPU: the built-in one with random weights, or a pretrained one."""
    if args.model == "builtin":
        torch.manual_seed(args.seed)
        return T5ForConditionalGeneration(config)
    # fp32, whatever the files hold: FSDP keeps fp32 shards for the optimizer and casts what it gathers.
    read = functools.partial(T5ForConditionalGeneration.from_pretrained, dtype=torch.float32)
    return common.read_pretrained(read, "--model", args.model, "weights")


def build(args: argparse.Namespace, world: World, model: T5ForConditionalGeneration) -> tuple:
    """The sharded model and its optimizer. The order of these lines matters. A collective."""
    if args.activation_checkpointing:  # inside the units, so that recomputing needs no gathering of its own
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, T5Block))
    if args.compile:
        torch._dynamo.config.recompile_limit = 32  # first and other blocks, encoder and decoder, training and not
        for module in model.modules():
            if isinstance(module, T5Block):
                module.compile(dynamic=True)  # block by block: FSDP's hooks stay outside the graphs
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    model = (shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1)(model, mesh, args)
    # After sharding: it must see the shards. Fused AdamW takes loss scaling into its kernel, which fails on DTensors.
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, fused=args.precision != "fp16")


# ---- Data ------------------------------------------------------------------------------------------------------


def sort_keys(dataset: Dataset) -> torch.Tensor:
    """A number per sample that sorts by the tokens of its article, then of its summary: (samples,)."""
    source, target = (pc.list_value_length(dataset.data.column(name)).to_numpy() for name in ("input_ids", "labels"))
    return torch.from_numpy(source.astype("int64") * (target.max() + 1) + target)


def epoch_order(keys: torch.Tensor, step_size: int, seed: int, group_by_length: bool) -> list[int]:
    """A random order of samples, the same on every rank; grouped, the samples of a step have about the same length.

    Padding is wasted work: shuffle, sort within chunks of 50 steps, then shuffle the steps.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(keys), generator=generator)
    if not group_by_length:
        return order.tolist()
    chunks = [chunk[keys[chunk].argsort(stable=True)] for chunk in order.split(50 * step_size)]
    steps = torch.cat(chunks).split(step_size)
    whole = len(keys) // step_size  # an incomplete step stays the last one
    shuffled = [steps[i] for i in torch.randperm(whole, generator=generator)]
    return torch.cat([*shuffled, *steps[whole:]]).tolist()


def load_batches(
    dataset: Dataset, collate: DataCollatorForSeq2Seq, order: list[int], batch_size: int, world: World
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's batches of the samples in `order`, on its device: (batch_size, tokens) each.

    Step after step, the ranks together take the next batch_size x world_size samples, so the global batch is the same
    on any number of ranks, and every sample comes exactly once. A rank that finds none left in the last step must
    still take part in the collectives: it gets a sample whose labels are all ignored.
    """
    global_batch = batch_size * world.world_size
    steps = [order[begin : begin + global_batch] for begin in range(0, len(order), global_batch)]
    own = [step[world.rank :: world.world_size] for step in steps]
    on_accelerator = world.device.type != "cpu"
    loader = DataLoader(
        dataset,
        batch_sampler=[indices or step[:1] for indices, step in zip(own, steps, strict=True)],
        collate_fn=collate,
        num_workers=2 if on_accelerator else 0,  # on a CPU they would take cores from the model
        pin_memory=on_accelerator,
        worker_init_fn=common.ignore_signals,
        generator=torch.Generator(),  # else each loader draws from the generator of dropout, and resume is not exact
    )
    for indices, batch in zip(own, loader, strict=True):
        if not indices:
            batch["labels"].fill_(-100)
        yield {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}


# ---- FSDP ------------------------------------------------------------------------------------------------------


def make_empty(device: torch.device | str) -> Callable[[nn.Module], None]:
    """A function for `model.apply` that gives each module uninitialized parameters on `device`.

    Unlike `Module.to_empty` it keeps what is shared shared: T5's embedding sits in up to four places.
    """
    replaced = {}

    def make_module_empty(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            empty = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, replaced.setdefault(parameter, empty))

    return make_module_empty


# Two translations of one plan: every T5Block is a unit; what remains is the root unit, above all the embedding that
# encoder, decoder and output layer share, which must be there for all of them.


def shard_with_fsdp2(model: T5ForConditionalGeneration, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""
    unit = CheckpointWrapper if args.activation_checkpointing else T5Block
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    reshard = STRATEGIES[args.sharding_strategy][1]
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    weights = model.state_dict() if mesh.get_rank() == 0 else {}
    model.apply(make_empty("meta"))  # rank 0 too: its copy is in `weights`, and no device ever holds the whole model
    for module in list(model.modules()):
        if isinstance(module, unit):
            fully_shard(module, reshard_after_forward=reshard, **options)
    fully_shard(model, **options)  # the root stays gathered after forward: backward begins with it
    for module in model.modules():
        if isinstance(module, FSDPModule) and args.backward_prefetch == "none":
            module.set_modules_to_backward_prefetch([module])  # an explicit list replaces the default: only itself
        if isinstance(module, FSDPModule) and mesh.device_type == "xpu":
            module.set_force_sum_reduction_for_comms(True)  # Intel's oneCCL cannot average
    model.to_empty(device=mesh.device_type)  # this rank's shards, on the device
    # Rank 0 sends one parameter at a time; each rank keeps its shard.
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    register_fsdp_forward_method(model, "generate")  # the root gathers its parameters for generate() as for forward()
    return model


def shard_with_fsdp1(model: T5ForConditionalGeneration, mesh: DeviceMesh, args: argparse.Namespace) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: top-down through a wrap policy, one flat parameter per unit."""
    unit = CheckpointWrapper if args.activation_checkpointing else T5Block
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    on_cpu = mesh.device_type == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device(mesh.device_type, torch.accelerator.current_device_index())
    weights = model.state_dict() if on_cpu and mesh.get_rank() == 0 else {}
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={unit}),
        sharding_strategy=STRATEGIES[args.sharding_strategy][0],
        mixed_precision=MixedPrecision(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            buffer_dtype=param_dtype,
            cast_forward_inputs=True,  # every unit casts its inputs, as in FSDP2; FSDP1 by default only the root
        ),
        backward_prefetch=BACKWARD_PREFETCH[args.backward_prefetch],
        device_id=device,  # units move to the device one by one as they are wrapped; on a CPU it must be named too
        param_init_fn=make_empty(device) if mesh.get_rank() != 0 else None,
        sync_module_states=not on_cpu,  # rank 0 sends its weights, unit by unit; FSDP1 refuses this on a CPU
        use_orig_params=True,  # parameters keep their names and shapes, for the optimizer and for --compile
        device_mesh=mesh,  # checkpoints then hold DTensors, as in FSDP2
    )
    if on_cpu:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


# ---- Training --------------------------------------------------------------------------------------------------


# Of one rank since the last report: loss sum, target tokens, all tokens, first step whose loss is not finite.
EMPTY_WINDOW = (0.0, 0.0, 0.0, math.inf)


@dataclasses.dataclass
class Progress:
    """Where training stands, the same on every rank. Saved in each checkpoint."""

    run_date: str
    epoch: int = 1
    step: int = 0  # optimizer steps since the start
    samples: int = 0  # of this epoch that are done
    step_size: int = 0  # samples in a step when this epoch began
    totals: tuple = (0.0, 0.0, 0.0)  # of this epoch, over all ranks: loss sum, target tokens, all tokens
    seconds: float = 0.0  # of this epoch, without checkpoints
    seconds_since_report: float = 0.0
    best_loss: float | None = None
    best_model: str | None = None


def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy summed over the real target tokens of a batch, and their number. Both 0-d tensors."""
    labels = batch["labels"]
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        use_cache=False,  # a cache is useless here, and activation checkpointing would fill it twice
    ).logits
    # Our own sum and not the model's mean: a mean over each rank's tokens would weigh ranks, not tokens.
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def train_one_epoch(
    args, world, model, optimizer, scaler, dataset, collate, progress, window, metrics, stop_requests, save
) -> bool:
    """Train from `progress.samples` to the end of the epoch or to `--max-steps`; update `progress` and `window`.

    Args:
        window: of this rank since the last report, on the device: see `EMPTY_WINDOW`.
        save: called where a checkpoint is due.

    Returns:
        Whether a SIGTERM asked to stop; everything is saved then.
    """
    model.train()
    global_batch = args.batch_size * world.world_size
    if progress.samples == 0:
        progress.step_size = global_batch  # an epoch resumed on other processes keeps its order
    seed = args.seed * 10_000 + progress.epoch
    order = epoch_order(sort_keys(dataset), progress.step_size, seed, args.group_by_length)
    bar = tqdm(
        load_batches(dataset, collate, order[progress.samples :], args.batch_size, world),
        desc=f"epoch {progress.epoch}",
        initial=progress.samples // global_batch,
        total=math.ceil(len(order) / global_batch),
        disable=True if world.rank else None,  # None: only when the output is not a terminal
    )
    began = time.perf_counter()
    for batch in bar:
        if args.max_steps and progress.step >= args.max_steps:
            break
        optimizer.zero_grad()
        loss, tokens = summed_loss(model, batch)
        # FSDP averages gradients over ranks. Times world_size and over everybody's tokens, that average is the
        # gradient of the mean over all real target tokens, as if one process held the whole global batch.
        all_tokens = tokens.clone()
        dist.all_reduce(all_tokens)
        scaler.scale(loss * world.world_size / all_tokens).backward()
        scaler.unscale_(optimizer)
        if args.fsdp_version == 2:
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        else:
            grad_norm = model.clip_grad_norm_(args.max_grad_norm)  # nn.utils would see this rank's shards only
        scaler.step(optimizer)
        scaler.update()

        progress.step += 1
        progress.samples = min(progress.samples + global_batch, len(order))
        # Stays on the device: reading a number (.item()) would make the host wait in every step.
        loss = loss.detach()
        window[:3] += torch.stack([loss, tokens, tokens + batch["attention_mask"].sum()])
        window[3] = torch.where(loss.isfinite(), window[3], window[3].clamp(max=progress.step))
        stops = stop_requests.any_rank()
        ends_epoch = progress.samples == len(order)
        ends_run = progress.step == args.max_steps or (ends_epoch and progress.epoch == args.epochs)
        reports = progress.step % args.log_every == 0 or ends_epoch or ends_run
        saves = stops or (args.checkpoint_every and (progress.step % args.checkpoint_every == 0 or ends_run))
        if reports or saves:
            rows = common.gather_over_ranks(window)
            common.check_losses(rows[:, 3])  # before saving: the newest checkpoint must stay usable
        now = time.perf_counter()
        progress.seconds += now - began
        progress.seconds_since_report += now - began
        began = now
        if reports:
            window.copy_(torch.tensor(EMPTY_WINDOW))
            sums = rows[:, :3].sum(dim=0).tolist()
            progress.totals = tuple(a + b for a, b in zip(progress.totals, sums, strict=True))
            # A DTensor norm is a sum still to be made over ranks: a collective, so on every rank, not on rank 0 only.
            grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
            report = {"train_loss": sums[0] / sums[1], "grad_norm": grad_norm.item()}
            report["learning_rate"] = optimizer.param_groups[0]["lr"]
            report["tokens_per_second"] = sums[2] / progress.seconds_since_report
            progress.seconds_since_report = 0.0
            with tqdm.external_write_mode():
                metrics.report("step", step=progress.step, epoch=progress.epoch, **report)
        if saves:
            save()
            began = time.perf_counter()
        if stops and not ends_run:
            return True
    return False


@torch.no_grad()
def evaluate(args, world, model, dataset, collate) -> float:
    """Mean loss over the real target tokens of the whole dataset, the same on any number of ranks. A collective."""
    model.eval()
    totals = torch.zeros(2, device=world.device)
    order = sort_keys(dataset).argsort(stable=True).tolist()  # similar lengths together: less padding
    for batch in load_batches(dataset, collate, order, args.test_batch_size, world):
        totals += torch.stack(summed_loss(model, batch))
    loss_sum, tokens = common.sum_over_ranks(totals)
    return loss_sum / tokens


@torch.compiler.set_stance("force_eager")  # with --compile: a graph for every length of a summary is not worth it
@torch.no_grad()
def summarize(args, world, model, dataset, collate, tokenizer, count) -> list[str]:
    """Greedy summaries of the first `count` samples, complete on rank 0. A collective.

    All ranks generate together: every forward pass gathers shards from all of them. `synced_gpus` keeps those going
    that have finished their own summaries; a rank that generated alone would wait for the others for ever.
    """
    model.eval()
    count = min(count, len(dataset))
    # FSDP1 gathers the root unit in its own forward(), which generate() of the module inside does not call.
    whole_root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    with whole_root if args.fsdp_version == 1 else contextlib.nullcontext():
        generate = model.module.generate if args.fsdp_version == 1 else model.generate
        own = []
        for batch in load_batches(dataset, collate, list(range(count)), args.test_batch_size, world):
            tokens = generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=args.max_target_length,
                do_sample=False,
                num_beams=1,
                synced_gpus=True,
            )
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            own.append([text.strip() for text in texts])
    per_rank = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(own, per_rank)
    if world.rank != 0:
        return []
    # Undo load_batches: sample i of a step went to rank i % world_size.
    summaries = []
    for step in zip(*per_rank, strict=True):
        size = min(args.test_batch_size * world.world_size, count - len(summaries))
        summaries += [step[i % world.world_size][i // world.world_size] for i in range(size)]
    return summaries


# ---- Main ------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace, world: World) -> None:
    stop_requests = common.StopRequests(world)
    args.precision = common.choose_precision(args.precision, world.device)
    if world.device.type == "cpu":
        # Blocks of any size: a fifth of a step with a real vocabulary. Not for units of hundreds of MB: it fragments.
        common.tune_malloc({common.M_MMAP_MAX: 0, common.M_TRIM_THRESHOLD: 2**31 - 1})
    must_match = {name: getattr(args, name) for name in MUST_MATCH}
    common.first_process_first(world, lambda: common.prepare_output_dir(world, args.output_dir))
    checkpoint = common.find_checkpoint(world, args.output_dir, args.resume, must_match)
    metrics = common.Metrics(world, args.output_dir)

    # ---- Data and tokenizer
    data = common.first_process_first(
        world,
        lambda: common.load_summarization_data(
            args.dataset,
            args.text_column,
            args.summary_column,
            args.num_train_samples,
            args.num_validation_samples,
            args.output_dir,
        ),
    )
    if args.model == "builtin":
        rows = data.train.select(range(min(4000, len(data.train))))
        texts = (text for row in rows for text in (row["text"], row["summary"]))
        tokenizer = common.train_tokenizer(world, texts, vocab_size=4096)
        config = builtin_config(len(tokenizer))
    else:
        config, tokenizer = common.first_process_first(world, lambda: load_config_and_tokenizer(args.model))
    lengths = (args.max_source_length, args.max_target_length)
    train_set, validation_set = common.first_process_first(
        world,
        lambda: [common.tokenize(rows, tokenizer, SOURCE_PREFIX, *lengths) for rows in (data.train, data.validation)],
    )
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)  # to the longest of the batch; labels with -100

    # ---- Model and optimizer
    model = load_model(args, config, world)
    whole = skeleton(config, model.lm_head.weight is not model.shared.weight)  # what the exported weights go into
    num_parameters = model.num_parameters()
    model, optimizer = build(args, world, model)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    # fp16 gradients vanish without loss scaling; for the other precisions the scaler is switched off. FSDP1 needs its
    # own, to skip a step on all ranks when a shard overflows on one; DTensors agree by themselves.
    scaler_class = torch.amp.GradScaler if args.fsdp_version == 2 else ShardedGradScaler
    scaler = scaler_class(world.device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank

    # ---- Resume
    progress = Progress(run_date=common.date_of_run())
    window = torch.tensor(EMPTY_WINDOW, device=world.device)
    rank_state = {"window": window, **common.random_states(world.device)}
    kept = "everything"
    if checkpoint:
        saved = common.load_checkpoint(checkpoint, model, optimizer, rank_state, world)
        progress = Progress(**saved["progress"])
        scheduler.load_state_dict(saved["scheduler"])
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        for group in optimizer.param_groups:
            group["lr"] = saved["learning_rate"]
        common.set_random_states(world.device, rank_state)
        if saved["world_size"] != world.world_size:
            kept = f"all but the random state of dropout: it was saved by {saved['world_size']} processes"

    def save() -> None:
        state = {"progress": dataclasses.asdict(progress), "must_match": must_match, "scaler": scaler.state_dict()}
        state |= {"scheduler": scheduler.state_dict(), "learning_rate": optimizer.param_groups[0]["lr"]}
        tensors = {"window": window, **common.random_states(world.device)}
        folder = args.output_dir / "checkpoints"
        common.save_checkpoint(folder, progress.step, model, optimizer, tensors, state, world, args.keep_checkpoints)

    # ---- What runs
    param_dtype, reduce_dtype = (str(dtype).removeprefix("torch.") for dtype in PRECISIONS[args.precision])
    units = sum(isinstance(module, T5Block) for module in model.modules())
    extras = [name for name in ("activation_checkpointing", "compile") if getattr(args, name)]
    not_chosen = (
        data.rows - data.without_text_or_summary - data.with_long_summary - len(train_set) - len(validation_set)
    )
    metrics.start_block(
        args,
        world,
        script=f"t5_fsdp.py, {progress.run_date}, torch {torch.__version__}, transformers {transformers.__version__}",
        fsdp=f"version {args.fsdp_version}, {args.sharding_strategy}, {units} T5Blocks and the root, "
        + ", ".join([f"backward prefetch {args.backward_prefetch}", *extras]),
        precision=f"{args.precision}: compute in {param_dtype}, reduce gradients in {reduce_dtype}, update in float32",
        model=f"{args.model}, {num_parameters:,} parameters",
        data=f"{args.dataset}, {len(train_set):,} articles to train on, {len(validation_set):,} to validate",
        left_out=f"of {data.rows:,} rows, {data.without_text_or_summary:,} without text or summary and "
        f"{data.with_long_summary:,} with a summary longer than 3/4 of the text; {not_chosen:,} not asked for",
        training=f"{args.epochs} epochs, batch {args.batch_size} per process, lr {args.lr}, gamma {args.gamma}",
        settings=common.departures(args, DEFAULTS, "the tutorial's"),
        resumed=checkpoint and f"{checkpoint}, keeps {kept}",
    )
    if args.print_model:
        metrics.say(str(model))

    # ---- Epochs
    shown = [data.validation[i] for i in range(min(max(args.num_rouge_samples, 3), len(data.validation)))]

    def validate() -> dict[str, float]:
        loss = evaluate(args, world, model, validation_set, collate)
        summaries = summarize(args, world, model, validation_set, collate, tokenizer, args.num_rouge_samples)
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
        scores = [scorer.score(row["summary"], summary) for row, summary in zip(shown, summaries, strict=False)]
        rouge = {kind: sum(s[kind].fmeasure for s in scores) / len(scores) for kind in scores[0]} if scores else {}
        return {"validation_loss": loss, **rouge}

    if args.run_validation and progress.step == 0:
        metrics.report("epoch", epoch=0, step=0, **validate())  # what the model can do before training
    for epoch in range(progress.epoch, args.epochs + 1):
        progress.epoch = epoch
        common.reset_peak_memory(world.device)
        training = (optimizer, scaler, train_set, collate, progress, window, metrics, stop_requests, save)
        if train_one_epoch(args, world, model, *training):
            metrics.say(
                f"stopped    by SIGTERM at step {progress.step}, all saved; the same command with --resume goes on"
            )
            return
        held = common.state_bytes(model, optimizer)  # here: SHARD_GRAD_OP leaves whole parameters after validation
        sums = zip(progress.totals, common.sum_over_ranks(window[:3]), strict=True)
        loss_sum, target_tokens, all_tokens = (reported + since for reported, since in sums)
        report = {"train_loss": loss_sum / target_tokens}
        if args.run_validation:
            report |= validate()
        report |= {
            "seconds": progress.seconds,
            "samples_per_second": progress.samples / progress.seconds,
            "tokens_per_second": all_tokens / progress.seconds,
        }
        if args.track_memory:
            report |= {"peak_memory_gb": common.format_gb(common.peak_memory_bytes(world.device))}
            report |= {"state_bytes": sum(held.values())}
        parts = held if args.track_memory else {}
        metrics.report("epoch", parts, epoch=epoch, step=progress.step, **report)

        ends_run = epoch == args.epochs or (args.max_steps and progress.step >= args.max_steps)
        loss = report.get("validation_loss", report["train_loss"])
        is_best = ends_run if not args.run_validation else progress.best_loss is None or loss < progress.best_loss
        if args.save_model and is_best:
            name = f"t5-{progress.run_date}-epoch-{epoch}-loss-{loss:.4f}"
            common.export_model(world, model, whole, tokenizer, args.output_dir / name)
            if world.rank == 0 and progress.best_model not in (None, name):
                shutil.rmtree(args.output_dir / progress.best_model, ignore_errors=True)
            progress.best_loss, progress.best_model = loss, name
        scheduler.step()
        if ends_run:
            break
        progress.samples, progress.totals, progress.seconds = 0, (0.0, 0.0, 0.0), 0.0

    # ---- Closing summary
    metrics.say(f"\nWhat the model of epoch {progress.epoch} makes of three articles that it was not trained on:")
    summaries = summarize(args, world, model, validation_set, collate, tokenizer, 3)
    for row, summary in zip(shown, summaries, strict=False):
        metrics.write("summary", article=row["text"], reference=row["summary"], summary=summary)
        metrics.say("")
        for name, text in (("article", row["text"]), ("reference", row["summary"]), ("summary", summary)):
            text = textwrap.shorten(text, 400, placeholder=" ...")
            metrics.say(textwrap.fill(text, 118, initial_indent=f"{name:<10} ", subsequent_indent=" " * 11))
    if progress.best_model:
        metrics.say(f"\nmodel      {args.output_dir / progress.best_model} (load it with from_pretrained)")
    metrics.say(f"metrics    {metrics.path}")


if __name__ == "__main__":
    common.launch(main, parse_args())
