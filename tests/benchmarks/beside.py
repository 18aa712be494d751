"""Compare the scripts with other code that trains the same model on the same cores: speed, and memory of a process.

    python tests/benchmarks/beside.py

All train in fp32, in two processes, with the same number of samples in a step. They take turns, each in new processes.
In each turn half of the steps warm up and the other half count. Padding does not count as tokens. Texts are as long as
C4's, and articles as long as WikiHow's.

    Trainer, Seq2SeqTrainer   transformers' own, which shard the model (tests/oracle.py) and get the script's samples.
                              They reduce gradients once a step, as `--gradient-sync last` does
    tutorial                  the loop of the tutorial that lm_multinode.py is based on: four workers pad or cut each
                              text, the model is one FSDP1 unit, AdamW is not fused, and every micro-batch calls
                              `.item()`. Its accumulation is corrected (docs/from-the-documents.md), so it is faster
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader

import datasets
import made_up
import shared
from datasets.distributed import split_dataset_by_node
from plain import lm_samples, t5_ordered, t5_samples
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from inside import parse, peak_gib, set_up, t5_articles


def tutorial(args, world):
    """Train without end, and yield the number of tokens of each step."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    model = FSDP(model, use_orig_params=True, device_id=world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tokenizer.pad_token = tokenizer.eos_token

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"], truncation=True, max_length=args.seq_length, padding="max_length")

    rows = datasets.load_dataset("json", data_files=args.dataset, split="train").select_columns(["text"])
    cut = tokenizer(rows[:2000]["text"], truncation=True, max_length=args.seq_length)["input_ids"]
    tokens = args.global_batch_size * statistics.mean(map(len, cut))  # without pads
    rows = rows.to_iterable_dataset(num_shards=8).map(tokenize, batched=True, remove_columns=["text"])
    rows = split_dataset_by_node(rows, world.rank, world.size)
    collate = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    batches = iter(DataLoader(rows, collate_fn=collate, batch_size=args.micro_batch_size, num_workers=4))
    micro_batches = args.global_batch_size // (args.micro_batch_size * world.size)
    while True:
        for micro_batch in range(1, micro_batches + 1):
            with model.no_sync() if micro_batch < micro_batches else contextlib.nullcontext():
                loss = model(**next(batches)).loss / micro_batches
                loss.backward()
            loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield tokens


def run_tutorial(options, flags: list) -> None:
    """Run one process of the tutorial's loop. Rank 0 writes the speed of the second half of the steps."""
    args = parse("lm_multinode.py", *flags)
    args.output_dir.mkdir(exist_ok=True)
    world = set_up(args)
    steps = tutorial(args, world)
    for _ in range(2):
        start = time.perf_counter()
        tokens = sum(itertools.islice(steps, options.steps))
        record = {"tokens/s": tokens / (time.perf_counter() - start), "peak_gib": peak_gib(world.device)}
    if world.rank == 0:
        (args.output_dir / "metrics.jsonl").write_text(json.dumps(record))
    os._exit(0)  # a normal exit would abort: the model would be freed after the process group


def trainer_loop(path: Path, model: Path, samples: list, micro_batch_size: int, options) -> list:
    """The command of transformers' trainer, for these samples of a script."""
    task = {"model": str(model), "samples": samples, "batch_size": 8, "micro_batch_size": micro_batch_size}
    task |= {"rates": [1e-4] * 2 * options.steps, "log_every": options.steps}
    path.write_text(json.dumps(task))
    return [shared.ROOT / "tests" / "oracle.py", path]


def lm_loops(folder: Path, options) -> dict[str, list]:
    """The command of each loop, without torchrun."""
    made_up.write_texts(folder, texts=5)
    model = made_up.write_llama(folder / "llama", layers=8)
    flags = [*options.flags, "--model", model, "--dataset", f"{folder}/*.json.gz", "--validate-every", 0]
    flags += ["--seq-length", 512, "--micro-batch-size", 1, "--global-batch-size", 8]
    args = parse("lm_multinode.py", *flags)
    samples = lm_samples(args, AutoTokenizer.from_pretrained(model), args.max_steps)
    script = [shared.ROOT / "lm_multinode.py", *flags]
    return {
        "lm_multinode.py": script,
        "with --gradient-sync last": [*script, "--gradient-sync", "last"],
        "Trainer": trainer_loop(folder / "lm.json", model, samples, 1, options),
        "tutorial": [__file__, *sys.argv[1:], "--tutorial", *flags],
    }


def t5_loops(folder: Path, options) -> dict[str, list]:
    made_up.write_articles(folder, 20 * options.steps + 20, "t5-small")
    flags = [*options.flags, "--model", folder, "--dataset", folder / "articles.csv", "--num-train-samples", 0]
    flags += ["--max-source-length", 256, "--max-target-length", 64, "--global-batch-size", 8, "--no-run-validation"]
    with contextlib.redirect_stdout(None):
        articles, _ = t5_articles(folder / "articles.csv")
    ordered = t5_ordered(t5_samples(articles, AutoTokenizer.from_pretrained(folder), 256, 64), 8)
    samples = list(itertools.chain.from_iterable(ordered[: 2 * options.steps]))
    return {
        "t5_fsdp.py": [shared.ROOT / "t5_fsdp.py", *flags],
        "Seq2SeqTrainer": trainer_loop(folder / "t5.json", folder, samples, 4, options),
    }


def loop_rows(make_loops, folder: Path, options):
    """Let the loops take turns, and yield a row for each."""
    loops = make_loops(folder, options)
    results = {name: [] for name in loops}
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // 2))}
    for turn, name in itertools.product(range(options.turns), loops):
        output = folder / f"{name} {turn}"
        command = [*shared.torchrun(2), *loops[name], "--output-dir", output]
        finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        if finished.returncode:
            sys.exit(f"{name}\n{finished.stderr[-5000:]}")
        results[name].append([record for record in shared.read_metrics(output) if "tokens/s" in record][-1])
    for name, records in results.items():
        speeds = " ".join(shared.cell(record["tokens/s"]) for record in records)
        yield {"loop": name, "tokens/s of each turn": speeds, "peak GiB": max(record["peak_gib"] for record in records)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="runs of each loop")
    parser.add_argument("--steps", type=int, default=4, help="steps to warm up, and again as many that count")
    parser.add_argument("--tutorial", action="store_true", help=argparse.SUPPRESS)  # for the processes of its loop
    options, flags = parser.parse_known_args()
    if options.tutorial:
        run_tutorial(options, flags)
    options.flags = ["--device", "cpu", "--precision", "fp32", "--lr", 1e-4, "--no-save-model"]
    options.flags += ["--max-steps", 2 * options.steps, "--log-every", options.steps]
    print(f"{shared.MACHINE}, two processes, fp32\n")
    for make_loops in (lm_loops, t5_loops):
        with tempfile.TemporaryDirectory() as scratch:
            shared.print_table(loop_rows(make_loops, Path(scratch), options))
            print()


if __name__ == "__main__":
    main()
