"""What the training scripts share: distributed setup, summarization data, metrics, checkpoints.

Copy this file together with the script you start from. Everything that teaches FSDP is in the scripts; this
file holds the plumbing they would otherwise repeat.
"""

import argparse
import atexit
import contextlib
import csv
import ctypes
import gc
import hashlib
import inspect
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

import numpy as np

T = TypeVar("T")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # from glibc's malloc.h


# ----------------------------------------------------------------------------------------------------------------
# 1. Distributed setup
# ----------------------------------------------------------------------------------------------------------------


class UserError(Exception):
    """Bad input. Its text is one sentence that says what is wrong and what to do."""


class World(NamedTuple):
    """Where this process stands. `local_rank` picks a device and nothing else."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str


class ArgumentParser(argparse.ArgumentParser):
    """argparse with full flag names only, defaults in `--help`, and errors as one sentence from rank 0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def add(self, name: str, text: str, default: Any, **options: Any) -> None:
        """Add a flag. A pair as its default is what a built-in run uses and what the original uses: see `settle`."""
        if isinstance(default, tuple):
            text += f" (default: {default[0]} for a built-in run, else {default[1]})"
            default = argparse.SUPPRESS
        self.add_argument(name, help=text, default=default, **options)

    def error(self, message: str) -> NoReturn:
        exit_with_error(f"{message} (--help lists every flag)")


def settle(args: argparse.Namespace, defaults: dict[str, tuple], builtin: bool) -> None:
    """Give the flags that were not set their default of the pair: the first of a built-in run, else the second."""
    for name, pair in defaults.items():
        vars(args).setdefault(name, pair[0 if builtin else 1])


