"""Useful tokens per second of lm_multinode.py against three other ways to train the same model on the same cores.

    pip install accelerate  # only for the Trainer; without it that row is left out
    python tests/benchmarks/lm_throughput.py
    python tests/benchmarks/lm_throughput.py --against FOLDER    # with the script in another checkout instead

All train the same Llama (random weights) in the same precision, with the same number of sequences in a step, on the
same texts: random words, with lengths as in C4 (480 tokens on average, half of them below 260, a long tail). They take
turns in one run, one optimizer step in each; medians over the turns are printed. Only the loop differs:

    lm_multinode.py  its own load and train_step: texts packed into full sequences, FSDP2
    document         each text padded or cut to the sequence length by four workers, the whole model in one unit of
                     FSDP1, AdamW without fusion, `.item()` in every micro-batch
    plain            no FSDP: one process on all the cores, with the packed sequences, loss and AdamW of lm_multinode.py
    Trainer          transformers.Trainer with FSDP2 through accelerate, its defaults: texts cut to the sequence length
                     and padded to the longest in the micro-batch. On CPUs accelerate 1.15 takes DDP without a word;
                     here it is told of another device so that it shards, unless --trainer-ddp leaves it alone

The code that circulates for the document steps the optimizer in nearly every micro-batch and forgets to count the
processes in the global batch; here its accumulation is put right, which makes it faster.

A turn of a padded loop depends on which texts it meets. So turns measure tokens computed, pads included, and the share
that is useful is counted over all texts. Flags that are not listed here go to lm_multinode.py:
`--sharding-strategy SHARD_GRAD_OP`, `--precision fp32`; `--peak-tflops 0.5` adds a column, the MFU of useful tokens.

--against runs both checkouts' lm_multinode.py by the command line; a turn is two steps, after two to warm up.
"""

import argparse
import contextlib
import importlib.util
import json
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

import datasets
import transformers
from datasets.distributed import split_dataset_by_node
from shared import Words, compare_checkouts, print_table, write_llama
from transformers import DataCollatorForLanguageModeling

import common
import lm_multinode

OURS = "lm_multinode.py"


