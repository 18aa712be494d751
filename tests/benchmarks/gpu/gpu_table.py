"""What the scripts do on one GPU: speed, MFU and memory of T5 and the 150m Llama, beside what the documents claim.

    python tests/benchmarks/gpu/gpu_table.py --keep FILE            # everything; again: what is not in FILE yet
    python tests/benchmarks/gpu/gpu_table.py --parts lm,lm-best     # or a part of it
    python tests/benchmarks/gpu/gpu_table.py --device cpu --tiny    # the same code on tiny shapes, to try it

Needs one CUDA GPU and no network: models have random weights in the shape of the real ones, tokens are random and fill
every sequence. Each row is a process of its own, so none inherits memory or compiled code from another; one that runs
out of memory says so and the next goes on. No row begins after `--minutes`. fp32 is fp32 itself; tf32 is what the
scripts make of fp32 on a GPU. After a turn of `--steps` steps to warm up and compile, the median of `--turns` turns
counts, each with one synchronization at its end. The parts, the most wanted first:

    lm-best  150m Llama, by lm_multinode.py's build() and train_step(), in bf16 with --compile: the largest MFU over
             micro-batches, recomputing, and the kernels of attention
    profile  where the time of a step of the best of lm-best goes: its kernels, and how long none runs
    loader   tokens/s that one process gets from the workers that pack texts, beside those of lm-best
    lm       150m: precision, --compile, version, recomputing
    t5-base  by t5_fsdp.py's build(), its loader and train_step(): 512 tokens an article, 152 a summary; prefetch
    init     until a t5-3b that starts on the CPU is sharded on the GPU, in three ways
    lm-1b, t5-3b  the same for models that fill a GPU
    scripts  each script by its command line, with its own data: the last rows that it reports

MFU is model FLOP/s over the device's bf16 peak, in every precision: for Llama by lm_multinode.py's formula, for T5
three times what torch's FLOP counter finds in a forward pass. `state_gb` is what the scripts say before they train, 16
bytes a parameter; `predicted_gb` is what will_it_fit.py says, for what `--compile` does not change; `peak_gb` and
`reserved_gb` are what PyTorch's allocator gave out and held.
"""

import argparse
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
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import lm_loader
import transformers
from datasets import Dataset
from shared import print_table, run_script
from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import common
import lm_multinode
import t5_fsdp

T5_SHAPES = {
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "tiny": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}
VOCABULARY, SOURCE, TARGET = 32128, 512, 152  # of T5; tokens in an article and a summary
PARTS = ("lm-best", "profile", "loader", "lm", "t5-base", "init", "lm-1b", "t5-3b", "scripts")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BEGAN = time.monotonic()
WAYS = ("FSDP1 on the CPU, then moved", "FSDP1 with device_id", "t5_fsdp.py, FSDP2")


def cases(part: str, tiny: bool) -> list[dict]:
    """The rows of a part, each as the settings of its process."""
    if part == "init":
        return [{"kind": "init", "model": "tiny" if tiny else "t5-3b", "way": way} for way in WAYS]
    if part == "loader":
        return [{"kind": "loader", "workers": workers} for workers in ((1,) if tiny else (1, 2, 4, 8))]
    kind = part.split("-")[0]
    model = {"lm": "150m", "lm-best": "150m", "lm-1b": "1b"}.get(part, part)
    base = {"kind": kind, "model": "tiny" if tiny else model, "fsdp": 2, "precision": "bf16"}
    base |= {"compile": False, "checkpointing": False, "prefetch": "pre", "kernel": "any"}
    batches = {"lm-best": (2, 4) if tiny else (8, 16, 32, 64), "lm-1b": (2,) if tiny else (4, 8, 16)}
    if part in batches:
        rows = [base | {"compile": True, "batch": batch} for batch in batches[part]]
        rows.append(rows[-1] | {"checkpointing": True})
        kernels = [] if part == "lm-1b" else ["math"] if tiny else ["flash", "cudnn", "efficient"]
        return rows + [rows[-2] | {"kernel": kernel} for kernel in kernels]
    base |= {"batch": 2 if tiny else 16 if part == "t5-base" else 8}
    changes = [{}, {"precision": "tf32"}, {"checkpointing": True}, {"fsdp": 1}]
    if part != "t5-3b":
        changes += [{"precision": "fp32"}, {"compile": True}]
    if kind == "t5":
        changes += [{"prefetch": "none"}]
    return [base | change for change in changes]


