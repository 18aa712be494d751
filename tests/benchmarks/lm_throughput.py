"""Useful tokens per second of lm_multinode.py against two other ways to train the same model on the same cores.

    python tests/benchmarks/lm_throughput.py

All train the same Llama (random weights) in the same precision, with the same number of sequences in a step, on the
same texts: random words, with lengths as in C4 (480 tokens on average, half of them below 260, a long tail). They take
turns, each turn in processes of its own; medians over the steps of all turns are printed. Only the loop differs:

    lm_multinode.py  its own loader and train_step: texts packed into full sequences, FSDP2
    document         each text padded or cut to the sequence length by four workers, the whole model in one unit of
                     FSDP1, AdamW without fusion, `.item()` in every micro-batch
    plain            no FSDP: one process on all the cores, with the packed sequences, loss and AdamW of lm_multinode.py

The code that circulates for the document steps the optimizer in nearly every micro-batch and forgets to count the
processes in the global batch; here its accumulation is put right, which makes it faster. The useful share of what it
computes, without pads, is counted over all texts.

Other flags go to lm_multinode.py: `--sharding-strategy SHARD_GRAD_OP`, `--precision bf16`.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.func import functional_call
from torch.utils.data import DataLoader

import datasets
import shared
import transformers
from datasets.distributed import split_dataset_by_node
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from inside import lm_config, lm_loader, lm_texts, lm_trainer, parse, set_up

OURS = "lm_multinode.py"


def write_c4_like(folder: Path, count: int) -> None:
    """Eight files in C4's format, and the model with a tokenizer for them."""
    words = shared.Words(40_000)
    sample = [words.text(500, 0) for _ in range(1000)]
    shared.write_llama(folder, sample, vocabulary=16_384)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    per_word = len(tokenizer(" ".join(sample[:100]))["input_ids"]) / 50_000
    for shard in range(8):
        texts = [words.text(480 / per_word, 1.1) for _ in range(count // 8)]
        lines = [json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in texts]
        (folder / f"c4-{shard}.json").write_text("".join(lines))


def read_texts(folder: Path) -> list[str]:
    lines = [line for path in sorted(folder.glob("c4-*.json")) for line in path.read_text().splitlines()]
    return [json.loads(line)["text"] for line in lines]


# ---- The loops: each makes steps, and yields the tokens that all processes computed in one, pads included ------------


def our_steps(args, world, tokenizer):
    config, _ = lm_config(args, world)
    source, _ = lm_texts(args)
    batches = lm_loader(args, tokenizer, world.rank, world.size, None, source)
    _, step = lm_trainer(args, world, config, batches)
    while True:
        step()
        yield args.global_batch_size * args.seq_length


def plain_steps(args, world, tokenizer):
    """In a launch of one process."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    source, _ = lm_texts(args)
    batches = lm_loader(args, tokenizer, 0, 1, None, source)
    tokens = args.global_batch_size * args.seq_length
    while True:
        optimizer.zero_grad()
        for _ in range(args.global_batch_size // args.micro_batch_size):
            batch, _ = next(batches)
            # As FSDP computes: with parameters in the lower precision, whose gradients add up in fp32.
            weights = {name: parameter.to(dtype_of(args)) for name, parameter in model.named_parameters()}
            logits = functional_call(model, weights, kwargs={"input_ids": batch["input_ids"]}).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield tokens


def document_steps(args, world, tokenizer):
    model = FSDP(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train(),
        mixed_precision=MixedPrecision(param_dtype=dtype_of(args)),
        use_orig_params=True,
        device_id=world.device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tokenizer.pad_token = tokenizer.eos_token

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"], truncation=True, max_length=args.seq_length, padding="max_length")

    texts = datasets.Dataset.from_dict({"text": read_texts(Path(args.model))}).to_iterable_dataset(num_shards=8)
    rows = split_dataset_by_node(texts.map(tokenize, batched=True, remove_columns=["text"]), world.rank, world.size)
    collate = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    batches = iter(DataLoader(rows, collate_fn=collate, batch_size=args.micro_batch_size, num_workers=4))
    micro_batches = args.global_batch_size // (args.micro_batch_size * world.size)
    while True:
        for number in range(1, micro_batches + 1):
            with model.no_sync() if number < micro_batches else contextlib.nullcontext():
                loss = model(**next(batches)).loss / micro_batches
                loss.backward()
            loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield args.global_batch_size * args.seq_length


LOOPS = {OURS: our_steps, "document": document_steps, "plain": plain_steps}


def dtype_of(args) -> torch.dtype:
    return torch.bfloat16 if args.precision == "bf16" else torch.float32


# ---- Turns -----------------------------------------------------------------------------------------------------------


def worker(options, flags: list) -> None:
    """One process of a turn; rank 0 writes the tokens per second of each step after the first, which warms up."""
    args = parse(OURS, *flags, "--output-dir", options.folder)
    world = set_up(args)
    steps = LOOPS[options.loop](args, world, AutoTokenizer.from_pretrained(options.folder))
    rates = []
    for _ in range(options.steps + 1):
        dist.barrier()
        began = time.perf_counter()
        tokens = next(steps)
        dist.barrier()
        rates.append(tokens / (time.perf_counter() - began))
    if world.rank == 0:
        (options.folder / "rates.json").write_text(json.dumps(rates[1:]))
        (options.folder / "precision").write_text(args.precision)
    os._exit(0)  # not a tidy end: the models would be freed after the process group, which aborts


def take_turns(options) -> None:
    rates = {name: [] for name in options.loops}
    for _ in range(options.turns):
        for name in rates:
            start = shared.torchrun(1 if name == "plain" else options.processes)
            command = [*start, *sys.argv, "--folder", str(options.folder), "--loop", name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            rates[name] += json.loads((options.folder / "rates.json").read_text())

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    batch = f"{options.global_batch_size} sequences of {options.seq_length} tokens, {options.micro_batch_size} at once"
    precision = (options.folder / "precision").read_text()
    print(f"{versions}, {os.cpu_count()} cores, {options.processes} processes, {precision}, steps of {batch}")
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    lengths = [len(ids) for ids in tokenizer(read_texts(options.folder))["input_ids"]]
    useful = statistics.mean(min(length, options.seq_length) for length in lengths) / options.seq_length
    shares = {name: useful if name == "document" else 1.0 for name in rates}
    speeds = {name: statistics.median(some) * shares[name] for name, some in rates.items()}
    rows = []
    for name, some in rates.items():
        row = {"loop": name, "useful tokens/s": speeds[name], "useful share": shares[name]}
        row["lm_multinode.py is"] = f"{speeds[OURS] / speeds[name]:.2f} times"
        rows.append(row | {"computed, all steps": " ".join(f"{rate:.0f}" for rate in some)})
    shared.print_table(rows)


def flags_of(options, more: list) -> list:
    folder = options.folder
    flags = ["--model", folder, "--dataset", f"{folder}/c4-*.json", "--num-validation-texts", 20, "--device", "cpu"]
    flags += ["--micro-batch-size", options.micro_batch_size, "--global-batch-size", options.global_batch_size]
    return [*flags, "--seq-length", options.seq_length, *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="of each loop")
    parser.add_argument("--steps", type=int, default=2, help="in a turn, after one to warm up")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS), help=f"among them {OURS}")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # four workers, as in the document
    if options.folder:
        worker(options, flags_of(options, more))
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = Path(scratch)
        write_c4_like(options.folder, count=4000)
        take_turns(options)


if __name__ == "__main__":
    main()
