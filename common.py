"""What the training scripts share: processes, metrics, checkpoints and the summarization data.

Copy this file together with a script. The script shards the model. Here, `load_weights` fills its
shards, `save_checkpoint` and `load_checkpoint` save and read them, and `export` gathers them.
"""

import argparse
import contextlib
import csv
import ctypes
import gc
import glob
import itertools
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

import fsspec
import numpy as np
from fsspec.utils import infer_compression
from safetensors import SafetensorError
from tqdm import tqdm

# ---- Flags -------------------------------------------------------------------------------------


class HelpFormatter(
    argparse.RawDescriptionHelpFormatter,
    argparse.ArgumentDefaultsHelpFormatter,
):
    """Print a script's header as written, and the default of every flag."""


def make_parser(header: str) -> argparse.ArgumentParser:
    """argparse with a script's header as its help."""
    # A shell does not replace ~ in --flag=~/file or '~/*.txt'.
    sys.argv = [re.sub("^(--[a-z-]+=)?~/", rf"\1{Path.home()}/", word) for word in sys.argv]
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]",
        description=header,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )

    def fail_once(message):  # not from every process
        if message.startswith("unrecognized arguments") and "--" not in message:
            message = f"{message[:200]}; put names with spaces or * between quotes"
        fail(message, code=2)

    parser.error = fail_once
    return parser


def at_least(minimum: int, kind=int):
    """An argparse type for ints, or floats, that are `minimum` or larger."""

    def parse(text: str):
        value = kind(text)
        if not value >= minimum:  # also rejects nan
            raise argparse.ArgumentTypeError(f"{text} is not {minimum} or more")
        return value

    parse.__name__ = kind.__name__  # argparse names it where `kind` fails
    return parse


def add_run_flags(group):
    add = group.add_argument
    folder = Path("output", Path(sys.argv[0]).stem)
    optional = argparse.BooleanOptionalAction
    add("--num-processes", default=0, type=at_least(0), help="0: one per GPU, or two on a CPU")
    add("--device", default="auto", help="auto (GPUs, if there are any), cpu, cuda or xpu")
    add("--seed", default=1, type=at_least(0), help="for weights, data order and dropout")
    add("--output-dir", default=folder, type=Path, help="use a new folder for each run")
    add("--save-model", default=True, action=optional, help="save the trained model")


def add_checkpoint_flags(group):
    add = group.add_argument
    add("--log-every", default=25, type=at_least(1), help="steps between printed lines")
    add(
        "--checkpoint-every",
        default=0,
        type=at_least(0),
        help="steps between checkpoints (T5: and at an epoch's end); 0: only if a signal stops it",
    )
    add("--resume", action="store_true", help="continue from the newest checkpoint, if any")


# ---- Processes and devices ---------------------------------------------------------------------

# How long a process waits in a collective, for example while another one downloads, tokenizes or
# writes a model. If one hangs, the run ends after this time.
TIMEOUT = timedelta(minutes=30)


class UserError(Exception):
    """Bad input. The text is one sentence: what is wrong and what to do."""


class World(NamedTuple):
    rank: int
    local_rank: int  # on this node
    size: int
    local_size: int  # processes on this node
    device: torch.device


def run(main, args):
    """Call `main(args, world)` in every process. Without torchrun, launch the processes first."""
    try:
        device_type = find_device_type(args.device)
        if "RANK" not in os.environ:  # not started by torchrun
            num_devices = 2 if device_type == "cpu" else torch.accelerator.device_count()
            num_processes = args.num_processes or num_devices
            if num_processes > 1:
                start_processes(num_processes)
                return
        world = setup(device_type)
        if args.num_processes not in (0, world.local_size):
            raise UserError(
                f"torchrun has started {world.local_size} per node: omit --num-processes"
            )
        main(args, world)
    except (UserError, OSError) as error:  # OSError: files, disk, Hub
        message = str(error).rpartition("UserError: ")[2]  # without a worker's traceback
        fail(" ".join(message.split()), code=2)
    except dcp.api.CheckpointException as error:
        cause = str(error).splitlines()[-1]
        if shutil.disk_usage(args.output_dir).free < 2**20:  # PyTorch does not say so
            cause = "the disk is full"
        fail(f"cannot save or read a checkpoint: {cause}", code=2)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        fail(traceback.format_exc(), code=1)

    # Free the model before the process group: otherwise Python may abort.
    gc.collect()
    for worker in multiprocessing.active_children():  # otherwise Python waits for busy ones
        worker.kill()
    dist.destroy_process_group()


