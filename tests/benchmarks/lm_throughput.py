"""Useful tokens per second of lm_multinode.py against three other ways to train the same model on the same cores.

    pip install accelerate  # only for the Trainer; without it that row is left out
    python tests/benchmarks/lm_throughput.py

All train the same Llama (random weights) in the same precision, with the same number of sequences in a step, on the
same texts: random words, with lengths as in C4 (480 tokens on average, half of them below 260, a long tail). They take
turns in one run, one optimizer step in each; medians over the turns are printed. Only the loop differs:

    lm_multinode.py  its own load_batches and train_step: texts packed into full sequences, FSDP2
    document         each text padded or cut to the sequence length by four workers, the whole model in one unit of
                     FSDP1, AdamW without fusion, `.item()` in every micro-batch
    plain            no FSDP: one process on all the cores, with the packed sequences, loss and AdamW of lm_multinode.py
    Trainer          transformers.Trainer with FSDP2 through accelerate, its defaults: texts cut to the sequence length
                     and padded to the longest in the micro-batch. On CPUs accelerate 1.15 takes DDP without a word;
                     here it is told of another device so that it shards, unless --trainer-ddp leaves it alone

The code that circulates for the document steps the optimizer in nearly every micro-batch and forgets to count the
processes in the global batch; here its accumulation is put right, which makes it faster.

A turn of a padded loop depends on which texts it meets. So turns measure tokens computed, pads included, and the share
that is useful is counted over all texts. MFU counts useful tokens only. Flags that are not listed here go to
lm_multinode.py: `--sharding-strategy SHARD_GRAD_OP`, `--precision fp32`.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.func import functional_call
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
import datasets
import numpy as np
import transformers
from datasets.distributed import split_dataset_by_node
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM

import common
import lm_multinode
from common import World

VOCABULARY = 16_384
SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
MEAN, SIGMA = 480, 1.1  # tokens in a text of C4, and the width of the log-normal distribution
OURS = "lm_multinode.py"


def write_c4_like(folder: Path, count: int) -> None:
    """Eight files in C4's format, a tokenizer for them, and the configuration of the model."""
    choose = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "ay", "er", "in")]
    words = ["".join(choose.choices(syllables, k=choose.choice((1, 2, 2, 3)))) for _ in range(40_000)]
    cumulative = np.cumsum([1 / rank for rank in range(1, len(words) + 1)]).tolist()  # Zipf, as in natural language

    def text(length: int) -> str:
        return " ".join(choose.choices(words, cum_weights=cumulative, k=length))

    world = common.setup_distributed("cpu")
    sample = [text(500) for _ in range(1000)]
    tokenizer = common.train_tokenizer(world, sample, VOCABULARY, append_eos=False)
    dist.destroy_process_group()
    tokenizer.save_pretrained(folder)
    per_word = len(tokenizer(" ".join(sample[:100]))["input_ids"]) / 50_000
    for shard in range(8):
        with open(folder / f"c4-{shard}.json", "w") as file:
            for _ in range(count // 8):
                tokens = choose.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA)
                record = {"text": text(max(1, round(tokens / per_word))), "timestamp": "", "url": ""}
                file.write(json.dumps(record) + "\n")
    config = LlamaConfig(
        vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, rms_norm_eps=1e-5, **SHAPE
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def allocate(ours: bool) -> None:
    """Set glibc's allocator as lm_multinode.py does, or to what it adapts to by itself for those who set nothing."""
    own = {common.M_MMAP_MAX: 0 if ours else 65536, common.M_TRIM_THRESHOLD: -1 if ours else 2**26}
    common.tune_malloc({common.M_MMAP_THRESHOLD: 2**25} | own)


# ---- The loops. Each of these functions returns one that makes an optimizer step and returns the tokens it computed,
# pads included, on all processes.


def make_ours(args: argparse.Namespace, world: World, source, tokenizer) -> Callable[[], int]:
    config = lm_multinode.load_config(args, tokenizer)
    model, optimizer = lm_multinode.build(args, world, config)
    texts = lm_multinode.PackedTexts(source, tokenizer, args, world, lm_multinode.START)
    batches = lm_multinode.load_batches(texts, world, 2 * args.accumulation)

    def step() -> int:
        allocate(ours=True)
        lm_multinode.train_step(args, world, model, optimizer, batches)
        return args.global_batch_size * args.seq_length

    return step


def make_plain(args: argparse.Namespace, world: World, source, tokenizer) -> Callable[[], int]:
    tokens = args.global_batch_size * args.seq_length
    if world.rank != 0:
        return lambda: tokens  # the first process has all the cores meanwhile
    alone = World(0, 0, 1, 1, world.device, world.backend)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.train()
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    texts = lm_multinode.PackedTexts(source, tokenizer, args, alone, lm_multinode.START)
    accumulation = args.global_batch_size // args.micro_batch_size
    batches = lm_multinode.load_batches(texts, alone, 2 * accumulation)
    dtype = lm_multinode.PRECISIONS[args.precision][0]

    def forward(**batch):
        # As FSDP computes: with parameters in the lower precision, whose gradients add up in fp32.
        return functional_call(model, {name: p.to(dtype) for name, p in model.named_parameters()}, kwargs=batch)

    def step() -> int:
        allocate(ours=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(threads * world.world_size)
        optimizer.zero_grad()
        for _ in range(accumulation):
            (lm_multinode.summed_loss(forward, next(batches)) / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        torch.set_num_threads(threads)
        return tokens

    return step


def make_document(args: argparse.Namespace, world: World, source, tokenizer) -> Callable[[], int]:
    dtype = lm_multinode.PRECISIONS[args.precision][0]
    model = FSDP(
        LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        mixed_precision=MixedPrecision(param_dtype=dtype),
        use_orig_params=True,
        device_id=world.device,
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"], truncation=True, max_length=args.seq_length, padding="max_length")

    rows = source.map(tokenize, batched=True, remove_columns=["text"])
    rows = split_dataset_by_node(rows, world.rank, world.world_size)
    collate = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    batches = iter(DataLoader(rows, collate_fn=collate, batch_size=args.micro_batch_size, num_workers=4))

    def step() -> int:
        allocate(ours=False)
        for number in range(1, args.accumulation + 1):
            batch = next(batches)
            with model.no_sync() if number < args.accumulation else contextlib.nullcontext():
                loss = model(**batch).loss / args.accumulation
                loss.backward()
            loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return args.global_batch_size * args.seq_length

    return step


class HandOver(transformers.TrainerCallback):
    """Lets the other loops work between two steps of the Trainer; counts the tokens this process computes."""

    def __init__(self, between: Callable[[int | None], None]) -> None:
        self.between, self.tokens = between, 0

    def on_train_begin(self, *_, **__) -> None:
        self.between(None)

    def on_step_end(self, *_, **__) -> None:
        tokens, self.tokens = self.tokens, 0
        self.between(tokens)


def run_trainer(args: argparse.Namespace, options: argparse.Namespace, world: World, texts, tokenizer, between) -> None:
    """Train with the Trainer. It calls `between(None)` before the first step, then `between(tokens)` after each."""
    settings = transformers.TrainingArguments(
        output_dir=args.output_dir / "trainer",
        use_cpu=True,
        bf16=args.precision == "bf16",
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=args.lr,
        max_steps=options.turns + 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if not options.trainer_ddp:
        from accelerate import DistributedType, PartialState

        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU  # the device remains the CPU
    rows = datasets.Dataset.from_dict(
        dict(tokenizer(texts, truncation=True, max_length=args.seq_length, return_token_type_ids=False))
    )
    collate = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    hand_over = HandOver(between)

    def counted(rows: list[dict]) -> dict:
        batch = collate(rows)
        hand_over.tokens += batch["input_ids"].numel()
        return batch

    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    trainer = transformers.Trainer(model, settings, counted, rows, callbacks=[hand_over])
    trainer.remove_callback(transformers.PrinterCallback)
    assert options.trainer_ddp or trainer.accelerator.is_fsdp2, "accelerate does not shard"
    trainer.train()


# ---- The turns


def worker(options: argparse.Namespace, folder: Path, more: list[str]) -> None:
    """One process: let the loops take turns, print rank 0's table."""
    sys.argv = [OURS, "--model", str(folder), "--dataset", str(folder / "c4-*.json"), "--num-validation-texts", "1"]
    sys.argv += ["--micro-batch-size", str(options.micro_batch_size), "--seq-length", str(options.seq_length)]
    sys.argv += ["--global-batch-size", str(options.global_batch_size), "--output-dir", str(folder), "--device", "cpu"]
    sys.argv += more
    args = lm_multinode.parse_args()
    world = common.setup_distributed("cpu")
    args.precision = common.choose_precision(args.precision, world.device)
    args.accumulation = args.global_batch_size // (args.micro_batch_size * world.world_size)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source, _ = lm_multinode.load_texts(args, world)
    texts = [record["text"] for record in source]
    random.Random(0).shuffle(texts)

    makers = {OURS: make_ours, "document": make_document, "plain": make_plain}
    loops = {name: make(args, world, source, tokenizer) for name, make in makers.items() if name in options.loops}
    rates: dict[str, list[float]] = {name: [] for name in options.loops}
    began = 0.0

    def measure(name: str, tokens: int) -> None:
        dist.barrier()
        rates[name].append(tokens / (time.perf_counter() - began))
        if world.rank == 0 and options.verbose:
            print(f"{name} {rates[name][-1]:.1f}", file=sys.stderr, flush=True)

    def others() -> None:
        nonlocal began
        for name, step in loops.items():
            dist.barrier()
            began = time.perf_counter()
            measure(name, step())

    def between(trainer_tokens: int | None) -> None:
        nonlocal began
        if trainer_tokens is not None:
            total = torch.tensor(trainer_tokens)
            dist.all_reduce(total)
            measure("Trainer", total.item())
            if len(rates["Trainer"]) == options.turns + 1:
                return
        others()
        allocate(ours=False)
        dist.barrier()
        began = time.perf_counter()

    if "Trainer" in options.loops:
        run_trainer(args, options, world, texts, tokenizer, between)
    else:
        for _ in range(options.turns + 1):
            others()

    if world.rank == 0:  # ---- The table
        lengths = [min(len(tokens), args.seq_length) for tokens in tokenizer(texts)["input_ids"]]
        micro_batches = [lengths[i : i + args.micro_batch_size] for i in range(0, len(lengths), args.micro_batch_size)]
        shares = {
            "document": statistics.mean(lengths) / args.seq_length,
            "Trainer": sum(lengths) / sum(max(batch) * len(batch) for batch in micro_batches),
        }
    config = lm_multinode.load_config(args, tokenizer)
    parameters = sum(p.numel() for p in lm_multinode.skeleton(args, config, torch.device("meta")).parameters())
    flops, peak = lm_multinode.flops_per_token(args, config, parameters), lm_multinode.peak_flops(args, world)
    if world.rank == 0:
        useful = {
            name: [rate * shares.get(name, 1.0) for rate in some[1:]]  # the first turn warms up
            for name, some in rates.items()
        }
        medians = {name: statistics.median(some) for name, some in useful.items()}
        print(
            f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, "
            f"{os.cpu_count()} cores, {world.world_size} processes, {args.precision}; {parameters:,} parameters, "
            f"steps of {args.global_batch_size} sequences of {args.seq_length} tokens in micro-batches of "
            f"{args.micro_batch_size}; peak of a process {peak / 1e9:,.0f} GFLOP/s"
        )
        print("| loop | useful tokens/s | MFU | useful share | lm_multinode.py is | turns |\n|---|---|---|---|---|---|")
        for name, some in useful.items():
            turns = " ".join(f"{rate:.0f}" for rate in some)
            mfu = medians[name] * flops / (peak * world.world_size)
            share, ratio = shares.get(name, 1.0), medians[OURS] / medians[name]
            print(f"| {name} | {medians[name]:,.0f} | {mfu:.3f} | {share:.2f} | {ratio:.2f} times | {turns} |")
    # Not a tidy end: the Trainer's and FSDP's models would be freed after the process group, which aborts.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="turns of each loop, after one to warm up")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--loops", default=f"{OURS},document,plain,Trainer", type=lambda text: text.split(","))
    parser.add_argument("--trainer-ddp", action="store_true", help="do not make accelerate shard on the CPU")
    parser.add_argument("--verbose", action="store_true", help="print every turn as it ends")
    parsed, others = parser.parse_known_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # four workers, as in the document
    if "Trainer" in parsed.loops and importlib.util.find_spec("accelerate") is None:
        parsed.loops.remove("Trainer")
        if "RANK" not in os.environ:
            print("accelerate is not installed, so without the Trainer: pip install accelerate")
    if OURS not in parsed.loops:
        parser.error(f"--loops must name {OURS}, with which the others are compared")
    if "RANK" in os.environ:
        worker(parsed, Path(os.environ["BENCHMARK_FOLDER"]), others)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            write_c4_like(Path(scratch), count=4000)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(parsed.processes)]
            environment = {**os.environ, "BENCHMARK_FOLDER": scratch}
            sys.exit(subprocess.run([*torchrun, *sys.argv], env=environment).returncode)
