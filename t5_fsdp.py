"""How do I fine-tune a real transformer with every FSDP feature that matters?

Fine-tunes T5 to summarize articles, sharded with FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`). Without
flags it needs no download: a small T5 learns built-in articles in two to three minutes on two cores.

    python t5_fsdp.py                                       # one process for each GPU, or two on the CPU
    torchrun --nproc_per_node 8 t5_fsdp.py --model google-t5/t5-base --dataset data/wikihowAll.csv \\
        --num-train-samples 1500 --epochs 2 --batch-size 4 --test-batch-size 4 --lr 2e-3 --gamma 0.7    # the tutorial's
    torchrun --nproc_per_node 8 t5_fsdp.py ... --checkpoint-every 500 --resume      # run again after any stop
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint HEAD:29500 t5_fsdp.py ...

Follows PyTorch's tutorial "Advanced Model Training with Fully Sharded Data Parallel (FSDP)",
https://docs.pytorch.org/tutorials/intermediate/FSDP_advanced_tutorial.html. Where it departs: losses are means over
real target tokens (the tutorial learns padding, too), texts begin with T5's "summarize: ", gradients are clipped at
norm 1, the articles of a step have similar lengths (no `DistributedSampler`), each is validated once, the best model is
a Hugging Face folder, FSDP2 is the default. Of the tutorial's code, imports are missing or fail today (`LooseVersion`,
the `wikihow` loading script), and its `--run_validation` and `--track_memory` switch off what they name.
"""

import argparse
import contextlib
import math
import textwrap
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

import transformers
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, T5Config

import common

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # nobody writes into it
transformers.logging.disable_progress_bar()

# ---- FSDP: what is sharded, in which precision, and when it is gathered ----------------------------------------
PRECISIONS = {  # parameters are gathered and computed with in, gradients reduced in; the optimizer updates fp32 shards
    "fp32": (torch.float32, torch.float32),  # the tutorial's fp32_policy
    "bf16": (torch.bfloat16, torch.bfloat16),  # bfSixteen: half the bytes on the wire, for devices that compute in bf16
    "fp16": (torch.float16, torch.float16),  # fpSixteen: for V100-class GPUs; small gradients vanish, so scale the loss
    "grad-bf16": (torch.float32, torch.bfloat16),  # grad_bf16: where only the network is the bottleneck
}
STRATEGIES = {  # FSDP1's name, FSDP2's reshard_after_forward
    "FULL_SHARD": (ShardingStrategy.FULL_SHARD, True),  # ZeRO-3: parameters are gathered for forward and for backward
    "SHARD_GRAD_OP": (ShardingStrategy.SHARD_GRAD_OP, False),  # ZeRO-2: kept in between; less traffic, more memory
}
PREFETCH = {  # when the next unit's parameters are gathered in backward
    "pre": BackwardPrefetch.BACKWARD_PRE,  # before this unit's gradients: overlaps most, holds two units
    "post": BackwardPrefetch.BACKWARD_POST,  # after them (FSDP1 only)
    "none": None,  # not before they are needed: least memory, no overlap
}


# Two translations of one plan: every T5Block is a unit; what remains is the root unit, above all the embedding that
# encoder, decoder and output layer share, which must be there for all of them.
def shard_with_fsdp2(args, world, mesh, config) -> nn.Module:
    """Shard with `fully_shard`: bottom-up, in place, one DTensor shard per parameter."""
    with common.first_on_node(world):  # the others wait, if need be for a download
        whole = load_model(args, config) if world.rank == 0 else None  # on the CPU
    model = empty_model(config)  # no device ever holds the whole model
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    if args.cpu_offload:  # pinned memory copies faster, and needs an accelerator
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    units = prepare_blocks(args, model)
    for unit in units:
        fully_shard(unit, reshard_after_forward=STRATEGIES[args.sharding_strategy][1], **options)
    fully_shard(model, **options)  # the root stays gathered after forward: backward begins with it
    for unit in (*units, model):
        if args.backward_prefetch == "none":
            unit.set_modules_to_backward_prefetch([unit])  # an explicit list replaces the default: only itself
        if world.device.type == "xpu":
            unit.set_force_sum_reduction_for_comms(True)  # Intel's oneCCL cannot average on every machine
    common.load_weights(model, whole, world, args.cpu_offload)  # memory for its shards, and rank 0's weights in it
    dist.fsdp.register_fsdp_forward_method(model, "generate")  # the root gathers its parameters for it as for forward()
    return model


