"""The one file of the tests that uses names from inside the scripts. If you rename something there, change this file.

First come functions that tests call. Then come changes: `run_many(..., change=(NAME, ARGUMENT, ...))` applies one to a
script in each process, before its main runs. A change injects a fault or records what the script does.
"""

import copy
import errno
import functools
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import numpy
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import lm_multinode
import mnist_fsdp
import mnist_fsdp_xpu
import t5_fsdp

MODULES = {
    "mnist_fsdp.py": mnist_fsdp,
    "mnist_fsdp_xpu.py": mnist_fsdp_xpu,
    "t5_fsdp.py": t5_fsdp,
    "lm_multinode.py": lm_multinode,
}

# ---- common.py -------------------------------------------------------------------------------------------------------
UserError = common.UserError
peak_gib = common.peak_gib
train_tokenizer = common.train_tokenizer
print_lost_text = common.print_lost_text


def world_of(rank=0, size=1):
    return common.World(rank, rank, size, size, torch.device("cpu"))


def parse(script, *flags):
    """What the script's main gets as `args`. Raises UserError where common.py refuses a number, and SystemExit where
    tyro refuses a flag."""
    argv = mock.patch.object(sys, "argv", [script, *map(str, flags)])
    with argv, mock.patch.object(common, "fail", side_effect=UserError):
        return common.parse_args(MODULES[script].Args, "")


# ---- mnist_fsdp.py and its twin --------------------------------------------------------------------------------------
NETWORKS = mnist_fsdp.NETWORKS | {"xpu": mnist_fsdp_xpu.Network}
draw_digits = mnist_fsdp.draw_digits

# ---- t5_fsdp.py ------------------------------------------------------------------------------------------------------
T5_STRATEGIES = tuple(t5_fsdp.RESHARD)
t5_tokenize = t5_fsdp.tokenize
builtin_articles = functools.cache(t5_fsdp.builtin_articles)


def builtin_article(index):
    return builtin_articles()[index % len(builtin_articles())]


def t5_articles(path, text="text", summary="headline"):
    """Two datasets of texts and summaries, for training and validation, as one process loads them."""
    args = parse("t5_fsdp.py", "--dataset", path, "--text-column", text, "--summary-column", summary)
    with mock.patch("torch.distributed.get_rank", return_value=0):
        return common.load_articles(args, builtin_articles)


# ---- lm_multinode.py -------------------------------------------------------------------------------------------------
LM_STRATEGIES = tuple(lm_multinode.RESHARD)
LM_MODELS = tuple(lm_multinode.MODELS)
LM_TESTED = tuple(lm_multinode.TESTED)
LM_CHARACTERS_AT_ONCE = (lm_multinode, "CHARACTERS_AT_ONCE")  # for monkeypatch.setattr
lm_is_held_out = lm_multinode.is_held_out
lm_count_passes = lm_multinode.count_passes


def lm_shape(name, vocabulary):
    """The model of a row of MODELS, on the meta device."""
    tokenizer = mock.MagicMock(eos_token_id=1, __len__=lambda _: vocabulary)
    return on_meta(lm_multinode.load_config(parse("lm_multinode.py", "--model", name), tokenizer))


def lm_model(args):
    """The model of a pretrained --model, on the meta device."""
    return on_meta(lm_multinode.load_config(args, None))


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def lm_mesh_shape(args, size, per_node):
    """The number of replicas, and of shards in each. Raises UserError if the processes cannot form them."""
    return lm_multinode.mesh_shape(args, world_of(size=size)._replace(local_world_size=per_node))


def lm_all_texts(args):
    """All texts of the dataset, sorted."""
    return sorted(row[args.text_column] for row in lm_multinode.open_texts(args))


def lm_sample_texts(args):
    """The texts that a tokenizer learns from, and the texts for validation."""
    return lm_multinode.sample_texts(args, lm_multinode.open_texts(args), 1000)


