"""What the training scripts share: processes, metrics, checkpoints and the dataset of summaries.

Copy this file together with a script. The script shards the model. Here, `load_weights` fills its
shards, `save_checkpoint` and `load_checkpoint` save and read them, and `export` gathers them.
"""

import contextlib
import copy
import csv
import ctypes
import gc
import json
import math
import multiprocessing
import os
import random
import re
import resource
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import fsspec
import numpy as np
import tyro
from tqdm import tqdm

# ---- Flags and errors --------------------------------------------------------------------------


class UserError(Exception):
    """Bad input. The text is one sentence: what is wrong and what to do."""


def check(condition, message: str):
    """Raise UserError unless a condition is true. A list is true if it is not empty."""
    if not condition:
        raise UserError(message)


def parse_args(kind: type, header: str):
    """Read the command line into a dataclass: a field is a flag, and the comment beside it is the
    flag's help. Numbers must be 0 or more, and those that have no meaning at 0 must be 1 or more.
    header: the script's docstring."""
    is_rank0 = os.environ.get("RANK", "0") == "0"
    try:
        args = tyro.cli(kind, description=header, console_outputs=is_rank0)
    except SystemExit as error:
        if error.code != 0:  # not after --help
            let_cause_print(error.code)
        raise
    for name, value in vars(args).items():
        minimum = 1 if re.search("length|per_unit|(micro|test)_batch|log_every", name) else 0
        if isinstance(value, int | float) and not value >= minimum:  # also rejects nan
            fail(f"--{name.replace('_', '-')} {value} is not {minimum} or more", code=2)
    return args


# ---- Processes and devices ---------------------------------------------------------------------


class World(NamedTuple):
    rank: int
    local_rank: int  # on this node
    size: int
    local_world_size: int  # processes on this node, as torchrun calls it
    device: torch.device


def run(main, args):
    """Call `main(args, world)` in this process, which torchrun has started. Without torchrun it is
    the only one."""
    try:
        main(args, setup(args.device))
    except (UserError, OSError) as error:  # OSError: files, disk, Hub
        message = str(error).rpartition("UserError: ")[2]  # without a worker's traceback
        fail(" ".join(message.split()), code=2)
    except dcp.api.CheckpointException as error:
        fail(f"cannot save or read a checkpoint: {str(error).splitlines()[-1]}", code=2)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        fail(traceback.format_exc(), code=1)

    # Free the model before the process group: otherwise Python may abort. The variables of `main`
    # are gone, but FSDP's objects refer to each other, so only the garbage collector frees them.
    gc.collect()
    for worker in multiprocessing.active_children():  # otherwise Python waits for busy ones
        worker.kill()
    dist.destroy_process_group()


def let_cause_print(code: int):
    """Wait while another rank may print the cause. When that rank ends, torchrun ends all."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, which `note_stops` only notes
    if os.environ.get("RANK", "0") != "0":
        if code == 1 and stops_received:  # torchrun is ending all, and connections are lost
            os._exit(code)
        time.sleep(10)  # most errors happen on rank 0, too
    elif code == 1:
        time.sleep(1)  # this may be a lost connection to a rank that has just ended


def fail(message: str, code: int):
    """Print an error and exit immediately. code: 2 for a user's mistake, 1 for a crash."""
    let_cause_print(code)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # a normal exit can hang while another rank waits in a collective


