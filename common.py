"""What the training scripts share: process group, metrics, checkpoints, and the data for summarization.

Copy this file together with the script you start from. What is sharded, and how, is in the script.
"""

import argparse
import contextlib
import difflib
import gc
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
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

from safetensors.torch import save_file
from tqdm import tqdm


# ---- Processes and devices -------------------------------------------------------------------------------------
class UserError(Exception):
    """Bad input. Its text is one sentence that says what is wrong and what to do."""


TIMEOUT = timedelta(minutes=10)  # of a collective: who waits longer waits for a process that hangs or is gone


class World(NamedTuple):
    rank: int
    local_rank: int  # picks a device and nothing else
    size: int
    local_size: int  # processes on this node
    device: torch.device


class Parser(argparse.ArgumentParser):
    """argparse with a script's header as its help, the flags of this file, and `--foo_bar` taken as `--foo-bar`."""

    def __init__(self, header: str, checkpoints: bool = False) -> None:
        kinds = (argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter)
        width = shutil.get_terminal_size().columns
        texts = [text if text.startswith("    ") else textwrap.fill(text, width) for text in header.split("\n\n")]
        start, end = "\n\n".join(texts[:2]), "examples:\n" + "\n\n".join(texts[2:])
        options = {"formatter_class": type("Help", kinds, {}), "allow_abbrev": False}
        super().__init__(usage="%(prog)s [flags]", description=start, epilog=end, **options)
        titles = ("data and model", "training", "FSDP", "processes and output")
        self.groups = {title: self.add_argument_group(title) for title in titles}
        add, count, switch = self.groups[titles[-1]].add_argument, at_least(0), argparse.BooleanOptionalAction
        add("--num-processes", default=0, type=count, help="to start; 0: one for each GPU, or two on a CPU")
        add("--device", default="auto", help="auto: GPUs, if there are; cpu; or by name: cuda, xpu, mps")
        add("--seed", default=1, type=count, help="of weights, data order and dropout; another one, another run")
        add("--output-dir", default=Path("output", Path(sys.argv[0]).stem), type=Path, help="one for each run")
        add("--save-model", default=True, action=switch, help="export the best or last model")
        if checkpoints:
            add("--log-every", default=25, type=at_least(1), help="steps between rows of the table")
            add("--checkpoint-every", default=0, type=count, help="steps between checkpoints, 0 for none")
            add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")

    def parse_args(self) -> argparse.Namespace:
        return super().parse_args([re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), a) for a in sys.argv[1:]])

    def error(self, message: str) -> NoReturn:
        _, _, wrong = message.partition("unrecognized arguments: ")
        near = difflib.get_close_matches(re.split(r"[= ]", wrong)[0], self._option_string_actions, 1)
        fail(f"{message} ({f'did you mean {near[0]}? ' if near else ''}--help lists every flag)")


def at_least(low: float, kind: type = int) -> Callable[[str], float]:
    """An argparse type: a finite number, `low` or more."""

    def number(text: str) -> float:
        if not low <= kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {low}")
        return kind(text)

    number.__name__ = "whole number" if kind is int else "number"  # for argparse's own sentence
    return number