def lm_stream(args, tokenizer, index, num_streams, position=None):
    """Yield the sequences of a stream, and its position after each."""
    rows = lm_multinode.open_texts(args)
    return lm_multinode.read_stream(args, rows, tokenizer, index, num_streams, position or {})


def lm_held_out(args, tokenizer, script=lm_multinode):
    """The held-out texts, cut into sequences: an array of input_ids, and one of labels."""
    args = copy.copy(args)
    args.model = "given"
    from_pretrained = mock.patch.object(script.AutoTokenizer, "from_pretrained", return_value=tokenizer)
    with from_pretrained, mock.patch("torch.distributed.get_rank", return_value=1):  # it prints nothing
        _, _, sequences, _ = script.load_data(args, None)
    return as_batch(sequences.numpy())


def as_batch(sequences):
    return {"input_ids": sequences[:, :-1], "labels": sequences[:, 1:]}


def lm_ranks(args, tokenizer, size, positions=None, script=lm_multinode):
    """Yield each step without a worker process: the sequences of each rank, and the positions of its streams."""
    rows = script.open_texts(args)
    worlds = [world_of(rank, size) for rank in range(size)]
    return zip(*(script.StepBatches(args, world, rows, tokenizer, positions) for world in worlds), strict=True)


def lm_steps(args, tokenizer, script=lm_multinode, size=1):
    """Yield each step without a worker process: a list of the streams' sequences as arrays, ordered by rank."""
    for parts in lm_ranks(args, tokenizer, size, script=script):
        streams = []
        for sequences, positions in parts:
            streams += map(as_batch, numpy.split(sequences, len(positions)))
        yield streams


# ---- What benchmarks time --------------------------------------------------------------------------------------------
lm_mfu_per_token_per_second = lm_multinode.mfu_per_token_per_second


def set_up(args):
    """Set up the process group and the device, as `run` does before main, and the precision, as main does."""
    world = common.setup(args.device)
    args.precision = common.choose_precision(args.precision, world.device)
    return world


def lm_trainer(args, world, config, steps):
    """The model, and a function that trains on the next of `steps`: this rank's sequences, and positions."""
    model, _, optimizer = lm_multinode.build(args, world, config)
    return model, lambda: lm_multinode.train_step(args, world, model, optimizer, next(steps)[0])


# ---- Changes ---------------------------------------------------------------------------------------------------------
def load_module(path):
    """Load a script, or a user's copy of one, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its workers unpickle names from there
    spec.loader.exec_module(module)
    return module


def start_changed(path, change, *arguments):
    """Change a script, then do what its last lines do."""
    sys.path.insert(0, str(Path(path).parent))
    del sys.modules["common"]  # a user's copy of a script imports the common.py next to it
    script = load_module(path)
    globals()[change](script, *arguments)
    script.common.run(script.main, script.common.parse_args(script.Args, ""))


def no_dropout(script):
    """Switch dropout off. Each rank draws its own, so losses would differ from a plain loop's."""
    torch.nn.Dropout.forward = lambda self, x: x


def signal_in_step(script, rank, step, name="SIGKILL", times=1, group=False):
    """Signal a rank, or its process group, after its first, second, ... update of its shards, but not after a restart
    by torchrun."""
    train_step = script.train_step
    steps = itertools.count(1)

    def step_and_signal(args, world, *arguments):
        result = train_step(args, world, *arguments)
        is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if next(steps) == step and world.rank == rank and is_first_start:
            for _ in range(times):
                os.kill(0 if group else os.getpid(), signal.Signals[name])
        return result

    script.train_step = step_and_signal


def without_loader(script, count):
    """Train on the batches of the first `count` steps again and again, from memory."""
    name = "batches_on_device" if hasattr(script, "batches_on_device") else "load_batches"
    load = getattr(script, name)

    def load_some(*arguments, **options):
        setattr(script, name, load)  # validation loads as before
        return itertools.cycle(list(itertools.islice(load(*arguments, **options), count)))

    setattr(script, name, load_some)