def fail(message: str, code: int):
    """Print an error and exit immediately. code: 2 for a user's mistake, 1 for a crash."""
    if os.environ.get("RANK", "0") != "0":
        # Most errors happen on rank 0 as well. Let it print them: torchrun then ends this process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # a normal exit can hang while another rank waits in a collective


def start_processes(count: int):
    """Run this script in `count` processes with torchrun. Exits if one of them fails."""
    # Without --nnodes, torchrun would read PET_NNODES. Without --local-addr, it would look up the
    # host name, which may not resolve.
    options = f"--standalone --local-addr localhost --nnodes 1 --nproc_per_node {count}"
    if signal.SIGHUP not in STOPS:  # under nohup: by default torchrun would still stop
        options += " --signals-to-handle SIGTERM,SIGINT,SIGQUIT"
    command = [*options.split(), *sys.argv]
    print("torchrun", shlex.join(command), flush=True)
    logging.disable()  # torchrun's report is long, and the script has already printed the error
    try:
        torchrun(command)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        killed = [-code for code in codes if code < 0 and code != -signal.SIGTERM]
        if killed:
            name = signal.Signals(killed[0]).name
            sys.exit(f"a process was killed by {name}; is the machine out of memory?")
        sys.exit(max(1, *codes))


def find_device_type(name: str) -> str:
    """Resolve `--device`: auto is the accelerator that torch finds, or else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator else "cpu"
    if found == "mps":  # Apple GPUs do not support FSDP
        found = "cpu"
    if name not in ("auto", "cpu", found):
        raise UserError(
            f"--device {name}: torch {torch.__version__} has no such device; install a torch build"
            " that supports it, or use --device cpu"
        )
    return found if name == "auto" else name


def setup(device_type: str) -> World:
    """Collective. Read torchrun's environment, choose the device and start the process group."""
    rank, local_rank, size, local_size = 0, 0, 1, 1
    store = dist.HashStore()  # one process needs no address
    if "RANK" in os.environ:  # started by torchrun
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, size, local_size = (int(os.environ[name]) for name in names)
        store = None  # torchrun's

    if size % local_size == 0 and rank % local_size != local_rank:
        raise UserError("each node must have consecutive ranks: with srun, use -m block")

    # Share the cores of this node. torchrun's default of one thread is too slow on a CPU, and for
    # the optimizer under --cpu-offload.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_size))

    device = torch.device("cpu")
    backend = "gloo"
    if device_type != "cpu":
        # With more processes than GPUs, several share one. NCCL supports that from 2.30.
        device = torch.device(device_type, local_rank % torch.accelerator.device_count())
        # Do this before starting the process group: otherwise every process opens device 0.
        torch.accelerator.set_device_index(device.index)
        # gloo for tensors on the CPU; NCCL or XCCL for those on the device.
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device)}"
        # TF32 on NVIDIA GPUs since Ampere: faster fp32 products, with 10 bits of mantissa.
        torch.set_float32_matmul_precision("high")

    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    return World(rank, local_rank, size, local_size, device)


def first_on_node(world, make):
    """Collective. Call `make()` in one process per node and send the result to the others, so that
    only one downloads, tokenizes or asks the Hub. Rank 0 goes first, because other nodes may share
    its cache."""
    result = make() if world.rank == 0 else None
    dist.barrier()
    if world.local_rank == 0:
        if world.rank != 0:
            result = make()
        for rank in range(world.rank + 1, world.rank + world.local_size):
            dist.send_object_list([result], dst=rank)
        return result
    received = [None]
    dist.recv_object_list(received, src=world.rank - world.local_rank)
    return received[0]


def divide_batch(args, world, default: int):
    """Replace `--global-batch-size 0` by `default`, rounded up to a multiple of the number of
    processes. Raises UserError if the processes cannot divide the batch."""
    if args.global_batch_size == 0:
        args.global_batch_size = math.ceil(default / world.size) * world.size
    if args.global_batch_size % world.size != 0:
        raise UserError(
            f"--global-batch-size must be a multiple of {world.size}, the number of processes"
        )