# ---- One row, in its own process


def parse(script, case: dict, *flags) -> argparse.Namespace:
    """A script's settings for a case."""
    switches = {"compile": "--compile", "checkpointing": "--activation-checkpointing"}
    precision = case["precision"].replace("tf32", "fp32")
    flags = [*flags, "--precision", precision, "--fsdp-version", case["fsdp"]]
    if script is t5_fsdp:
        flags += ["--backward-prefetch", case["prefetch"]]
    sys.argv = [script.__name__, *map(str, flags), *(flag for name, flag in switches.items() if case[name])]
    return script.parse_args()


def make_lm(case: dict, world, steps: int) -> tuple[Callable[[], object], float, int, float]:
    """A function that makes a step, the model FLOPs of a token, tokens of a sample, and GB of state."""
    batch, length = case["batch"], 128 if case["model"] == "tiny" else 1024
    flags = ["--model", case["model"], "--micro-batch-size", batch, "--global-batch-size", batch]
    args = parse(lm_multinode, case, *flags, "--seq-length", length, "--peak-tflops", 1)
    some_text = Dataset.from_dict({"text": ['{"text": "any"}']})
    config, _ = lm_multinode.load_config_and_tokenizer(args, world, some_text)
    config.vocab_size = 2048 if case["model"] == "tiny" else 32000
    flops = lm_multinode.mfu_per_token_per_second(args, world, config) * 1e12  # the share is that of one teraflop
    model, optimizer = lm_multinode.build(args, world, config)
    tokens = torch.randint(config.vocab_size, (batch, length + 1), device=world.device)
    batches = itertools.repeat(({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}, None))
    state_gb = 16 * model.num_parameters() / 2**30
    return lambda: lm_multinode.train_step(args, world, model, optimizer, batches), flops, length, state_gb