def read_other_data(script):
    """Give the nodes different copies of the dataset."""
    load_data = script.load_data

    def load_and_change(args, checkpoint):
        *others, checksum = load_data(args, checkpoint)
        return *others, checksum + dist.get_rank()

    script.load_data = load_and_change


def pause_worker(script, seconds):
    """Make the LM's workers wait after they have sent one step."""
    iterate = script.StepBatches.__iter__

    def iterate_and_pause(self):
        batches = iterate(self)
        yield next(batches)
        time.sleep(seconds)
        yield from batches

    script.StepBatches.__iter__ = iterate_and_pause


def report_threads(script, has_tokenized=False):
    """Report how many threads a worker starts to tokenize, after the user's own code may have tokenized with some."""
    if has_tokenized:
        train_tokenizer(["no"] * 99, 300, append_eos=False)(["no"] * 99)
    iterate = script.StepBatches.__iter__

    def iterate_and_report(self):
        before = len(os.listdir("/proc/self/task"))
        batches = iterate(self)
        first = next(batches)
        os.write(2, f"{len(os.listdir('/proc/self/task')) - before} threads\n".encode())
        yield from itertools.chain([first], batches)

    script.StepBatches.__iter__ = iterate_and_report


def kill_alone(script):
    """Kill rank 1, and no other process, in its first step, while its worker is reading."""
    pause_worker(script, 400)
    signal_in_step(script, 1, 1)


def stop_group(script, name):
    """Signal this rank and its worker, as a terminal does, while the worker prepares the second step."""
    os.setsid()
    pause_worker(script, 3)
    signal_in_step(script, 0, 1, name, group=True)


def kill_in_save(script, save):
    """Kill rank 0 in its first, second, ... save, after it has written its shards and before `progress.json` is."""
    saves = itertools.count(1)
    write_data = torch.distributed.checkpoint.FileSystemWriter.write_data

    def write_and_die(*arguments):
        written = write_data(*arguments)
        if next(saves) == save and dist.get_rank() == 0:
            written.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    torch.distributed.checkpoint.FileSystemWriter.write_data = write_and_die


def lose_file(script):
    """Make the LM's worker fail as where a server has lost a file, after it has sent one step."""
    iterate = script.StepBatches.__iter__

    def iterate_and_fail(self):
        yield next(iterate(self))
        raise OSError(errno.ESTALE, "Stale file handle", "texts.jsonl")

    script.StepBatches.__iter__ = iterate_and_fail


def one_gpu(script):
    """Pretend that this machine has one NVIDIA GPU. A process that takes it ends."""

    def set_device(index):
        os.write(2, f"set_device {index}\n".encode())
        os._exit(1)

    torch.accelerator.current_accelerator = lambda **_: torch.device("cuda")
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.set_device_index = set_device


def single_texts(script):
    """Streams tokenize one text at a time."""
    script.CHARACTERS_AT_ONCE = 1


def unname_layers(script):
    """Let transformers not name the classes of the model's layers."""
    load_model = script.load_model

    def load_without_names(args, config):
        model = load_model(args, config)
        model._no_split_modules = set()
        return model

    script.load_model = load_without_names


def own_folders(script):
    """Give each process its own --output-dir for checkpoints, as on nodes that share no folder."""
    save = script.common.save_checkpoint

    def save_in_own(progress, args, *others):
        args.output_dir = args.output_dir / os.environ["RANK"]
        save(progress, args, *others)

    script.common.save_checkpoint = save_in_own


def kill_in_export(script):
    """Kill the process before the exported weights get their place."""
    replace = Path.replace

    def replace_or_die(path, *arguments):
        if path.name == "model.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, *arguments)

    Path.replace = replace_or_die