def from_rank0(value):
    """Collective. Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def choose_precision(name: str, device: torch.device) -> str:
    """Collective. Resolve `--precision`: auto is bf16 if rank 0's GPU supports it natively, or else
    fp32. All ranks must use the same."""
    if name == "auto":
        name = "fp32"
        if device.type != "cpu":
            module = torch.get_device_module(device)
            name = "bf16" if module.is_bf16_supported(including_emulation=False) else "fp32"
    return from_rank0(name)


# ---- Stops -------------------------------------------------------------------------------------

# Signals that stop a run: SIGTERM (from a cluster), SIGINT (Ctrl-C) and SIGHUP (closed terminal).
# A signal that is already ignored, such as SIGHUP under nohup, stays ignored.
STOPS = [
    signum
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(signum) != signal.SIG_IGN
]
stops_received = []


def note_stops():
    """From now on, only note stop signals. The training loop then saves a checkpoint and ends."""

    def note(signum, _frame):
        stops_received.append(signum)
        if signum == signal.SIGINT and dist.get_world_size() == 1:
            signal.signal(signum, signal.default_int_handler)  # a second Ctrl-C quits

    for signum in STOPS:
        signal.signal(signum, note)


def ask_for_stops():
    """Collective. Begin to ask all ranks whether they have noted a stop. Returns a function that
    waits for the answer. Compute a step in between: the answer passes through all hosts, in a ring.
    """
    count = torch.tensor(len(stops_received))  # on the CPU: no device has to wait
    work = dist.all_reduce(count, async_op=True)

    def any_rank_stops() -> bool:
        work.wait()
        return count.item() > 0

    return any_rank_stops


def protect_worker(_worker: int):
    """Make a DataLoader worker ignore stop signals, because the current step still needs it. It
    ends together with the training process."""
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: Linux kills the worker when the training process ends, however it ends.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# Options for DataLoaders with workers. Let workers send NumPy arrays, which go through a pipe.
# Tensors would go through /dev/shm, which is small in Docker, and through a socket in TMPDIR, whose
# path may be too long.
WORKER_OPTIONS = {
    # Python 3.14 would start workers from a fork server. Linux would then count that as their
    # parent, instead of the training process.
    "multiprocessing_context": "fork" if sys.platform == "linux" else None,
    "worker_init_fn": protect_worker,
    # Steps to prepare ahead. The LM's streams fill up at about the same step, which takes long.
    "prefetch_factor": 16,
}


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy a batch to the device. The host does not wait for the copies."""
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        if device.type != "cpu":
            tensor = tensor.pin_memory()  # otherwise the host would wait
        tensors[name] = tensor.to(device, non_blocking=True)
    return tensors


# ---- Metrics -----------------------------------------------------------------------------------


def sum_over_ranks(values: torch.Tensor):
    """Collective. Sum over all ranks and return Python numbers. Do not call it in every step: the
    host waits for the device."""
    total = values.cpu().clone()  # .cpu() copies only from a device
    dist.all_reduce(total)
    return total.tolist()


def describe_state(model, shards: int) -> str:
    """Describe how much state each process will hold of a model, which may be on the meta device.
    With Adam, each trained weight needs 12 more bytes: its gradient and two moments, in fp32."""
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
    return f"{text}, {num_bytes / shards / 2**30:.3f} GiB of state per process"