def t5_config(model: str) -> T5Config:
    """The shape, with the vocabulary of the pretrained models."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5Config(vocab_size=VOCABULARY, **ids, **T5_SHAPES[model])


def t5_forward_flops(config: T5Config) -> int:
    """Of one sample."""
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        ids = {"input_ids": torch.ones(1, SOURCE, dtype=torch.long), "labels": torch.ones(1, TARGET, dtype=torch.long)}
        T5ForConditionalGeneration(config)(**ids)
    return counter.get_total_flops()


def make_t5(case: dict, world, steps: int) -> tuple[Callable[[], object], float, int, float]:
    """The same, with the data loader."""
    args = parse(t5_fsdp, case, "--batch-size", case["batch"])
    config = t5_config(case["model"])

    def load_model(args, config) -> T5ForConditionalGeneration:
        with world.device:  # where three billion random numbers take no minutes
            return T5ForConditionalGeneration(config)

    t5_fsdp.load_model = load_model
    model, optimizer = t5_fsdp.build(args, world, config)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    tokens = torch.randint(2, VOCABULARY, (steps * case["batch"], SOURCE + TARGET)).tolist()
    rows = {"input_ids": [row[:SOURCE] for row in tokens], "labels": [row[SOURCE:] for row in tokens]}
    tokenizer = common.train_tokenizer(["any text"], 300, append_eos=True)
    numbers = torch.arange(len(tokens)).view(steps, -1).tolist()
    batches = t5_fsdp.batches_on_device(Dataset.from_dict(rows), numbers, DataCollatorForSeq2Seq(tokenizer), world)
    flops = 3 * t5_forward_flops(config) / (SOURCE + TARGET)
    state_gb = 16 * t5_fsdp.empty_model(config).num_parameters() / 2**30

    def step():
        return t5_fsdp.train_step(args, world, model, optimizer, scaler, next(batches))

    return step, flops, SOURCE + TARGET, state_gb


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def measure_steps(case: dict, options: argparse.Namespace, world: common.World) -> dict:
    """Speed and memory of training."""
    steps = (options.turns + 1) * options.steps + 3  # three for a profile
    step, flops, tokens, state_gb = {"lm": make_lm, "t5": make_t5}[case["kind"]](case, world, steps)
    times = []
    for _ in range(options.turns + 1):
        common.peak_memory(world.device)  # from here on
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        synchronize(world.device)
        times.append(time.perf_counter() - began)
    samples = options.steps * case["batch"] / statistics.median(times[1:])
    result = {"samples/s": samples, "tokens/s": samples * tokens, "mfu": "unknown"}
    result |= common.peak_memory(world.device) | {"state_gb": state_gb}
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else ""
    peaks = (tflops for part, tflops in lm_multinode.PEAK_TFLOPS.items() if part in name)
    if peak := options.peak_tflops or next(peaks, 0):
        result["mfu"] = samples * tokens * flops / (peak * 1e12)
    if case.get("profile"):
        print_profile(step, world.device)
    return result


def print_profile(step: Callable[[], object], device: torch.device) -> None:
    """The kernels of a step by their time, and for how much of it none of them ran."""
    step()
    synchronize(device)
    with profile() as profiler:
        began = time.perf_counter()
        step()
        synchronize(device)
        seconds = time.perf_counter() - began
    on_cpu = device.type == "cpu"
    by = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60))

    # On a CPU operators stand in for kernels.
    kind = DeviceType.CPU if on_cpu else DeviceType.CUDA
    ranges = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == kind)
    busy, last_end = 0.0, 0.0
    for start, end in ranges:
        busy += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    print(f"busy {busy / 1e6 / seconds:.1%} of a step of {1000 * seconds:.1f} ms")


def measure_loader(case: dict, world: common.World, options: argparse.Namespace) -> dict:
    """Tokens per second of so many workers, and how many cores they had."""
    with tempfile.TemporaryDirectory() as folder:
        lm_loader.write_texts(Path(folder), texts=1000 if options.tiny else 8000)
        rate = lm_loader.measure(Path(folder), world, case["workers"])
    return {"tokens/s": rate, "cores": os.cpu_count()}


def measure_init(case: dict, world: common.World) -> dict:
    """Seconds from a whole model on the CPU to a sharded one on the device."""
    config = t5_config(case["model"])
    with torch.device("meta"):  # minutes of random numbers would say nothing about FSDP
        model = T5ForConditionalGeneration(config)
    model.to_empty(device="cpu").tie_weights()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    t5_fsdp.load_model = lambda args, config: model
    args = parse(t5_fsdp, {"precision": "bf16", "fsdp": 2, "compile": False, "checkpointing": False, "prefetch": "pre"})
    began = time.perf_counter()
    if case["way"] == "t5_fsdp.py, FSDP2":
        t5_fsdp.shard_with_fsdp2(args, world, config)
    elif case["way"] == "FSDP1 with device_id":
        t5_fsdp.shard_with_fsdp1(args, world, config)
    else:
        device_id = world.device if world.device.type == "cpu" else None  # on a CPU FSDP1 needs it
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({T5Block}), device_id=device_id).to(world.device)
    synchronize(world.device)
    return {"seconds": time.perf_counter() - began}


def measure(case: dict, options: argparse.Namespace) -> None:
    """Print the result of a case as JSON, in the last line."""
    world = common.setup(common.find_accelerator(options.device))
    # The scripts compute fp32 products in TF32; the documents compare bf16 with fp32 itself.
    torch.set_float32_matmul_precision("highest" if case.get("precision") == "fp32" else "high")
    if case["kind"] == "init":
        result = measure_init(case, world)
    elif case["kind"] == "loader":
        result = measure_loader(case, world, options)
    else:
        chosen = [KERNELS[case["kernel"]]] if case["kernel"] in KERNELS else list(KERNELS.values())
        with sdpa_kernel(chosen):
            result = measure_steps(case, options, world)
    gc.collect()
    dist.destroy_process_group()
    print(json.dumps(result))


# ---- All rows


def run_case(case: dict, options: argparse.Namespace) -> tuple[dict, str]:
    """The result of a case, from a run before or measured now, and what it printed."""
    kept = {}
    if options.keep and options.keep.exists():
        for line in options.keep.read_text().splitlines():
            record = json.loads(line)
            kept[json.dumps(record["case"])] = record["result"], record["printed"]
    if json.dumps(case) in kept:
        return kept[json.dumps(case)]
    if time.monotonic() - BEGAN > 60 * options.minutes:
        return {"note": "no time left"}, ""
    predictor = start_prediction(case)  # on the CPU, while the GPU is measured
    result, printed = measure_case(case, options)
    if predictor:
        lines = predictor.communicate()[0].splitlines()
        if predictor.returncode == 0:
            result["predicted_gb"] = float(lines[-1].split()[1])
    if options.keep and "failed" not in result.get("note", ""):
        with options.keep.open("a") as file:
            file.write(json.dumps({"case": case, "result": result, "printed": printed}) + "\n")
    return result, printed


def start_prediction(case: dict) -> subprocess.Popen | None:
    """will_it_fit.py for a row, where it knows the model."""
    if case["kind"] not in ("lm", "t5") or case["fsdp"] == 1 or (case["kind"] == "t5" and case["model"] == "tiny"):
        return None
    precision = case["precision"].replace("tf32", "fp32")
    flags = ["--num-processes", 1, "--precision", precision, "--model", case["model"]]
    if case["checkpointing"]:
        flags += ["--activation-checkpointing"]
    if case["kind"] == "t5":
        flags = ["t5_fsdp.py", *flags, "--batch-size", case["batch"], "--max-target-length", TARGET]
    else:
        tiny = case["model"] == "tiny"
        batch = ["--micro-batch-size", case["batch"], "--global-batch-size", case["batch"]]
        flags = ["lm_multinode.py", *flags, *batch, "--seq-length", 128 if tiny else 1024]
        flags += ["--vocabulary", 2048 if tiny else 32000]
    tool = Path(__file__).parents[1] / "will_it_fit.py"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the GPU is for the row
    command = [sys.executable, tool, *flags]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment)


def measure_case(case: dict, options: argparse.Namespace) -> tuple[dict, str]:
    """The result of a case in a process of its own, and what it printed before; a "note" where there is no result."""
    environment = {**os.environ, "BENCHMARK_CASE": json.dumps(case)}
    settings = {"env": environment, "capture_output": True, "text": True, "timeout": options.timeout}
    try:
        finished = subprocess.run([sys.executable, __file__, *sys.argv[1:]], **settings)
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
    """Run the rows of a part and print each as soon as it is measured."""
    results = []

    def rows() -> Iterator[dict]:
        for case in cases(part, options.tiny):
            result, _ = run_case(case, options)
            results.append((case, result))
            names = {"init": ["seconds"], "loader": ["tokens/s", "cores"]}
            memory = ["state_gb", "predicted_gb", "peak_gb", "reserved_gb"]
            names = names.get(part, ["samples/s", "tokens/s", "mfu", *memory])
            shown = {name: value for name, value in case.items() if name != "kind"}
            yield shown | {name: result.get(name, "") for name in names} | {"note": result.get("note", "")}

    print(f"\n{part}\n")
    print_table(rows())
    return results


def compare(results: list[tuple[dict, dict]], what: str, value, other, field: str) -> str:
    """The range of the ratios of a field between rows that differ only in `what`."""
    measured: dict[str, dict] = {}
    for case, result in results:
        measured.setdefault(json.dumps(case | {what: None}), {})[case[what]] = result.get(field)
    pairs = [row for row in measured.values() if row.get(value) and row.get(other)]
    ratios = sorted(row[value] / row[other] for row in pairs)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "not measured"


def print_claims(results: dict[str, list[tuple[dict, dict]]]) -> None:
    """What the documents claim beside what was measured here: ratios, their range over the other settings."""
    bf16, checkpointing = ("precision", "bf16", "fp32"), ("checkpointing", True, False)
    claims = {
        "bf16: up to 4 times the speed of fp32": (*bf16, "tokens/s"),
        "bf16, speed of TF32": ("precision", "bf16", "tf32", "tokens/s"),
        "bf16: about 30% less memory, 0.7 of fp32's": (*bf16, "peak_gb"),
        "activation checkpointing, memory": (*checkpointing, "peak_gb"),
        "activation checkpointing, speed": (*checkpointing, "tokens/s"),
        "compile, speed": ("compile", True, False, "tokens/s"),
        "FSDP2, speed of FSDP1's": ("fsdp", 2, 1, "tokens/s"),
        "FSDP2, memory of FSDP1's": ("fsdp", 2, 1, "peak_gb"),
        "BACKWARD_PRE: 2 to 10% faster, with several GPUs": ("prefetch", "pre", "none", "tokens/s"),
    }
    models, title = ("lm", "t5-base", "t5-3b"), "the documents' claim, or what to expect"
    rows = [
        {title: claim} | {model: compare(results[model], *what) for model in models} for claim, what in claims.items()
    ]
    for case, result in results["init"]:
        claim = f"initialization on the device: several times faster; {case['way']}"
        if "note" in result:
            continue
        rows.append({title: claim, "lm": "", "t5-base": "", "t5-3b": f"{result['seconds']:.2f} s"})
    print("\nclaims\n")
    print_table(rows)


def run_scripts(options: argparse.Namespace) -> None:
    """Run each script by its command line, and print the last rows that it reports."""
    short = ["--max-steps", 5, "--log-every", 5] if options.tiny else []
    commands = [
        ["mnist_fsdp.py", *(["--model", "shallow", "--epochs", 1] if options.tiny else [])],
        ["t5_fsdp.py", *short],
        ["t5_fsdp.py", "--fsdp-version", 1, "--no-save-model", *short],  # before torch 2.14 a CPU cannot save it
        ["lm_multinode.py", *short],
        ["lm_multinode.py", "--compare-strategies"],
    ]
    if not options.tiny:  # its own data loader beside a fast device: its tokens/s must stay near lm-best's
        recipe = ["--model", "150m", "--max-steps", 60, "--no-save-model", "--compile", "--num-validation-texts", 20]
        recipe += ["--micro-batch-size", 32, "--global-batch-size", 32, "--seq-length", 1024]
        commands.append(["lm_multinode.py", *recipe])
    for script, *flags in commands:
        if time.monotonic() - BEGAN > 60 * options.minutes:
            print(f"\n{script} {' '.join(map(str, flags))}: no time left")
            continue
        began = time.perf_counter()
        try:
            records = run_script(script, *flags, "--device", options.device)
        except subprocess.CalledProcessError as error:
            records, code = [], error.returncode
        else:
            code = 0
        print(f"\n{script} {' '.join(map(str, flags))}: code {code}, {time.perf_counter() - began:.1f} s\n")
        records = records[-5:]
        names = dict.fromkeys(name for record in records for name in record if name != "run")
        print_table({name: record.get(name, "") for name in names} for record in records)


def main(options: argparse.Namespace) -> None:
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{date.today()}, {name}, {versions}, one process")
    results: dict[str, list] = {part: [] for part in PARTS}
    for part in options.parts:
        if part == "scripts":
            run_scripts(options)
        elif part == "profile":
            measured = results["lm-best"] or [(case, {}) for case in cases("lm-best", options.tiny)]
            case, _ = max(measured, key=lambda pair: pair[1].get("tokens/s", 0))
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
    parser.add_argument("--minutes", type=float, default=24.0, help="after which no row begins")
    parser.add_argument("--keep", type=Path, help="a file for the results, to go on from after a stop")
    parsed = parser.parse_args()
    parsed.parts = parsed.parts.split(",")
    if unknown := set(parsed.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    transformers.logging.set_verbosity_error()
    if "BENCHMARK_CASE" in os.environ:
        measure(json.loads(os.environ["BENCHMARK_CASE"]), parsed)
    else:
        main(parsed)