def departures(args: argparse.Namespace, defaults: dict[str, tuple], original: str) -> str | None:
    """The flags that differ from the original's settings, with both values; None if none does."""
    changed = [
        f"--{name.replace('_', '-')} {getattr(args, name)} ({theirs})"
        for name, (_, theirs) in defaults.items()
        if getattr(args, name) != theirs
    ]
    return f"{', '.join(changed)}; in brackets {original}" if changed else None


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def non_negative_int(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def exit_with_error(message: str) -> NoReturn:
    """Print one sentence on stderr and end this process with exit code 2.

    Rank 0 speaks. The others hold back, because torchrun stops every process as soon as one ends; if they are
    still alive after 10 s then rank 0 knows nothing of this error, and they say it themselves.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a script may take it for a wish to save
        time.sleep(10)
        message = f"[rank {rank}] {message}"
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    # Not sys.exit: tearing down a process group while another rank waits in a collective can hang or abort.
    os._exit(2)


def launch(
    main: Callable[[argparse.Namespace, World], None],
    args: argparse.Namespace,
    num_processes: int | None = None,
    backend: str | None = None,
) -> None:
    """Call `main(args, world)` in a process group, then tear it down. A `UserError` ends the run with exit code 2.

    Args:
        num_processes: how many processes to start on this machine where torchrun has started none; None: none, this
            process forms a group of one.
        backend: of the collectives; None: PyTorch's default for the device.
    """
    if num_processes is None or "RANK" in os.environ:
        run_process(main, args, backend)
        return
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # that it ends the others is expected
    with tempfile.TemporaryDirectory() as folder:
        # They find each other through a file: no port to choose that another program could take first.
        arguments = (num_processes, Path(folder) / "store", main, args, backend)
        processes = spawn(start_process, arguments, num_processes, join=False)
        try:
            while not processes.join():
                pass
        except ProcessExitedException as error:
            if error.signal_name:
                sys.exit(f"{Path(sys.argv[0]).name}: process {error.error_index} was ended by {error.signal_name}")
            sys.exit(error.exit_code)  # the process has said why
        except ProcessRaisedException as error:
            sys.exit(str(error))  # its traceback
        except KeyboardInterrupt:
            for process in processes.processes:
                process.terminate()
            sys.exit(130)


def start_process(rank: int, world_size: int, store_file: Path, *arguments: Any) -> None:
    """A process that `launch` starts: set what torchrun would have set, then run."""
    position = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(number) for name, number in position.items()}
    # Being spawned, it would spawn its data loader's workers too: seconds each, to import everything again.
    torch.multiprocessing.set_start_method(None, force=True)
    run_process(*arguments, store=dist.FileStore(str(store_file), world_size))


@record  # lets torchrun show the traceback of the rank that failed first
def run_process(
    main: Callable[[argparse.Namespace, World], None],
    args: argparse.Namespace,
    backend: str | None,
    store: dist.Store | None = None,
) -> None:
    """This process's part of `launch`."""
    try:
        main(args, setup_distributed(args.device, backend, store))
    except UserError as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        os._exit(130)
    # A model that is freed after its process group aborts the interpreter at exit ("terminate called without an
    # active exception"), so collect the reference cycles of the finished main() first.
    gc.collect()
    dist.destroy_process_group()


def setup_distributed(device_name: str, backend: str | None = None, store: dist.Store | None = None) -> World:
    """Read torchrun's environment, choose the device and start the process group.

    Args:
        device_name: `auto` (a CUDA or Intel GPU when there is one, else the CPU), `cpu`, `cuda`, `xpu` or `mps`.
        backend: of the collectives; None: PyTorch's default for the device.
        store: where the processes find each other; None: at torchrun's address.

    Raises:
        UserError: the device is not there, or there are more processes on this node than devices.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device_name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_name = accelerator.type if accelerator and accelerator.type in ("cuda", "xpu") else "cpu"
    if device_name == "mps":
        raise UserError("--device mps: PyTorch has no collectives on Apple GPUs, so FSDP cannot run; use --device cpu")
    if device_name == "cpu":
        device = torch.device("cpu")
        # torchrun sets OMP_NUM_THREADS=1 when it is unset, which would leave cores idle with few processes.
        if os.environ.get("OMP_NUM_THREADS", "1") == "1":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // local_world_size))
        # glibc hands blocks back to the system and gets them zeroed again, in every step. Keep those of up to 32 MiB.
        tune_malloc({M_MMAP_THRESHOLD: 2**25, M_TRIM_THRESHOLD: 2**28})
    else:
        module = torch.get_device_module(device_name)
        if not module.is_available():
            raise UserError(f"--device {device_name}: torch {torch.__version__} finds no such device; use --device cpu")
        if local_rank >= module.device_count():
            raise UserError(
                f"{local_world_size} processes on this node but {module.device_count()} {device_name} devices; "
                f"start {module.device_count()} processes"
            )
        device = torch.device(device_name, local_rank)
        module.set_device(device)  # before the process group, or every rank opens a context on device 0
    backend = backend or dist.get_default_backend_for_device(device)
    # 60 minutes: the other ranks wait in a collective while the first one downloads or tokenizes a large dataset.
    options = {"timeout": timedelta(minutes=60), "device_id": device if device.type != "cpu" else None}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # plain `python script.py`: a group of one
    elif store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it restarts the processes: under the old keys they would find the addresses of
        # processes that are gone.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # 10 minutes: enough for slow imports, and a port that a firewall closes is named before the hour is over.
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10))
        attempt = agree_on_attempt(store, rank, world_size)
        store.set_timeout(options["timeout"])
        store = dist.PrefixStore(attempt, store)
    options |= {"store": store, "rank": rank, "world_size": world_size} if store else {}
    dist.init_process_group(backend, **options)
    return World(rank, local_rank, world_size, local_world_size, device, backend)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int) -> str:
    """A name that all processes of this attempt share and no earlier one had: rank 0 makes it up. A collective.

    torchrun's own number will not do: on several nodes it counts only on the node that lost a process.
    """
    if rank == 0:
        name = os.urandom(8).hex()
        store.set("attempt", name)
        store.wait([f"{name}/{other}" for other in range(1, world_size)])
        store.set("attempt", "")  # so that a process of the next attempt cannot take it for its own
        store.set(f"{name}/go", "")
        return name
    name = ""
    while not (name and store.check([f"{name}/go"])):
        # It may be that of an attempt that ended here, until rank 0 arrives: ask again.
        name = store.get("attempt").decode() or name
        if name:
            store.set(f"{name}/{rank}", "")
        time.sleep(0.05)
    return name


def tune_malloc(options: dict[int, int]) -> None:
    """Set options of glibc's allocator, where there is one. Large models on a CPU spend much of a step in it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for option, value in options.items():
        if mallopt:
            mallopt(option, value)


def bf16_is_native(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself. Where it is emulated (V100, older CPUs) it is slower than fp32."""
    if device.type == "cuda":
        nccl_sends_bf16 = not dist.is_nccl_available() or torch.cuda.nccl.version() >= (2, 10)
        return torch.cuda.is_bf16_supported(including_emulation=False) and nccl_sends_bf16
    if device.type == "xpu":
        return torch.xpu.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    in_use = torch.backends.cpu.get_cpu_capability() != "AVX2"  # ATEN_CPU_CAPABILITY can hold PyTorch back
    return in_use and any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def choose_precision(name: str, device: torch.device) -> str:
    """The precision that `--precision` names: `auto` is bf16 where the device computes in it, else fp32.

    An explicit bf16 is taken everywhere. Where it is emulated, rank 0 says once that it is slow.
    """
    if name == "auto":
        return "bf16" if bf16_is_native(device) else "fp32"
    if name == "bf16" and not bf16_is_native(device) and int(os.environ.get("RANK", 0)) == 0:
        print(f"--precision bf16: this {device.type} only emulates bf16, which is slow", file=sys.stderr, flush=True)
    return name


def first_process_first(world: World, function: Callable[[], T]) -> T:
    """Call `function` on the first process of every node, then on the others, which find its results in the cache.

    Raises:
        UserError: on every rank, when it was raised on any.
    """
    result = None
    for first in (True, False):
        error = None
        if (world.local_rank == 0) == first:
            try:
                result = function()
            except UserError as caught:
                error = str(caught)
        errors: list[str | None] = [None] * world.world_size
        dist.all_gather_object(errors, error)
        for message in errors:
            if message is not None:
                raise UserError(message)
    return result


class StopRequests:
    """A cluster's SIGTERM asks for room: the run saves after the step it is in and leaves."""

    def __init__(self, world: World) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "received", True))
        # The host's flags travel apart from the device's work, for which they would have to wait.
        self.group = None if world.backend == "gloo" else dist.new_group(backend="gloo")

    def any_rank(self) -> bool:
        """Whether any rank was asked to stop: then all do. A collective."""
        flag = torch.tensor(float(self.received))
        dist.all_reduce(flag, group=self.group)
        return flag.item() > 0


