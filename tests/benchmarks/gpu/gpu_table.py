"""What the scripts do on one GPU: speed, MFU and memory of T5 and the 150m Llama, beside what the documents claim.

    python tests/benchmarks/gpu/gpu_table.py                        # everything
    python tests/benchmarks/gpu/gpu_table.py --parts lm,lm-best     # or a part of it
    python tests/benchmarks/gpu/gpu_table.py --device cpu --tiny    # the same code on tiny shapes, to try it

Needs one CUDA GPU and no network: models have random weights in the shape of the real ones, tokens are random and fill
every sequence. Each row is a process of its own, so none inherits memory or compiled code from another; one that runs
out of memory says so and the next goes on. After a turn of `--steps` steps to warm up and compile, the median of
`--turns` turns counts, each with one synchronization at its end. The parts:

    lm       150m Llama, by lm_multinode.py's build() and train_step(): precision, --compile, version, checkpointing
    lm-best  the same in bf16 with --compile under larger micro-batches and --chunked-loss: the largest MFU
    t5-base, t5-3b  by t5_fsdp.py's build() and train_one_epoch(), articles of 512 tokens, summaries of 152
    init     until a t5-3b that starts on the CPU is sharded on the GPU, in three ways
    profile  the kernels in which the best of lm-best spends its time
    scripts  each script by its command line, with its own data: what it reports

MFU is model FLOP/s over the device's bf16 peak, in every precision: for Llama by lm_multinode.py's formula, for T5
three times what torch's FLOP counter finds in a forward pass.
"""

import argparse
import functools
import gc
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
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
import transformers
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

import common
import lm_multinode
import t5_fsdp

T5_SHAPES = {
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "tiny": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}
VOCABULARY, SOURCE, TARGET = 32128, 512, 152  # of T5; tokens in an article and a summary
PARTS = ("lm", "lm-best", "t5-base", "t5-3b", "init", "profile", "scripts")


def cases(part: str, tiny: bool) -> list[dict]:
    """The rows of a part, each as the settings of its process."""
    if part in ("lm", "t5-base", "t5-3b"):
        models = {"lm": ("150m", 8), "t5-base": ("t5-base", 16), "t5-3b": ("t5-3b", 8)}
        model, batch = ("tiny", 2) if tiny else models[part]
        precisions = (("fp32", False), ("bf16", False), ("bf16", True))
        grid = itertools.product((2, 1), precisions, (False, True))
        rows = [
            {"fsdp": fsdp, "precision": precision, "compile": compiled, "checkpointing": checkpointing}
            for fsdp, (precision, compiled), checkpointing in grid
        ]
        return [{"kind": part.split("-")[0], "model": model, "batch": batch, "chunked": False, **row} for row in rows]
    if part == "lm-best":
        best = {"kind": "lm", "model": "tiny" if tiny else "150m", "fsdp": 2, "precision": "bf16", "compile": True}
        grid = itertools.product((2, 4) if tiny else (8, 16, 32, 64), (False, True))
        return [best | {"checkpointing": False, "batch": batch, "chunked": chunked} for batch, chunked in grid]
    ways = ("FSDP1 on the CPU, then moved", "FSDP1 with device_id", "t5_fsdp.py, FSDP2")
    return [{"kind": "init", "model": "tiny" if tiny else "t5-3b", "way": way} for way in ways]


# ---- One row, in its own process


def flags(case: dict) -> list[str]:
    """The command-line flags that a case stands for."""
    switches = {"compile": "--compile", "checkpointing": "--activation-checkpointing", "chunked": "--chunked-loss"}
    chosen = [flag for name, flag in switches.items() if case[name]]
    return ["--precision", case["precision"], "--fsdp-version", str(case["fsdp"]), *chosen]


