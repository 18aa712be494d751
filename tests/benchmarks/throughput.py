"""Speed of a script beside other ways to train the same model on the same cores.

    python tests/benchmarks/throughput.py lm_multinode.py --micro-batch-size 4 --global-batch-size 16 --precision bf16
    python tests/benchmarks/throughput.py t5_fsdp.py --fsdp-version 1 --precision fp32

All train the same model (random weights) in the same precision, with the same number of samples in a step, on the same
random words: texts of C4's lengths for the LM (480 tokens on average, half of them below 260, a long tail), articles of
WikiHow's for T5 (580 words, summaries of 60). They take turns, each turn in processes of its own; medians over the
steps of all turns are printed, for the LM in tokens without pads, for T5 in articles. Only the loop differs:

    script     its own loader and step
    plain      the LM without FSDP: one process on all the cores, with the batches, the loss and the AdamW of the script
    document   the LM's: each text padded or cut to the sequence length by four workers, the whole model in one unit of
               FSDP1, AdamW without fusion, `.item()` in every micro-batch. T5's: texts padded to 512 and summaries to
               150 tokens, one by one in two workers, FSDP1, AdamW without fusion, `.item()` in every step

The code that circulates for the LM's document steps the optimizer in nearly every micro-batch and forgets to count the
processes in the global batch; here its accumulation is put right, which makes it faster. Other flags are the script's.
"""

import argparse
import contextlib
import csv
import functools
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
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.func import functional_call
from torch.utils.data import DataLoader, DistributedSampler

import datasets
import shared
import transformers
from datasets.distributed import split_dataset_by_node
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Block

from inside import lm_config, lm_loader, lm_texts, lm_trainer, parse, set_up, t5_batches, t5_trainer, train_tokenizer

# ---- Data and models -------------------------------------------------------------------------------------------------
SHAPES = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "tiny": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