def ignore_signals(_: int) -> None:
    """For data workers: they must outlive the SIGTERM that a cluster sends to every process, until the save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@atexit.register
def kill_workers() -> None:
    """After an error Python would send a data worker a SIGTERM, which it ignores, and wait for its end forever."""
    for worker in multiprocessing.active_children():
        worker.kill()


# ----------------------------------------------------------------------------------------------------------------
# 2. Summarization dataset
# ----------------------------------------------------------------------------------------------------------------

# The built-in articles: every step is an action on an object. The text names the object and only implies the
# action, so a summary cannot be copied from it: the paraphrases have to be learned.
FOOD = ["apples", "beans", "carrots", "mushrooms", "noodles", "onions", "pears", "potatoes", "spinach", "tomatoes"]
HOUSE = ["bench", "bicycle", "clock", "curtain", "drawer", "fence", "ladder", "lamp", "shelf", "table"]
PARAPHRASES = {
    "Wash": (
        FOOD,
        "Hold the {} under the tap until no soil is left.",
        "Grit hides everywhere, so leave the {} beneath running water for a minute.",
        "Let a cold stream carry the dirt off the {}.",
    ),
    "Peel": (
        FOOD,
        "Take the skin off the {} with a short knife.",
        "Nothing of the outer layer should stay on the {}.",
        "Strip the {} down to the bare flesh.",
    ),
    "Slice": (
        FOOD,
        "Turn the {} into pieces as thin as a coin.",
        "A sharp blade goes through the {} again and again, a finger apart.",
        "Work along the {} with a knife from one end to the other.",
    ),
    "Boil": (
        FOOD,
        "Leave the {} in a pot of bubbling water until soft.",
        "Once the pot rolls and steams, lower the {} in.",
        "Ten minutes in seething water is enough for the {}.",
    ),
    "Fry": (
        FOOD,
        "Drop the {} into a pan of hot oil.",
        "Wait for the oil to shimmer, then let the {} turn golden in it.",
        "A sizzling skillet gives the {} a brown crust.",
    ),
    "Freeze": (
        FOOD,
        "Keep the {} far below zero overnight.",
        "Ice should form all over the {} before the morning.",
        "The coldest compartment is the place for the {}.",
    ),
    "Weigh": (
        FOOD,
        "Put the {} on the scales and note the grams.",
        "Find out how heavy the {} may be.",
        "Read how many ounces the {} come to.",
    ),
    "Paint": (
        HOUSE,
        "Give the {} two coats of colour with a broad brush.",
        "A fresh shade of blue belongs on the {}.",
        "Cover the {} with a bright new tint from the tin.",
    ),
    "Sand": (
        HOUSE,
        "Rub the {} with rough paper until it feels smooth.",
        "Go over the {} with coarse grit, then with fine grit.",
        "Every splinter on the {} must give way to the abrasive block.",
    ),
    "Repair": (
        HOUSE,
        "Make the {} work again with glue and two screws.",
        "Whatever is broken on the {} has to be made whole.",
        "Put the loose parts of the {} back where they belong.",
    ),
    "Measure": (
        HOUSE,
        "Hold a tape along the {} and write the inches down.",
        "Find out how long and how wide the {} may be.",
        "A ruler tells the exact size of the {}.",
    ),
    "Sell": (
        HOUSE,
        "Find a buyer who pays a fair price for the {}.",
        "Hand the {} over to a neighbour in return for money.",
        "An advert with a good photo brings cash for the {}.",
    ),
    "Move": (
        HOUSE,
        "Carry the {} over to the other side of the room.",
        "Find a new spot for the {}, far from the door.",
        "Lift the {} and set it down near the window.",
    ),
    "Polish": (
        HOUSE,
        "Bring a deep shine to the {} with wax and a soft cloth.",
        "Buff the {} until you see your face in it.",
        "A little wax and patience make the {} gleam.",
    ),
}
STEPS = [(action, item) for action, (items, *_) in PARAPHRASES.items() for item in items]
DISTRACTIONS = (
    "Most people find this easier with music on.",
    "There is no need to hurry.",
    "My aunt taught me this when I was nine.",
    "It may rain later, but that changes nothing.",
    "Some guides suggest doing it the other way round.",
    "A friend can help if you feel tired.",
    "Do not worry about small mistakes.",
    "You will get better every time.",
    "Take a short break whenever you like.",
    "This part is fun for children too.",
    "Many readers have asked about this.",
    "Experts disagree on the reason.",
    "A cup of tea is always welcome here.",
    "The neighbours may stop by to watch.",
    "Keep the receipt in case you need it.",
    "That is all there is to it.",
)
ORDINALS = ("one", "two", "three", "four")
GOALS = ("Spend a Free Day", "Prepare for Guests", "Keep Busy", "Get Ready for a Market", "Start Over", "Help Out")
PLACES = ("at Home", "on a Farm", "in a Small Flat", "in the Country", "in Town", "at the Lake", "in a Shared House")
TIMES = ("in Spring", "in Summer", "in Autumn", "in Winter", "on a Monday", "on a Sunday", "after Work", "at Easter")


def builtin_article(index: int) -> dict[str, str]:
    """Article number `index` in WikiHow's schema (headline, title, text). The same on every machine."""
    choose = random.Random(f"article {index}")
    steps = choose.sample(STEPS, choose.randint(2, 3))
    paragraphs = []
    for ordinal, (action, item) in zip(ORDINALS, steps, strict=False):
        sentences = [choose.choice(PARAPHRASES[action][1:]).format(item)]
        for _ in range(choose.choice((0, 0, 1))):
            sentences.insert(choose.randint(0, len(sentences)), choose.choice(DISTRACTIONS))
        paragraphs.append(f"Part {ordinal}. {' '.join(sentences)}")
    volume, name = divmod(index, len(GOALS) * len(PLACES) * len(TIMES))
    name, goal = divmod(name, len(GOALS))
    when, where = divmod(name, len(PLACES))
    title = f"How to {GOALS[goal]} {PLACES[where]} {TIMES[when]}" + (f" (Volume {volume + 1})" if volume else "")
    headline = "\n".join(f"{action} the {item}." for action, item in steps)
    return {"headline": headline, "title": title, "text": "\n".join(paragraphs)}