def measure_lm(case: dict, options: argparse.Namespace, world: common.World) -> tuple[float, float, int]:
    """Tokens per second, model FLOPs of a token, and tokens of a sample."""
    batch = str(case["batch"])
    sys.argv = ["lm_multinode.py", "--model", case["model"], "--micro-batch-size", batch, "--global-batch-size", batch]
    sys.argv += flags(case)
    args = lm_multinode.parse_args()
    args.accumulation = 1
    tokenizer = common.train_tokenizer(world, ["any text"], vocab_size=300, append_eos=False)
    config = lm_multinode.load_config(args, tokenizer)
    whole = lm_multinode.skeleton(args, config, torch.device("meta"))
    flops = lm_multinode.flops_per_token(args, config, sum(p.numel() for p in whole.parameters()))
    model, optimizer = lm_multinode.build(args, world, config)
    tokens = torch.randint(config.vocab_size, (case["batch"], args.seq_length + 1), device=world.device)
    batches = itertools.repeat({"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    times = []
    for turn in range(options.turns + 1):
        began = time.perf_counter()
        for _ in range(options.steps):
            lm_multinode.train_step(args, world, model, optimizer, batches)
        synchronize(world.device)
        times.append(time.perf_counter() - began)
        if turn == 0:
            common.reset_peak_memory(world.device)
    if case.get("profile"):
        with profile() as profiler:
            lm_multinode.train_step(args, world, model, optimizer, batches)
            synchronize(world.device)
        by = "self_cpu_time_total" if world.device.type == "cpu" else "self_device_time_total"
        print(profiler.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60))
    rate = options.steps * case["batch"] * args.seq_length / statistics.median(times[1:])
    return rate, flops, args.seq_length


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def t5_config(model: str) -> T5Config:
    """The shape, with the vocabulary of the pretrained models."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5Config(vocab_size=VOCABULARY, **ids, **T5_SHAPES[model])


class Turns:
    """What train_one_epoch reports to: keeps the rate of every turn."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rates = device, []

    def report(self, _: str, tokens_per_second: float, **__) -> None:
        self.rates.append(tokens_per_second)
        if len(self.rates) == 1:
            common.reset_peak_memory(self.device)


def measure_t5(case: dict, options: argparse.Namespace, world: common.World) -> tuple[float, float, int]:
    """As `measure_lm`, through train_one_epoch with its data loader."""
    count = (options.turns + 1) * options.steps * case["batch"]
    sys.argv = ["t5_fsdp.py", "--model", "random", "--batch-size", str(case["batch"])]
    sys.argv += ["--log-every", str(options.steps), *flags(case)]
    args = t5_fsdp.parse_args()
    config = t5_config(case["model"])
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        ids = {"input_ids": torch.ones(1, SOURCE, dtype=torch.long), "labels": torch.ones(1, TARGET, dtype=torch.long)}
        T5ForConditionalGeneration(config)(**ids)
    with world.device:
        model = T5ForConditionalGeneration(config)
    model, optimizer = t5_fsdp.build(args, world, model)
    tokens = torch.randint(2, VOCABULARY, (count, SOURCE + TARGET)).tolist()
    rows = Dataset.from_dict(
        {"input_ids": [row[:SOURCE] for row in tokens], "labels": [row[SOURCE:] for row in tokens]}
    )
    collate = DataCollatorForSeq2Seq(common.train_tokenizer(world, ["any text"], vocab_size=300), pad_to_multiple_of=8)
    turns = Turns(world.device)
    t5_fsdp.train_one_epoch(
        args,
        world,
        model,
        optimizer,
        torch.amp.GradScaler(world.device.type, enabled=False),
        rows,
        collate,
        t5_fsdp.Progress(run_date=""),
        torch.tensor(t5_fsdp.EMPTY_WINDOW, device=world.device),
        turns,
        common.StopRequests(world),
        None,
    )
    return statistics.median(turns.rates[1:]), 3 * counter.get_total_flops() / (SOURCE + TARGET), SOURCE + TARGET


def initialize(case: dict, world: common.World) -> float:
    """Seconds from a whole model on the CPU to a sharded one on the device."""
    model = t5_fsdp.skeleton(t5_config(case["model"]), own_output_layer=False)
    model.apply(t5_fsdp.make_empty("cpu"))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # minutes of random numbers would say nothing about FSDP
    sys.argv = ["t5_fsdp.py", "--model", "random", "--precision", "bf16"]
    args = t5_fsdp.parse_args()
    mesh = init_device_mesh(world.device.type, (1,))
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={t5_fsdp.T5Block})
    began = time.perf_counter()
    if case["way"] == "t5_fsdp.py, FSDP2":
        model = t5_fsdp.shard_with_fsdp2(model, mesh, args)
    elif case["way"] == "FSDP1 with device_id" or world.device.type == "cpu":  # which FSDP1 needs on a CPU
        model = FSDP(model, auto_wrap_policy=policy, device_id=world.device)
    else:
        model = FSDP(model, auto_wrap_policy=policy).to(world.device)
    synchronize(world.device)
    return time.perf_counter() - began