def setup(device_name: str) -> World:
    """Collective. Read torchrun's environment, choose the device and start the process group."""
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # None: torchrun's. Without torchrun, one process needs no address.
    store = None if "RANK" in os.environ else dist.HashStore()

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator else "cpu"
    if device_type == "mps" or device_name == "cpu":  # FSDP does not support Apple's GPUs
        device_type = "cpu"
    check(
        device_name in ("auto", device_type),
        f"--device {device_name}: torch {torch.__version__} finds no such device; install a torch"
        " build that supports it, or use --device cpu",
    )

    # Each process has connections to all others. Most systems allow 1,024 open files by default.
    with contextlib.suppress(OSError, ValueError):  # where the limit may not be changed
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # Share the cores of this node. torchrun's default of one thread is too slow on a CPU, and for
    # the optimizer under --cpu-offload.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))

    device = torch.device("cpu")
    backend = "gloo"
    if device_type != "cpu":
        # With more processes than GPUs, several share one, which NCCL mostly refuses.
        device = torch.device(device_type, local_rank % torch.accelerator.device_count())
        # Do this before starting the process group: otherwise every process opens device 0.
        torch.accelerator.set_device_index(device.index)
        # gloo for tensors on the CPU; NCCL or XCCL for those on the device.
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device)}"
        # TF32 on NVIDIA GPUs since Ampere: faster fp32 products, with 10 bits of mantissa.
        torch.set_float32_matmul_precision("high")

    timeout = timedelta(minutes=30)  # to wait for others, as while rank 0 writes a model
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    return World(rank, local_rank, size, local_world_size, device)


def first_on_node(world, make):
    """Collective. Call `make()` in one process per node, and send the result to the others. Rank 0
    goes first: what it downloads or tokenizes may be in a cache that other nodes share."""
    result = make() if world.rank == 0 else None
    dist.barrier()
    if world.local_rank == 0:
        if world.rank != 0:
            result = make()
        for rank in range(world.rank + 1, world.rank + world.local_world_size):
            dist.send_object_list([result], dst=rank)
        return result
    received = [None]
    dist.recv_object_list(received, src=world.rank - world.local_rank)
    return received[0]


def from_rank0(value):
    """Collective. Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def say(text: str):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        # The terminal may be closed, or unable to print a character. The run must still save.
        with contextlib.suppress(OSError, UnicodeError), tqdm.external_write_mode():
            print(text, flush=True)


def divide_batch(args, world, default: int):
    """Replace `--global-batch-size 0` by `default`, rounded up to a multiple of the number of
    processes. Raises UserError if the processes cannot divide the batch."""
    if args.global_batch_size == 0:
        args.global_batch_size = math.ceil(default / world.size) * world.size
    check(
        args.global_batch_size % world.size == 0,
        f"--global-batch-size must be a multiple of {world.size}, the number of processes",
    )


def choose_precision(name: str, device: torch.device) -> str:
    """Collective. Resolve `--precision`: auto is bf16 if rank 0's GPU supports it natively, or else
    fp32. All ranks must use the same."""
    if name == "auto":
        module = torch.get_device_module(device)
        has_bf16 = device.type != "cpu" and module.is_bf16_supported(including_emulation=False)
        name = "bf16" if has_bf16 else "fp32"
    return from_rank0(name)


# ---- Stops -------------------------------------------------------------------------------------

# Signals that stop a run: from a cluster, by Ctrl-C, and from a closed terminal
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
stops_received = []


def note_stops():
    """From now on, only note stop signals. After the step, the training loop saves a checkpoint and
    ends with code 0, without validation or export. torchrun kills what still runs after 30 s."""

    def note(signum, _frame):
        stops_received.append(signum)
        if signum == signal.SIGINT and "RANK" not in os.environ:
            signal.signal(signum, signal.default_int_handler)  # a second Ctrl-C quits

    for signum in STOPS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(signum, note)


def ask_for_stops():
    """Collective. Begin to ask all ranks whether they have noted a stop. Returns a function that
    waits for the answer. Compute a step in between: the answer passes through all hosts."""
    count = torch.tensor(len(stops_received))  # on the CPU: no device has to wait
    work = dist.all_reduce(count, async_op=True)

    def any_rank_stops():
        work.wait()
        return count.item() > 0

    return any_rank_stops


def protect_worker(_worker):
    """Make a DataLoader worker ignore stop signals, because the current step still needs it. It
    ends together with the training process."""
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: Linux kills the worker when the training process ends, however it ends.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# Options for DataLoaders with workers. Let workers send NumPy arrays, which go through a pipe:
# tensors would go through /dev/shm, which is small in Docker.
WORKER_OPTIONS = {
    # Python 3.14 would start workers from a fork server. Linux would then count that as their
    # parent, instead of the training process.
    "multiprocessing_context": "fork" if sys.platform == "linux" else None,
    "worker_init_fn": protect_worker,
    "prefetch_factor": 16,  # steps to prepare ahead
}


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device. The host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cpu":
        tensor = tensor.pin_memory()  # otherwise the host would wait
    return tensor.to(device, non_blocking=True)


# ---- Metrics -----------------------------------------------------------------------------------


def sum_over_ranks(values: torch.Tensor):
    """Collective. Sum over all ranks and return Python numbers. Do not call it in every step: the
    host waits for the device."""
    total = values.cpu().clone()  # .cpu() may return `values`, which all_reduce would change
    dist.all_reduce(total)
    return total.tolist()


def describe_state(model, shards: int) -> str:
    """Describe how much state each process will hold of a model, which may be on the meta device.
    With Adam each parameter needs 16 bytes: itself, its gradient and two moments, all in fp32."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count:,} parameters, {16 * count / shards / 2**30:.3f} GiB of state per process"


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
    unit = 2**10 if sys.platform == "linux" else 1  # of ru_maxrss: KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def format_metric(name: str, value: float) -> str:
    if name == "lr":
        return f"{value:.1e}"
    return f"{value:6,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.4f}"


