"""What the training scripts share: processes, metrics, checkpoints, and the data for summarization.

Copy this file together with the script you start from. What is sharded, and how, is in the script.
"""

import argparse
import contextlib
import csv
import ctypes
import gc
import hashlib
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
import zlib
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

from tqdm import tqdm

# ---- Flags -------------------------------------------------------------------------------------


class HelpFormatter(
    argparse.RawDescriptionHelpFormatter,
    argparse.ArgumentDefaultsHelpFormatter,
):
    """The header of a script as it is written, and the default of every flag."""


def make_parser(header: str) -> argparse.ArgumentParser:
    """argparse, with a script's header as its help."""
    sys.stdout.reconfigure(errors="replace")  # a screen without UTF-8 loses letters, not the run
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]",
        description=header,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    # From one rank, not from each
    parser.error = lambda message: fail(f"{message} (--help lists every flag)", code=2)
    return parser


def at_least(minimum: int, kind=int):
    """A type for argparse: whole numbers, or floats, from `minimum` on."""

    def parse(text: str):
        number = kind(text)
        if not minimum <= number < math.inf:  # false for nan, too
            raise argparse.ArgumentTypeError(f"{text} is not a number of {minimum} or more")
        return number

    parse.__name__ = kind.__name__  # argparse names it where `kind` fails
    return parse


def add_run_flags(group):
    add = group.add_argument
    folder = Path("output", Path(sys.argv[0]).stem)
    optional = argparse.BooleanOptionalAction
    add("--num-processes", default=0, type=at_least(0), help="0: the GPUs, or two on a CPU")
    add("--device", default="auto", help="auto: GPUs, if any; cpu; or by name: cuda, xpu")
    add("--seed", default=1, type=at_least(0), help="of weights, data order and dropout")
    add("--output-dir", default=folder, type=Path, help="one for each run")
    add("--save-model", default=True, action=optional, help="write the trained model")


