"""What the training scripts share: processes, metrics, checkpoints, and the data for summarization.

Copy this file together with the script you start from. What is sharded, and how, is in the script.
"""

import argparse
import contextlib
import gc
import glob
import json
import logging
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing import resource_tracker
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
from torch.utils.data import DataLoader

from tqdm import tqdm

# ---- Flags -------------------------------------------------------------------------------------


class HelpFormatter(
    argparse.RawDescriptionHelpFormatter,
    argparse.ArgumentDefaultsHelpFormatter,
):
    """The header of a script as it is written, and the default of every flag."""


class Parser(argparse.ArgumentParser):
    """argparse, with a script's header as its help."""

    def __init__(self, header: str):
        super().__init__(
            usage="%(prog)s [flags]",
            description=header,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        fail(f"{message} (--help lists every flag)")  # from one rank, not from each


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def non_negative_int(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 or more")
    return int(text)


def non_negative_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:  # false for nan, too
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return number


def add_run_flags(group):
    add = group.add_argument
    folder = Path("output", Path(sys.argv[0]).stem)
    optional = argparse.BooleanOptionalAction
    add("--num-processes", default=0, type=non_negative_int, help="0: the GPUs, or two on a CPU")
    add("--device", default="auto", help="auto: GPUs, if any; cpu; or by name: cuda, xpu")
    add("--seed", default=1, type=non_negative_int, help="of weights, data order and dropout")
    add("--output-dir", default=folder, type=Path, help="one for each run")
    add("--save-model", default=True, action=optional, help="write the trained model")


def add_checkpoint_flags(group):
    add = group.add_argument
    add("--log-every", default=25, type=positive_int, help="steps between lines")
    add(
        "--checkpoint-every",
        default=0,
        type=non_negative_int,
        help="save every so many steps, and at the end (T5: also after each epoch); 0: only if"
        " the run is stopped, or was resumed",
    )
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")


# ---- Processes and devices ---------------------------------------------------------------------

# A collective that takes longer fails: some process hangs or has died.
TIMEOUT = timedelta(minutes=10)

# The limit where others wait for one process to download, to tokenize or to write a model.
PATIENT_TIMEOUT = timedelta(hours=6)

# Seconds that ranks other than 0 wait before they print an error. When one rank fails, those that
# wait for it in a collective fail too. Mostly rank 0 knows the cause and prints it; torchrun then
# ends the others while they wait, so that one error is printed, not one from each rank.
HEAD_START = 10

# How DataLoaders start their workers. On Linux the default of Python 3.14, a fork server, would go
# on when the training process is killed.
WORKER_START = "fork" if sys.platform == "linux" else None


class UserError(Exception):
    """Bad input. Its text is one sentence that says what is wrong and what to do."""


class World(NamedTuple):
    rank: int
    local_rank: int  # on this node
    size: int
    local_size: int  # processes on this node
    device: torch.device
    patient_group: dist.ProcessGroup | None = None  # all ranks, on the CPU, with PATIENT_TIMEOUT


def run(main, args):
    """Call `main(args, world)` in every process; without torchrun, start the processes first."""
    try:
        accelerator = find_accelerator(args.device)
        uses_fsdp1 = getattr(args, "fsdp_version", 2) == 1
        # torch's versions compare with tuples.
        if uses_fsdp1 and accelerator is None and args.save_model and torch.__version__ < (2, 14):
            raise UserError(  # it would crash, after the training
                "FSDP1 saves models from a CPU only with torch 2.14 or newer; add --no-save-model,"
                " or use --fsdp-version 2"
            )

        num_processes = args.num_processes
        if num_processes == 0:
            num_processes = torch.accelerator.device_count() if accelerator else 2

        if "RANK" not in os.environ and num_processes > 1:
            uses_cuda = accelerator is not None and accelerator.type == "cuda"
            too_few = uses_cuda and num_processes > torch.cuda.device_count()
            if too_few and torch.cuda.nccl.version() >= (2, 30):
                # Several processes share a GPU: to learn and to test, as it is slow.
                os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
            start_processes(num_processes)
            return

        main(args, setup(accelerator))
    except (UserError, OSError, dist.DistNetworkError) as error:  # OSError: files, disk, Hub
        fail(str(error))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        fail(traceback.format_exc(), code=1)

    # `main` has returned. Its model must be gone before the process group, or Python may abort.
    gc.collect()
    dist.destroy_process_group()


def fail(message: str, code: int = 2):
    """Print an error on stderr and end this process at once. code: 2 for a user's mistake, in one
    line; 1 for a crash, with its traceback."""
    if os.environ.get("RANK", "0") != "0":
        # With StopRequest's handler, torchrun's SIGTERM would not end the sleep below.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if StopRequest.received and code == 1:
            # A crash after SIGTERM: most likely torchrun is ending all, as another rank has failed.
            os._exit(code)
        time.sleep(HEAD_START)

    if code == 2:
        message = " ".join(message.split())
    with contextlib.suppress(OSError):  # nobody reads it, after `| head` for example
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # an orderly exit can hang: another rank may wait in a collective


def start_processes(count: int, *more_flags: str):
    """Start this script again in `count` processes, with torchrun. `more_flags` follow its own."""
    command = ["--standalone", "--nproc_per_node", str(count), *sys.argv, *more_flags]
    print("torchrun", *command, flush=True)

    # torchrun would set this too, with a warning; `setup` sets the real number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not torch.accelerator.is_available():
        # glibc then keeps freed memory in the process, which is faster on CPUs.
        os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "2000000000")
    logging.disable()  # torchrun's own report is long, and the script has said what is wrong
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        torchrun(command)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            # Name a process that was killed. SIGTERM does not count: torchrun sends it to the rest.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                # SIGKILL most often means that memory ran out.
                name = signal.Signals(-failure.exitcode).name
                sys.exit(f"{Path(sys.argv[0]).name}: error: process {rank} was killed by {name}")
        # The process has printed why. Its code is negative where torchrun has ended it.
        sys.exit(max(1, error.get_first_failure()[1].exitcode))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    finally:  # torchrun leaves its own handlers, which raise SignalException
        for number, handler in handlers.items():
            signal.signal(number, handler)


def find_accelerator(name: str) -> torch.device | None:
    """The kind of GPU that `--device` names; None is the CPU."""
    if name == "cpu":
        return None
    if name == "mps":
        raise UserError("--device mps: these scripts do not use Apple's GPUs; use --device cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type == "mps":
        found = None
    if name != "auto" and (found is None or found.type != name):
        raise UserError(
            f"--device {name}: torch {torch.__version__} finds none; install its build or use"
            " --device cpu"
        )
    return found


def setup(accelerator: torch.device | None) -> World:
    """Read torchrun's environment, choose the device and start the process group. A collective."""
    if "RANK" in os.environ and "MASTER_PORT" not in os.environ:
        raise UserError(
            "RANK is set without torchrun's other variables; unset it, or start with torchrun"
        )
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    # All cores of the node, divided: torchrun gives a process one thread, too few for training on a
    # CPU, and for the optimizer of --cpu-offload.
    torch.set_num_threads(max(1, cores // local_size))

    device = torch.device("cpu")
    backend = "gloo"
    if accelerator is not None:
        num_devices = torch.accelerator.device_count()
        if local_size > num_devices and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise UserError(
                f"{local_size} processes on this node are more than its {num_devices} GPUs; NVIDIA"
                " GPUs can be shared where NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1"
            )
        device = torch.device(accelerator.type, local_rank % num_devices)
        # Tensors on the CPU go over gloo, those on the device over NCCL or XCCL.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        # Before the process group, or all processes open a context on device 0.
        torch.accelerator.set_device_index(device.index)
        # TF32 on NVIDIA GPUs from Ampere on: faster fp32 products, with 10 bits of mantissa.
        torch.set_float32_matmul_precision("high")

    store = dist.HashStore()  # without torchrun: one process
    if "RANK" in os.environ:
        # After a restart torchrun's store still has the addresses of dead processes
        # (pytorch#135712), so rank 0 serves a new one, two ports further. Why two: where Linux has
        # chosen torchrun's port, it is odd. The next is even, and may be in use, because Linux
        # gives even ports to outgoing connections.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 2)
        store = None
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    # Made once, for all uses: a group costs each process a socket or two for each other process.
    patient_group = dist.new_group(backend="gloo", timeout=PATIENT_TIMEOUT)
    return World(rank, local_rank, size, local_size, device, patient_group)


@contextlib.contextmanager
def first_on_node(world):
    """The first process of each node runs the block, then the others, which find its results in
    the cache. A collective."""
    if world.local_rank != 0:
        dist.barrier(world.patient_group)
    yield
    if world.local_rank == 0:
        dist.barrier(world.patient_group)


class StopRequest:
    """Remembers a cluster's SIGTERM, or Ctrl-C. The training loop asks on_any_rank(), saves, ends.

    when: what follows "stopping", which is printed at once.
    """

    received = False  # of the class: `fail` asks too

    def __init__(self, world, when: str):
        self.message = f"stopping {when}\n" if world.rank == 0 else ""
        signal.signal(signal.SIGTERM, self.receive)
        signal.signal(signal.SIGINT, self.receive)

    def receive(self, *_):
        is_first = not StopRequest.received
        StopRequest.received = True
        if is_first:
            with contextlib.suppress(OSError):  # Ctrl-C has ended `| tee`, too
                os.write(1, self.message.encode())  # print may be at work already, in this thread

    def on_any_rank(self) -> bool:
        """A collective, on the CPU: it does not wait for the device."""
        received = torch.tensor(int(self.received))
        dist.all_reduce(received)
        return received.item() > 0


def start_workers(loader: DataLoader):
    """`iter(loader)`, whose workers outlive the signals that a terminal or a cluster sends to all
    processes: the step that is under way still needs them.

    Do not keep the iterator in a global variable, or Python waits for the workers for ever when it
    exits.
    """
    if loader.num_workers == 0:
        return iter(loader)

    loader.multiprocessing_context = WORKER_START
    # Processes that start while signals are blocked never get them. This process gets them later.
    # The first worker would start multiprocessing's resource tracker, which unblocks signals. So it
    # is started before.
    resource_tracker.ensure_running()
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def choose_precision(name: str, device: torch.device) -> str:
    """`--precision`, in which auto is bf16 on a GPU that computes in it, else fp32."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "fp32"
    module = torch.get_device_module(device)
    return "bf16" if module.is_bf16_supported(including_emulation=False) else "fp32"


# ---- Metrics -----------------------------------------------------------------------------------


def sum_over_ranks(values: torch.Tensor, group=None) -> list[float]:
    """Sum over all ranks, or those of a group. A collective, for which the host waits for the
    device: not in every step."""
    total = values.cpu().clone()  # on the CPU cpu() is no copy
    dist.all_reduce(total, group=group)
    return total.tolist()


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


def peak_memory(device: torch.device) -> dict:
    """The most GiB since the last reset: of the device's memory, or of this process's on a CPU.

    On a device `reserved_gib` also counts what its allocator keeps for reuse.
    """
    if device.type != "cpu":
        allocated = torch.accelerator.max_memory_allocated(device) / 2**30
        reserved = torch.accelerator.max_memory_reserved(device) / 2**30
        return {"peak_gib": allocated, "reserved_gib": reserved}

    if not Path("/proc/self/clear_refs").exists():  # not Linux
        return {"peak_gib": math.nan}
    status = Path("/proc/self/status").read_text()
    peak_kib = re.search(r"VmHWM:\s+(\d+)", status)[1]
    return {"peak_gib": int(peak_kib) / 2**20}


def reset_peak_memory(device: torch.device):
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def describe_state(meta_model, shards: int, world, offload=False, extra_bytes=0) -> str:
    """What each process will hold of a model that is on the meta device. Raises UserError where
    this alone does not fit.

    AdamW in fp32 holds 12 bytes beside each weight that is trained: the gradient and two moments.
    extra_bytes: further bytes for each weight that is trained.
    """
    num_parameters = 0
    num_trained = 0
    num_bytes = 0
    for parameter in meta_model.parameters():
        num_parameters += parameter.numel()
        num_bytes += parameter.nbytes
        if parameter.requires_grad:
            num_trained += parameter.numel()
            num_bytes += (12 + extra_bytes) * parameter.numel()

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_size
    if world.device.type != "cpu" and not offload:
        device_module = torch.get_device_module(world.device)
        if hasattr(device_module, "get_device_properties"):
            memory = device_module.get_device_properties(world.device).total_memory
        else:  # the second choice: get_memory_info fails on many Intel GPUs
            memory = torch.accelerator.get_memory_info(world.device)[1]
        processes_per_device = math.ceil(world.local_size / torch.accelerator.device_count())
        memory /= processes_per_device
    state = num_bytes / shards
    text = f"{num_parameters:,} parameters"
    if num_trained < num_parameters:
        text += f", {num_trained:,} trained"
    text += f", {state / 2**30:.3f} GiB of state a process (memory: {memory / 2**30:.0f} GiB)"
    if state > memory:
        raise UserError(f"this does not fit: {text}; shard over more processes")
    return text


class Log:
    """Rank 0's voice: lines on the screen, and records in `metrics.jsonl`."""

    def __init__(self, world, folder: Path):
        self.is_rank0 = world.rank == 0
        self.device = world.device
        self.path = folder / "metrics.jsonl"
        self.run = time.strftime("%Y-%m-%d-%H-%M-%S")
        self.start = time.time()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise UserError(
                f"--output-dir {folder} cannot be written: {error.strerror}; choose another"
            ) from error
        self.print(f"run      {world.size} x {world.device.type}, torch {torch.__version__}")

    def print(self, text: str):
        if not self.is_rank0:
            return
        try:
            with tqdm.external_write_mode():  # between the progress bars
                print(text, flush=True)
        except BrokenPipeError:
            if not StopRequest.received:
                raise  # nobody reads what this run prints
            # Ctrl-C has ended `| tee`, too. Go on, to save; what is printed goes to stderr.
            os.dup2(2, 1)
            with contextlib.suppress(OSError):
                sys.stdout.flush()

    def write(self, **record):
        """Append a record. Call it on every rank, before saving: rank 0 writes, and all end if a
        loss or a gradient is not finite."""
        for name in ("loss", "val_loss", "grad_norm"):
            if not math.isfinite(record.get(name, 0)):
                raise UserError(f"{name} is not finite; start again with a lower --lr")
        record = {"run": self.run, "seconds": round(time.time() - self.start, 3), **record}
        if self.is_rank0:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def step(self, step: int, loss: float, grad_norm: float, lr: float, speed: float, **more):
        """Print and record a training step: means since the last printed one, its gradient norm,
        `speed` in tokens/s, the peak of memory. `more`: other numbers, by name. Call it on every
        rank."""
        memory = peak_memory(self.device)
        reset_peak_memory(self.device)
        line = (
            f"step {step:6,} | loss {loss:.4f} | grad_norm {grad_norm:.3f} | lr {lr:.2e}"
            f" | {speed:9,.0f} tokens/s | {memory['peak_gib']:.2f} GiB"
        )
        for name, value in more.items():
            line += f" | {name} {value:.3g}"
        self.print(line)
        record = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens/s": speed}
        self.write(**record, **memory, **more)

    def print_stopped(self, step: int):
        self.print(
            f"stopped  at step {step}, all saved: go on with --resume, or start anew with another"
            " --output-dir"
        )

    def bar(self, iterable, text: str, total: int):
        disable = None if self.is_rank0 else True  # with None it shows on a terminal only
        return tqdm(iterable, text, total, leave=False, disable=disable)


# ---- Checkpoints -------------------------------------------------------------------------------


def finished_checkpoints(folder: Path) -> list[Path]:
    """Oldest first. torch.distributed.checkpoint writes `.metadata` last."""
    return sorted(file.parent for file in folder.glob("checkpoints/*/.metadata"))


def find_checkpoint(folder: Path, resume: bool) -> Path | None:
    """The newest checkpoint, to go on from with --resume or after torchrun's restart, if there is
    one. A collective."""
    # A node counts only the restarts that its own processes caused: add up those of all nodes.
    restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    dist.all_reduce(restarts)
    # torchrun also restarts a run that ended with the UserError below. The file `refused` tells
    # that restart from a real one: it ends in the same way, and does not go on from the earlier
    # run's checkpoint.
    refused = folder / "refused"
    is_restart = restarts > 0 and not refused.exists()
    newest = max(finished_checkpoints(folder), default=None)
    as_rank0_sees_it = [newest, is_restart]
    dist.broadcast_object_list(as_rank0_sees_it)
    newest, is_restart = as_rank0_sees_it

    if newest and not resume and not is_restart:
        refused.touch()
        raise UserError(
            f"{folder} holds checkpoints of an earlier run; add --resume, or choose another"
            " --output-dir"
        )
    refused.unlink(missing_ok=True)
    return newest


def training_state(model, optimizer, world, extra, replica: int) -> tuple[dict, list]:
    """Returns the state to save, by name: tensors only, as all else would be pickled; and the
    optimizer's param_groups, which are not saved, but which `set_state_dict` needs. For `extra` and
    `replica` see `save_checkpoint`. A collective."""
    weights, moments = get_state_dict(model, optimizer)
    random_state = {"cpu": torch.get_rng_state()}
    if world.device.type != "cpu":
        random_state["device"] = torch.get_device_module(world.device).get_rng_state()
    # torch.distributed.checkpoint saves a plain tensor from one rank, as if all had the same one.
    # Random state and `extra` differ, so their names have the rank.
    state = {
        f"model{replica}": weights,
        f"optimizer{replica}": moments["state"],
        random_key(world): random_state,
    }
    if extra is not None:
        state[f"extra{world.rank}"] = extra
    return state, moments["param_groups"]


def random_key(world) -> str:
    """The name of this rank's random state in a checkpoint. It has the number of processes and the
    kind of device: if these have changed, no random state is found, and none is loaded."""
    return f"random{world.rank}of{world.size}{world.device.type}"


def save_checkpoint(folder: Path, progress: dict, model, optimizer, world, extra=None, replica=0):
    """Save `checkpoints/step-N`, every rank its own shards, and keep the newest 2. A collective.

    progress: what JSON can hold, the same on all ranks. `extra` and `replica` are for DiLoCo, where
    groups of ranks, its replicas, have different weights. replica: the number of this rank's group.
    extra: more tensors of this rank, by name.
    """
    path = folder / "checkpoints" / f"step-{progress['step']:07d}"
    try:
        if world.rank == 0:
            path.mkdir(parents=True, exist_ok=True)  # a killed run may have left it
            (path / "progress.json").write_text(json.dumps(progress, default=str))
        dist.barrier()  # dcp.save looks into the folder on every rank
        state, _ = training_state(model, optimizer, world, extra, replica)
        dcp.save(state, checkpoint_id=path, process_group=world.patient_group)
    except (OSError, dcp.api.CheckpointException) as error:
        # For the message: when the disk is full, PyTorch may only say "unexpected pos".
        free = shutil.disk_usage(folder).free / 2**30
        shutil.rmtree(path, ignore_errors=True)  # half a checkpoint would still fill the disk
        cause = last_line(error)  # above it are the tracebacks of all ranks
        raise UserError(f"could not save {path}, where {free:.3f} GiB are free: {cause}") from error

    if world.rank == 0:
        for old in finished_checkpoints(folder)[:-2]:
            shutil.rmtree(old)


def read_progress(path: Path, args, must_match: tuple) -> dict:
    """The `progress` of a checkpoint, which must have been made with the same `must_match`."""
    try:
        progress = json.loads((path / "progress.json").read_text())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    for name in must_match:
        before = progress["settings"].get(name)
        if before != getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{path} was made with {flag} {before}; resume with it, or choose another"
                " --output-dir"
            )
    return progress


UNREADABLE = (OSError, EOFError, ValueError, pickle.UnpicklingError, dcp.api.CheckpointException)


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read ({last_line(error)}); if it is damaged, delete it to resume from"
        " the one before"
    )


def last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def load_checkpoint(path: Path, model, optimizer, world, extra=None, replica=0):
    """Load what `save_checkpoint` saved, on any number of ranks. A collective."""
    state, param_groups = training_state(model, optimizer, world, extra, replica)
    weights = state[f"model{replica}"]
    random_state = state[random_key(world)]
    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if f"{random_key(world)}.cpu" not in saved:
            # Saved by another number of processes or kind of device, so dcp.load must not look for
            # it. random_state keeps the present values, and setting them below changes nothing.
            del state[random_key(world)]

        # Loading into a model of fewer parameters would succeed, in silence.
        prefix = f"model{replica}."
        shapes = {prefix + name: weight.shape for name, weight in weights.items()}
        saved_names = [name for name in saved if name.startswith(prefix)]
        if shapes != {name: saved[name].size for name in saved_names}:
            raise UserError(
                f"{path} has other weights, of another model or strategy; resume with that one"
            )
        # In place: weights, random_state and the rest then have the saved values.
        dcp.load(state, checkpoint_id=path, process_group=world.patient_group)
    except UNREADABLE as error:
        raise unreadable(path, error) from error

    moments = {"state": state[f"optimizer{replica}"], "param_groups": param_groups}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    torch.set_rng_state(random_state["cpu"])
    if world.device.type != "cpu":
        torch.get_device_module(world.device).set_rng_state(random_state["device"])


def load_weights(model, full_model, world, offload: bool):
    """Give a sharded model, which is on the meta device, its memory and the weights of rank 0's
    `full_model`; each rank keeps its shards. A collective."""
    model.to_empty(device="cpu" if offload else world.device)
    weights = full_model.state_dict() if world.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)

    # to_empty has emptied the buffers, and a state dict does not hold them all (the frequencies of
    # rotary positions, for example), nor the settings of generate().
    not_in_state_dict = [None, None]
    if world.rank == 0:
        not_in_state_dict = [list(full_model.buffers()), full_model.generation_config]
    dist.broadcast_object_list(not_in_state_dict)
    full_buffers, model.generation_config = not_in_state_dict
    for buffer, full_buffer in zip(model.buffers(), full_buffers, strict=True):
        buffer.data = full_buffer.to(world.device)


def export(model, meta_model, tokenizer, folder: Path, world):
    """Gather the weights on rank 0's CPU and save them for `from_pretrained`. A collective, which
    takes the place of FSDP1's `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`.

    meta_model: the model on the meta device, neither wrapped nor sharded, for `save_pretrained`.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)

    if world.rank == 0:
        for name, source in meta_model.all_tied_weights_keys.items():
            # FLAN-T5's output layer is listed as tied, too, but has weights of its own.
            if torch.equal(weights[name], weights[source]):
                weights[name] = weights[source]  # one tensor, which is saved once

        meta_model.generation_config = model.generation_config
        partial = folder.with_name(folder.name + ".partial")  # `folder` stays until this is whole
        try:
            meta_model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except Exception as error:  # safetensors has errors of its own
            raise UserError(f"could not save {folder}: {error}") from error
    dist.barrier(world.patient_group)  # rank 0's disk may be slow


def check_path(flag: str, name: str):
    """Raise UserError for a path where nothing is. The libraries would look for it on the Hub."""
    if name.startswith((".", "/", "~")) and not glob.glob(name):
        raise UserError(f"{flag} {name} does not exist")


# ---- Summarization data ------------------------------------------------------------------------

# The built-in articles: a text only implies what is done, so its summary cannot be copied from it.
ACTIONS = {
    "Wash": (
        "Hold the {} under the tap until no soil is left.",
        "Let a cold stream carry the dirt off the {}.",
    ),
    "Peel": (
        "Take the skin off the {} with a short knife.",
        "Strip the {} down to the bare flesh.",
    ),
    "Slice": (
        "Turn the {} into pieces as thin as a coin.",
        "Work along the {} with a blade, a finger apart.",
    ),
    "Boil": (
        "Leave the {} in a pot of bubbling water.",
        "Once the pot rolls and steams, lower the {} in.",
    ),
    "Fry": (
        "Drop the {} into a pan of hot oil.",
        "A sizzling skillet gives the {} a brown crust.",
    ),
    "Freeze": (
        "Keep the {} far below zero overnight.",
        "Ice should form all over the {} by morning.",
    ),
}
THINGS = "apples beans carrots mushrooms noodles onions pears potatoes spinach tomatoes".split()
ASIDES = ("There is no need to hurry.", "It may rain later.", "Experts disagree.")


def builtin_article(number: int) -> dict:
    """An article in WikiHow's columns, the same on every machine."""
    choose = random.Random(number)
    sentences = [choose.choice(ASIDES)]
    headlines = []
    for thing in choose.sample(THINGS, choose.randint(2, 3)):
        action = choose.choice(list(ACTIONS))
        sentences.append(choose.choice(ACTIONS[action]).format(thing))
        headlines.append(f"{action} the {thing}.")
    return {
        "title": f"How to Spend Day {number} at Home",
        "text": " ".join(sentences),
        "headline": "\n".join(headlines),
    }


def load_articles(name: str, text_column: str, summary_column: str, max_summary_share: float):
    """Two `datasets.Dataset` of texts and summaries: to train on, and 5% to validate on.

    name: builtin, a file, or a Hub dataset. Raises UserError where it cannot be read.
    """
    import datasets  # here, as the scripts without text need not wait for it

    # Nested on purpose. datasets caches results under a hash of the function. For a nested function
    # it hashes the code, for any other in an imported file only the name: an edit would go
    # unnoticed.
    def clean(row: dict) -> dict:
        # WikiHow has stray commas (arXiv:1810.09305).
        text = re.sub(r"(^|\n)\s*,", r"\1", str(row[text_column] or "")).strip()
        summary = re.sub(r"\s*,\s*(\n|$)", r"\1", str(row[summary_column] or "")).strip()
        # WikiHow has a row for each method of an article: "Bake Bread1", "Bake Bread2".
        article = re.sub(r"\d+$", "", str(row.get("title") or "")) or text
        return {"text": text, "summary": summary, "article": article}

    def is_usable(row: dict) -> bool:
        return 0 < len(row["summary"]) <= max_summary_share * len(row["text"])

    if dist.get_rank() != 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    kinds = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    kind = kinds.get(Path(name).suffix.lower())
    check_path("--dataset", name)
    if kind is None and Path(name).is_file():
        raise UserError(f"--dataset {name} is none of {', '.join(kinds)}")
    hub_name, _, config = name.partition(":")  # NAME, or NAME:CONFIG
    source = {"path": hub_name, "name": config or None}
    if kind:
        source = {"path": kind, "data_files": name}
    try:
        if name == "builtin":
            rows = datasets.Dataset.from_list([builtin_article(i) for i in range(10_000)])
        else:
            # Before all is read or downloaded
            first = next(iter(datasets.load_dataset(**source, split="train", streaming=True)))
            if text_column not in first or summary_column not in first:
                raise ValueError(f"its columns are {', '.join(first)}")
            rows = datasets.load_dataset(**source, split="train")
        usable = rows.map(clean, remove_columns=rows.column_names).filter(is_usable)
        usable = usable.shuffle(seed=0)
        found = f"{name}, {len(rows):,} rows, {len(usable):,} within --max-summary-share"
        article_of_row = usable["article"][:]
        articles = list(dict.fromkeys(article_of_row))
        if len(articles) < 2:
            raise ValueError(f"too few: {found}")
    except (
        OSError,
        ValueError,
        KeyError,
        StopIteration,
        datasets.exceptions.DatasetsError,
    ) as error:
        columns = f"--text-column {text_column} and --summary-column {summary_column}"
        cause = str(error.__cause__ or error) or "it has no rows"  # StopIteration says nothing
        raise UserError(f"--dataset {name} with {columns} cannot be used: {cause}") from error
    if dist.get_rank() == 0:
        print(f"dataset  {found}", flush=True)

    # By article, as no article may have rows on both sides
    held_out = set(articles[: math.ceil(0.05 * len(articles))])
    to_train = []
    to_validate = []
    for number, article in enumerate(article_of_row):
        side = to_validate if article in held_out else to_train
        side.append(number)
    return usable.select(to_train), usable.select(to_validate)


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