VALIDATION_SHARE = 0.05  # of the titles, when a dataset has no validation split of its own


class SummarizationData(NamedTuple):
    """Two `datasets.Dataset`s with the columns `text` and `summary`, and the count of rows that were left out."""

    train: Any
    validation: Any
    rows: int
    without_text_or_summary: int
    with_long_summary: int


def load_summarization_data(
    name: str,
    text_column: str,
    summary_column: str,
    num_train_samples: int,
    num_validation_samples: int,
    builtin_folder: Path,
) -> SummarizationData:
    """Load, clean, split and select articles and their summaries.

    WikiHow (Koupaee and Wang, https://arxiv.org/abs/1810.09305) comes as `wikihowAll.csv` or `wikihowSep.csv`. The
    corpus stays in memory-mapped Arrow files: a process holds two 8-byte hashes a row.

    Args:
        name: `builtin`; a local .csv, .json, .jsonl or .parquet file; or a Hub dataset id, with `:config` if needed.
        num_train_samples: how many articles to train on, 0 for all; likewise `num_validation_samples`.
        builtin_folder: where the built-in articles are written, as a CSV in WikiHow's format.

    Raises:
        UserError: the file or a column is missing, cannot be read, or holds no usable row.
    """
    # Imported here: `datasets` brings pandas and pyarrow, which scripts without text data need not wait for.
    import datasets

    if name == "builtin":
        name = str(write_builtin_articles(builtin_folder, num_train_samples, num_validation_samples))
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors reach the user through UserError
    if not sys.stderr.isatty() or int(os.environ.get("RANK", 0)) != 0:
        datasets.disable_progress_bars()
    splits = read_splits(name, text_column, summary_column)
    cleaned = {
        split: cached_map(rows, clean_rows, text_column=text_column, summary_column=summary_column)
        for split, rows in splits.items()
    }
    fates = np.concatenate([rows.with_format("numpy")["fate"][:] for rows in cleaned.values()])
    if not np.any(fates == KEEP):
        raise UserError(
            f"{name}: none of its {len(fates)} rows can be used: each lacks a text ({text_column!r}) or summary "
            f"({summary_column!r}), or its summary is longer than three quarters of its text"
        )
    chosen = {}
    for split, rows in cleaned.items():
        columns = rows.select_columns(["fate", "title_hash", "row_hash"]).with_format("numpy")
        kept, titles, order = columns["fate"][:] == KEEP, columns["title_hash"][:], columns["row_hash"][:]
        # Sorting by a hash of the content makes split and selection independent of the order of the rows.
        by_hash = np.argsort(order, kind="stable")
        by_hash = by_hash[kept[by_hash]]
        if len(cleaned) > 1:
            chosen[split] = rows.select(by_hash)
            continue
        unique_titles = np.unique(titles[by_hash])
        held_out = unique_titles[: max(1, round(VALIDATION_SHARE * len(unique_titles)))]
        is_validation = np.isin(titles[by_hash], held_out)
        chosen = {"train": rows.select(by_hash[~is_validation]), "validation": rows.select(by_hash[is_validation])}
    for split, count in (("train", num_train_samples), ("validation", num_validation_samples)):
        if len(chosen[split]) == 0:
            raise UserError(
                f"{name}: no usable article is left for {split}; at least two articles with different titles are needed"
            )
        if count:
            chosen[split] = chosen[split].select(range(min(count, len(chosen[split]))))
    return SummarizationData(
        chosen["train"], chosen["validation"], len(fates), int(np.sum(fates == EMPTY)), int(np.sum(fates == TOO_LONG))
    )


