r"""How do I fine-tune a real transformer with FSDP?

Fine-tunes T5 to summarize articles, sharded with FSDP2 (`fully_shard`) or FSDP1
(`FullyShardedDataParallel`). It has units by layer, ZeRO-2 and ZeRO-3, mixed precision, prefetch in
backward, recomputing, offloading and checkpoints; for hybrids see lm_multinode.py. Without flags it
needs no download: a small T5 learns built-in articles in about two minutes on two cores.

    torchrun --nproc_per_node 2 t5_fsdp.py --device cpu         # without GPUs, or with only one
    torchrun --nproc_per_node gpu t5_fsdp.py                    # a process for each GPU
    torchrun --nproc_per_node 8 t5_fsdp.py --model google-t5/t5-base --lr 3e-4 --compile \
        --dataset abisee/cnn_dailymail:3.0.0 --text-column article --summary-column highlights \
        --num-train-samples 0 --global-batch-size 128 --layers-per-unit 2 \
        --checkpoint-every 500 --resume     # run it again after any stop
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d \
        --rdzv_endpoint HEAD:29500 t5_fsdp.py ... --output-dir /SHARED/run1
                                            # on both nodes, with the flags above
    torchrun --nproc_per_node 8 t5_fsdp.py --model google-t5/t5-base \
        --dataset data/wikihowAll.csv --num-train-samples 1500 --epochs 2 --global-batch-size 32 \
        --test-batch-size 4 --lr 2e-3 --gamma 0.7   # the tutorial's; download the CSV by hand

Read `main` first: data, model, `build`, `train_step`. FSDP is in `shard_with_fsdp2` (or its twin
`shard_with_fsdp1`) and `train_step`. FSDP1 also differs in which ranks load the weights (`build`),
--backward-prefetch post, clipping (`train_step`) and `generate`, and lacks three flags.

After each epoch, `best/` gets the model if its validation loss is the lowest. --checkpoint-every N
also saves a checkpoint, to continue from, every N steps and after each epoch, before validation. A
signal saves one, too (docs/multi-node.md says when not).

Follows PyTorch's tutorial "Advanced Model Training with Fully Sharded Data Parallel (FSDP)",
https://docs.pytorch.org/tutorials/intermediate/FSDP_advanced_tutorial.html.
docs/from-the-documents.md lists the differences, docs/your-model-and-data.md what to change where.
"""

import copy
import math
import random
import textwrap
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
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
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

import transformers
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    T5Config,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

import common

# FSDP2 warns against modifying returned views in place. T5Blocks return one, the position bias. No
# code modifies it. The other warning is about an option that `datasets` passes to pyarrow.
NOISE = r"FSDP2.* \(.*(T5Block|CheckpointWrapper)\) returned a view|Specifying null_placement"
warnings.filterwarnings("ignore", message=NOISE)
transformers.logging.disable_progress_bar()


@dataclass
class Args:
    # Data and model
    model: str = "builtin"  # builtin, or any T5: Hub name or folder
    dataset: str = "builtin"  # builtin; .csv, .jsonl or .parquet files; URL; Hub name
    text_column: str = "text"  # column with the articles
    summary_column: str = "headline"  # column with their summaries
    num_train_samples: int = 8000  # articles, at most; 0: all
    num_validation_samples: int = 300  # articles, at most; 0: all
    max_summary_share: float = 0.75  # leave out longer summaries, as a share of the text
    max_source_length: int = 512  # tokens of an article, at most
    max_target_length: int = 150  # tokens of a summary, at most

    # Training
    epochs: int = 3  # passes over the articles
    max_steps: int = 0  # optimizer steps instead of --epochs, if not 0
    global_batch_size: int = 0  # articles per step on all GPUs; 0: 32, rounded up to divide evenly
    micro_batch_size: int = 16  # articles on a GPU at once; out of memory? try 8, 4, 2, 1
    test_batch_size: int = 50  # articles at once in validation
    lr: float = 1e-3  # learning rate of AdamW
    gamma: float = 0.8  # factor on the learning rate after each epoch
    seed: int = 1  # for weights, data order and dropout

    # FSDP
    fsdp_version: Literal[2, 1] = 2  # 2: fully_shard; 1: FullyShardedDataParallel (deprecated)
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"  # ZeRO-3 or ZeRO-2
    layers_per_unit: int = 1  # T5Blocks gathered at once; 2: faster if they are small (not FSDP1)
    precision: Literal["auto", "fp32", "bf16", "bf16-reduce", "grad-bf16"] = "auto"
    """auto: bf16 if the GPU supports it. bf16 reduces in fp32; grad-bf16: fp32, reduced in bf16"""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"  # when backward gathers the next unit
    cpu_offload: bool = False  # keep shards on the CPU: least memory, slow
    activation_checkpointing: bool = False  # recompute each T5Block: less memory, slower
    compile: bool = False  # torch.compile T5Blocks and loss: faster after a slow start
    device: str = "auto"  # auto (GPUs, if there are any), cpu, cuda or xpu

    # Output
    output_dir: Path = Path("output/t5_fsdp")  # use a new folder for each run
    save_model: bool = True  # saving the best model
    print_model: bool = False  # print the sharded model with its units
    run_validation: bool = True  # loss and ROUGE, before training and after each epoch
    log_every: int = 25  # steps between printed lines, after that of step 1
    checkpoint_every: int = 0  # steps between checkpoints; 0: only when a signal stops the run
    resume: bool = False  # continue from the newest checkpoint, if there is one