def state_gib(model, optimizer) -> float:
    """GiB of parameters, gradients and optimizer state on this rank."""
    num_bytes = 0
    for parameter in model.parameters():
        for tensor in [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if torch.is_tensor(tensor):
                num_bytes += tensor.nbytes
    return num_bytes / 2**30


def reset_peak(device: torch.device):
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # in some sandboxes; then the peak is since the start
            Path("/proc/self/clear_refs").write_text("5")


def peak_gib(device: torch.device) -> float:
    """Peak memory since `reset_peak`, in GiB: of the device, or on a CPU of this process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 2**30
    if sys.platform != "linux":
        return math.nan
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 2**20 if found else math.nan  # gVisor does not report it


# How `Log.metrics` prints values. Everything else gets four decimals.
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
    """Prints lines and writes `metrics.jsonl`, on rank 0 only."""

    def __init__(self, world, folder: Path):
        self.is_rank0 = world.rank == 0
        self.path = folder / "metrics.jsonl"
        self.run = time.strftime("%Y-%m-%d-%H-%M-%S")
        self.start = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        self.print(f"run      {world.size} x {world.device.type}, torch {torch.__version__}")

    def print(self, text: str):
        if self.is_rank0:
            # The terminal may be closed, or unable to print a character. The run must still save.
            with contextlib.suppress(OSError, UnicodeError), tqdm.external_write_mode():
                print(text, flush=True)

    def write(self, record: dict):
        """Append a record to the file. Raises UserError if a loss or a gradient is not finite, so
        call it on every rank, and before saving."""
        for name in ("loss", "val_loss", "grad_norm"):
            if not math.isfinite(record.get(name, 0)):
                raise UserError(f"{name} is not finite; start again with a lower --lr")
        if self.is_rank0:
            record = {"run": self.run, "seconds": round(time.time() - self.start, 3), **record}
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def metrics(self, record: dict):
        """Write a record and print it as one line."""
        fields = [f"{name} {value:{FORMATS.get(name, '.4f')}}" for name, value in record.items()]
        self.print(" | ".join(fields))
        self.write(record)

    def bar(self, iterable, text: str, total: int):
        disable = None if self.is_rank0 else True  # None: show it only on a terminal
        return tqdm(iterable, text, total, leave=False, disable=disable)


# ---- Checkpoints -------------------------------------------------------------------------------


def step_folders(output_dir: Path) -> list[Path]:
    """The folders of checkpoints, oldest first. Other names are the user's."""
    folders = output_dir.glob("checkpoints/step-*")
    folders = [folder for folder in folders if re.fullmatch(r"step-\d+", folder.name)]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def checkpoints(output_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first. `progress.json` is written last."""
    return [folder for folder in step_folders(output_dir) if (folder / "progress.json").exists()]


def read_progress(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "progress.json").read_text())


def find_checkpoint(args, must_match: list[str], model_folder: Path) -> Path | None:
    """Collective. Return the newest checkpoint in --output-dir, or None. Raises UserError if the
    run would mix with an earlier one, or overwrite the model that it starts from.

    must_match: names of the flags that must have the same values as in the run that saved it.
    """
    if args.save_model and model_folder.resolve() == Path(args.model).resolve():
        raise UserError("the trained model would replace --model; choose another --output-dir")
    found = checkpoints(args.output_dir)
    newest = from_rank0(found[-1] if found else None)
    if newest is None:
        if args.resume and dist.get_rank() == 0:
            print(f"resume   no checkpoint in {args.output_dir}: starting a new run", flush=True)
        return None

    if not args.resume:
        raise UserError(
            f"{args.output_dir} holds checkpoints of an earlier run; add --resume, or choose"
            " another --output-dir"
        )
    settings = read_progress(newest)["settings"]
    for name in must_match:
        if settings.get(name) != getattr(args, name):
            raise UserError(
                f"{newest} was saved with --{name.replace('_', '-')} {settings.get(name)}; resume"
                " with the same value, or choose another --output-dir"
            )
    return newest


def check_data(content: int, config, checkpoint: Path | None) -> int:
    """Collective. Return a checksum of the data, whose content has a hash, and the model's config.
    Raises UserError if it is not the same on all nodes, or as when the checkpoint was saved."""
    settings = config.to_diff_dict() | {"transformers_version": None}
    checksum = zlib.crc32(json.dumps([content, settings], sort_keys=True).encode())
    checksums = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, checksum)
    if len(set(checksums)) > 1:
        raise UserError("--dataset, or the config of --model, is not the same on all nodes")
    if checkpoint and read_progress(checkpoint)["checksum"] != checksum:
        raise UserError(
            f"--dataset, or the config of --model, has changed since {checkpoint}; choose another"
            " --output-dir"
        )
    return checksum


def save_checkpoint(progress: dict, args, model, optimizer, tokenizer):
    """Collective. Save `checkpoints/step-N` and delete all but the newest two. Each rank writes its
    own shards.

    progress: `step`, `checksum` and anything else that JSON can hold; the same on all ranks.
    """
    path = args.output_dir / "checkpoints" / f"step-{progress['step']:07d}"
    path.mkdir(parents=True, exist_ok=True)  # on every rank, because dcp.save checks it
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=path)

    if dist.get_rank() == 0:
        tokenizer.save_pretrained(path)  # a resumed run uses this one
        progress = progress | {"settings": vars(args)}
        unfinished = path / "progress.partial"
        unfinished.write_text(json.dumps(progress, default=str))
        unfinished.replace(path / "progress.json")  # now the checkpoint is finished

        keep = checkpoints(args.output_dir)[-2:]
        for other in set(step_folders(args.output_dir)) - set(keep):
            shutil.rmtree(other, ignore_errors=True)  # also half-written ones


def load_checkpoint(path: Path, model, optimizer) -> dict:
    """Collective. Load a checkpoint, on any number of ranks, and return its `progress`."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": optimizer_state}, checkpoint_id=path)  # in place

    # The checkpoint also has the settings of the optimizer that saved it, such as its betas. Keep
    # those of this run.
    settings = [dict(group) for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    for group, of_this_run in zip(optimizer.param_groups, settings, strict=True):
        group.update(of_this_run)
    return read_progress(path)


# ---- Models: read, fill the shards, save -------------------------------------------------------


def load_tokenizer(name: str | Path):
    """Load the tokenizer of a folder or a Hub model. Raises UserError if it has none."""
    from transformers import AutoTokenizer  # a slow import that the MNIST scripts do not need

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ValueError as error:  # if files are missing, its text asks for packages
        raise UserError(f"{name} has no tokenizer that can be read: {error}") from error
    # Or transformers creates one with only special tokens (and, for T5, a space).
    if len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise UserError(f"{name} has no tokenizer; save one there with tokenizer.save_pretrained")
    return tokenizer


def load_config(name: str, attention: str):
    """Load the config of a folder or a Hub model. Raises UserError if it cannot be trained."""
    from transformers import AutoConfig
    from transformers.utils import find_adapter_config_file

    try:
        if find_adapter_config_file(name):
            raise ValueError("it is a LoRA adapter; merge it into its base model")
        config = AutoConfig.from_pretrained(name, attn_implementation=attention)
        if hasattr(config, "quantization_config"):
            raise ValueError("it is quantized; choose the model from which it was made")
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"--model {name}: {error}") from error
    return config