def add_checkpoint_flags(group):
    add = group.add_argument
    add("--log-every", default=25, type=at_least(1), help="steps between lines")
    add(
        "--checkpoint-every",
        default=0,
        type=at_least(0),
        help="save every so many steps, and at the end (T5: also after each epoch); 0: only at"
        " Ctrl-C, SIGTERM or when the terminal closes",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")


# ---- Processes and devices ---------------------------------------------------------------------

# A cluster's, Ctrl-C, and that of a terminal that closes; but what nohup ignores stays ignored.
STOPS = [
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN
]

# A collective of all processes that takes longer fails. While one process downloads, tokenizes or
# writes a model, the others wait for it. The groups inside a mesh keep PyTorch's own limit.
TIMEOUT = timedelta(minutes=30)


class UserError(Exception):
    """Bad input. Its text is one sentence that says what is wrong and what to do."""


# What torchrun tells each of its processes
TORCHRUN = set("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split())


class World(NamedTuple):
    rank: int
    local_rank: int  # on this node
    size: int
    local_size: int  # processes on this node
    device: torch.device


def run(main, args):
    """Call `main(args, world)` in every process; without torchrun, start the processes first."""
    try:
        device_type = find_device_type(args.device)
        num_processes = args.num_processes
        if num_processes == 0:
            num_processes = 2 if device_type == "cpu" else torch.accelerator.device_count()
        if num_processes > 1 and TORCHRUN.isdisjoint(os.environ):
            start_processes(num_processes)
            return
        world = setup(device_type)
        if args.num_processes not in (0, world.local_size):
            raise UserError(
                f"--num-processes {args.num_processes}: torchrun has started {world.local_size} on"
                " this node; leave the flag out"
            )
        main(args, world)
    except (UserError, OSError, dist.DistNetworkError) as error:  # OSError: files, disk, Hub
        # A DataLoader's worker hands on a whole traceback, of which the end counts.
        message = re.split(r"\n\S*(?:Error|Timeout): ", str(error))[-1]
        fail(" ".join(message.split()), code=2)
    except dcp.api.CheckpointException as error:  # above its last line are all ranks' tracebacks
        fail(f"cannot save or read a checkpoint: {str(error).splitlines()[-1]}", code=2)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        # A DataLoader had no batch in time, or a worker was killed.
        if re.match("DataLoader|unable to allocate shared memory", str(error)):
            fail(f"{error}; is /dev/shm full? In Docker, try --shm-size 8g", code=2)
        fail(traceback.format_exc(), code=1)

    # `main` has returned. Its model must be gone before the process group, or Python may abort.
    gc.collect()
    for worker in multiprocessing.active_children():  # one that still reads: Python would wait
        worker.kill()
    dist.destroy_process_group()


def fail(message: str, code: int):
    """Print an error and end this process at once. code: 2 for a user's mistake, 1 for a crash."""
    if os.environ.get("RANK", "0") != "0" or "by peer" in message:
        # When one rank fails, those that wait for it fail too. Mostly rank 0 knows the cause and
        # prints it. torchrun then ends the others while they wait here: one error is printed.
        if StopRequest.received:  # a SIGTERM came before: most likely torchrun's
            os._exit(code)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    with contextlib.suppress(OSError):  # nobody reads it, after `2>&1 | head` for example
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # an orderly exit can hang: another rank may wait in a collective


def start_processes(count: int, *more_flags: str):
    """Start this script again in `count` processes, with torchrun. `more_flags` follow its own."""
    # Without --local-addr torchrun asks for the host by its own name, which may be unknown.
    options = f"--standalone --local-addr localhost --nproc_per_node {count}"
    if signal.SIGHUP not in STOPS:  # under nohup; unasked, torchrun would stop
        options += " --signals-to-handle SIGTERM,SIGINT,SIGQUIT"
    command = [*options.split(), *sys.argv, *more_flags]
    print("torchrun", shlex.join(command), flush=True)
    logging.disable()  # torchrun's own report is long, and the script has said what is wrong
    try:
        torchrun(command)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        for code in codes:
            if code < 0 and code != -signal.SIGTERM:  # torchrun sends SIGTERM to the others
                # SIGKILL most often means that memory ran out.
                sys.exit(f"a process was killed by {signal.Signals(-code).name}")
        sys.exit(max(1, *codes))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    finally:  # torchrun leaves handlers of its own, which raise SignalException
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)


def find_device_type(name: str) -> str:
    """`--device`, in which auto is the accelerator that torch finds, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator else "cpu"
    if found == "mps":  # Apple's, on which FSDP does not run
        found = "cpu"
    if name not in ("auto", "cpu", found):
        raise UserError(
            f"--device {name}: torch {torch.__version__} finds none; install its build or use"
            " --device cpu"
        )
    return found if name == "auto" else name


def setup(device_type: str) -> World:
    """Read torchrun's environment, choose the device and start the process group. A collective."""
    given = TORCHRUN & os.environ.keys()
    if given not in (set(), TORCHRUN):
        raise UserError(f"unset {' '.join(given)}, or start with torchrun, which sets all it needs")
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    # All cores of the node, divided. torchrun gives a process one thread: too few to train on a
    # CPU, and for the optimizer of --cpu-offload.
    cores = os.cpu_count()
    if sys.platform == "linux":
        import resource

        cores = len(os.sched_getaffinity(0))
        # Shells allow few open files. Each stream of the LM has some, and each process sockets.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(max(1, cores // local_size))

    device = torch.device("cpu")
    backend = "gloo"
    if device_type != "cpu":
        num_devices = torch.accelerator.device_count()
        if local_size > num_devices and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise UserError(
                f"{local_size} processes on this node are more than its {num_devices} GPUs; to let"
                " them share, set NCCL_MULTI_RANK_GPU_ENABLE=1 (NVIDIA, with NCCL 2.30 or newer)"
            )
        device = torch.device(device_type, local_rank % num_devices)
        # Before the process group, or all processes open a context on device 0.
        torch.accelerator.set_device_index(device.index)
        # Tensors on the CPU go over gloo, those on the device over NCCL or XCCL.
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device)}"
        # TF32 on NVIDIA GPUs from Ampere on: faster fp32 products, with 10 bits of mantissa.
        torch.set_float32_matmul_precision("high")

    store = dist.HashStore()  # without torchrun: one process
    if given:
        # After a restart torchrun's store still has the addresses of dead processes
        # (pytorch#135712), so rank 0 serves a new one, two ports further. Not where torchrun took
        # any port that was free, above 32767: there others do so, too.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        port = int(os.environ["MASTER_PORT"])
        os.environ["MASTER_PORT"] = str(port + 2 if port < 32768 else port // 2)
        store = None
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    return World(rank, local_rank, size, local_size, device)


def first_on_node(world, make):
    """Run `make()` in the first process of each node, and give what it returns to the others there:
    so one process downloads, tokenizes and asks the Hub. Rank 0 goes before the other nodes, which
    may share its cache. A collective."""
    made = make() if world.rank == 0 else None
    dist.barrier()
    if world.local_rank == 0:
        if world.rank != 0:
            made = make()
        for other in range(world.rank + 1, world.rank + world.local_size):
            dist.send_object_list([made], dst=other)
        return made
    received = [None]
    dist.recv_object_list(received, src=world.rank - world.local_rank)
    return received[0]


def from_rank0(value):
    """Rank 0's value, on every rank. A collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


class StopRequest:
    """One of STOPS. The training loop asks on_any_rank(), saves, and ends."""

    received = False  # of the class: `fail` asks, too

    def __init__(self):
        self.sum = torch.tensor(0)
        self.sent = None
        for number in STOPS:
            signal.signal(number, StopRequest.receive)

    # Static, so that no handler holds an object: a worker replaces the handlers, and would crash
    # when it freed `sent` with them.
    @staticmethod
    def receive(number, _frame):
        StopRequest.received = True
        if number == signal.SIGINT and dist.get_world_size() == 1:
            # A second Ctrl-C ends the run. (Of several processes torchrun is the one that waits.)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_any_rank(self) -> bool:
        """Whether any rank had received one when this was called a step before: one step late, so
        that no step waits for the sum over all ranks. A collective, on the CPU."""
        if self.sent:
            self.sent.wait()
        on_any_rank = self.sum.item() > 0
        self.sum = torch.tensor(int(self.received))
        self.sent = dist.all_reduce(self.sum, async_op=True)
        return on_any_rank


def protect_worker(_worker: int):
    """Terminals and clusters signal all processes, but the step that is under way still needs its
    workers. They end with the training process, and not before."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: also when the training process is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# For DataLoaders that have workers
WORKERS = {
    # Python 3.14's default on Linux is a fork server, which would be the parent that they end with.
    "multiprocessing_context": "fork" if sys.platform == "linux" else None,
    "worker_init_fn": protect_worker,
    # Seconds. A batch that does not fit into /dev/shm never comes. Less than TIMEOUT, after which
    # the ranks that wait for this one would fail first.
    "timeout": 1500,
}


def choose_precision(name: str, device: torch.device) -> str:
    """`--precision`, in which auto is bf16 on a GPU that computes in it, else fp32."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "fp32"
    module = torch.get_device_module(device)
    return "bf16" if module.is_bf16_supported(including_emulation=False) else "fp32"


# ---- Metrics -----------------------------------------------------------------------------------


def sum_over_ranks(values: torch.Tensor, group=None):
    """Sum over all ranks, or those of a group: a number, or a list of them. A collective, but not
    for every step: the host waits until the device has computed the values."""
    total = values.cpu().clone()  # cpu() is what waits; on the CPU it is no copy
    dist.all_reduce(total, group=group)
    return total.tolist()


def describe_state(model, shards: int) -> str:
    """What each process will hold of a model, which may be on the meta device. Adam in fp32 holds
    12 bytes beside each weight that is trained: the gradient and two moments."""
    count = 0
    trained = 0
    num_bytes = 0
    for parameter in model.parameters():
        count += parameter.numel()
        trained += parameter.numel() * parameter.requires_grad
        num_bytes += parameter.nbytes
    num_bytes += 12 * trained
    text = f"{count:,} parameters"
    if trained < count:
        text += f", {trained:,} trained"
    return f"{text}, {num_bytes / shards / 2**30:.3f} GiB of state a process"


def state_gib(model, optimizer) -> float:
    """GiB that this rank holds of parameters, gradients and optimizer state."""
    num_bytes = 0
    for parameter in model.parameters():
        for tensor in [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if torch.is_tensor(tensor):
                num_bytes += tensor.nbytes
    return num_bytes / 2**30


def peak_gib(device: torch.device) -> float:
    """The most GiB since the last call: of the device's memory, or of this process's on a CPU."""
    if device.type != "cpu":
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return peak / 2**30

    reset = Path("/proc/self/clear_refs")
    if not reset.exists():  # not Linux
        return math.nan
    peak_kib = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    reset.write_text("5")
    return int(peak_kib) / 2**20


# How `Log.metrics` prints numbers and names; all others have four decimals.
FORMATS = {
    "step": "5,",
    "epoch": "",
    "lr": ".1e",
    "perplexity": ",.1f",
    "grad_norm": ".3f",
    "tokens/s": "6,.0f",
    "samples/s": "6,.0f",
    "peak_gib": ".2f",
    "mfu": ".2f",
    "strategy": "19",
}


class Log:
    """Rank 0's voice: lines on the screen, and records in `metrics.jsonl`."""

    def __init__(self, world, folder: Path):
        self.is_rank0 = world.rank == 0
        self.path = folder / "metrics.jsonl"
        if self.is_rank0 and self.path.exists():  # without a last line that was cut
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self.run = time.strftime("%Y-%m-%d-%H-%M-%S")
        self.start = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self.print(f"run      {world.size} x {world.device.type}, torch {torch.__version__}")

    def print(self, text: str):
        if self.is_rank0:
            # After Ctrl-C with `| tee`, or in a closed terminal, nobody reads: the run must save.
            with contextlib.suppress(OSError), tqdm.external_write_mode():
                print(text, flush=True)

    def write(self, record: dict):
        """Append a record, whose values have names. Call it on every rank, before saving: rank 0
        writes, and all end if a loss or a gradient is not finite."""
        for name in ("loss", "val_loss", "grad_norm"):
            if not math.isfinite(record.get(name, 0)):
                raise UserError(f"{name} is not finite; start again with a lower --lr")
        if self.is_rank0:
            record = {"run": self.run, "seconds": round(time.time() - self.start, 3), **record}
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def metrics(self, record: dict):
        """Write a record, and print it as a line."""
        fields = [f"{name} {value:{FORMATS.get(name, '.4f')}}" for name, value in record.items()]
        self.print(" | ".join(fields))
        self.write(record)

    def bar(self, iterable, text: str, total: int):
        disable = None if self.is_rank0 else True  # with None it shows on a terminal only
        return tqdm(iterable, text, total, leave=False, disable=disable)


# ---- Checkpoints -------------------------------------------------------------------------------


def step_folders(folder: Path) -> list[Path]:
    """Those of `save_checkpoint`, oldest first. All else in `checkpoints` is the user's."""
    own = [path for path in folder.glob("checkpoints/step-*") if path.name[5:].isdecimal()]
    return sorted(own, key=lambda path: int(path.name[5:]))


def finished_checkpoints(folder: Path) -> list[Path]:
    """Oldest first. torch.distributed.checkpoint writes `.metadata` last."""
    return [path for path in step_folders(folder) if (path / ".metadata").exists()]


def find_checkpoint(args, model_folder: Path) -> Path | None:
    """The newest checkpoint, if there is one, as rank 0 sees it. Raises UserError where the run
    would write over what it starts from, or over another run. A collective."""
    if args.save_model and model_folder.resolve() == Path(args.model).resolve():
        raise UserError(
            f"the trained model would replace --model {args.model}; choose another --output-dir"
        )
    newest = from_rank0([None, *finished_checkpoints(args.output_dir)][-1])
    if args.resume and newest is None and dist.get_rank() == 0:
        print("resume   finds no checkpoint: from the beginning", flush=True)
    if newest and not args.resume:
        raise UserError(
            f"{args.output_dir} holds checkpoints of an earlier run; add --resume, or choose"
            " another --output-dir"
        )
    return newest


def save_checkpoint(folder: Path, progress: dict, args, model, optimizer, tokenizer, world):
    """Save `checkpoints/step-N`, every rank its own shards, and keep the newest 2. A collective.

    progress: the `step`, and what else JSON can hold; the same on all ranks.
    """
    path = folder / "checkpoints" / f"step-{progress['step']:07d}"
    path.mkdir(parents=True, exist_ok=True)  # on every rank, as dcp.save looks into it
    if world.rank == 0:
        progress = progress | {"settings": vars(args)}
        (path / "progress.json").write_text(json.dumps(progress, default=str))
        tokenizer.save_pretrained(path)  # --resume must not train another one

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)

    if world.rank == 0:
        keep = finished_checkpoints(folder)[-2:]
        for other in set(step_folders(folder)) - set(keep):  # half-written ones, too
            shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(path: Path, args, must_match: list[str], model, optimizer) -> dict:
    """Load what `save_checkpoint` saved, on any number of ranks. Returns its `progress`. A
    collective.

    must_match: names of the flags that must be those of the run that saved.
    """
    progress = json.loads((path / "progress.json").read_text())
    for name in must_match:
        before = progress["settings"].get(name)
        if before != getattr(args, name):
            raise UserError(
                f"{path} was made with --{name.replace('_', '-')} {before}; resume with it, or"
                " choose another --output-dir"
            )

    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)  # in place
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return progress