# To continue a run, --resume needs these to be the same: they choose the articles of a step.
MUST_MATCH = (
    "model num_train_samples num_validation_samples max_source_length max_target_length"
    " global_batch_size seed"
).split()

# ---- FSDP --------------------------------------------------------------------------------------

# FSDP gathers and frees parameters in groups, called units: a T5Block, or several. All else is the
# root unit: mostly the embedding of encoder and decoder, in some T5s also the output layer.

# The dtype for gathering parameters and computing, and the dtype for reducing gradients. The
# optimizer's shards are always fp32.
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),  # the tutorial's fp32_policy
    "bf16": (torch.bfloat16, torch.float32),  # sums of gradients stay exact enough
    "bf16-reduce": (torch.bfloat16, torch.bfloat16),  # the tutorial's bfSixteen: sends least
    "grad-bf16": (torch.float32, torch.bfloat16),  # the tutorial's grad_bf16: for a slow network
}

# FSDP1's names, with the value for FSDP2's reshard_after_forward.
RESHARD = {
    "FULL_SHARD": True,  # ZeRO-3: parameters are gathered for forward and again for backward
    "SHARD_GRAD_OP": False,  # ZeRO-2: they stay gathered from forward to backward: more memory
}

# When backward gathers the parameters of the next unit
PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,  # before it computes this unit: holds two units
    "post": BackwardPrefetch.BACKWARD_POST,  # after it has computed this unit (FSDP1 only)
    "none": None,  # when it needs them: least memory, no overlap
}

# The next two functions do the same, with FSDP2 and with FSDP1.


def shard_with_fsdp2(args, world, full_model, meta_model) -> nn.Module:
    """Collective: every rank must call it. Shard with `fully_shard`: bottom-up, in place, one
    DTensor per parameter.

    full_model: the model with its weights, on rank 0 only. meta_model: a copy whose parameters have
    shapes but no memory.
    """
    common.check(args.backward_prefetch != "post", "--backward-prefetch post needs FSDP1")
    # 1. Begin on the meta device, so that no device has to hold the whole model.
    model = copy.deepcopy(meta_model)
    layers = prepare_layers(args, model)

    # 2. Shard each unit, the root last.
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    options = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")

    num_encoder_layers = model.config.num_hidden_layers
    for stack in (layers[:num_encoder_layers], layers[num_encoder_layers:]):  # encoder, decoder
        for first in range(0, len(stack), args.layers_per_unit):
            unit = stack[first : first + args.layers_per_unit]
            fully_shard(unit, reshard_after_forward=RESHARD[args.sharding_strategy], **options)
    # By default the root stays gathered after forward, because backward starts with it.
    fully_shard(model, **options)

    for module in [*layers, model]:
        if args.backward_prefetch == "none":
            # FSDP2 has no switch for this, and an empty list means the default. So let each unit
            # prefetch only itself: it is already gathered then.
            module.set_modules_to_backward_prefetch([module])
        if world.device.type == "xpu":
            # On some machines oneCCL cannot average: sum, then divide.
            module.set_force_sum_reduction_for_comms(True)

    # 3. Allocate this rank's shards, and copy rank 0's weights into them.
    common.fill_shards(model, full_model, world, args.cpu_offload)
    register_fsdp_forward_method(model, "generate")  # gather the root there, too
    return model