def infinite_loss(script, rank, micro_batch, in_training=True, only_gradient=False):
    """Make the loss of a rank's first, second, ... micro-batch infinite, or only the gradient of a finite loss."""
    summed_loss = script.summed_loss
    micro_batches = itertools.count(1)

    def infinite_once(*arguments):
        loss = summed_loss(*arguments)
        is_kind = torch.is_grad_enabled() == in_training
        if is_kind and next(micro_batches) == micro_batch and dist.get_rank() == rank:
            if only_gradient:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            else:
                loss = loss * float("inf")
        return loss

    script.summed_loss = infinite_once


def capture_graphs(script):
    """Make --compile capture and run graphs, but not compile them to machine code, which takes a minute."""

    def count_graph(graph, inputs):
        os.write(2, b"graph captured\n")
        return graph.forward

    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend=count_graph)


def record_shards(script):
    """Write shards-RANK.json at each validation: sums of this rank's shards, which are offloaded, if cuDNN attends, and
    how many matrices this rank has orthogonalized."""
    validate = script.validate
    muon = torch.optim._muon
    orthogonalize = muon._zeropower_via_newtonschulz = mock.Mock(wraps=muon._zeropower_via_newtonschulz)

    def record_and_validate(args, world, model, *others, **options):
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        groups = {m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)}
        seen = {
            "sums": [shard.detach().double().sum().item() for shard in shards],
            "offloaded": [parameter.offload_to_cpu for group in groups if group for parameter in group.fsdp_params],
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
            "orthogonalized": orthogonalize.call_count,
        }
        (args.output_dir / f"shards-{dist.get_rank()}.json").write_text(json.dumps(seen))
        return validate(args, world, model, *others, **options)

    script.validate = record_and_validate


class Operators(TorchDispatchMode):
    """Calls `see(operator, arguments)` for each operator that PyTorch dispatches."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.see(operator, arguments)
        return operator(*arguments, **(options or {}))


# These operators return a value, or a shape that depends on values, to the host. On a GPU the host waits for it.
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive")


def record_host_reads(script):
    """Write reads-RANK.json: the operators by which each training step of this rank reads the device."""
    train_step = script.train_step
    steps = []

    def see(operator, _):
        if operator._schema.name.removeprefix("aten::") in READS:
            steps[-1].append(operator._schema.name)

    def recorded_step(args, world, *arguments):
        steps.append([])
        with Operators(see):
            result = train_step(args, world, *arguments)
        (args.output_dir / f"reads-{world.rank}.json").write_text(json.dumps(steps))
        return result

    script.train_step = recorded_step


def record_collectives(script):
    """Write collectives-RANK.json: [name, bytes, processes] of each collective, in order, for each step and for what
    follows it. ["compute", 0, 1] stands for each matrix product."""
    train_step = script.train_step
    main = script.main
    calls_by_phase = {"after 0": []}

    def see(operator, arguments):
        *_, calls = calls_by_phase.values()
        if operator._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            calls.append(["compute", 0, 1])
        if operator.namespace == "c10d":
            [group] = [a for a in arguments if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            sizes = [leaf.nbytes for leaf in tree_leaves(arguments[:2]) if torch.is_tensor(leaf)]
            name = operator._schema.name.removeprefix("c10d::").strip("_")
            # Of the tensors, the largest is the whole one, not a shard.
            calls.append([name, max(sizes, default=0), dist.ProcessGroup.unbox(group).size()])

    def recorded_step(*arguments):
        step = 1 + len(calls_by_phase) // 2
        calls_by_phase[f"step {step}"] = []
        result = train_step(*arguments)
        calls_by_phase[f"after {step}"] = []
        return result

    def recorded_main(args, world):
        script.train_step = recorded_step
        with Operators(see):
            main(args, world)
        (args.output_dir / f"collectives-{world.rank}.json").write_text(json.dumps(calls_by_phase))

    script.main = recorded_main


def record_peak(script):
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    import memory_tracker

    memory_tracker.record_peak(script)