def hub_or_folder(text: str) -> str:
    """An argparse type: a name on the Hugging Face Hub, or a folder that is there."""
    if text[:1] in "./~" and not Path(text).expanduser().is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return os.path.expanduser(text)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print a message on stderr and end this process at once."""
    if os.environ.get("RANK", "0") != "0":
        # What fails here often follows from what failed on rank 0, so that speaks first; torchrun then ends the others.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if StopRequest.flag:  # torchrun has asked already
            os._exit(code)
        time.sleep(10)
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    message += " (torchrun tries again, as --max-restarts says)" if done < most else ""
    with contextlib.suppress(OSError):  # nobody reads it, after `| head` for example
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    os._exit(code)  # an orderly end can hang: another rank may wait in a collective


def run(main: Callable[[argparse.Namespace, World], None], args: argparse.Namespace, apart: bool = False) -> None:
    """Call `main(args, world)` in every process; without torchrun, start them first, with `apart` also a single one."""
    try:
        accelerator = find_accelerator(args.device)
        if args.fsdp_version == 1 and args.save_model and not accelerator and torch.__version__ < (2, 14):
            raise UserError("before torch 2.14 FSDP1 cannot save a whole model on a CPU; add --no-save-model")
        if args.fsdp_version == 1 and getattr(args, "cpu_offload", False) and not accelerator:
            raise UserError("FSDP1 offloads from a GPU only; on a CPU use --fsdp-version 2, or no --cpu-offload")
        if accelerator and accelerator.type == "mps" and getattr(args, "mode", None) != "local":
            raise UserError("FSDP was not tried on Apple's GPUs; use --device cpu, or mnist_fsdp.py --mode local")
        count = args.num_processes or (torch.accelerator.device_count() if accelerator else 2)  # two on a CPU
        if "RANK" not in os.environ and (apart or count > 1):
            return start_processes(count)
        main(args, setup(accelerator))
    except (UserError, OSError, dist.DistNetworkError) as error:  # OSError: of a file, the disk, the Hub
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        fail(traceback.format_exc(), code=1)
    # The `cleanup` of the tutorials. A model that outlives its process group can abort Python at its end.
    gc.collect()
    dist.destroy_process_group()


def start_processes(count: int) -> None:
    """Start this script again in `count` processes, with torchrun."""
    command = ["--standalone", "--nproc_per_node", str(count), *sys.argv]
    print("torchrun", *command, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning; `setup` sets another on a CPU
    logging.disable()  # torchrun's warnings of every end; the report that it raises says it all
    try:
        torchrun(command)
    except elastic.errors.ChildFailedError as error:
        sys.exit(2 if error.get_first_failure()[1].exitcode == 2 else str(error))  # 2: it has said what is wrong
    except elastic.api.SignalException as error:
        sys.exit(128 + error.sigval)


def find_accelerator(name: str) -> torch.device | None:
    """The kind of GPU that `--device` names, None for the CPU. `auto` skips Apple's, where FSDP was not tried."""
    if name == "cpu":
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto" and (not found or found.type == "mps"):
        return None
    if not found or name not in ("auto", found.type):
        raise UserError(f"--device {name}: torch {torch.__version__} finds none; install its build or use --device cpu")
    return found


def setup(accelerator: torch.device | None) -> World:
    """Read torchrun's environment, set the device and start the process group."""
    if "RANK" in os.environ and "MASTER_PORT" not in os.environ:
        raise UserError("RANK is set without torchrun's other variables; unset it, or start with torchrun")
    names = (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    rank, local_rank, size, local_size = (int(os.environ.get(name, default)) for name, default in names)
    device = torch.device(accelerator.type, local_rank) if accelerator else torch.device("cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_size))  # torchrun allows one, also to an offloaded optimizer
    if accelerator:
        count = torch.accelerator.device_count()
        if local_size > count:
            raise UserError(f"{local_size} processes on this node, but {count} GPUs; start at most one for each")
        torch.accelerator.set_device_index(local_rank)  # before the process group, or all open a context on device 0
        torch.set_float32_matmul_precision("high")  # TF32: fp32 products several times faster, with 10 bits of mantissa
    # Tensors of the CPU go over gloo, those of the device over NCCL or XCCL. Unnamed, it would be the latter alone.
    backend = dist.get_default_backend_for_device(device)
    options = {"backend": backend, "timeout": TIMEOUT}
    if backend != "gloo":
        options["backend"] = f"cpu:gloo,{device.type}:{backend}"
    if "RANK" in os.environ:
        # A store of rank 0's own: torchrun's outlives a restart, with dead processes' addresses (pytorch#135712).
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    else:  # without torchrun: a group of one
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    return World(rank, local_rank, size, local_size, device)


@contextlib.contextmanager
def first_on_node(world: World):
    """The first process of each node runs the block before the others, which then find its results in the cache."""
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))  # the block may download, or tokenize
    if world.local_rank != 0:
        dist.barrier(group)
    yield
    if world.local_rank == 0:
        dist.barrier(group)


class StopRequest:
    """A cluster's SIGTERM, or Ctrl-C, asks for room: the run saves after the step it is in and leaves."""

    flag = torch.zeros(1)  # on the CPU: reading it does not wait for the device

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.flag.fill_(1))

    def on_any_rank(self) -> bool:
        dist.all_reduce(flag := self.flag.clone())
        return flag.item() > 0