def load_pretrained(kind, name: str, config):
    """`kind.from_pretrained(name)` in fp32, ready to train. Raises UserError if it fails, or if
    weights are missing: transformers would initialize them at random."""
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    try:
        model, info = kind.from_pretrained(name, **options)
    except Exception as error:  # transformers raises many kinds
        raise UserError(f"cannot read the weights of --model {name}: {error}") from error
    if info["missing_keys"]:
        raise UserError(f"{name} has no weights for {', '.join(sorted(info['missing_keys']))}")
    return model.train()  # from_pretrained returns it in eval mode


def untie(meta_model, full_model, world):
    """Collective. Untie the weights of `meta_model` that are not tied in rank 0's `full_model`.

    transformers ties weights by the config, but a checkpoint can hold two different tensors, such
    as the embedding and the output layer of FLAN-T5.
    """
    tied = None
    if world.rank == 0:
        tied = set(full_model.all_tied_weights_keys)
    for name in meta_model.all_tied_weights_keys.keys() - from_rank0(tied):
        module = meta_model.get_submodule(name.removesuffix(".weight"))
        is_trained = module.weight.requires_grad  # False under LoRA
        module.weight = torch.nn.Parameter(torch.empty_like(module.weight), is_trained)


def load_weights(model, full_model, world, offload: bool):
    """Collective. Allocate a sharded model, which is on the meta device, and copy the weights of
    rank 0's `full_model` into it. Each rank keeps its own shards."""
    model.to_empty(device="cpu" if offload else world.device)
    weights = full_model.state_dict() if world.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)

    # A state dict has neither the settings of generate() nor some buffers, such as the frequencies
    # of rotary positions.
    full_buffers = None
    if world.rank == 0:
        full_buffers = list(full_model.buffers())
        model.generation_config = full_model.generation_config
    model.generation_config = from_rank0(model.generation_config)
    for buffer, full_buffer in zip(model.buffers(), from_rank0(full_buffers), strict=True):
        buffer.data = full_buffer.to(world.device)