def measure(case: dict, options: argparse.Namespace) -> None:
    """Print the result of a case as JSON, in the last line."""
    world = common.setup_distributed(options.device)
    if case["kind"] == "init":
        result = {"seconds": initialize(case, world)}
    else:
        rate, flops, tokens = {"lm": measure_lm, "t5": measure_t5}[case["kind"]](case, options, world)
        # Of bf16 in every row, so that rows can be compared.
        peak = lm_multinode.peak_flops(argparse.Namespace(peak_tflops=options.peak_tflops, precision="bf16"), world)
        result = {"samples_per_second": rate / tokens, "tokens_per_second": rate}
        result |= {"mfu": rate * flops / peak if peak else "unknown"}
        result |= {"peak_memory_gb": common.format_gb(common.peak_memory_bytes(world.device))}
    gc.collect()
    dist.destroy_process_group()
    print(json.dumps(result))


# ---- All rows


def run_case(case: dict, options: argparse.Namespace) -> tuple[dict, str]:
    """The result of a case in a process of its own, and what it printed before; a "note" where there is no result."""
    environment = {**os.environ, "BENCHMARK_CASE": json.dumps(case)}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": options.timeout}
    try:
        finished = subprocess.run([sys.executable, __file__, *sys.argv[1:]], **options)
    except subprocess.TimeoutExpired:
        return {"note": "took too long"}, ""
    if finished.returncode == 0:
        *lines, result = finished.stdout.splitlines()
        return json.loads(result), "\n".join(lines)
    if "OutOfMemoryError" in finished.stderr:
        return {"note": "out of memory"}, ""
    print(finished.stderr[-3000:], file=sys.stderr)
    return {"note": f"failed with code {finished.returncode}"}, ""


def run_part(part: str, options: argparse.Namespace) -> list[tuple[dict, dict]]:
    """Run the rows of a part and print them as a table."""
    results = [(case, run_case(case, options)[0]) for case in cases(part, options.tiny)]
    fields = next((list(result) for _, result in results if "note" not in result), ["result"])
    shown = []
    for case, result in results:
        cells = {
            name: str(value) if isinstance(value, bool) else value for name, value in case.items() if name != "kind"
        }
        missing = {fields[0]: result["note"]} | dict.fromkeys(fields[1:], "") if "note" in result else {}
        shown.append(cells | (missing or result))
    print(f"\n{part}\n\n{common.format_table(shown)}", flush=True)
    return results


def compare(results: list[tuple[dict, dict]], what: str, value, other, field: str) -> str:
    """The range of the ratios of a field between rows that differ only in `what`."""
    measured = {json.dumps(case | {what: None}): {} for case, _ in results}
    for case, result in results:
        measured[json.dumps(case | {what: None})][case[what]] = result.get(field)
    pairs = [row for row in measured.values() if row.get(value) and row.get(other)]
    ratios = sorted(row[value] / row[other] for row in pairs)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "not measured"