def ignore_sigterm(worker: int) -> None:
    """For a DataLoader's workers: they must outlive the SIGTERM that a cluster sends to every process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def choose_precision(name: str, device: torch.device) -> str:
    """`--precision`, where `auto` is bf16 if the device computes in it (the T5 tutorial's `bf16_ready`), else fp32."""
    if device.type != "cpu":
        native = torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    else:  # ATEN_CPU_CAPABILITY=avx2 holds PyTorch back on a newer CPU
        found = torch.cpu.get_capabilities() if torch.backends.cpu.get_cpu_capability() != "AVX2" else {}
        native = any(found.get(kind) for kind in ("avx512_bf16", "amx_bf16", "bf16"))
    if name == "bf16" and not native and dist.get_rank() == 0:
        print(f"--precision bf16: this {device.type} only emulates bf16, which is slow", file=sys.stderr)
    return ("bf16" if native else "fp32") if name == "auto" else name


# ---- Metrics ---------------------------------------------------------------------------------------------------
def sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sum over all ranks, or those of a group, and read from the device, for which the host waits: not in every step.
    A collective."""
    total = values.cpu().clone()
    dist.all_reduce(total, group=group)
    return total.tolist()


def state_gb(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """GB that this rank holds of parameters, gradients and optimizer state."""
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if torch.is_tensor(t)]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) / 2**30


def peak_memory(device: torch.device) -> dict[str, float]:
    """GB at most since the last call: of the device's memory, or on a CPU of this process's resident memory (Linux)."""
    peaks = {"peak_gb": math.nan}
    if device.type not in ("cpu", "mps"):  # reserved: with what the allocator keeps for later
        peaks = {"peak_gb": torch.accelerator.max_memory_allocated(device) / 2**30}
        peaks["reserved_gb"] = torch.accelerator.max_memory_reserved(device) / 2**30
        torch.accelerator.reset_peak_memory_stats(device)
    elif device.type == "cpu" and (clear := Path("/proc/self/clear_refs")).exists():
        peaks["peak_gb"] = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20
        clear.write_text("5")
    return peaks


def describe_run(world: World) -> str:
    """Where it runs, and with what."""
    versions = [f"{name} {sys.modules[name].__version__}" for name in ("torch", "transformers") if name in sys.modules]
    tf32 = ["TF32"] if torch.get_float32_matmul_precision() == "high" else []
    return ", ".join([f"{world.size} processes on {world.device.type}", *versions, *tf32])


def describe_size(num_parameters: int, shards: int, world: World, copies: int = 4, offload: bool = False) -> str:
    """What each process will hold of a model, and the memory that there is for it, on the CPU with `offload`.

    AdamW in fp32 takes four `copies` of a parameter, 4 bytes each: weight, gradient, two moments. Raises UserError
    where these alone do not fit.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world.local_size
    on_device = world.device.type not in ("cpu", "mps") and not offload
    if on_device:
        memory = torch.accelerator.get_memory_info(world.device)[1]
    held = 4 * copies * num_parameters / shards
    size = f"{num_parameters:,} parameters, {held / 2**30:.3f} GB of state a process, which has {memory / 2**30:.0f} GB"
    if held > memory:
        needed = math.ceil(shards * held / memory)
        way = f"shard over {needed} processes or more{', or add --cpu-offload' if on_device else ''}"
        raise UserError(f"this does not fit: {size}; {way}")
    return size


class Log:
    """Rank 0's voice: one table on the screen, of columns such as loss="8.4f", and its rows in `metrics.jsonl`.

    A narrow terminal goes without the columns named in `least`, the first of them first.
    """

    def __init__(self, rank: int, folder: Path, least: str = "", **columns: str) -> None:
        self.rank, self.path, self.columns, self.header = rank, folder / "metrics.jsonl", columns, True
        self.began, self.run = time.time(), f"{datetime.now():%Y-%m-%d-%H-%M-%S}"  # the tutorial's get_date_of_run
        self.widths = {name: max(len(name), int(re.match(r"\d*", form)[0])) for name, form in columns.items()}
        for name in least.split():
            if sum(self.widths.values()) + 2 * len(self.widths) - 2 > shutil.get_terminal_size((120, 24)).columns:
                del self.widths[name]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            raise UserError(f"--output-dir {folder} cannot be written ({error.strerror}); choose another") from error

    def say(self, text: str) -> None:
        if self.rank == 0:
            with tqdm.external_write_mode():
                print(text, flush=True)

    def row(self, write: bool = True, **values: float) -> None:
        """Print a row of the table, empty where there is no value, and write it, with date and seconds of the run."""
        cells = {name: format(values[name], form) if name in values else "" for name, form in self.columns.items()}
        if self.header:
            self.say("")
        for line in ({name: name for name in cells}, cells) if self.header else (cells,):
            self.say("  ".join(line[name].rjust(width) for name, width in self.widths.items()))
        self.header = False
        if self.rank == 0 and write:
            record = {"run": self.run, "seconds": round(time.time() - self.began, 3), **values}
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")

    def bar(self, iterable: Iterable, text: str, total: int) -> Iterable:
        return tqdm(iterable, text, total, leave=False, disable=True if self.rank else None)


# ---- Checkpoints -----------------------------------------------------------------------------------------------
def refuse_fsdp1_offload(args: argparse.Namespace) -> None:
    """For a model that is not sharded: FSDP1 then computes with a pinned copy of its weights, and loads into others."""
    if args.fsdp_version == 1 and args.cpu_offload:
        raise UserError("FSDP1 with --cpu-offload resumes wrongly with one shard; use --fsdp-version 2, or more shards")


def find_checkpoints(folder: Path, resume: bool) -> list[Path]:
    """The finished checkpoints, oldest first, to go on from with `resume` or after torchrun's restart. A collective."""
    # .metadata is written at the very end. On several nodes torchrun counts a restart only where a process was lost.
    dist.broadcast_object_list(found := [sorted(path.parent for path in folder.glob("checkpoints/*/.metadata"))])
    dist.all_reduce(restarts := torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))))
    if found[0] and not resume and not restarts:
        raise UserError(f"{folder} holds checkpoints of an earlier run; add --resume, or choose another --output-dir")
    return found[0]