def shard_with_fsdp1(args, world, mesh, config) -> nn.Module:
    """Shard with `FullyShardedDataParallel`: top-down through a wrap policy, one flat parameter per unit."""
    with common.first_on_node(world):
        model = load_model(args, config)  # on every rank's CPU; units move to the device one by one as they are wrapped
    param_dtype, reduce_dtype = PRECISIONS[args.precision]
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in prepare_blocks(args, model)}),
        sharding_strategy=STRATEGIES[args.sharding_strategy][0],
        mixed_precision=MixedPrecision(param_dtype, reduce_dtype, torch.float32, cast_forward_inputs=True),
        backward_prefetch=PREFETCH[args.backward_prefetch],
        cpu_offload=CPUOffload(offload_params=args.cpu_offload),
        device_id=world.device,
        use_orig_params=True,  # parameters keep their names and shapes, for the optimizer and for --compile
        device_mesh=mesh,  # checkpoints then hold DTensors, as in FSDP2
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Each becomes a unit. For another architecture this is the place to change."""
    return [*model.encoder.block, *model.decoder.block]


def prepare_blocks(args, model: nn.Module) -> list[nn.Module]:
    """torch.compile and activation checkpointing, block by block and before sharding. Returns the blocks."""
    torch._dynamo.config.recompile_limit = 32  # first and other blocks, encoder and decoder, training and not
    blocks = blocks_of(model)
    for block in blocks if args.compile else ():
        block.compile(dynamic=True)  # FSDP's hooks stay outside the graphs
    if args.activation_checkpointing:  # the wrapper becomes the unit, so that recomputing gathers nothing again
        apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    return blocks_of(model)


def train_step(args, world, model, optimizer, scaler, batch) -> torch.Tensor:
    """One step. Returns this rank's summed loss, target tokens, all tokens and the gradient norm, on the device."""
    optimizer.zero_grad()
    tokens = (batch["labels"] != -100).sum()
    dist.all_reduce(all_tokens := tokens.clone())
    loss_sum = torch.zeros((), device=world.device)
    for first in range(0, len(batch["labels"]), args.batch_size):
        micro_batch = {name: tensor[first : first + args.batch_size] for name, tensor in batch.items()}
        # Only the last micro-batch sends gradients (FSDP1's no_sync); ZeRO-2 keeps its parameters until then.
        is_last = first + args.batch_size >= len(batch["labels"])
        if args.fsdp_version == 2:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last or STRATEGIES[args.sharding_strategy][1])
        # One process has nothing to send; there FSDP1's no_sync fails in bf16 with tied weights.
        waits = args.fsdp_version == 1 and not is_last and world.size > 1
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = summed_loss(model, micro_batch)
            # FSDP averages gradients over ranks. Multiplied by their number and divided by all their tokens, that is
            # the gradient of the mean over all real target tokens, as if one process held the whole global batch.
            scaler.scale(loss * world.size / all_tokens).backward()
        loss_sum += loss.detach()
    scaler.unscale_(optimizer)
    if args.fsdp_version == 2:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    else:
        norm = model.clip_grad_norm_(1.0)  # nn.utils would see this rank's shards only
    scaler.step(optimizer)
    scaler.update()
    return torch.stack([loss_sum, tokens, tokens + batch["attention_mask"].sum(), norm.to(world.device)])


def summed_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    """Cross-entropy summed over the real target tokens of a batch, 0-d."""
    labels = batch["labels"]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def learning_rate(args, step: int, done: float) -> float:
    """Of step 1, 2, ..., with `done` epochs behind it, 1.5 for example: --gamma lowers it after each epoch."""
    return args.lr * args.gamma ** int(done)