def export(model, meta_model, dtype, tokenizer, folder: Path, world):
    """Collective. Gather the weights on rank 0's CPU and save them for `from_pretrained`. Does what
    FSDP1's `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)` did.

    meta_model: the unsharded model on the meta device, whose `save_pretrained` is used.
    dtype: that of the model which training began from; None for random weights: fp32.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)

    if world.rank == 0:
        for parameter in meta_model.parameters():
            parameter.data = parameter.to(dtype or torch.float32)
        tensors = {}
        # A tied weight has several names in `weights`. Save it under one of them.
        for name, tensor in [*meta_model.named_parameters(), *meta_model.named_buffers()]:
            if name in weights:
                tensors[name] = weights.pop(name).to(tensor.dtype)
        meta_model.generation_config = model.generation_config
        # T5's own config sets tie_word_embeddings for every model, and other versions of
        # transformers rely on it.
        head = meta_model.get_output_embeddings().weight
        meta_model.config.tie_word_embeddings = head is meta_model.get_input_embeddings().weight
        # generate() must stop where this tokenizer ends texts.
        for settings in (meta_model.config, meta_model.generation_config):
            if tokenizer.eos_token_id not in np.atleast_1d(settings.eos_token_id):
                settings.eos_token_id = tokenizer.eos_token_id
        try:
            replace_model(folder, meta_model, tensors, tokenizer)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot save the model to {folder}: {error}; if there is a checkpoint, --resume"
                " saves the model again"
            ) from error
    dist.barrier()  # rank 0's disk may be slow


def replace_model(folder: Path, meta_model, tensors: dict[str, torch.Tensor], tokenizer):
    """Save a model with these weights. The old model in the folder stays until it is complete."""
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    meta_model.save_pretrained(partial, state_dict=tensors)
    tokenizer.save_pretrained(partial)

    for pattern in ("model[-.]*safetensors*", "adapter_model.*", "adapter_config.json"):
        for file in folder.glob(pattern):  # the old model
            file.unlink()
    # Copy the weights last: without them, an incomplete folder does not load.
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(partial, folder, ignore=ignore, dirs_exist_ok=True)
    for file in partial.glob("*.safetensors"):
        # safetensors makes files that only their owner can read.
        shutil.copymode(folder / "tokenizer_config.json", file)
        file.replace(folder / file.name)
    shutil.rmtree(partial)


# ---- Data --------------------------------------------------------------------------------------


def train_tokenizer(texts, vocab_size: int, append_eos: bool):
    """Train a byte-level BPE tokenizer. The same texts give the same tokenizer."""
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


# The built-in articles. Their texts only imply what is done, so a model cannot copy the summary.
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


def builtin_article(index: int) -> dict:
    """Make up an article with WikiHow's columns. It is the same on every machine."""
    choose = random.Random(index)
    sentences = [choose.choice(ASIDES)]
    headlines = []
    for thing in choose.sample(THINGS, choose.randint(2, 3)):
        sentence = choose.choice(list(SENTENCES))
        sentences.append(sentence.format(thing))
        headlines.append(f"{SENTENCES[sentence]} the {thing}.")
    return {
        "title": f"How to Spend Day {index} at Home",
        "text": " ".join(sentences),
        "headline": "\n".join(headlines),
    }


WIKIHOW = {"title", "text", "headline"}  # its columns


def open_dataset(name: str, readers: dict[str, str], output_dir: Path):
    """Return the builder of `datasets` for a file, a folder, a glob, a URL or a Hub dataset (NAME
    or NAME:CONFIG). Its files to train on are in `config.data_files["train"]`.

    readers: the reader of `datasets` for each ending of files. Raises UserError if the files have
    no such ending, or need different readers.
    """
    import datasets  # a slow import that the MNIST scripts do not need
    from datasets.data_files import DataFilesList, get_data_patterns

    ending = re.compile(rf"\.({'|'.join(readers)})(\.gz|\.bz2|\.xz|\.zst)?(\?.*)?$", re.I)
    path = Path(name).absolute()
    exact = glob.escape(str(path))  # its name may have brackets
    card = path / "README.md"  # if it has configs, they name files and say how to read them
    has_configs = card.exists() and b"\nconfigs:" in card.read_bytes()
    if path.is_dir() and not has_configs:
        patterns = get_data_patterns(exact).get("train", [])
        files = DataFilesList.from_patterns(patterns, base_path=exact)
    elif path.is_file():
        files = [str(path)]
    elif ending.search(name) or re.search(r"[*?[]|://", name):
        files = DataFilesList.from_patterns([name])
    else:
        return datasets.load_dataset_builder(*name.split(":"))

    output = output_dir.absolute()
    found = []
    for file in filter(ending.search, files):
        if "://" not in file:
            # A run's own files are no data, unless all data is in its folder.
            from_run = output in Path(file).parents and output not in (path, *path.parents)
            if from_run or os.path.getsize(file) == 0:
                continue
            file = glob.escape(file)
        found.append(file)
    kinds = {readers[ending.search(file)[1].lower()] for file in found}
    if len(kinds) != 1:
        raise UserError(
            f"found {' and '.join(sorted(kinds)) or 'no'} files to train on; choose files of one"
            f" kind ({', '.join(readers)}), for example by a glob in quotes: 'folder/*.jsonl' (in a"
            " folder, names with test or dev are left out)"
        )
    return datasets.load_dataset_builder(*kinds, data_files=found)