class Log:
    """Prints metrics and writes `metrics.jsonl`, on rank 0 only."""

    def __init__(self, world, folder: Path):
        self.is_rank0 = world.rank == 0
        self.path = folder / "metrics.jsonl"
        self.run = time.strftime("%Y-%m-%d-%H-%M-%S")
        self.start = time.time()
        folder.mkdir(parents=True, exist_ok=True)
        say(f"run      {world.size} x {world.device.type}, torch {torch.__version__}")

    def write(self, record: dict):
        """Append a record to the file. Raises UserError if a loss or a gradient is not finite, so
        call it on every rank, and before saving."""
        for name in ("loss", "val_loss", "grad_norm"):
            is_finite = math.isfinite(record.get(name, 0))
            check(is_finite, f"{name} is not finite; start again with a lower --lr")
        if self.is_rank0:
            record = {"run": self.run, "seconds": round(time.time() - self.start, 3), **record}
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def metrics(self, record: dict):
        """Write a record and print it as one line."""
        fields = [f"{name} {format_metric(name, value)}" for name, value in record.items()]
        say(" | ".join(fields))
        self.write(record)

    def bar(self, iterable, text: str, total: int):
        disable = None if self.is_rank0 else True  # None: show it only on a terminal
        return tqdm(iterable, text, total, leave=False, disable=disable)


# ---- Checkpoints -------------------------------------------------------------------------------

STEP = "step-" + 7 * "[0-9]"  # folders with other names are not ours