def state_of(model, optimizer, world: World, outer) -> tuple[dict, dict, list]:
    """What a checkpoint holds, this rank's own part of it, and the optimizer's groups.

    Tensors only: all else would be pickled. With DiLoCo's `outer` optimizer the replicas differ, so each is saved under
    its number; one name for all would keep a mixture of them.
    """
    weights, moments = sd.get_state_dict(model, optimizer)
    own = {"cpu": torch.get_rng_state()}
    if world.device.type != "cpu":
        own[world.device.type] = torch.get_device_module(world.device).get_rng_state()
    if outer:
        own |= {"shared": dict(enumerate(outer.shared)), "momentum": dict(enumerate(outer.momentum))}
    part = f"-{outer.replica}" if outer else ""
    state = {f"model{part}": weights, f"optimizer{part}": moments["state"], f"rank{world.rank}of{world.size}": own}
    return state, own, moments["param_groups"]


def save_checkpoint(folder: Path, model, optimizer, progress: dict, world: World, outer=None) -> None:
    """Save `checkpoints/step-N`, every rank its own shards, and `progress` as JSON; keep the newest 2. A collective."""
    path = folder / "checkpoints" / f"step-{progress['step']:07d}"
    try:
        if world.rank == 0:
            path.mkdir(parents=True, exist_ok=True)  # a killed run may have left it
            (path / ".metadata").unlink(missing_ok=True)  # unfinished again
            (path / "progress.json").write_text(json.dumps(progress, default=str))
        dist.barrier()  # dcp.save looks into the folder on every rank
        dcp.save(state_of(model, optimizer, world, outer)[0], checkpoint_id=path)
        for old in sorted(path.parent.glob("*/.metadata"))[:-2] if world.rank == 0 else ():
            shutil.rmtree(old.parent)
    except (OSError, dcp.api.CheckpointException) as error:
        free = shutil.disk_usage(folder).free / 2**30
        shutil.rmtree(path, ignore_errors=True)  # half of one would keep a full disk full
        cause = str(error).strip().rpartition("\n")[2]  # the line that names it: those above are every rank's traceback
        raise UserError(f"could not save {path}, where {free:.3f} GB are free: {cause}") from error