def load_pretrained(kind, name: str, what: str, **options):
    """`kind.from_pretrained(name)`: of a folder, or of the Hub. Raises UserError that names it, and
    what it should have."""
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # each library that reads a file has its own
        place = "" if Path(name).exists() else " is no folder here, and on the Hub it"
        raise UserError(f"{name}{place} has no {what} to read: {error}") from error


def load_tokenizer(name: str):
    """Of a model's folder or Hub name. Raises UserError where there is none."""
    from transformers import AutoTokenizer  # here, as the scripts without text need not wait for it

    tokenizer = load_pretrained(AutoTokenizer, name, "tokenizer")
    # Without files transformers makes one that knows special tokens only, and T5's a space.
    if len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise UserError(f"{name} has no tokenizer; save one there: tokenizer.save_pretrained()")
    return tokenizer


def untie(meta_model, full_model, world):
    """Untie in `meta_model` what is not tied in rank 0's `full_model`. A collective.

    transformers ties by the config, but not what a checkpoint holds twice with different values:
    the output layers of FLAN-T5 and mT5, for example.
    """
    tied = None
    if world.rank == 0:
        tied = set(full_model.all_tied_weights_keys)
    for name in meta_model.all_tied_weights_keys.keys() - from_rank0(tied):
        module = meta_model.get_submodule(name.removesuffix(".weight"))
        is_trained = module.weight.requires_grad  # not with LoRA
        module.weight = torch.nn.Parameter(torch.empty_like(module.weight), is_trained)