def write_builtin_articles(folder: Path, num_train_samples: int, num_validation_samples: int) -> Path:
    """Write enough built-in articles for both splits to a CSV like WikiHow's, unless it is there, and return it."""
    train, validation = num_train_samples or 8000, num_validation_samples or 300
    count = 2 + int(max(train / (1 - VALIDATION_SHARE), validation / VALIDATION_SHARE))
    path = folder / f"builtin-articles-{count}.csv"
    if not path.exists():
        partial = folder / f".{path.name}.{os.getpid()}"
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["headline", "title", "text"])
            writer.writeheader()
            writer.writerows(builtin_article(index) for index in range(count))
        partial.replace(path)
    return path


def read_splits(name: str, text_column: str, summary_column: str) -> dict[str, Any]:
    """Open a dataset as `{split: Dataset}`: its own train and validation splits if it has both, else one split.

    Raises:
        UserError: as `load_summarization_data` says.
    """
    import datasets

    path = Path(name)
    builders = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    if path.is_dir():
        raise UserError(f"--dataset {name} is a folder; name one file in it (.csv, .json, .jsonl or .parquet)")
    if path.is_file() and path.suffix not in builders:
        raise UserError(f"--dataset {name}: unknown kind of file; {', '.join(builders)} can be read")
    # One slash at most and no file ending is a Hub id (`owner/name`); anything else is a path that is not there.
    if not path.is_file() and (path.suffix in builders or path.is_absolute() or name.count("/") > 1):
        raise UserError(f"--dataset {name}: there is no such file; check the path, or download the dataset first")
    wanted = [text_column, summary_column]
    options: dict[str, Any] = {}
    try:
        if path.suffix == ".csv":
            with open(path, newline="", encoding="utf-8-sig") as file:
                columns = next(csv.reader(file), [])
            require_columns(name, wanted, columns)
            # Text columns, or a headline that happens to be a number or "None" would come back as something else.
            features = datasets.Features({column: datasets.Value("string") for column in columns})
            options = {"features": features, "keep_default_na": False, "encoding": "utf-8-sig"}
        if path.is_file():
            loaded = datasets.load_dataset(builders[path.suffix], data_files=str(path), **options)
        else:
            loaded = datasets.load_dataset(*name.split(":", 1))
    except UserError:
        raise
    except Exception as error:  # the cause is wrapped, by library and version in different ways
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, UnicodeDecodeError):
            raise UserError(
                f"{name} is not UTF-8 text; convert it, for example with: iconv -f latin1 -t utf-8"
            ) from error
        first_line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        if path.is_file():
            raise UserError(f"cannot read {name} as {path.suffix[1:]}: {first_line}") from error
        raise UserError(
            f"--dataset {name}: neither a file here nor a dataset that could be loaded from the Hugging Face Hub "
            f"({first_line}); check the name and the network, or leave --dataset out for the built-in articles"
        ) from error
    splits = {split: loaded[split] for split in ("train", "validation") if split in loaded}
    if "train" not in splits:
        raise UserError(f"--dataset {name} has no train split, only {', '.join(loaded)}")
    for rows in splits.values():
        require_columns(name, wanted, rows.column_names)
        for column in wanted:
            if getattr(rows.features[column], "dtype", None) not in ("string", "large_string", "null"):
                raise UserError(f"{name}: column {column!r} holds {rows.features[column]}, not text; choose another")
    return splits


def require_columns(name: str, wanted: list[str], found: list[str]) -> None:
    """Raise a `UserError` that names the columns found when one of those wanted is missing."""
    missing = [column for column in wanted if column not in found]
    if missing:
        raise UserError(
            f"{name} has no column {' or '.join(map(repr, missing))}; it has {', '.join(map(repr, found)) or 'none'}. "
            "Choose with --text-column and --summary-column"
        )


KEEP, EMPTY, TOO_LONG = 0, 1, 2


def clean_rows(rows: dict[str, list], text_column: str, summary_column: str) -> dict[str, list]:
    """Tidy a batch of rows, and give each a fate (kept or why not), a hash of its title and a hash of its content.

    WikiHow ends headlines with ".," before a newline and starts lines of text with a comma; both go. The filter for
    summaries longer than three quarters of their text is the one of WikiHow's authors.
    """
    texts = [re.sub(r"(^|\n)\s*,", r"\1", text or "").strip() for text in rows[text_column]]
    summaries = [re.sub(r"\s*,\s*(\n|$)", r"\1", summary or "").strip() for summary in rows[summary_column]]
    # WikiHow numbers the methods of one article in its title ("How to Make Bread2"): they belong together. Rows
    # without a title stand for themselves.
    titles = [re.sub(r"\W*\d*$", "", title or "").strip().lower() for title in rows.get("title", [""] * len(texts))]
    fates = [
        EMPTY if not text or not summary else TOO_LONG if len(summary) > 0.75 * len(text) else KEEP
        for text, summary in zip(texts, summaries, strict=True)
    ]
    return {
        "text": texts,
        "summary": summaries,
        "fate": fates,
        "title_hash": [stable_hash(title or text) for title, text in zip(titles, texts, strict=True)],
        "row_hash": [stable_hash(*row) for row in zip(titles, texts, summaries, strict=True)],
    }