@torch.compiler.set_stance("force_eager")  # with --compile: a graph for every length of a summary is not worth it
def generate(args, model: nn.Module, batch: dict) -> torch.Tensor:
    """Greedy summaries. On all ranks together: `synced_gpus` keeps those gathering that have finished their own."""
    options = {"max_new_tokens": args.max_target_length, "do_sample": False, "num_beams": 1, "synced_gpus": True}
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if args.fsdp_version == 2:
        return model.generate(**inputs, **options)
    # generate() bypasses the root's forward(), so the root's parameters are gathered here, in fp32.
    dtype = PRECISIONS[args.precision][0]
    cast = torch.autocast(batch["input_ids"].device.type, dtype, enabled=dtype != torch.float32)
    with cast, FSDP.summon_full_params(model, recurse=False, writeback=False):
        return model.module.generate(**inputs, **options)


# ---- Model and data --------------------------------------------------------------------------------------------
def load_model(args, config) -> nn.Module:
    """The model on this process's CPU, in fp32: FSDP keeps fp32 shards for the optimizer and casts what it gathers."""
    if args.model != "builtin":
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model, config=config, dtype=torch.float32)
        return model.train()  # it comes in eval()
    torch.manual_seed(args.seed)
    return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)


def empty_model(config) -> nn.Module:
    """The model on the meta device: shapes, no memory."""
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        if not getattr(config, "scale_decoder_outputs", True):  # FLAN-T5: an output layer of its own
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def load_config_and_tokenizer(args, world, articles) -> tuple:
    """Those of a pretrained model, or of one small enough to learn the built-in articles in a minute."""
    if args.model == "builtin":
        some = articles[:4000]
        tokenizer = common.train_tokenizer(some["text"] + some["summary"], 4096, append_eos=True)
        shape = {"d_model": 128, "d_kv": 16, "num_heads": 8, "d_ff": 256, "num_layers": 2, "dropout_rate": 0.0}
        special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        return T5Config(vocab_size=len(tokenizer), **shape, **special), tokenizer
    try:
        with common.first_on_node(world):
            config, tokenizer = AutoConfig.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise common.UserError(f"--model {args.model} cannot be read: {error}") from error
    if config.model_type != "t5":
        raise common.UserError(f"--model {args.model} is not a T5; docs/your-model-and-data.md says what to change")
    return config, tokenizer


def tokenize(rows: dict, tokenizer, source_length: int, target_length: int) -> dict:
    """Token ids of a batch of articles; padding is the collator's."""
    texts = ["summarize: " + text for text in rows["text"]]  # T5 was pretrained on many tasks, named like this
    sources = tokenizer(texts, max_length=source_length, truncation=True)["input_ids"]
    targets = tokenizer(text_target=rows["summary"], max_length=target_length, truncation=True)["input_ids"]
    return {"input_ids": sources, "labels": targets}