def checkpoints(output_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first. `progress.json` is written last."""
    return [file.parent for file in sorted(output_dir.glob(f"checkpoints/{STEP}/progress.json"))]


def read_progress(checkpoint: Path):
    return json.loads((checkpoint / "progress.json").read_text())


def find_checkpoint(args, model_folder: Path) -> Path | None:
    """Collective. Return the newest checkpoint in --output-dir, or None. Raises UserError if the
    run would mix with an earlier one, or overwrite the model that it starts from."""
    check(
        not args.save_model or model_folder.resolve() != Path(args.model).resolve(),
        "the trained model would replace --model; choose another --output-dir",
    )
    newest = from_rank0([None, *checkpoints(args.output_dir)][-1])
    if args.resume and newest is None:
        say(f"resumed  nothing: {args.output_dir} has no checkpoint")
    check(
        args.resume or newest is None,
        f"{args.output_dir} holds checkpoints; add --resume, or choose another --output-dir",
    )
    return newest


def checksum(*values):
    """A hash of values that JSON can hold. It is the same in every process, unlike `hash`."""
    return zlib.crc32(json.dumps(values, sort_keys=True, default=str).encode())


def check_same(args, names, dataset: int, config, checkpoint: Path | None) -> dict:
    """Collective. Return what decides a step: some flags, and checksums of dataset and config.
    Raises UserError unless they are the same on all nodes and in the checkpoint."""
    must_match = {name: getattr(args, name) for name in names}
    must_match["dataset"] = dataset
    # An update of transformers changes its version in the config.
    must_match["config"] = checksum(config.to_diff_dict() | {"transformers_version": None})

    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, must_match)
    expected = read_progress(checkpoint)["must_match"] if checkpoint else of_ranks[0]
    for values in of_ranks:  # of all, so that every rank raises the same error
        for name, value in values.items():
            other = expected.get(name)
            check(value == other, f"{name} is {value}, not {other} as in {checkpoint or 'rank 0'}")
    return must_match


def save_checkpoint(progress: dict, args, model, optimizer, tokenizer):
    """Collective. Save `checkpoints/step-N`, each rank its shards, and delete all but the newest
    two. progress: `step`, `must_match` and what else JSON can hold; the same on all ranks."""
    path = args.output_dir / "checkpoints" / f"step-{progress['step']:07d}"
    path.mkdir(parents=True, exist_ok=True)  # on every rank, because dcp.save checks it
    weights, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": optimizer_state}
    planner = DefaultSavePlanner(enable_plan_caching=True)  # with many ranks, planning takes long
    gc.disable()  # and rank 0 makes so many objects that collections take half of the time
    stored = dcp.save(state, checkpoint_id=path, planner=planner).storage_data.values()
    gc.enable()

    if dist.get_rank() == 0:
        tokenizer.save_pretrained(path)  # a resumed run uses this one
        missing = {shard.relative_path for shard in stored} - set(os.listdir(path))
        check(not missing, f"{path} lacks shards: --output-dir must be a folder that all nodes see")
        unfinished = path / "progress.partial"
        unfinished.write_text(json.dumps(progress))
        unfinished.replace(path / "progress.json")  # now the checkpoint is finished
        for other in path.parent.glob(STEP):  # also half-written ones
            if other not in checkpoints(args.output_dir)[-2:]:
                shutil.rmtree(other, ignore_errors=True)


def load_checkpoint(path: Path, model, optimizer) -> dict:
    """Collective. Load a checkpoint, on any number of ranks, and return its `progress`. The files
    know the place of each shard in its tensor, so each rank reads just the slices that it needs."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    # Without its param_groups: settings of the optimizer, such as its betas, are this run's.
    moments = {"state": optimizer_state["state"]}
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)  # in place
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state)
    return read_progress(path)


# ---- Models: read, fill the shards, save -------------------------------------------------------


def load_pretrained(kind, name: str, config):
    """`kind.from_pretrained(name)` in fp32, ready to train. Raises UserError if weights are
    missing, because transformers would initialize them at random."""
    model, info = kind.from_pretrained(
        name, config=config, dtype=torch.float32, output_loading_info=True
    )
    missing = ", ".join(sorted(info["missing_keys"]))
    check(not missing, f"{name} has no weights for {missing}")
    return model.train()  # from_pretrained returns it in eval mode