def shard_with_fsdp1(args, world, model) -> nn.Module:
    """Collective. Shard with `FullyShardedDataParallel`: one call, one flat parameter per unit.

    model: the model with its weights, on every rank's CPU. FSDP moves it unit by unit.
    """
    common.check(
        not args.cpu_offload,
        "FSDP1's --cpu-offload keeps only the last micro-batch's gradients; use --fsdp-version 2",
    )
    common.check(args.layers_per_unit == 1, "--layers-per-unit needs FSDP2")
    common.check(not args.compile, "--compile needs FSDP2")
    mesh = init_device_mesh(world.device.type, (world.size,))
    layers = prepare_layers(args, model)

    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
        sharding_strategy=ShardingStrategy[args.sharding_strategy],
        mixed_precision=MixedPrecision(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            buffer_dtype=torch.float32,
            cast_forward_inputs=True,
        ),
        backward_prefetch=PREFETCH[args.backward_prefetch],
        device_id=world.device,
        # parameters() returns the original ones, views of the flat one.
        use_orig_params=True,
        device_mesh=mesh,  # so that checkpoints hold DTensors, as with FSDP2
    )


def prepare_layers(args, model: nn.Module) -> list[nn.Module]:
    """Apply --compile and --activation-checkpointing to the T5Blocks, before sharding. Return them:
    each will be a unit."""
    names = model._no_split_modules  # transformers' names of the classes of layers
    if args.activation_checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in names)
        names = [CheckpointWrapper.__name__]  # from here on, the wrappers are the layers

    layers = [module for module in model.modules() if type(module).__name__ in names]
    common.check(layers, f"transformers does not name the layers of {type(model).__name__}")
    if args.compile:  # after wrapping: then recomputing needs less
        # The limit is for all T5Blocks together. Encoder and decoder have different graphs, and so
        # have training and validation.
        torch._dynamo.config.recompile_limit = 32
        for layer in layers:
            # In place. FSDP's hooks stay outside the graphs: they are marked for the compiler. Do
            # not pass dynamic=True: it makes symbols of constants such as the number of position
            # buckets, and Inductor fails.
            layer.compile()
        cross_entropy.compile()  # then it makes no fp32 copy of the logits
    return layers


def build(args, world, config) -> tuple:
    """Collective. Return the sharded model, a copy without memory for `common.export`, and the
    optimizer."""
    full_model = None
    meta_model = None
    # FSDP2 copies rank 0's weights into all shards. FSDP1 needs the weights on every rank.
    if world.rank == 0 or args.fsdp_version == 1:
        full_model = load_model(args, config)  # on the CPU
        meta_model = common.meta_copy(full_model)
    meta_model = common.from_rank0(meta_model)

    if args.fsdp_version == 2:
        model = shard_with_fsdp2(args, world, full_model, meta_model)
    else:
        model = shard_with_fsdp1(args, world, full_model)
    # After sharding: the optimizer must get the shards.
    return model, meta_model, torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)


