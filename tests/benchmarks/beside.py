"""Compare the scripts with other code that trains the same model on the same cores: speed, and memory of a process.

    python tests/benchmarks/beside.py

All train in fp32, with the same number of samples in a step. They take turns, each in new processes. In each turn half
of the steps warm up and the other half count; the table has medians over the turns. Padding does not count as tokens.
Texts are as long as C4's, articles as long as WikiHow's. On a busy machine, set OMP_WAIT_POLICY=passive.

    Trainer, Seq2SeqTrainer   transformers' own, which shard the model (tests/oracle.py) and get the script's samples
    Trainer without FSDP      the same in one process, on all cores
    tutorial                  the loop of the tutorial that lm_multinode.py is based on: four workers pad or cut each
                              text, the model is one FSDP1 unit, AdamW is not fused, and every micro-batch calls
                              `.item()`. Its accumulation is corrected (docs/from-the-documents.md), so it is faster
    loader                    how fast the LM's worker packs texts for one process. It must be faster than a GPU trains

The last table has the LM's loader beside a GPU that needs 60 ms for 16 sequences of 1,024 tokens (here, a sleep): the
mean time of 200 steps, by the number of steps prepared ahead. All eight streams fill up at about the same step.
"""

import argparse
import contextlib
import gzip
import itertools
import json
import os
import platform
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
import transformers
from datasets.distributed import split_dataset_by_node
from plain import lm_samples, t5_ordered, t5_samples
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from inside import WORKER_OPTIONS, lm_loader, parse, peak_gib, set_up, t5_articles


def tutorial(args, world):
    """Train without end, and yield the number of tokens of each step."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    model = FSDP(model, use_orig_params=True, device_id=world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    tokenizer.pad_token = tokenizer.eos_token

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"], truncation=True, max_length=args.seq_length, padding="max_length")

    files = [gzip.decompress(path.read_bytes()) for path in sorted(Path(args.model).parent.glob("*.gz"))]
    texts = [json.loads(line)["text"] for file in files for line in file.splitlines()]
    cut = tokenizer(texts[:2000], truncation=True, max_length=args.seq_length)["input_ids"]
    tokens = args.global_batch_size * statistics.mean(map(len, cut))  # without pads
    rows = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=8)
    rows = split_dataset_by_node(rows.map(tokenize, batched=True, remove_columns=["text"]), world.rank, world.size)
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


def loader(args, world):
    """The LM's loader alone. Its one process has all streams."""
    steps = lm_loader(args, AutoTokenizer.from_pretrained(args.model))
    while True:  # time many steps at once: a block fills about 100 sequences
        yield sum(args.global_batch_size * args.seq_length for _ in itertools.islice(steps, 200))


ALONE = ("Trainer without FSDP", "loader")  # in one process
LOOPS = {"tutorial": tutorial, "loader": loader}


def run_loop(options, flags: list) -> None:
    """Run one process of a loop. Rank 0 writes the speed of the second half of the steps, as the scripts do."""
    args = parse("lm_multinode.py", *flags)
    args.output_dir.mkdir(exist_ok=True)
    world = set_up(args)
    steps = LOOPS[options.loop](args, world)
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
    """The command of each loop, without `python` or torchrun."""
    made_up.write_texts(folder, texts=20)
    model = made_up.write_llama(folder / "llama", layers=8)
    flags = [*options.flags, "--model", model, "--dataset", f"{folder}/*.json.gz", "--validate-every", 0]
    flags += ["--seq-length", 512, "--micro-batch-size", 1, "--global-batch-size", 8]
    args = parse("lm_multinode.py", *flags)
    samples = lm_samples(args, AutoTokenizer.from_pretrained(model), args.max_steps)
    loops = {"lm_multinode.py": [shared.ROOT / "lm_multinode.py", *flags]}
    loops["Trainer"] = loops["Trainer without FSDP"] = trainer_loop(folder / "lm.json", model, samples, 1, options)
    return loops | {name: [__file__, *sys.argv[1:], "--loop", name, *flags] for name in LOOPS}