def load_checkpoint(paths: list[Path], model, optimizer, settings: dict, world: World, outer=None) -> dict:
    """Load the newest checkpoint that can be read, on any number of ranks. Returns its `progress`, {} without one."""
    for path in reversed(paths):
        state, own, groups = state_of(model, optimizer, world, outer)
        weights, moments, mine = state  # their names
        try:
            progress = json.loads((path / "progress.json").read_text())
            if changed := [name for name in settings if progress["settings"].get(name) != settings[name]]:
                flag, before = f"--{changed[0].replace('_', '-')}", progress["settings"].get(changed[0])
                text = f"was made with {flag} {before}, on which its weights, data or learning rates depend"
                raise UserError(f"{path} {text}; resume with it, or choose another --output-dir")
            saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            # Loading into a model of fewer parameters would succeed, in silence.
            shapes = {f"{weights}.{name}": weight.shape for name, weight in state[weights].items()}
            if shapes != {name: entry.size for name, entry in saved.items() if name.startswith(f"{weights}.")}:
                raise UserError(f"{path} is of another model or strategy; resume with the one it was made with")
            if f"{mine}.cpu" not in saved:  # saved by another number of processes: dropout draws anew
                if outer:
                    raise UserError(f"{path} was made by more or fewer processes, which DILOCO's replicas cannot join")
                del state[mine]
            elif f"{mine}.{world.device.type}" not in saved:  # saved on another kind of device: the same
                del own[world.device.type]
            dcp.load(state, checkpoint_id=path)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError, dcp.api.CheckpointException) as error:
            if world.rank == 0:
                print(f"{path} is damaged ({type(error).__name__}); trying the one before", file=sys.stderr)
            continue
        moments = {"state": state[moments], "param_groups": groups}
        sd.set_state_dict(model, optimizer, model_state_dict=state[weights], optim_state_dict=moments)
        torch.set_rng_state(own["cpu"])
        if world.device.type != "cpu" and world.device.type in own:
            torch.get_device_module(world.device).set_rng_state(own[world.device.type])
        return progress
    if paths:
        raise UserError(f"no checkpoint in {paths[0].parent} can be read; start again with another --output-dir")
    return {}


def load_weights(model: torch.nn.Module, whole: torch.nn.Module | None, world: World, offload: bool) -> None:
    """Give a sharded model on the meta device its memory, and the weights and buffers of rank 0's `whole` one."""
    # Memory of this rank's shards, with `offload` on the CPU; then rank 0 sends one parameter at a time.
    model.to_empty(device="cpu" if offload else world.device)
    options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sd.set_model_state_dict(model, whole.state_dict() if whole else {}, options=options)
    # to_empty has emptied the buffers too, and a state dict does not hold them all: positions, for example. Nor is a
    # config all that a folder says about generate().
    dist.broadcast_object_list(others := [(list(whole.buffers()), whole.generation_config) if whole else None])
    buffers, model.generation_config = others[0]
    for empty, values in zip(model.buffers(), buffers, strict=True):
        empty.data = values.to(world.device)