def is_text(kind) -> bool:
    """Whether an Arrow type is text, or a column has no values."""
    return str(kind) in ("string", "large_string", "null")


def read_rows(builder, files: list[str], columns: list[str], is_valid=is_text):
    """Yield these columns of some files. Raises UserError, with the file's name, if it cannot be
    read, or if the Arrow type of a column is not valid."""
    for file in files:
        try:
            if builder.name == "csv":
                yield from read_csv(file, columns, builder.config)
            elif builder.name == "text":
                yield from read_paragraphs(file, columns)
            else:
                yield from read_tables(builder, file, columns, is_valid)
        except UnicodeError as error:
            raise UserError(f"{file}: {error}; save it as UTF-8") from error
        except Exception as error:  # each reader raises its own kind
            raise UserError(f"{file}: {error}") from error


def read_tables(builder, file: str, columns: list[str], is_valid):
    """Yield these columns of a JSON or Parquet file. Raises UserError if one is not there, and
    TypeError if its type is not valid."""
    builder.config.columns = columns  # what to read of a .parquet file
    builder.config.data_files = {"train": [file]}
    rows = builder.as_streaming_dataset(split="train")
    # Do not require the columns and types of the first rows in every file.
    builder.info.features = None
    rows.info.features = None
    try:
        for table in rows.select_columns(columns).with_format("arrow").iter(batch_size=200):
            for field in table.schema:
                # If a column has several types, datasets has converted its values to JSON.
                if not is_valid(field.type):
                    kind = str(field.type)[:60]
                    raise TypeError(f"column {field.name} holds {kind}, not only text or null")
            yield from table.to_pylist()
    except KeyError as error:
        names = ", ".join([*next(iter(rows))][:20])
        raise UserError(
            f"it has no {' and '.join(columns)}; choose --text-column from {names}"
        ) from error


def read_paragraphs(file: str, columns: list[str]):
    """Yield the paragraphs of a .txt file, which empty lines separate."""
    with open_text(file) as lines:
        for is_empty, paragraph in itertools.groupby(lines, str.isspace):
            if not is_empty:
                yield dict.fromkeys(columns, "".join(paragraph).rstrip("\n"))


def open_text(file: str, encoding="utf-8-sig", newline=None):
    """Open a text file, which may be compressed, on this disk or at a URL."""
    compression = infer_compression(file.partition("?")[0])
    return fsspec.open(file, "rt", compression, encoding, newline=newline)


def read_csv(file: str, columns: list[str], config):
    """Yield these columns of a CSV file as it was written, and WikiHow's title. Raises csv.Error if
    a row does not fit the header, as where a text has a line break but no quotes around it.

    config: of the builder. Its `sep`, `names` and `encoding` can come from a dataset's card.
    """
    csv.field_size_limit(2**31 - 1)  # characters of a text; the default is 131,072
    with open_text(file, config.encoding or "utf-8-sig", newline="") as lines:
        first_line = "" if config.names else lines.readline()
        for delimiter in ",;\t|" if config.sep == "," else [config.sep]:
            options = {"delimiter": delimiter, "skipinitialspace": True}
            header = config.names or next(csv.reader([first_line], **options))
            if all(header.count(column) == 1 for column in columns):
                break
        else:
            raise UserError(
                f"it has no {' and '.join(columns)}, whether commas, semicolons, tabs or | divide"
                " it; delete what stands above the header, or choose --text-column and"
                f" --summary-column from its first line: {first_line[:300]!r}"
            )
        if set(header) == WIKIHOW:
            columns = sorted(WIKIHOW)
        num_needed = 1 + max(map(header.index, columns))

        reader = csv.reader(lines, strict=True, **options)
        try:
            for row in check_rows(reader, len(header), num_needed):
                yield {column: row[header.index(column)] for column in columns}
        except csv.Error as error:
            line = reader.line_num + bool(first_line)
            raise csv.Error(
                f"line {line}: {error}; write texts between quotes, and each quote in them twice"
            ) from error