def meta_copy(model):
    """Return a copy on the meta device: its parameters have shapes but no memory. Tied parameters
    stay tied, and buffers keep their values."""
    copies = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        copies[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
    return copy.deepcopy(model, copies)  # uses these instead of copying the parameters


def load_weights(model, full_model, world, offload: bool):
    """Collective. Allocate a sharded model, which is on the meta device, and copy the weights of
    rank 0's `full_model` into it. Each rank keeps its own shards."""
    buffers = [buffer.to(world.device) for buffer in model.buffers()]
    model.to_empty(device="cpu" if offload else world.device)  # also empties the buffers
    weights = full_model.state_dict() if world.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for empty, buffer in zip(model.buffers(), buffers, strict=True):
        empty.data = buffer


def export(model, meta_model, dtype, tokenizer, folder: Path, world):
    """Collective. Gather the weights on rank 0's CPU and save them for `from_pretrained`. Does what
    FSDP1's `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)` did.

    meta_model: the unsharded model on the meta device, whose `save_pretrained` is used.
    dtype: that of the model which training began from; None for random weights: fp32.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if world.rank == 0:
        meta_model.to(dtype or torch.float32)
        tensors = {}
        # A tied weight has several names in `weights`. Save it under one of them.
        for name, tensor in [*meta_model.named_parameters(), *meta_model.named_buffers()]:
            if name in weights:
                tensors[name] = weights.pop(name).to(tensor.dtype)
        # T5's own config sets tie_word_embeddings for every model, also for one with two tensors.
        head = meta_model.get_output_embeddings().weight
        meta_model.config.tie_word_embeddings = head is meta_model.get_input_embeddings().weight

        # The old model stays until the new one is complete. Weights come last: without them, an
        # incomplete folder does not load.
        partial = folder / "partial"
        meta_model.save_pretrained(partial, state_dict=tensors)
        tokenizer.save_pretrained(partial)
        for pattern in ("*.safetensors*", "*.jinja", "adapter_config.json"):
            for old in folder.glob(pattern):
                old.unlink()
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        for file in sorted(partial.iterdir(), key=lambda file: file.suffix == ".safetensors"):
            if file.suffix == ".safetensors":  # which only its owner can read
                file.chmod(partial.stat().st_mode & 0o666)
            file.replace(folder / file.name)
        partial.rmdir()
    dist.barrier()  # rank 0's disk may be slow


def train_tokenizer(texts, vocab_size: int, append_eos: bool):
    """Train a byte-level BPE tokenizer. The same texts give the same tokenizer."""
    from tokenizers import ByteLevelBPETokenizer  # slow imports that the MNIST scripts do not need
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    special = ["<pad>", "</s>"]
    bpe.train_from_iterator(texts, vocab_size, special_tokens=special, show_progress=False)
    tokenizer = bpe._tokenizer
    if append_eos:
        tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def print_lost_text(tokenizer, texts: list[str]):
    """Print how many texts change, apart from spaces, when they are tokenized and decoded again.
    Raises UserError if more than a quarter of the tokens are unknown."""
    texts = [text[:2000] for text in texts]
    tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    decoded = tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
    num_lost = sum(a.split() != b.split() for a, b in zip(texts, decoded, strict=True))
    say(f"tokens   {num_lost:,} of {len(texts):,} texts differ when decoded")
    num_unknown = sum(of_text.count(tokenizer.unk_token_id) for of_text in tokens)
    is_known = 4 * num_unknown <= sum(map(len, tokens))
    check(is_known, "more than a quarter of the tokens are unknown: name another tokenizer")


# ---- Data --------------------------------------------------------------------------------------


def reader_of(name: str):
    """The reader of `datasets` for a file, by its ending, or None for all else."""
    ending = re.search(r"\.(csv|tsv|jsonl?|parquet|txt)(\.(gz|bz2|xz|zst))?(\?.*)?$", name.lower())
    return ending and {"tsv": "csv", "jsonl": "json", "txt": "text"}.get(ending[1], ending[1])


def open_dataset(name: str):
    """Return the builder of `datasets` for a file, glob, URL or Hub dataset NAME:CONFIG."""
    import datasets  # a slow import that the MNIST scripts do not need

    # Of a folder, datasets leaves out some files without a word.
    check(not Path(name).is_dir(), f"this is a folder: name files, as by '{Path(name)}/*.jsonl'")
    if reader_of(name):
        builder = datasets.load_dataset_builder(reader_of(name), data_files=name)
    else:
        builder = datasets.load_dataset_builder(*name.split(":"))
    if builder.name == "text":
        builder.config.sample_by = "paragraph"  # empty lines separate texts
    if builder.name == "json":
        builder.config.on_mixed_types = None  # otherwise one number turns all texts into JSON
    return builder


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


# `datasets` keeps its rows: after a change, delete ~/.cache/huggingface/datasets/generator.
def read_csv(files):
    """Yield the rows of CSV files. Unlike pandas, raise UserError at a row that does not fit the
    header, as where a text has a line break but no quotes around it."""
    csv.field_size_limit(2**31 - 1)  # characters of a text; the default is 131,072
    for path in files:
        with fsspec.open(path, "rt", "infer", "utf-8-sig", newline="") as file:
            rows = csv.reader(file)  # until the delimiter is known
            try:
                header_line = file.readline()
                delimiter = max(",;\t|", key=header_line.count)
                options = {"delimiter": delimiter, "skipinitialspace": True, "strict": True}
                header = next(csv.reader([header_line], **options))
                rows = csv.reader(file, **options)
                for row in filter(None, rows):  # without empty lines
                    if not len(set(header)) == len(header) == len(row):
                        raise csv.Error(f"{len(row)} fields do not fit {header}; quote all texts")
                    yield dict(zip(header, row, strict=True))
            except (csv.Error, UnicodeDecodeError) as error:
                raise UserError(f"{path}, line {rows.line_num + 1}: {error}") from None


def load_articles(name: str, text_column: str, summary_column: str, max_summary_share: float):
    """Return two `datasets.Dataset` of texts and summaries: 95% to train on and 5% to validate on.

    name: builtin, or what `open_dataset` takes. Raises UserError if it has no such articles.
    """
    import datasets

    columns = [text_column, summary_column]

    # These functions are nested on purpose. datasets caches results under a hash of the function:
    # of its code if it is nested, but only of its name if it could be imported.
    def clean(text, summary, title=None) -> dict:
        text = text if isinstance(text, str) else "\n".join(text or ())  # a list of sentences
        summary = summary if isinstance(summary, str) else "\n".join(summary or ())
        article = text
        if title is not None:
            # WikiHow has stray commas (arXiv:1810.09305). An article with two methods has two rows,
            # "Bake Bread1" and "Bake Bread2".
            text = re.sub(r"(^|\n)\s*,", r"\1", text)
            summary = re.sub(r"\s*,\s*(\n|$)", r"\1", summary)
            article = re.sub(r"\d+$", "", title) or text
        text = text.strip()
        summary = summary.strip()
        return {
            "text": text,
            "summary": summary,
            "article_hash": zlib.crc32(article.encode()),
            "content_hash": zlib.crc32(f"{text}\n{summary}".encode()),
        }

    def is_usable(text: str, summary: str) -> bool:
        return 0 < len(summary) <= max_summary_share * len(text)

    if dist.get_rank() != 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if name == "builtin":
            rows = datasets.Dataset.from_list([builtin_article(i) for i in range(10_000)])
        else:
            builder = open_dataset(name)
            if builder.name == "csv":
                files = {"files": builder.config.data_files["train"]}
                rows = datasets.Dataset.from_generator(read_csv, gen_kwargs=files)
            else:
                builder.download_and_prepare()
                rows = builder.as_dataset(split="train")
    except Exception as error:  # each reader raises its own kind
        raise UserError(f"--dataset {name}: {error.__cause__ or error}") from error
    for column in columns:
        kind = rows.features.get(column)
        kind = getattr(kind, "feature", kind)  # a list may hold the sentences
        check(
            getattr(kind, "dtype", None) in ("string", "large_string", "null"),
            f"--dataset {name} has no column {column} of texts, only {list(rows.features)}",
        )

    if set(rows.column_names) == {"title", "text", "headline"}:  # WikiHow
        columns.append("title")
    articles = rows.map(clean, input_columns=columns, remove_columns=rows.column_names)
    articles = articles.filter(is_usable, input_columns=["text", "summary"])

    # Sort by a hash of the article and hold out the first twentieth of the hash's range. Then the
    # order of rows does not matter, and added rows move no article to the other side.
    articles = articles.sort(["article_hash", "content_hash"])
    hashes = articles["article_hash"][:]
    limit = max([2**32 // 20, *hashes[:1]])  # at least one article
    num_held_out = sum(hash <= limit for hash in hashes)
    check(
        num_held_out < len(articles),
        f"--dataset {name}: too few of {len(rows)} rows are usable; see --max-summary-share",
    )
    say(f"dataset  {name}, {len(rows):,} rows, {len(articles):,} usable")
    return articles.skip(num_held_out), articles.take(num_held_out)