def write_c4_like(folder: Path, count: int) -> None:
    """Eight files in C4's format, and the model with a tokenizer for them."""
    words = Words(40_000)
    sample = [words.text(500, 0) for _ in range(1000)]
    write_llama(folder, sample, vocabulary=16_384)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    per_word = len(tokenizer(" ".join(sample[:100]))["input_ids"]) / 50_000
    for shard in range(8):
        texts = [words.text(480 / per_word, 1.1) for _ in range(count // 8)]
        lines = [json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in texts]
        (folder / f"c4-{shard}.json").write_text("".join(lines))


# ---- The loops. Each of these functions returns one that makes an optimizer step and returns the tokens it computed,
# pads included, on all processes.


def make_ours(args, world, source, tokenizer) -> Callable[[], int]:
    model, optimizer = lm_multinode.build(args, world, transformers.AutoConfig.from_pretrained(args.model))
    batches = lm_multinode.batches_on_device(args, world, source, tokenizer, {})

    def step() -> int:
        lm_multinode.train_step(args, world, model, optimizer, batches)
        return args.global_batch_size * args.seq_length

    return step


def make_plain(args, world, source, tokenizer) -> Callable[[], int]:
    tokens = args.global_batch_size * args.seq_length
    if world.rank != 0:
        return lambda: tokens  # the first process has all the cores meanwhile
    model = lm_multinode.load_model(args, None).train()
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    batches = lm_multinode.batches_on_device(args, world._replace(size=1), source, tokenizer, {})
    dtype = lm_multinode.PRECISIONS[args.precision][0]

    def forward(**batch):
        # As FSDP computes: with parameters in the lower precision, whose gradients add up in fp32.
        return functional_call(model, {name: p.to(dtype) for name, p in model.named_parameters()}, kwargs=batch)

    def step() -> int:
        threads = torch.get_num_threads()
        torch.set_num_threads(threads * world.size)
        optimizer.zero_grad()
        for _ in range(args.global_batch_size // args.micro_batch_size):
            (lm_multinode.summed_loss(forward, next(batches)[0]) / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.set_num_threads(threads)
        return tokens

    return step


def make_document(args, world, source, tokenizer) -> Callable[[], int]:
    model = FSDP(
        lm_multinode.load_model(args, None),
        mixed_precision=MixedPrecision(param_dtype=lm_multinode.PRECISIONS[args.precision][0]),
        use_orig_params=True,
        device_id=world.device,
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def tokenize(rows: dict) -> dict:
        texts = list(lm_multinode.texts_of(rows["text"], args.text_column))
        return tokenizer(texts, truncation=True, max_length=args.seq_length, padding="max_length")

    rows = source.map(tokenize, batched=True, remove_columns=["text"])
    rows = split_dataset_by_node(rows, world.rank, world.size)
    collate = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    batches = iter(DataLoader(rows, collate_fn=collate, batch_size=args.micro_batch_size, num_workers=4))
    micro_batches = args.global_batch_size // (args.micro_batch_size * world.size)

    def step() -> int:
        for number in range(1, micro_batches + 1):
            batch = next(batches)
            with model.no_sync() if number < micro_batches else contextlib.nullcontext():
                loss = model(**batch).loss / micro_batches
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


def run_trainer(args, options, world, texts, tokenizer, between) -> None:
    """Train with the Trainer. It calls `between(None)` before the first step, then `between(tokens)` after each."""
    settings = transformers.TrainingArguments(
        output_dir=args.output_dir / "trainer",
        use_cpu=True,
        bf16=args.precision == "bf16",
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.global_batch_size // (args.micro_batch_size * world.size),
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

    model = lm_multinode.load_model(args, None)
    trainer = transformers.Trainer(model, settings, counted, rows, callbacks=[hand_over])
    trainer.remove_callback(transformers.PrinterCallback)
    assert options.trainer_ddp or trainer.accelerator.is_fsdp2, "accelerate does not shard"
    trainer.train()


# ---- The turns


def worker(options: argparse.Namespace, flags: list) -> None:
    """One process: let the loops take turns, print rank 0's table."""
    sys.argv = [OURS, *map(str, flags), "--output-dir", str(options.folder)]
    args = lm_multinode.parse_args()
    world = common.setup(None)
    args.precision = common.choose_precision(args.precision, world.device)
    source, _ = lm_multinode.load_texts(args)
    config, tokenizer = lm_multinode.load_config_and_tokenizer(args, world, source)
    texts = list(lm_multinode.texts_of((row["text"] for row in source), "text"))
    random.Random(0).shuffle(texts)

    makers = {OURS: make_ours, "document": make_document, "plain": make_plain}
    loops = {name: make(args, world, source, tokenizer) for name, make in makers.items() if name in options.loops}
    rates: dict[str, list[float]] = {name: [] for name in options.loops}
    began = 0.0

    def measure(name: str, tokens: int) -> None:
        dist.barrier()
        rates[name].append(tokens / (time.perf_counter() - began))

    def others() -> None:
        nonlocal began
        for name, step in loops.items():
            dist.barrier()
            began = time.perf_counter()
            measure(name, step())

    def between(trainer_tokens: int | None) -> None:
        nonlocal began
        if trainer_tokens is not None:
            dist.all_reduce(total := torch.tensor(trainer_tokens))
            measure("Trainer", total.item())
            if len(rates["Trainer"]) == options.turns + 1:
                return
        others()
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
        mfu_share, rows = lm_multinode.mfu_per_token_per_second(args, world, config), []
        for name, some in rates.items():
            share = shares.get(name, 1.0)
            turns = [rate * share for rate in some[1:]]  # the first turn warms up
            row = {"loop": name, "useful tokens/s": statistics.median(turns), "useful share": share}
            row |= {"MFU": row["useful tokens/s"] * mfu_share} if mfu_share else {}
            rows.append(row | {"lm_multinode.py is": 0.0, "turns": " ".join(f"{rate:.0f}" for rate in turns)})
        ours = next(row["useful tokens/s"] for row in rows if row["loop"] == OURS)
        print(
            f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, "
            f"{os.cpu_count()} cores, {world.size} processes, {args.precision}, "
            f"steps of {args.global_batch_size} sequences of {args.seq_length} tokens in micro-batches of "
            f"{args.micro_batch_size}"
        )
        print_table(row | {"lm_multinode.py is": f"{ours / row['useful tokens/s']:.2f} times"} for row in rows)
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
    parser.add_argument("--against", type=Path, help="another checkout, to compare its lm_multinode.py with this one")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the processes
    options, more = parser.parse_known_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # four workers, as in the document
    if "Trainer" in options.loops and importlib.util.find_spec("accelerate") is None:
        options.loops.remove("Trainer")
        if not options.folder:
            print("accelerate is not installed, so without the Trainer: pip install accelerate")
    if OURS not in options.loops:
        parser.error(f"--loops must name {OURS}, with which the others are compared")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        flags = ["--model", folder, "--dataset", f"{folder}/c4-*.json", "--num-validation-texts", 20, "--device", "cpu"]
        flags += ["--micro-batch-size", options.micro_batch_size, "--global-batch-size", options.global_batch_size]
        flags += ["--seq-length", options.seq_length, *more]
        if options.folder:
            worker(options, flags)
        write_c4_like(folder, count=4000)
        if options.against:
            turns = {"processes": options.processes, "turns": options.turns, "steps": 2}
            compare_checkouts(options.against, OURS, *flags, **turns)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc_per_node", str(options.processes), *sys.argv, "--folder", scratch]
            sys.exit(subprocess.run(command).returncode)