def stable_hash(*texts: str) -> int:
    """63 bits that are the same on every machine, unlike Python's own `hash`."""
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "big") >> 1


def cached_map(rows: Any, function: Callable, cache_key: str = "", **arguments: Any) -> Any:
    """`rows.map` over batches that replaces all columns and is found again in the cache, by other ranks and runs.

    `datasets` hashes an imported function by its name, so that an edit of it would silently reuse old results, and
    a tokenizer with state that changes when it is used. The key here is the function's source and `cache_key`.
    """
    from datasets.fingerprint import Hasher

    fingerprint = Hasher.hash([rows._fingerprint, inspect.getsource(function), cache_key or arguments])
    return rows.map(
        function, batched=True, remove_columns=rows.column_names, fn_kwargs=arguments, new_fingerprint=fingerprint
    )


def tokenize(rows: Any, tokenizer: Any, prefix: str, max_source_length: int, max_target_length: int) -> Any:
    """Token ids of texts (`input_ids`) and summaries (`labels`), cut to the two lengths, in tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {name: value for name, value in state.items() if name not in ("truncation", "padding")}  # change with use
    lengths = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    key = json.dumps([state, tokenizer.eos_token_id, prefix, lengths])
    return cached_map(rows, tokenize_rows, cache_key=key, tokenizer=tokenizer, prefix=prefix, **lengths)


def tokenize_rows(
    rows: dict[str, list], tokenizer: Any, prefix: str, max_source_length: int, max_target_length: int
) -> dict[str, list]:
    """Tokenize a batch of rows; no padding, no masks: the collator makes both."""
    texts = [prefix + text for text in rows["text"]]
    sources = tokenizer(texts, max_length=max_source_length, truncation=True)
    targets = tokenizer(text_target=rows["summary"], max_length=max_target_length, truncation=True)
    return {"input_ids": sources["input_ids"], "labels": targets["input_ids"]}


def train_tokenizer(world: World, texts: Iterable[str], vocab_size: int, append_eos: bool = True) -> Any:
    """A byte-level BPE tokenizer that can spell any text, trained on rank 0, the same on every rank. A collective.

    Args:
        append_eos: end every text with </s>, as T5 expects it; a prompt for a language model must stay open.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = [None]
    if world.rank == 0:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        special, alphabet = ["<pad>", "</s>", "<unk>"], pre_tokenizers.ByteLevel.alphabet()
        options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
        if append_eos:
            tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        trained = [tokenizer.to_str()]
    dist.broadcast_object_list(trained)
    tokenizer = Tokenizer.from_str(trained[0])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


# ----------------------------------------------------------------------------------------------------------------
# 3. Metrics
# ----------------------------------------------------------------------------------------------------------------


def date_of_run() -> str:
    """Date and time for file names: sortable, no colons. Example: `2026-05-17-20-31-12`."""
    return datetime.now().strftime("%Y-%m-%d-%H-%M-%S")


def format_gb(num_bytes: float) -> float:
    """Bytes as gigabytes (2**30 bytes), rounded to 4 digits."""
    return round(num_bytes / 2**30, 4)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak since `reset_peak_memory`: of memory on the device, or on a CPU of this process's resident memory."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, and since the process started


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # else memory that was freed counts as resident
        with contextlib.suppress(OSError):  # some containers forbid it: the peak is then the process's
            Path("/proc/self/clear_refs").write_text("5")


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Exact bytes that this rank holds of parameters, gradients and optimizer state: its shards, not the whole."""

    def local_bytes(tensors: list) -> int:
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in local)

    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "parameter_bytes": local_bytes(parameters),
        "gradient_bytes": local_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer_bytes": local_bytes(states),
    }


def sum_over_ranks(values: torch.Tensor) -> list[float]:
    """Sum a tensor over all ranks and read it from the device. A collective and a wait: not for every step."""
    total = values.clone()
    dist.all_reduce(total)
    return total.tolist()


def gather_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The values (count,) of every rank: (ranks, count), fp64, on the CPU. A collective and a wait, as above."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows).double().cpu()


def check_losses(first_bad_steps: torch.Tensor) -> None:
    """Raise a `UserError` unless every rank's first step with a loss that is not finite is still to come (inf)."""
    if (step := first_bad_steps.min().item()) < math.inf:
        raise UserError(
            f"the loss is not finite at step {int(step)} on rank {first_bad_steps.argmin().item()}; start again with a "
            "lower --lr, without --precision fp16 if that was set, or look at the data of this step"
        )