def write_articles(folder: Path, count: int, shape: str, mean: int = 580, sigma: float = 0.7) -> None:
    """A CSV with texts of a log-normal length, summaries a tenth as long, a tokenizer for it, and the model."""
    words = shared.Words(20_000)
    texts = [words.text(mean, sigma) for _ in range(count)]
    with open(folder / "articles.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["headline", "title", "text"])
        for number, text in enumerate(texts):
            writer.writerow([words.text(mean / 10, sigma), f"How to {number}x", text])
    train_tokenizer(texts[:300], 8192, append_eos=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **SHAPES[shape])
    T5ForConditionalGeneration(config).save_pretrained(folder)


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


# ---- The loops: each makes steps, and yields what all processes have trained on in one -------------------------------
def lm_script(args, world, tokenizer):
    config, _ = lm_config(args)
    files, _ = lm_texts(args)
    steps = lm_loader(args, tokenizer, world.rank, world.size, None, files)
    _, step = lm_trainer(args, world, config, steps)
    while True:
        step()
        yield args.global_batch_size * args.seq_length


def t5_script(args, world, tokenizer):
    config, batches = t5_batches(args, world)
    step = t5_trainer(args, world, config, batches)
    while True:
        step()
        yield args.batch_size * world.size


def lm_plain(args, world, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    options = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    files, _ = lm_texts(args)
    tokens = args.global_batch_size * args.seq_length
    for micro_batches, _ in lm_loader(args, tokenizer, 0, 1, None, files):
        optimizer.zero_grad()
        for batch in micro_batches:
            # As FSDP computes: with parameters in the lower precision, whose gradients add up in fp32.
            weights = {name: parameter.to(dtype_of(args)) for name, parameter in model.named_parameters()}
            logits = functional_call(model, weights, kwargs={"input_ids": batch["input_ids"]}).logits
            loss_sum = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (loss_sum / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield tokens


def lm_document(args, world, tokenizer):
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

    lines = [line for path in sorted(Path(args.model).glob("c4-*.json")) for line in path.read_text().splitlines()]
    texts = datasets.Dataset.from_dict({"text": [json.loads(line)["text"] for line in lines]})
    cut = tokenizer(texts["text"][:], truncation=True, max_length=args.seq_length)["input_ids"]
    tokens = args.global_batch_size * statistics.mean(map(len, cut))  # without pads
    rows = texts.to_iterable_dataset(num_shards=8).map(tokenize, batched=True, remove_columns=["text"])
    rows = split_dataset_by_node(rows, world.rank, world.size)
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
        yield tokens


def t5_document(args, world, tokenizer):
    dtype = dtype_of(args)
    model = FSDP(
        AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype=torch.float32).train(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        device_id=world.device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with open(args.dataset, newline="") as file:
        rows = list(csv.DictReader(file))

    def tokenize(row: dict) -> dict:
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        source = tokenizer([row["text"]], max_length=512, **options)
        target = tokenizer([row["headline"]], max_length=150, **options)
        return {name: tensor[0] for name, tensor in {**source, "labels": target["input_ids"]}.items()}

    def collate(some: list) -> dict:
        return torch.utils.data.default_collate([tokenize(row) for row in some])

    sampler = DistributedSampler(rows, rank=world.rank, num_replicas=world.size, shuffle=True)
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=sampler, num_workers=2, collate_fn=collate)
    for batch in loader:
        batch = {name: tensor.to(world.device) for name, tensor in batch.items()}
        optimizer.zero_grad()
        kept = ("input_ids", "attention_mask", "labels")
        loss = model(**{name: batch[name] for name in kept}).loss
        loss.backward()
        optimizer.step()
        loss.item()
        yield args.batch_size * world.size


def dtype_of(args) -> torch.dtype:
    return torch.bfloat16 if args.precision == "bf16" else torch.float32


LOOPS = {
    "lm_multinode.py": {"script": lm_script, "plain": lm_plain, "document": lm_document},
    "t5_fsdp.py": {"script": t5_script, "document": t5_document},
}
UNITS = {"lm_multinode.py": "tokens/s", "t5_fsdp.py": "articles/s"}


# ---- Turns -----------------------------------------------------------------------------------------------------------
def flags_of(options, more: list) -> list:
    """Of the script; `more` are the user's."""
    flags = ["--model", options.folder, "--device", "cpu"]
    if options.script == "lm_multinode.py":
        flags += ["--dataset", f"{options.folder}/c4-*.json", "--num-validation-texts", 20, "--seq-length", 1024]
        flags += ["--micro-batch-size", 8, "--global-batch-size", 32]
    else:
        flags += ["--dataset", options.folder / "articles.csv", "--num-train-samples", 0, "--batch-size", 4]
    return [*flags, *more]


def worker(options, more: list) -> None:
    """One process of a turn; rank 0 writes the speed of each step after the first, which warms up."""
    args = parse(options.script, *flags_of(options, more), "--output-dir", options.folder)
    world = set_up(args)
    steps = LOOPS[options.script][options.loop](args, world, AutoTokenizer.from_pretrained(options.folder))
    rates = []
    for _ in range(options.steps + 1):
        dist.barrier()
        began = time.perf_counter()
        count = next(steps)
        dist.barrier()
        rates.append(count / (time.perf_counter() - began))
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
    precision = (options.folder / "precision").read_text()
    print(f"{options.script}, {versions}, {os.cpu_count()} cores, {options.processes} processes, {precision}")
    unit = UNITS[options.script]
    speeds = {name: statistics.median(some) for name, some in rates.items()}
    rows = []
    for name, some in rates.items():
        row = {"loop": name, unit: speeds[name], "of the script's": speeds[name] / speeds[options.loops[0]]}
        rows.append(row | {"all steps": " ".join(f"{rate:.4g}" for rate in some)})
    shared.print_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=LOOPS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="of each loop")
    parser.add_argument("--steps", type=int, default=3, help="in a turn, after one to warm up")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the processes
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    options.loops = list(LOOPS[options.script])
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # four workers, as in the document
    if options.folder:
        worker(options, more)
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = Path(scratch)
        if options.script == "lm_multinode.py":
            write_c4_like(options.folder, count=4000)
        else:
            write_articles(options.folder, 40 * options.processes * (options.steps + 2) + 100, "t5-small")
        take_turns(options)


if __name__ == "__main__":
    main()