def train_step(args, world, model, optimizer, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective. Make one optimizer step, in micro-batches.

    batch: this rank's part of the global batch: {input_ids, attention_mask}, int64 of shape
    (articles, source length), and labels, int64 of shape (articles, target length).

    Returns tensors, because reading their values would make the host wait for the device: this
    rank's [loss in nats, summed over its targets; number of target tokens; number of all tokens],
    and the norm of all gradients before clipping.
    """
    num_targets = (batch["labels"] != -100).sum()
    global_targets = num_targets.clone()
    dist.all_reduce(global_targets)

    loss_sum = torch.zeros((), device=world.device)
    optimizer.zero_grad()
    for first in range(0, len(batch["labels"]), args.micro_batch_size):
        part = slice(first, first + args.micro_batch_size)
        micro_batch = {name: tensor[part] for name, tensor in batch.items()}
        loss = summed_loss(model, micro_batch)
        # FSDP divides gradients by the number of ranks. Undo that, and divide by the number of
        # targets on all ranks: the gradient of the mean over the global batch, as in one process.
        # Every backward reduces gradients to shards. FSDP1's no_sync would keep those of the whole
        # model on every rank.
        (loss * world.size / global_targets).backward()
        loss_sum += loss.detach()

    if args.fsdp_version == 2:
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    else:
        grad_norm = model.clip_grad_norm_(1.0)  # nn.utils would see this rank's shards only
    optimizer.step()

    num_tokens = num_targets + batch["attention_mask"].sum()
    return torch.stack([loss_sum, num_targets, num_tokens]), grad_norm


def summed_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    """Collective, like every forward of a sharded model. Return a scalar: the cross-entropy in
    nats, summed over all targets that are not -100, which marks padding. `batch` is as in
    `train_step`."""
    labels = batch["labels"]
    output = model(
        input_ids=batch["input_ids"],
        # Give the mask four dimensions: transformers reads a two-dimensional one on the host.
        attention_mask=batch["attention_mask"][:, None, None, :].bool(),
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        use_cache=False,
    )
    return cross_entropy(output.logits, labels)


class CrossEntropy(nn.Module):
    """A module, because --compile compiles it in place, when the arguments are known."""

    def forward(self, logits, labels):
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


cross_entropy = CrossEntropy()


@torch.compiler.set_stance("force_eager")  # otherwise each length of a summary needs a graph
def generate(args, model: nn.Module, batch: dict) -> torch.Tensor:
    """Collective. Write summaries greedily. Return token ids, int64 of shape (articles, at most
    --max-target-length + 1). With `synced_gpus`, ranks that are done continue until all are."""
    options = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "max_new_tokens": args.max_target_length,
        "do_sample": False,
        "num_beams": 1,
        "synced_gpus": True,
    }
    if args.fsdp_version == 2:
        return model.generate(**options)

    # generate() bypasses the root's forward(), so gather the root here, in fp32, and let autocast
    # compute in `dtype`. The layers gather themselves, in `dtype`, in their own forward().
    dtype = PRECISIONS[args.precision][0]
    device_type = batch["input_ids"].device.type
    with (
        torch.autocast(device_type, dtype, enabled=dtype != torch.float32),
        FSDP.summon_full_params(model, recurse=False, writeback=False),
    ):
        return model.module.generate(**options)


# ---- Model and data ----------------------------------------------------------------------------


def load_config_and_tokenizer(args, checkpoint, articles) -> tuple:
    """Return the config and the tokenizer of --model. Those of `builtin` are made here."""
    if args.model != "builtin":
        config = common.read_pretrained(AutoConfig, args.model, attn_implementation="sdpa")
        common.check(
            config.model_type in ("t5", "mt5", "umt5"),
            f"--model {args.model} is not a T5; see docs/your-model-and-data.md for others",
        )
        return config, common.read_pretrained(AutoTokenizer, checkpoint or args.model)

    if checkpoint:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    else:
        first = articles[:4000]
        texts = first["text"] + first["summary"]
        tokenizer = common.train_tokenizer(texts, vocab_size=4096, append_eos=True)
    shape = {"d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 2, "dropout_rate": 0.0}
    return T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **shape), tokenizer


def load_model(args, config) -> nn.Module:
    """Load the model on the CPU, in fp32: FSDP keeps fp32 shards for the optimizer."""
    torch.manual_seed(args.seed)
    if args.model == "builtin":
        return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    return common.load_pretrained(AutoModelForSeq2SeqLM, args.model, config)


# The built-in articles. Their texts only imply what is done, so a model cannot copy the summary.
SENTENCES = {
    "Wash": "Hold the {} under the tap until no soil is left.",
    "Peel": "Take the skin off the {} with a short knife.",
    "Slice": "Turn the {} into pieces as thin as a coin.",
    "Boil": "Leave the {} in a pot of bubbling water.",
    "Fry": "Drop the {} into a pan of hot oil.",
    "Freeze": "Keep the {} far below zero overnight.",
}
THINGS = "apples beans carrots mushrooms noodles onions pears potatoes spinach tomatoes".split()


def builtin_articles() -> list[dict]:
    """Make up articles with WikiHow's columns, the same on every machine."""
    choose = random.Random(0)
    articles = {}  # no two have one summary
    for day in range(12_000):
        sentences = []
        headlines = []
        for thing in choose.sample(THINGS, choose.randint(2, 3)):
            verb = choose.choice(list(SENTENCES))
            sentences.append(SENTENCES[verb].format(thing))
            headlines.append(f"{verb} the {thing}.")
        summary = "\n".join(headlines)
        title = f"How to Spend Day {day} at Home"
        articles[summary] = {"title": title, "text": " ".join(sentences), "headline": summary}
    return list(articles.values())


def tokenize(rows: dict, tokenizer, source_length: int, target_length: int) -> dict:
    """Return the token ids of some articles, without padding, and the lengths of the sources."""
    texts = ["summarize: " + text for text in rows["text"]]  # T5 was trained with this prefix
    sources = tokenizer(texts, truncation=True, max_length=source_length, return_length=True)
    targets = tokenizer(text_target=rows["summary"], truncation=True, max_length=target_length)
    return {**sources, "labels": targets["input_ids"]}


def load_data(args, checkpoint) -> tuple:
    """Return the config and tokenizer of the model, tokenized articles to train on and to validate
    on, and a checksum of the dataset."""
    train_set, validation_set = common.load_articles(args, builtin_articles)
    checksum = common.checksum(train_set["content_hash"][:], validation_set["content_hash"][:])
    train_set = train_set.take(args.num_train_samples or len(train_set))
    validation_set = validation_set.take(args.num_validation_samples or len(validation_set))

    config, tokenizer = load_config_and_tokenizer(args, checkpoint, train_set)
    tokenizer.padding_side = "right"  # on the left, targets would begin with padding
    tokenizer.truncation_side = "right"  # on the left, prefix and beginning would be cut off
    has_eos = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    common.check(has_eos, f"the tokenizer of --model {args.model} ends no text with EOS")
    common.print_lost_text(tokenizer, train_set[:1000]["summary"])

    options = {
        "tokenizer": copy.deepcopy(tokenizer),  # a tokenizer keeps the last max_length
        "source_length": args.max_source_length,
        "target_length": args.max_target_length,
    }
    train_set = train_set.map(tokenize, batched=True, fn_kwargs=options)
    validation_set = validation_set.map(tokenize, batched=True, fn_kwargs=options)
    labels = train_set[:1000]["labels"]
    num_cut = sum(len(ids) == args.max_target_length for ids in labels)
    common.say(f"targets  {num_cut:,} of {len(labels):,} summaries reach --max-target-length")
    return config, tokenizer, train_set, validation_set, checksum


def indices_of_steps(args, world, lengths, step: int):
    """Yield the indices of this rank's articles in each step after `step`, epoch after epoch. A
    step has the same articles on any number of processes. They have similar lengths, because
    padding is wasted work."""
    batch_size = args.global_batch_size
    steps_per_epoch = len(lengths) // batch_size
    epoch, done = divmod(step, steps_per_epoch)
    while True:
        generator = torch.Generator().manual_seed(args.seed + epoch)
        # Articles that do not fill a batch are left out, different ones in each epoch.
        chosen = torch.randperm(len(lengths), generator=generator)[: steps_per_epoch * batch_size]
        lengths_of_chosen = [lengths[index] for index in chosen]
        sampler = LengthGroupedSampler(batch_size, lengths=lengths_of_chosen, generator=generator)
        batches = chosen[list(sampler)].view(-1, batch_size).tolist()
        random.Random(epoch).shuffle(batches)  # the sampler sorts them from long to short
        for batch in batches[done:]:
            # Each rank takes its own part. Together, the parts are always the whole batch.
            yield batch[world.rank :: world.size]
        epoch += 1
        done = 0


def load_batches(articles, indices, collate, world):
    """Yield padded batches on this rank's device. `indices`: a list of them for each batch. Padding
    64 articles takes 3 ms, so no worker process does it."""
    articles = articles.select_columns(["input_ids", "labels"])
    for arrays in DataLoader(articles, batch_sampler=indices, collate_fn=collate):
        yield {name: common.to_device(array, world.device) for name, array in arrays.items()}


ROUGE = ("rouge1", "rouge2", "rougeL")
NUM_SCORED = 100  # articles whose summaries are generated and scored


@torch.no_grad()
def validate(args, world, model, articles, collate, log, step: int) -> float:
    """Collective. Print and return the mean loss per target token, in nats, over all articles. Also
    print ROUGE of the first NUM_SCORED, and an example."""
    # Every rank must take part in every forward. So repeat the first articles at the end. Labels of
    # -100 exclude these.
    padded = math.ceil(len(articles) / world.size) * world.size
    parts = torch.arange(world.rank, padded, world.size).split(args.test_batch_size)
    indices = [(part % len(articles)).tolist() for part in parts]
    batches = load_batches(articles, indices, collate, world)
    num_scored = min(NUM_SCORED, len(articles))
    scorer = RougeScorer(ROUGE, use_stemmer=True)  # for English: it keeps only a to z and digits

    model.eval()
    totals = torch.zeros(2, device=world.device)  # summed loss, target tokens
    rouge = torch.zeros(len(ROUGE), dtype=torch.float64)
    example = {}
    for part, batch in zip(parts, log.bar(batches, "validate", len(parts)), strict=True):
        batch["labels"][part >= len(articles)] = -100
        totals[0] += summed_loss(model, batch)
        totals[1] += (batch["labels"] != -100).sum()
        # Generating is a collective: all ranks generate, or none. So every rank looks at the first
        # index of rank 0.
        if part[0] - world.rank >= num_scored:
            continue

        tokens = generate(args, model, batch)
        summaries = collate.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for index, summary in zip(part.tolist(), summaries, strict=True):
            if index < num_scored:
                reference = articles[index]["summary"]
                scores = scorer.score(reference, summary)
                rouge += torch.tensor([scores[name].fmeasure for name in ROUGE])
                if index == 0:  # on rank 0
                    example = {"reference": reference, "summary": summary.strip()}
    model.train()

    loss, num_targets = common.sum_over_ranks(totals)
    val_loss = loss / num_targets
    means = common.sum_over_ranks(rouge / num_scored)
    record = {"step": step, "val_loss": val_loss}
    log.metrics(record | dict(zip(ROUGE, means, strict=True)))
    for name, text in {"article": articles[0]["text"], **example}.items():
        common.say(textwrap.fill(f"{name:10} {text}", 79, subsequent_indent=" " * 11, max_lines=5))
    return val_loss


# ---- Main --------------------------------------------------------------------------------------


def learning_rate(args, step: int, num_steps: int, epoch: int) -> float:
    """Return --lr, multiplied by --gamma after each epoch. Replace this to change the schedule:
    `step` counts from 1 to `num_steps`, `epoch` from 0."""
    return args.lr * args.gamma**epoch


def main(args, world):
    # On an H100 or H200, cuDNN's attention with a mask has NaN in the gradients of some lengths
    # (pytorch#196678). PyTorch then takes its own.
    torch.backends.cuda.enable_cudnn_sdp(False)
    log = common.Log(world, args.output_dir)
    best_folder = args.output_dir / "best"
    args.precision = common.choose_precision(args.precision, world.device)
    common.divide_batch(args, world, default=32)
    checkpoint, progress = common.find_checkpoint(args, best_folder)

    # Data
    config, tokenizer, train_set, validation_set, checksum = common.first_on_node(
        world, lambda: load_data(args, checkpoint)
    )
    must_match = common.check_same(args, MUST_MATCH, checksum, config, progress)
    # It pads labels with -100.
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, return_tensors="np")
    steps_per_epoch = len(train_set) // args.global_batch_size
    message = f"{len(train_set)} articles cannot fill --global-batch-size {args.global_batch_size}"
    common.check(steps_per_epoch > 0, message)
    common.say(
        f"data     {len(train_set):,} articles to train on, {len(validation_set):,} to validate on;"
        f" {steps_per_epoch:,} steps of {args.global_batch_size} an epoch"
    )

    # Where the run stands
    step = progress.get("step", 0)
    best_loss = progress.get("best_loss", math.inf)
    epoch_sums = progress.get("epoch_sums", [0.0, 0.0])  # loss and targets of this epoch's steps
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    indices = indices_of_steps(args, world, train_set["length"][:], step)
    batches = load_batches(train_set, indices, collate, world)

    # Model
    model, meta_model, optimizer = build(args, world, config)
    common.say(f"model    {args.model}, {common.describe_state(meta_model, world.size)}")
    common.say(f"fsdp     FSDP{args.fsdp_version}, {args.sharding_strategy}, {args.precision}")
    if args.print_model:
        common.say(str(model))

    def end_epoch(step: int):
        """Print the mean loss of the epoch, validate, and save the model if it is the best so far.
        Without validation the latest model counts as the best."""
        nonlocal best_loss, epoch_sums
        if epoch_sums[1] > 0 and step % steps_per_epoch == 0:  # a run may end within an epoch
            epoch_loss = epoch_sums[0] / epoch_sums[1]
            log.metrics({"step": step, "epoch": step // steps_per_epoch, "epoch_loss": epoch_loss})
            epoch_sums = [0.0, 0.0]
        val_loss = math.inf
        if args.run_validation:
            val_loss = validate(args, world, model, validation_set, collate, log, step)
        if args.save_model and (val_loss < best_loss or not args.run_validation):
            best_loss = val_loss
            common.export(model, meta_model, tokenizer, best_folder, world)
            common.say(f"saved    the model to {best_folder}")

    if checkpoint:
        common.load_checkpoint(checkpoint, model, optimizer)
        common.say(f"resumed  from step {step} of {num_steps}")
    # A checkpoint at the end of an epoch is from before the validation.
    if progress.get("epoch_ends") or step >= num_steps:
        end_epoch(step)
    elif args.run_validation and not checkpoint:
        validate(args, world, model, validation_set, collate, log, step)

    # Train
    common.note_stops()
    totals = torch.zeros(3, device=world.device)  # since the last printed line
    start = time.perf_counter()
    waited = 0.0

    remaining = range(step + 1, num_steps + 1)
    for step in log.bar(remaining, "train"):
        epoch = (step - 1) // steps_per_epoch
        lr = learning_rate(args, step, num_steps, epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr
        before = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - before
        # Dropout must be equal after a resume, and differ between ranks.
        torch.manual_seed(args.seed + step * world.size + world.rank)
        any_rank_stops = common.ask_for_stops()  # a signal after this counts in the next step
        step_totals, grad_norm = train_step(args, world, model, optimizer, batch)
        totals += step_totals

        stop_now = any_rank_stops()
        epoch_ends = step % steps_per_epoch == 0 or step == num_steps
        save_due = args.checkpoint_every > 0 and (epoch_ends or step % args.checkpoint_every == 0)
        save_now = stop_now or save_due
        if save_now or epoch_ends or step == 1 or step % args.log_every == 0:
            loss_sum, num_targets, num_tokens = common.sum_over_ranks(totals)
            epoch_sums[0] += loss_sum
            epoch_sums[1] += num_targets
            seconds = time.perf_counter() - start
            speed = num_tokens / seconds
            record = {
                "step": step,
                "loss": loss_sum / num_targets,
                "grad_norm": grad_norm.item(),
                "lr": lr,
                "tokens/s": speed,
                "per_gpu": speed / world.size,
                "peak_gib": common.peak_gib(world.device),
                "waited": waited / seconds,  # for data
            }
            log.metrics(record)
            common.reset_peak(world.device)
            totals.zero_()

            if save_now:
                # Before validation and export: if they fail, --resume repeats only them.
                progress = {
                    "step": step,
                    "epoch_ends": epoch_ends,
                    "epoch_sums": epoch_sums,
                    "best_loss": best_loss,
                    "must_match": must_match,
                }
                common.save_checkpoint(progress, args, model, optimizer, tokenizer)
            if stop_now:  # without the validation that may be due
                common.say(f"stopped  at step {step}, checkpoint saved: continue with --resume")
                return
            if epoch_ends:
                end_epoch(step)
            start = time.perf_counter()  # do not count validation and saving
            waited = 0.0

    common.say(f"metrics  {log.path}, run {log.run}")
    if args.save_model:
        common.say(f"model    {best_folder}")


if __name__ == "__main__":
    common.run(main, common.parse_args(Args, __doc__))