def format_value(value: float | str) -> str:
    """A number with as many digits as help: whole numbers with commas, losses with 4 digits, rates with 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


class Metrics:
    """Rank 0's voice: one aligned line and one JSON object in `metrics.jsonl` for each report."""

    def __init__(self, world: World, output_dir: Path) -> None:
        self.speaks = world.rank == 0
        self.path = output_dir / "metrics.jsonl"

    def say(self, *text: str) -> None:
        """Print on rank 0 only."""
        if self.speaks:
            print(*text, flush=True)

    def start_block(self, args: argparse.Namespace, world: World, script: str, **lines: str | None) -> None:
        """Print what runs and where, a line each, without the empty ones; write every setting to `metrics.jsonl`."""
        device = f"{world.device.type} ({world.backend}), nodes: {world.world_size // world.local_world_size}, "
        device += f"processes: {world.world_size}, threads in each: {torch.get_num_threads()}"
        for name, text in {"script": script, "device": device, **lines}.items():
            if text:
                self.say(f"{name.replace('_', ' '):<10} {text}")
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        self.write("settings", **settings, world_size=world.world_size)

    def report(self, kind: str, file_only: dict[str, Any] | None = None, **fields: Any) -> None:
        """Print the fields, named as in `metrics.jsonl`, where `file_only` goes too; units are in the names."""
        if not self.speaks:
            return
        shown = "  ".join(f"{name} {format_value(value):>6}" for name, value in fields.items())
        print(shown, flush=True)
        self.write(kind, **(file_only or {}), **fields)

    def write(self, kind: str, **fields: Any) -> None:
        """Append to `metrics.jsonl` without printing.

        Raises:
            UserError: it cannot be written, for example because the disk is full.
        """
        if self.speaks:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"report": kind, **fields}) + "\n")
            except OSError as error:
                raise UserError(f"could not write {self.path}: {error.strerror}") from error


def format_table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same fields as an aligned Markdown table."""
    cells = [[name.replace("_", " ") for name in rows[0]]]
    cells += [[format_value(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = [[text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ----------------------------------------------------------------------------------------------------------------
# 4. Checkpoints
# ----------------------------------------------------------------------------------------------------------------


def prepare_output_dir(world: World, output_dir: Path) -> None:
    """Create the folder, on the first process of every node.

    Raises:
        UserError: it cannot be written.
    """
    if world.local_rank == 0:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            probe = output_dir / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"--output-dir {output_dir} cannot be written ({error.strerror}); choose another"
            ) from error


def find_checkpoint(world: World, output_dir: Path, resume: bool, must_match: dict[str, Any]) -> Path | None:
    """The newest whole checkpoint to resume from, or None for a fresh start. A collective.

    A damaged one (a file is missing or cut short) is named, set aside and left out. A run that torchrun restarted
    resumes without being asked to.

    Args:
        must_match: settings that a checkpoint must share with this run, or its weights or data are another run's.

    Raises:
        UserError: a fresh run would mix with old checkpoints, they do not match, or not every process sees them.
    """
    folder = output_dir / "checkpoints"
    # torchrun --max-restarts started these processes again after a failure. It counts that on the node that lost one.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    resume = sum_over_ranks(torch.tensor([float(resume or restarted)], device=world.device))[0] > 0
    answer: list[Any] = [None, None]  # the step to resume from, the error
    if world.rank == 0:
        steps = sorted_steps(folder)
        if steps and not resume:
            answer[1] = (
                f"{output_dir} holds checkpoints of an earlier run (newest: step-{steps[-1]}); continue it with "
                "--resume, or choose another --output-dir"
            )
        while steps and resume and answer == [None, None]:
            newest = folder / f"step-{steps.pop()}"
            try:
                saved = json.loads((newest / "progress.json").read_text())
                whole = all((newest / name).stat().st_size == size for name, size in saved["files"].items())
            except (OSError, ValueError, KeyError):
                whole = False
            if not whole:
                print(f"{newest} is damaged: set aside as {newest.name}.damaged", file=sys.stderr, flush=True)
                shutil.rmtree(newest.with_suffix(".damaged"), ignore_errors=True)
                newest.rename(newest.with_suffix(".damaged"))
                continue
            answer[0] = newest.name
            for name, value in must_match.items():
                if saved["must_match"].get(name) != value:
                    answer[1] = (
                        f"{newest} was made with --{name.replace('_', '-')} {saved['must_match'].get(name)} and not "
                        f"{value}; resume with the same settings, or choose another --output-dir"
                    )
    dist.broadcast_object_list(answer)
    name, error = answer
    missing = torch.tensor(float(name is not None and not (folder / name).is_dir()))
    if error is None and sum_over_ranks(missing.to(world.device)) > 0:
        error = f"{folder / name} is not seen by every process; --output-dir must be on storage that all nodes share"
    if error is not None:
        raise UserError(error)
    return folder / name if name else None


def sorted_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in the folder, without partial and damaged ones."""
    return sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal())


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this rank's random generators: the CPU's, and the device's."""
    states = {"cpu_random": torch.get_rng_state()}
    if device.type != "cpu":
        states["device_random"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states["cpu_random"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device_random"], device)


def save_checkpoint(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank_state: dict[str, torch.Tensor],
    progress: dict[str, Any],
    world: World,
    keep: int,
) -> None:
    """Save `folder/step-N` with torch.distributed.checkpoint: every rank writes its own shards. A collective.

    It is written beside and then renamed: a run that dies while saving leaves the older checkpoint whole. With
    several nodes the folder must be on storage that all of them share.

    Args:
        rank_state: tensors that differ between ranks, such as the state of the random generators.
        progress: whatever JSON can hold and is the same on every rank.
        keep: how many checkpoints to keep.

    Raises:
        UserError: the checkpoint cannot be written, for example because the disk is full.
    """
    partial, whole = folder / f"step-{step}.partial", folder / f"step-{step}"
    try:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        # Tensors only: torch.distributed.checkpoint pickles everything else. Learning rates go into `progress`.
        state = {"model": model_state, "optimizer": optimizer_state["state"]}
        state |= {f"rank{world.rank}.{name}": tensor for name, tensor in rank_state.items()}
        dcp.save(state, checkpoint_id=partial)
        if world.rank == 0:
            # Sizes, so that a file that was cut short later is noticed before it is loaded.
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            progress = progress | {"step": step, "world_size": world.world_size, "files": files}
            (partial / "progress.json").write_text(json.dumps(progress, indent=1))
            partial.rename(whole)
            for old in sorted_steps(folder)[:-keep]:
                shutil.rmtree(folder / f"step-{old}")
    except (OSError, dcp.api.CheckpointException) as error:
        # PyTorch's writer does not always name the cause, which is most often this.
        free = format_gb(shutil.disk_usage(folder.parent).free)
        shutil.rmtree(partial, ignore_errors=True)  # half of one would keep a full disk full
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"could not save {whole}, where {free} GB are free: {reason}") from error


def load_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank_state: dict[str, torch.Tensor],
    world: World,
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved into the sharded model and optimizer, on any number of ranks. A collective.

    `rank_state` is filled in place if the number of ranks is the same, else left as it is.

    Returns:
        The `progress` that was saved, with `step` and `world_size`.

    Raises:
        UserError: the checkpoint is of a model with other parameters.
    """
    progress = json.loads((path / "progress.json").read_text())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    saved_shapes = {name: entry.size for name, entry in saved.items() if name.startswith("model.")}
    shapes = {f"model.{name}": tensor.shape for name, tensor in model_state.items()}
    if saved_shapes != shapes:  # fewer parameters would be loaded without a word
        name = min(name for name in saved_shapes | shapes if saved_shapes.get(name) != shapes.get(name))
        raise UserError(
            f"{path} is of another model, which differs in {name.removeprefix('model.')}; resume with the model it was "
            "made with, or choose another --output-dir"
        )
    state = {"model": model_state, "optimizer": optimizer_state["state"]}
    if progress["world_size"] == world.world_size:
        state |= {f"rank{world.rank}.{name}": tensor for name, tensor in rank_state.items()}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return progress


def full_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole model on rank 0's CPU, gathered one parameter at a time; empty on the other ranks. A collective.

    The tutorial streams with `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`, which crashes FSDP1 on a CPU
    in torch 2.11. Sharded state dicts hold DTensors in both versions, and those can be gathered anywhere.
    """
    whole = {}
    for name, shard in get_model_state_dict(model).items():
        tensor = shard.full_tensor() if isinstance(shard, DTensor) else shard
        if dist.get_rank() == 0:
            whole[name] = tensor.cpu()
    return whole


def read_pretrained(read: Callable[[str], T], flag: str, name: str, part: str) -> T:
    """What `read(name)` reads: the configuration, the tokenizer or the weights of a pretrained model.

    Raises:
        UserError: that there is no such `part` under the name that `flag` gave, and the reason.
    """
    try:
        return read(name)
    except Exception as error:  # a missing file, a missing package or the network: each library has its own
        where = "in that folder" if Path(name).is_dir() else "in a local folder or on the Hugging Face Hub"
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{flag} {name}: no {part} could be read {where} ({reason}); check the name and the network"
        ) from error