def check_rows(rows, width: int, num_needed: int):
    """Yield rows that have as many fields as the header. Rows may lack the same last cells, because
    Excel drops empty ones. Or all rows may end with a delimiter."""
    row_end = None
    num_short = None  # fields of the rows that lack cells
    was_short = False
    for row in filter(None, rows):  # without empty lines
        if row_end is None:
            row_end = [""] if row[width:] == [""] else []
        if row[width:] != row_end or len(row) < num_needed:
            raise csv.Error(f"{len(row)} fields under a header of {width}")
        is_short = len(row) < width
        if is_short:
            # Two parts of a row that a line break divides have at most width + 1 fields.
            can_be_parts = was_short and 2 * len(row) <= width + 1
            if can_be_parts or num_short not in (None, len(row)):
                raise csv.Error(f"a line break, or only {len(row)} of {width} fields")
            num_short = len(row)
        was_short = is_short
        yield row


def load_articles(
    name: str, text_column: str, summary_column: str, max_summary_share: float, output_dir: Path
):
    """Return two `datasets.Dataset` of texts and summaries: 95% to train on and 5% to validate on.

    name: builtin, or what `open_dataset` takes. Raises UserError if it has no articles.
    """
    import datasets

    # These functions are nested on purpose. datasets caches results under a hash of the function:
    # of its code if it is nested, but only of its name if it could be imported.
    def clean(text, summary, title=None) -> dict:
        text = as_text(text)
        summary = as_text(summary)
        article = text
        if title is not None:
            # WikiHow has stray commas (arXiv:1810.09305). An article with two methods has two rows,
            # "Bake Bread1" and "Bake Bread2".
            text = re.sub(r"(^|\n)\s*,", r"\1", text).strip()
            summary = re.sub(r"\s*,\s*(\n|$)", r"\1", summary).strip()
            article = re.sub(r"\d+$", "", title) or text
        return {
            "text": text,
            "summary": summary,
            "article_hash": zlib.crc32(article.encode()),
            "content_hash": zlib.crc32(f"{text}\n{summary}".encode()),
        }

    def as_text(value) -> str:
        sentences = value if isinstance(value, list) else [value]
        return "\n".join(filter(None, sentences)).strip()

    def is_usable(text: str, summary: str) -> bool:
        return 0 < len(summary) <= max_summary_share * len(text)

    def is_text_or_list(kind) -> bool:  # a list may hold the sentences
        return is_text(getattr(kind, "value_type", kind))

    def read(files: list[str], code: int):
        yield from read_rows(builder, files, columns, is_text_or_list)

    if dist.get_rank() != 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    columns = [text_column, summary_column]
    readers = {"csv": "csv", "tsv": "csv", "json": "json", "jsonl": "json", "parquet": "parquet"}
    try:
        if name == "builtin":
            rows = datasets.Dataset.from_list([builtin_article(i) for i in range(10_000)])
        else:
            builder = open_dataset(name, readers, output_dir)
            files = builder.config.data_files["train"]
            code = zlib.crc32(Path(__file__).read_bytes())  # an edited reader reads again
            options = {"files": files, "code": code}
            rows = datasets.Dataset.from_generator(read, gen_kwargs=options)
    except Exception as error:  # each reader raises its own kind
        raise UserError(f"--dataset {name}: {error.__cause__ or error}") from error
    for column in columns:
        if column not in rows.column_names:
            raise UserError(f"--dataset {name} has no column {column}, only {rows.column_names}")

    if set(rows.column_names) == WIKIHOW:
        columns.append("title")
    articles = rows.map(clean, input_columns=columns, remove_columns=rows.column_names)
    articles = articles.filter(is_usable, input_columns=["text", "summary"])

    # Sort by a hash of the article and hold out the first twentieth of the hash's range. Then the
    # order of rows does not matter, and added rows move no article to the other side.
    hashes = list(zip(articles["article_hash"][:], articles["content_hash"][:], strict=True))
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    smallest, _ = min(hashes, default=(0, 0))
    num_held_out = sum(hash <= max(smallest, 2**32 // 20) for hash, _ in hashes)
    if num_held_out == len(hashes):
        raise UserError(
            f"--dataset {name} has too few rows with a text and a summary (see --max-summary-share)"
        )
    if dist.get_rank() == 0:
        print(f"dataset  {name}, {len(rows):,} rows, {len(articles):,} usable", flush=True)
    return articles.select(order[num_held_out:]), articles.select(order[:num_held_out])