def epoch_steps(lengths: torch.Tensor, args, world, epoch: int) -> list[list[int]]:
    """This rank's samples, step by step; an incomplete last step is left out."""
    # Samples of similar length share a step: padding is wasted work.
    step_size = args.batch_size * args.accumulation_steps * world.size
    generator = torch.Generator().manual_seed(args.seed * 10_000 + epoch)
    chunks = torch.randperm(len(lengths), generator=generator).split(50 * step_size)
    steps = torch.cat([chunk[lengths[chunk].argsort(stable=True)] for chunk in chunks]).split(step_size)
    order = torch.randperm(len(lengths) // step_size, generator=generator)
    return [steps[i][world.rank :: world.size].tolist() for i in order]


def load(articles, batches: list[list[int]], collate, world):
    """Yield the batches, padded, on this rank's device."""
    # A generator of its own: the global one is dropout's, and resume would not be exact.
    options = {"batch_sampler": batches, "collate_fn": collate, "generator": torch.Generator()}
    if world.device.type != "cpu":  # workers must outlive the SIGTERM that a cluster sends to every process
        options |= {"worker_init_fn": common.ignore_sigterm, "num_workers": 2, "pin_memory": True}
    for batch in DataLoader(articles.select_columns(["input_ids", "labels"]), **options):
        yield {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}


@torch.no_grad()
def validate(args, world, model, articles, collate, log) -> tuple[dict, list[str]]:
    """The loss over all articles, each counted once on any number of ranks; ROUGE and summaries of the first 100."""
    model.eval()
    totals, own_summaries = torch.zeros(2, device=world.device), {}
    # Every rank must take part in every forward pass: numbers past the end repeat articles, and do not count.
    padded = math.ceil(len(articles) / world.size) * world.size
    own = torch.arange(world.rank, padded, world.size).split(args.test_batch_size)
    batches = load(articles, [(part % len(articles)).tolist() for part in own], collate, world)
    for number, batch in enumerate(log.bar(batches, "validate", len(own))):
        batch["labels"][own[number] >= len(articles)] = -100
        totals += torch.stack([summed_loss(model, batch), (batch["labels"] != -100).sum()])
        if number * args.test_batch_size * world.size < 100:  # the same on every rank
            texts = collate.tokenizer.batch_decode(generate(args, model, batch), skip_special_tokens=True)
            own_summaries |= zip(own[number].tolist(), texts, strict=True)
    model.train()
    loss, tokens = common.sum_over_ranks(totals)
    dist.all_gather_object(parts := [None] * world.size, own_summaries)
    summaries = {number: text.strip() for part in parts for number, text in part.items()}
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scored = articles.select(range(min(100, len(articles))))
    scores = [scorer.score(reference, summaries[number]) for number, reference in enumerate(scored["summary"])]
    rouge = {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in scorer.rouge_types}
    return {"val_loss": loss / tokens, **rouge}, [summaries[number] for number in range(len(scored))]


# ---- Main ------------------------------------------------------------------------------------------------------
def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__, checkpoints=True)
    count, size, number, flag = common.at_least(0), common.at_least(1), common.at_least(0, float), "store_true"
    add = parser.groups["data and model"].add_argument
    add("--model", default="builtin", type=common.hub_or_folder, help="builtin, or any T5: a Hub name or a folder")
    add("--dataset", default="builtin", help="builtin; a .csv, .json, .jsonl or .parquet file; a Hub dataset")
    add("--text-column", default="text", help="of the dataset, with the articles")
    add("--summary-column", default="headline", help="of the dataset, with their summaries")
    add("--num-train-samples", default=8000, type=count, help="articles to train on at most; 0 for all")
    add("--num-validation-samples", default=300, type=count, help="articles to validate on at most; 0 for all")
    add("--max-summary-share", default=0.75, type=number, help="drop summaries longer than this share of the text")
    add("--max-source-length", default=512, type=size, help="tokens kept of an article: fewer take less memory")
    add("--max-target-length", default=150, type=size, help="tokens kept of a summary, and generated at most")
    add = parser.groups["training"].add_argument
    add("--epochs", default=3, type=size, help="passes over the articles")
    add("--max-steps", default=0, type=count, help="stop after this many steps, with the same schedule; 0: never")
    add("--batch-size", default=16, type=size, help="articles in a process at once: fewer, less memory")
    add("--accumulation-steps", default=1, type=size, help="batches in one step of the optimizer")
    add("--test-batch-size", default=50, type=size, help="articles per process in validation")
    add("--lr", default=1e-3, type=number, help="learning rate of AdamW")
    add("--gamma", default=0.8, type=number, help="factor on the learning rate after each epoch")
    add = parser.groups["FSDP"].add_argument
    add("--fsdp-version", default=2, type=int, choices=(1, 2), help="2: fully_shard; 1: FullyShardedDataParallel")
    add("--sharding-strategy", default="FULL_SHARD", choices=STRATEGIES, help="least memory, or less traffic")
    add("--precision", default="auto", choices=("auto", *PRECISIONS), help="auto: bf16 where native, else fp32")
    add("--backward-prefetch", default="pre", choices=PREFETCH, help="none: less memory; post: only FSDP1's")
    add("--cpu-offload", action=flag, help="keep shards on the CPU and update them there: least memory, slow")
    add("--activation-checkpointing", action=flag, help="recompute each T5Block in backward: less memory, slower")
    add("--compile", action=flag, help="torch.compile each T5Block: a slow start, then faster")
    add = parser.groups["processes and output"].add_argument
    add("--print-model", action=flag, help="print the sharded model, with its units")
    add("--run-validation", default=True, action=argparse.BooleanOptionalAction, help="loss and ROUGE after each epoch")
    args = parser.parse_args()
    if args.fsdp_version == 2 and args.backward_prefetch == "post":
        parser.error("--backward-prefetch post needs --fsdp-version 1: FSDP2 has pre (its default) and none")
    if args.precision == "fp16" and args.cpu_offload:  # the scale is read before it arrives (pytorch#176429)
        parser.error("--precision fp16 cannot scale gradients that --cpu-offload keeps on the CPU; use bf16 or fp32")
    return args