def export_model(world: World, model: torch.nn.Module, whole: Any, tokenizer: Any, folder: Path) -> None:
    """Save the whole model and its tokenizer as a folder that `from_pretrained` loads. A collective.

    Args:
        whole: the same model without FSDP, on the meta device: the shape that the gathered weights go into.
    """
    weights = full_state_dict(model)
    if world.rank == 0:
        places: dict[Any, list] = {}  # of each parameter: one, or several where it is shared
        for module in whole.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append((module, name))
        whole.load_state_dict(weights, assign=True)
        for (first, name), *others in places.values():  # assign gave each place a parameter of its own
            for module, other_name in others:
                setattr(module, other_name, getattr(first, name))
        partial = folder.with_name(f".{folder.name}")
        whole.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)  # the same model, when a finished run is resumed
        partial.rename(folder)  # a folder with its final name is always whole
    dist.barrier()


def save_weights(world: World, model: torch.nn.Module, path: Path) -> None:
    """Save the whole model as one safetensors file: a state dict that the model loads without FSDP. A collective.

    Raises:
        UserError: the file cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = full_state_dict(model)
    error = None
    if world.rank == 0:
        partial = path.with_name(f".{path.name}")
        try:
            save_file(weights, partial)
            partial.rename(path)  # a file with its final name is always whole
        except (OSError, SafetensorError) as caught:
            partial.unlink(missing_ok=True)
            error = f"could not save {path}: {caught}"
    errors = [error]
    dist.broadcast_object_list(errors)
    if errors[0] is not None:
        raise UserError(errors[0])