def export(model: torch.nn.Module, tokenizer: Any, folder: Path, world: World) -> None:
    """Gather the whole model on rank 0's CPU (as `FullStateDictConfig` did) and save it for `from_pretrained`."""
    weights = sd.get_model_state_dict(model, options=sd.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.rank == 0:
        partial = folder.with_name(f"{folder.name}.partial")  # what is in `folder` stays until this is whole
        try:
            partial.mkdir(exist_ok=True)
            if tokenizer:
                whole = getattr(model, "module", model)  # FSDP1 has it there
                for name, source in whole.all_tied_weights_keys.items():  # T5's embedding, but not FLAN-T5's output
                    weights[name] = weights[source if torch.equal(weights[name], weights[source]) else name]
                whole.save_pretrained(partial, state_dict=weights)
                tokenizer.save_pretrained(partial)
            else:
                save_file(weights, partial / "model.safetensors")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        except Exception as error:  # safetensors has errors of its own
            raise UserError(f"could not save {folder}: {error}") from error
    dist.barrier()


# ---- Summarization data ----------------------------------------------------------------------------------------
# The built-in articles: a text only implies what is done, so its summary has to be learned and cannot be copied.
ACTIONS = {
    "Wash": ("Hold the {} under the tap until no soil is left.", "Let a cold stream carry the dirt off the {}."),
    "Peel": ("Take the skin off the {} with a short knife.", "Strip the {} down to the bare flesh."),
    "Slice": ("Turn the {} into pieces as thin as a coin.", "Work along the {} with a blade, a finger apart."),
    "Boil": ("Leave the {} in a pot of bubbling water.", "Once the pot rolls and steams, lower the {} in."),
    "Fry": ("Drop the {} into a pan of hot oil.", "A sizzling skillet gives the {} a brown crust."),
    "Freeze": ("Keep the {} far below zero overnight.", "Ice should form all over the {} by morning."),
}
THINGS = ("apples", "beans", "carrots", "mushrooms", "noodles", "onions", "pears", "potatoes", "spinach", "tomatoes")
ASIDES = ("There is no need to hurry.", "You will get better every time.", "It may rain later.", "Experts disagree.")


def builtin_article(number: int) -> dict[str, str]:
    """An article in WikiHow's columns, the same on every machine."""
    choose = random.Random(number)
    steps = [(choose.choice(list(ACTIONS)), thing) for thing in choose.sample(THINGS, choose.randint(2, 3))]
    text = [choose.choice(ACTIONS[action]).format(thing) for action, thing in steps]
    text.insert(choose.randint(0, len(text)), choose.choice(ASIDES))
    headline = "\n".join(f"{action} the {thing}." for action, thing in steps)
    return {"title": f"How to Spend Day {number} at Home", "text": " ".join(text), "headline": headline}


def load_articles(name: str, columns: tuple[str, str], counts: tuple[int, int], longest: float) -> list:
    """Two `datasets.Dataset` of texts and summaries, to train on and to validate on.

    `counts` are theirs, 0 for all; `longest` is that of a summary, as a share of its text.
    """
    import datasets  # here: the scripts without text need not wait for it

    # WikiHow (arXiv:1810.09305) has stray commas, and parts of one article ("How to Make Bread2") that stay together.
    def clean(row: dict) -> dict:
        text = re.sub(r"(^|\n)\s*,", r"\1", str(row[columns[0]] or "")).strip()
        summary = re.sub(r"\s*,\s*(\n|$)", r"\1", str(row[columns[1]] or "")).strip()
        title = re.sub(r"(?<=[^\s\d])\d+$", "", str(row.get("title") or text).strip()).lower()
        return {"text": text, "summary": summary, "held_out": random.Random(title).random() < 0.05}

    if dist.get_rank() or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    kind = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(Path(name).suffix.lower())
    try:
        if name == "builtin":
            rows = datasets.Dataset.from_list([builtin_article(number) for number in range(10_000)])
        elif kind:
            rows = datasets.load_dataset(kind, data_files=name, split="train")
        else:
            rows = datasets.load_dataset(*name.split(":"), split="train")
        if not {*columns} <= {*rows.column_names}:
            raise ValueError(f"its columns are {', '.join(rows.column_names)}")
        rows = rows.map(clean, remove_columns=rows.column_names)
    except (KeyError, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        flags = f"--text-column {columns[0]} and --summary-column {columns[1]}"
        raise UserError(f"--dataset {name} with {flags} cannot be read: {error.__cause__ or error}") from error
    usable = rows.filter(lambda row: 0 < len(row["summary"]) <= longest * len(row["text"]))
    chosen = []
    for held_out, count in zip((False, True), counts, strict=True):
        side = usable.filter(lambda row, side=held_out: row["held_out"] == side).shuffle(seed=0)
        chosen.append(side.select(range(min(count or len(side), len(side)))))
    found = f"{len(rows):,} rows, of which {len(usable):,} have a text and a summary within --max-summary-share"
    if not all(map(len, chosen)):
        raise UserError(f"--dataset {name}: {found}; these are too few, or of too few titles, to hold some out")
    if dist.get_rank() == 0:
        print(f"dataset  {name}, {found}", flush=True)
    return chosen


def train_tokenizer(texts: Iterable[str], vocab_size: int, append_eos: bool) -> Any:
    """A byte-level BPE tokenizer; training is deterministic, so every rank makes the same."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    bpe.train_from_iterator(texts, vocab_size, special_tokens=["<pad>", "</s>"], show_progress=False)
    if append_eos:
        bpe._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="</s>")