def t5_loops(folder: Path, options) -> dict[str, list]:
    made_up.write_articles(folder, 20 * options.steps + 20, "t5-small")
    flags = [*options.flags, "--model", folder, "--dataset", folder / "articles.csv", "--num-train-samples", 0]
    flags += ["--max-source-length", 256, "--max-target-length", 64, "--global-batch-size", 8, "--no-run-validation"]
    with contextlib.redirect_stdout(None):
        articles, _ = t5_articles(folder / "articles.csv")
    ordered = t5_ordered(t5_samples(articles, AutoTokenizer.from_pretrained(folder), 256, 64), 8)
    samples = list(itertools.chain.from_iterable(ordered[: 2 * options.steps]))
    loops = {"t5_fsdp.py": [shared.ROOT / "t5_fsdp.py", *flags]}
    return loops | {"Seq2SeqTrainer": trainer_loop(folder / "t5.json", folder, samples, 4, options)}


def rows(loops: dict[str, list], folder: Path, options):
    """Let the loops take turns, and yield a row for each."""
    results = {name: [] for name in loops}
    for turn, name in itertools.product(range(options.turns), loops):
        processes = 1 if name in ALONE else 2
        output = folder / f"{name} {turn}"
        start = shared.torchrun(processes) if processes > 1 else [sys.executable]  # torchrun would make it DDP
        command = [*start, *loops[name], "--output-dir", output]
        environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count() // processes)}
        finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        if finished.returncode:
            sys.exit(f"{name}\n{finished.stderr[-5000:]}")
        results[name].append([record for record in shared.read_metrics(output) if "tokens/s" in record][-1])
    for name, records in results.items():
        speeds = [record["tokens/s"] for record in records]
        row = {"loop": name, "tokens/s": statistics.median(speeds), "of each turn": " ".join(map(shared.cell, speeds))}
        yield row | {"peak GiB of a process": statistics.median(record["peak_gib"] for record in records)}


def steady_rows(folder: Path, options):
    """Yield the milliseconds of a step in which a GPU computes for 60 ms, for each number of steps to prepare ahead."""
    made_up.write_texts(folder, texts=20)
    flags = ["--dataset", f"{folder}/*.json.gz", "--seq-length", 1024, "--global-batch-size", 16]
    args = parse("lm_multinode.py", *flags)
    for turn, ahead in itertools.product(range(options.turns), (2, 8, 16)):
        WORKER_OPTIONS["prefetch_factor"] = ahead
        steps = lm_loader(args, AutoTokenizer.from_pretrained(folder))
        seconds = []
        for _ in range(220):
            start = time.perf_counter()
            next(steps)
            time.sleep(0.06)
            seconds.append(time.perf_counter() - start)
        del steps  # ends its worker
        row = {"turn": turn + 1, "steps ahead": ahead, "mean ms of a step": 1000 * statistics.mean(seconds[20:])}
        yield row | {"longest": 1000 * max(seconds[20:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="runs of each loop")
    parser.add_argument("--steps", type=int, default=4, help="steps to warm up, and again as many that count")
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)  # for the processes of a loop
    options, flags = parser.parse_known_args()
    if options.loop:
        run_loop(options, flags)
    options.flags = ["--device", "cpu", "--precision", "fp32", "--lr", 1e-4, "--no-save-model"]
    options.flags += ["--max-steps", 2 * options.steps, "--log-every", options.steps]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()},", end=" ")
    print(f"{os.cpu_count()} cores, two processes, fp32")
    for loops_of in (lm_loops, t5_loops):
        with tempfile.TemporaryDirectory() as scratch:
            print()
            shared.print_table(rows(loops_of(Path(scratch), options), Path(scratch), options))
    with tempfile.TemporaryDirectory() as scratch:
        print()
        shared.print_table(steady_rows(Path(scratch), options))


if __name__ == "__main__":
    main()