def load_weights(model, full_model, world, offload: bool):
    """Give a sharded model, which is on the meta device, its memory and the weights of rank 0's
    `full_model`; each rank keeps its shards. A collective."""
    model.to_empty(device="cpu" if offload else world.device)
    weights = full_model.state_dict() if world.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)

    # to_empty has emptied the buffers, and a state dict does not hold them all (the frequencies of
    # rotary positions, for example), nor the settings of generate().
    not_in_state_dict = None
    if world.rank == 0:
        not_in_state_dict = (list(full_model.buffers()), full_model.generation_config)
    full_buffers, model.generation_config = from_rank0(not_in_state_dict)
    for buffer, full_buffer in zip(model.buffers(), full_buffers, strict=True):
        buffer.data = full_buffer.to(world.device)


# What `from_pretrained` takes for a model's weights, their index, or an adapter
WEIGHTS = (
    r"(pytorch_|adapter_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|adapter_config\.json"
)


def export(model, meta_model, tokenizer, folder: Path, world):
    """Gather the weights on rank 0's CPU and save them for `from_pretrained`. A collective, which
    takes the place of FSDP1's `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`.

    meta_model: the model on the meta device, neither wrapped nor sharded, for `save_pretrained`.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)

    if world.rank == 0:
        # Tied weights have several names, of which a file has one.
        kept = [*meta_model.named_parameters(), *meta_model.named_buffers()]
        weights = {name: weights[name] for name, _ in kept if name in weights}
        meta_model.generation_config = model.generation_config
        partial = folder / ".partial"  # the model before stays until this one is whole
        shutil.rmtree(partial, ignore_errors=True)  # a killed run's
        meta_model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)

        for file in folder.iterdir():
            if re.fullmatch(WEIGHTS, file.name):
                file.unlink()
        # Weights last: if this run is killed here, the folder has none, and loads as no model.
        ignore = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(partial, folder, ignore=ignore, dirs_exist_ok=True)
        for file in partial.glob("*.safetensors"):
            shutil.copymode(folder / "tokenizer_config.json", file)  # theirs: owner only
            file.replace(folder / file.name)
        shutil.rmtree(partial)
    dist.barrier()  # rank 0's disk may be slow


# ---- Summarization data ------------------------------------------------------------------------

# The built-in articles: a text only implies what is done, so its summary cannot be copied from it.
SENTENCES = {
    "Hold the {} under the tap until no soil is left.": "Wash",
    "Let a cold stream carry the dirt off the {}.": "Wash",
    "Take the skin off the {} with a short knife.": "Peel",
    "Strip the {} down to the bare flesh.": "Peel",
    "Turn the {} into pieces as thin as a coin.": "Slice",
    "Work along the {} with a blade, a finger apart.": "Slice",
    "Leave the {} in a pot of bubbling water.": "Boil",
    "Once the pot rolls and steams, lower the {} in.": "Boil",
    "Drop the {} into a pan of hot oil.": "Fry",
    "A sizzling skillet gives the {} a brown crust.": "Fry",
    "Keep the {} far below zero overnight.": "Freeze",
    "Ice should form all over the {} by morning.": "Freeze",
}
THINGS = "apples beans carrots mushrooms noodles onions pears potatoes spinach tomatoes".split()
ASIDES = ("There is no need to hurry.", "It may rain later.", "Experts disagree.")


def builtin_article(number: int) -> dict:
    """An article in WikiHow's columns, the same on every machine."""
    choose = random.Random(number)
    sentences = [choose.choice(ASIDES)]
    headlines = []
    for thing in choose.sample(THINGS, choose.randint(2, 3)):
        sentence = choose.choice(list(SENTENCES))
        sentences.append(sentence.format(thing))
        headlines.append(f"{SENTENCES[sentence]} the {thing}.")
    return {
        "title": f"How to Spend Day {number} at Home",
        "text": " ".join(sentences),
        "headline": "\n".join(headlines),
    }