def main(args, world) -> None:
    columns = {"epoch": "5d", "step": "6,d", "loss": "7.4f", "val_loss": "8.4f", "rouge1": "6.4f", "rouge2": "6.4f"}
    columns |= {"rougeL": "6.4f", "grad_norm": "9.3f", "lr": "8.2e", "tokens/s": "10,.0f", "peak_gb": "7.2f"}
    log = common.Log(world.rank, args.output_dir, "grad_norm lr", **columns)
    log.say(f"run      {common.describe_run(world)}")
    checkpoints = common.find_checkpoints(args.output_dir, args.resume)
    args.precision = common.choose_precision(args.precision, world.device)
    with common.first_on_node(world):
        names, counts = (args.text_column, args.summary_column), (args.num_train_samples, args.num_validation_samples)
        articles = common.load_articles(args.dataset, names, counts, args.max_summary_share)
    config, tokenizer = load_config_and_tokenizer(args, world, articles[0])
    options = {"tokenizer": tokenizer, "source_length": args.max_source_length, "target_length": args.max_target_length}
    with common.first_on_node(world):
        train_set, validation_set = (part.map(tokenize, batched=True, fn_kwargs=options) for part in articles)
    lengths = torch.tensor([len(ids) for ids in train_set["input_ids"]])
    step_size = args.batch_size * args.accumulation_steps * world.size
    if len(lengths) < step_size:
        raise common.UserError(f"{len(lengths)} articles do not fill a step of {step_size}; lower --batch-size")
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)  # to the longest of the batch; labels with -100
    log.say(f"fsdp     FSDP{args.fsdp_version}, {args.sharding_strategy}, {args.precision}")
    num_parameters, offload = empty_model(config).num_parameters(), args.cpu_offload
    log.say(f"model    {args.model}, {common.describe_size(num_parameters, world.size, world, offload=offload)}")
    log.say(f"data     {len(train_set):,} articles to train on, {len(validation_set):,} to validate")
    if world.size == 1:
        common.refuse_fsdp1_offload(args)
    mesh = init_device_mesh(world.device.type, (world.size,))
    model = (shard_with_fsdp2 if args.fsdp_version == 2 else shard_with_fsdp1)(args, world, mesh, config)
    # After sharding: it must see the shards. Fused AdamW takes loss scaling into its kernel, which fails on DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=args.precision != "fp16")
    # When a shard overflows on one rank, all must skip the step: DTensors agree by themselves, FSDP1 needs a scaler.
    scaler_class = torch.amp.GradScaler if args.fsdp_version == 2 else ShardedGradScaler
    scaler = scaler_class(world.device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + 1 + world.rank)  # weights had one seed, dropout has one per rank
    split = {"processes": world.size, "step_size": step_size, "device": world.device.type}
    progress = {"epoch": 1, "step": 0, "samples": 0, "best_loss": math.inf, **split}  # samples: of this epoch
    fixed = ("model", "dataset", "num_train_samples", "max_source_length", "max_target_length", "seed", "lr", "gamma")
    settings = {name: getattr(args, name) for name in fixed}  # a resumed run must have the same
    progress |= common.load_checkpoint(checkpoints, model, optimizer, settings, world)
    if progress.get("scaler"):
        scaler.load_state_dict(progress["scaler"])
    if progress["step"]:
        kept = "all but the order of this epoch, and of dropout"
        if split.items() <= progress.items():
            kept = "everything"
        elif progress["processes"] == world.size and progress["step_size"] == step_size:
            kept = f"all but dropout's random numbers, which {progress['device']} drew before"
        log.say(f"resumed  from step {progress['step']}, keeps {kept}")
    if args.print_model:
        log.say(str(model))
    progress |= {"settings": vars(args), **split}
    stop = common.StopRequest()
    if args.run_validation and progress["step"] == 0:
        log.row(epoch=0, step=0, **validate(args, world, model, validation_set, collate, log)[0])
    summaries, best = [], args.output_dir / "best"
    window = torch.zeros(3, device=world.device)  # since the last row: summed loss, target tokens, all tokens
    for epoch in range(progress["epoch"], args.epochs + 1):
        progress["epoch"] = epoch
        steps = epoch_steps(lengths, args, world, epoch)[progress["samples"] // step_size :]
        steps = steps[: max(0, args.max_steps - progress["step"])] if args.max_steps else steps
        began = time.perf_counter()
        batches = load(train_set, steps, collate, world)
        for number, batch in enumerate(log.bar(batches, f"epoch {epoch}", len(steps)), 1):
            lr = learning_rate(args, progress["step"] + 1, epoch - 1 + progress["samples"] / len(lengths))
            for group in optimizer.param_groups:
                group["lr"] = lr
            result = train_step(args, world, model, optimizer, scaler, batch)
            window += result[:3]  # stays on the device: reading a number would make the host wait in every step
            progress["step"] += 1
            progress["samples"] += step_size
            stops, ends = stop.on_any_rank(), number == len(steps)
            saves = stops or (args.checkpoint_every and (ends or progress["step"] % args.checkpoint_every == 0))
            if saves or ends or progress["step"] % args.log_every == 0:
                loss, targets, tokens = common.sum_over_ranks(window)
                if not math.isfinite(loss):  # before saving: the newest checkpoint must stay usable
                    raise common.UserError(f"the loss is not finite at step {progress['step']}; take a lower --lr")
                row = {"loss": loss / targets, "tokens/s": tokens / (time.perf_counter() - began)}
                row |= {"grad_norm": result[3].item(), "lr": lr} | common.peak_memory(world.device)
                log.row(epoch=epoch, step=progress["step"], **row)
                if saves:
                    progress["scaler"] = scaler.state_dict()
                    common.save_checkpoint(args.output_dir, model, optimizer, progress, world)
                window.zero_()
                began = time.perf_counter()
            if stops:
                return log.say(f"stopped  on request at step {progress['step']}, all saved; --resume goes on")
        progress["samples"], is_best = 0, True
        if args.run_validation:
            scores, summaries = validate(args, world, model, validation_set, collate, log)
            log.row(epoch=epoch, step=progress["step"], **scores)
            is_best = scores["val_loss"] < progress["best_loss"]
            progress["best_loss"] = min(scores["val_loss"], progress["best_loss"])
        if args.save_model and is_best:
            common.export(model, tokenizer, best, world)
            log.say(f"       best so far: saved to {best}, in place of any before it")
        if args.max_steps and progress["step"] >= args.max_steps:
            break
    for article, summary in zip(validation_set, summaries[:3], strict=False):
        log.say("")
        for name, text in {"article": article["text"], "reference": article["summary"], "summary": summary}.items():
            log.say(textwrap.fill(f"{name:<10} {text}", 79, subsequent_indent=" " * 11, max_lines=5))
    log.say(f"\nmetrics  {log.path}, run {log.run}\nmodel    {best if args.save_model else 'not saved'}")


if __name__ == "__main__":
    common.run(main, parse_args())