def print_claims(results: dict[str, list[tuple[dict, dict]]]) -> None:
    """What the documents claim beside what was measured here: ratios, their range over the other settings."""
    bf16, checkpointing = ("precision", "bf16", "fp32"), ("checkpointing", True, False)
    claims = {
        "bf16: up to 4 times the speed of fp32": (*bf16, "tokens_per_second"),
        "bf16: about 30% less memory, 0.7 of fp32's": (*bf16, "peak_memory_gb"),
        "activation checkpointing, memory": (*checkpointing, "peak_memory_gb"),
        "activation checkpointing, speed": (*checkpointing, "tokens_per_second"),
        "compile, speed": ("compile", True, False, "tokens_per_second"),
        "FSDP2, speed of FSDP1's": ("fsdp", 2, 1, "tokens_per_second"),
        "FSDP2, memory of FSDP1's": ("fsdp", 2, 1, "peak_memory_gb"),
    }
    models = ("lm", "t5-base", "t5-3b")
    print(f"\nclaims\n\n| the documents' claim, or what to expect | {' | '.join(models)} |\n|---|---|---|---|")
    for claim, what in claims.items():
        print(f"| {claim} | {' | '.join(compare(results[model], *what) for model in models)} |")
    for case, result in results["init"]:
        seconds = f"{result['seconds']:.2f} s" if "seconds" in result else result["note"]
        print(f"| initialization on the device: several times faster; {case['way']} | | | {seconds} |")


def run_scripts(options: argparse.Namespace) -> None:
    """Run each script by its command line, and print its last report."""
    short = ["--max-steps", "5", "--log-every", "5"] if options.tiny else []
    commands = [
        [
            "mnist_fsdp.py",
            "--model",
            "shallow" if options.tiny else "both",
            *(["--epochs", "1"] if options.tiny else []),
        ],
        ["t5_fsdp.py", *short],
        ["t5_fsdp.py", "--fsdp-version", "1", *short],
        ["lm_multinode.py", *short],
        ["lm_multinode.py", "--compare-strategies"],
    ]
    if not options.tiny:  # its own data loader beside a fast device: the reported wait must stay small
        recipe = ["--model", "150m", "--tokenizer", "builtin", "--max-steps", "60", "--no-save-model", "--compile"]
        commands.append(["lm_multinode.py", *recipe, "--micro-batch-size", "32", "--num-validation-texts", "20"])
    for script, *arguments in commands:
        with tempfile.TemporaryDirectory() as folder:
            more = ["--device", options.device, "--output-dir", folder]
            began = time.perf_counter()
            finished = subprocess.run(
                [sys.executable, ROOT / script, *arguments, *more], capture_output=True, text=True, cwd=ROOT
            )
            print(f"\n{script} {' '.join(arguments)}: code {finished.returncode}, {time.perf_counter() - began:.1f} s")
            reports = [
                line for line in finished.stdout.splitlines() if line.startswith(("epoch", "step", "|", "fastest"))
            ]
            print("\n".join(reports[-8:]) if finished.returncode == 0 else finished.stderr[-2000:], flush=True)


def main(options: argparse.Namespace) -> None:
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{common.date_of_run()}, {name}, {versions}, one process")
    results: dict[str, list] = {part: [] for part in PARTS}
    for part in options.parts:
        if part == "scripts":
            run_scripts(options)
        elif part == "profile":
            case = max(
                results["lm-best"], key=lambda pair: pair[1].get("mfu", 0), default=(cases("lm-best", options.tiny)[0],)
            )[0]
            print(f"\nprofile of {case}\n\n```\n{run_case(case | {'profile': True}, options)[1]}\n```")
        else:
            results[part] = run_part(part, options)
    print_claims(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of the table, with commas between (default: all)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of a GPU that lm_multinode.py does not know")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a row")
    parsed = parser.parse_args()
    parsed.parts = parsed.parts.split(",")
    if unknown := set(parsed.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    transformers.logging.set_verbosity_error()
    if "BENCHMARK_CASE" in os.environ:
        measure(json.loads(os.environ["BENCHMARK_CASE"]), parsed)
    else:
        main(parsed)