def load_articles(name: str, text_column: str, summary_column: str, max_summary_share: float):
    """Two `datasets.Dataset` of texts and summaries: to train on, and 5% to validate on.

    name: builtin, a file, or a Hub dataset. Raises UserError where it cannot be used.
    """
    import datasets  # here, as the scripts without text need not wait for it

    # Nested on purpose. datasets caches results under a hash of the function. For a nested function
    # it hashes the code, for any other in an imported file only the name: an edit would go
    # unnoticed.
    def read_csv(files: list[str]):
        """Yield the rows as they are written: guessed types would turn 007 into 7."""
        csv.field_size_limit(sys.maxsize)
        for path in datasets.DownloadManager().download_and_extract(files):
            with open(path, encoding="utf-8-sig", newline="") as file:
                delimiter = max(",;\t", key=file.readline().count)
                file.seek(0)
                rows = csv.DictReader(file, restval="", delimiter=delimiter, strict=True)
                # All rows may end with a delimiter more. One row alone has a text with a comma.
                ends = None
                for row in rows:
                    rest = row.pop(None, [])
                    if ends is None:
                        ends = [""] * len(rest)
                    if rest != ends:
                        raise ValueError(f"line {rows.line_num}: quote texts with {delimiter!r}")
                    yield row

    def clean(*values) -> dict:
        text, summary, *title_of_wikihow = map(as_text, values)
        article = text
        for title in title_of_wikihow:
            # It has stray commas (arXiv:1810.09305), and a row for each method of an article:
            # "Bake Bread1", "Bake Bread2".
            text = re.sub(r"(^|\n)\s*,", r"\1", text).strip()
            summary = re.sub(r"\s*,\s*(\n|$)", r"\1", summary).strip()
            article = re.sub(r"\d+$", "", title) or text
        content = hashlib.sha256(f"{text}\0{summary}".encode()).hexdigest()
        place = f"{zlib.crc32(article.encode()) % 20:02} {content}"
        return {"text": text, "summary": summary, "place": place}

    def as_text(value) -> str:
        parts = value if isinstance(value, list) else [value]  # a list of sentences
        return "\n".join(str(part) for part in parts if part is not None).strip()

    def is_usable(row: dict) -> bool:
        return 0 < len(row["summary"]) <= max_summary_share * len(row["text"])

    if dist.get_rank() != 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    kind = re.search(r"\.(csv|tsv|json|parquet)l?(\.gz|\.bz2|\.xz|\.zst)?$", name.lower())
    try:
        if name == "builtin":
            rows = datasets.Dataset.from_list([builtin_article(i) for i in range(10_000)])
        elif kind and kind[1] in ("csv", "tsv"):
            files = datasets.load_dataset_builder("csv", data_files=name).config.data_files["train"]
            rows = datasets.Dataset.from_generator(read_csv, gen_kwargs={"files": files})
        elif kind:
            rows = datasets.load_dataset(kind[1], data_files=name, split="train")
        elif Path(name).is_file():
            raise ValueError("it is no .csv, .tsv, .json, .jsonl or .parquet file")
        else:
            rows = datasets.load_dataset(*name.split(":"), split="train")  # NAME, or NAME:CONFIG
        columns = [text_column, summary_column]
        if set(rows.column_names) == {"title", "text", "headline"}:  # WikiHow's
            columns.append("title")
        articles = rows.map(clean, input_columns=columns, remove_columns=rows.column_names)
    except (ValueError, EOFError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            cause = f"{cause}; convert it to UTF-8 with iconv"
        raise UserError(f"--dataset {name}: {cause}") from error

    # Contents alone decide the order of articles and which are held out: those of the first of 20
    # numbers, or in a small dataset of the first that is there.
    usable = articles.filter(is_usable)
    places = usable["place"][:]
    order = sorted(range(len(places)), key=places.__getitem__)
    held_out = min(places, default="")[:2]
    num_held_out = sum(place.startswith(held_out) for place in places)
    if num_held_out == len(places):
        raise UserError(
            f"--dataset {name} has too few rows with a text and a summary within"
            " --max-summary-share"
        )
    if dist.get_rank() == 0:
        print(f"dataset  {name}, {len(rows):,} rows, {len(usable):,} usable", flush=True)
    return usable.select(order[num_held_out:]), usable.select(order[:num_held_out])


def train_tokenizer(texts, vocab_size: int, append_eos: bool):
    """A byte-level BPE tokenizer. The same texts make the same one."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    special = ["<pad>", "</s>"]
    bpe.train_from_iterator(texts, vocab_size, special_tokens=special, show_progress=False)
    tokenizer = bpe._tokenizer
    if append_eos:
        tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
