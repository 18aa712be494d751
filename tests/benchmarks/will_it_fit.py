"""Will a run fit a GPU, how long does a step take, and which strategy is the fastest? Predicts what one process holds
at its peak, sends and computes, without a GPU. docs/will-it-fit.md explains the output and how far to trust it.

    python tests/benchmarks/will_it_fit.py t5_fsdp.py --model google-t5/t5-3b --num-processes 4 --gpu A100-40
    python tests/benchmarks/will_it_fit.py lm_multinode.py --model 7b --seq-length 1024 --num-processes 16 \\
        --activation-checkpointing --sweep sharding-strategy --network-gbits 100 400 --plot memory.png
    python tests/benchmarks/will_it_fit.py lm_multinode.py --sweep model=1b,7b --hardware 1x24 8x40 --seq-length 4096

All other flags are the script's. The tool calls the script's own load_model, build and train_step on fake tensors,
which have a shape but no data. Your own copy of a script works, too. Every sample has the full length. `--model` is
t5-small, t5-base, t5-large, t5-3b, t5-11b, a row of the LM's `MODELS`, a name on the Hub, or a folder with a
config.json. `--precision auto` means bf16. `--device` is ignored, and `--compile` is not traced.
"""

import argparse
import contextlib
import functools
import itertools
import math
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import transformers
from memory_tracker import KINDS, Tracker
from shared import ROOT, print_table
from step_time import GPUS, Gpu, Kernels, gpu_attention, gpu_dropout, tensors_in
from tqdm import tqdm

from inside import load_module

GIB = 2**30
USABLE = 0.9  # the share of a GPU's memory that a run may use; CUDA and NCCL also need some
MOST_TRACED = 3  # micro-batches of a step
T5 = {  # d_model, d_ff, layers, heads and d_kv of the models on the Hub
    "t5-small": (512, 2048, 6, 8, 64),
    "t5-base": (768, 3072, 12, 12, 64),
    "t5-large": (1024, 4096, 24, 16, 64),
    "t5-3b": (1024, 16384, 24, 32, 128),
    "t5-11b": (1024, 65536, 24, 128, 128),
}


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add("script", help="t5_fsdp.py, lm_multinode.py, or your copy of one")
    add("--num-processes", type=int, default=2, help="the number of all GPUs")
    add("--processes-per-node", type=int, default=8, help="GPUs of a node")
    add("--gpu", default="H100", choices=GPUS, help="the GPU: its memory, its speed, its link inside a node")
    add("--device-gib", type=float, help="memory of another GPU in GiB, as PyTorch reports it")
    add("--sweep", default="", help="flag=value,value: one row per value; sharding-strategy alone: all strategies")
    more = "for example 8x40 64x80: a table of what fits 8 GPUs of 40 GiB, and 64 of 80, and with which strategy"
    add("--hardware", nargs="+", metavar="GPUSxGIB", help=more)
    add("--network-gbits", type=float, nargs="+", default=[100], help="Gbit/s of a node's network; one or several")
    add("--vocabulary", type=int, default=32_000, help="tokens of the tokenizer, for a MODELS row without --tokenizer")
    add("--attention", default="gpu", choices=("gpu", "cpu"), help="the device whose attention and dropout are used")
    add("--plot", help="draw the memory over a step into this file, one panel per row; needs matplotlib")
    return parser


def fail(message: str) -> None:
    print(f"will_it_fit.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def load_script(path: str):
    """Import a script as a module. It imports the `common.py` in its own folder."""
    path = Path(path) if Path(path).exists() else ROOT / path
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.pop("common", None)
    return load_module(path)


def config_of(script, args, vocabulary: int) -> transformers.PreTrainedConfig:
    """The config of `--model`. Raises the script's UserError if the script cannot train this model."""
    if hasattr(script, "MODELS"):  # the LM script, which takes the vocabulary from a tokenizer
        tokenizer = mock.MagicMock(eos_token_id=0, __len__=lambda _: vocabulary)
        if args.tokenizer:
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer)
        return script.load_config(args, tokenizer)

    name = args.model.removeprefix("google-t5/")
    if name in T5:
        shape = dict(zip(("d_model", "d_ff", "num_layers", "num_heads", "d_kv"), T5[name], strict=True))
        return transformers.T5Config(**shape, decoder_start_token_id=0)
    if name == "builtin":  # the script trains its tokenizer on the articles, which sets the vocabulary
        with contextlib.redirect_stdout(None):
            return script.load_data(args, None)[0]
    with mock.patch.object(script, "AutoTokenizer"):  # the folder may have none
        return script.load_config_and_tokenizer(args, None, None)[0]


def without_weights(kind, _name: str, config, **_):
    """Replaces `kind.from_pretrained`, which reads in the weights whether the output layer is tied. These models do not
    tie it: mT5, UMT5, and FLAN-T5 and T5 v1.1 (scale_decoder_outputs=False)."""
    model = kind.from_config(config, dtype=torch.float32)
    if config.model_type in ("mt5", "umt5") or not getattr(config, "scale_decoder_outputs", True):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    return model, {"missing_keys": []}


# How many times a ring sends the gathered or reduced tensor, except for one n-th of it. The first name that is part of
# the collective's name counts.
ROUNDS = {"gather": 1, "reduce_scatter": 1, "broadcast": 1, "alltoall": 1, "all_to_all": 1, "reduce": 2}


class Sending(TorchDispatchMode):
    """Counts the bytes that a process sends in collectives, `inside` its node and `between` nodes. In a ring, a process
    sends to the next one, so one process of a node sends to another node. `between` is the mean over a node."""

    def __init__(self, per_node: int) -> None:
        super().__init__()
        self.per_node = per_node
        self.inside = self.between = 0.0
        self.repeats = 1  # how many times the current micro-batch counts

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        rounds = [ROUNDS[name] for name in ROUNDS if name in function._schema.name]
        if "c10d" in function.namespace and rounds:
            objects = [argument for argument in arguments if isinstance(argument, torch.ScriptObject)]
            groups = [dist.ProcessGroup.unbox(item) for item in objects if "ProcessGroup" in str(item._type())]
            # Functional collectives name their group in the last argument.
            [group] = groups or [dist.distributed_c10d._resolve_process_group(arguments[-1])]
            ranks = dist.get_process_group_ranks(group)
            on_node = sum(rank < self.per_node for rank in ranks)  # this process is rank 0, on the first node

            whole = max(sum(leaf.nbytes for leaf in tensors_in(value)) for value in (*arguments, result))
            sent = self.repeats * rounds[0] * whole * (len(ranks) - 1) / len(ranks)
            between = sent / on_node if len(ranks) > on_node else 0
            self.between += between
            self.inside += sent - between
        return result


class Run:
    """One process of a run on fake tensors."""

    def __init__(self, arguments: list[str]) -> None:
        self.options, flags = make_parser().parse_known_args(arguments)
        self.script = script = load_script(self.options.script)
        if not hasattr(script, "PRECISIONS"):
            fail("only t5_fsdp.py, lm_multinode.py and copies of them are traced")
        with mock.patch.object(sys, "argv", [script.__file__, *flags, "--device", "cpu"]):  # the last --device counts
            self.args = script.common.parse_args(script.Args, "")
        if getattr(self.args, "fsdp_version", 2) != 2:
            fail("FSDP1 is not traced; leave --fsdp-version out")
        if self.args.precision == "auto":
            self.args.precision = "bf16"
        self.args.compile = False
        self.is_lm = hasattr(self.args, "seq_length")
        if self.is_lm:
            self.lengths = [self.args.seq_length]
            self.samples = f"sequences of {self.args.seq_length:,} tokens"
        else:
            self.lengths = [8 * math.ceil(n / 8) for n in (self.args.max_source_length, self.args.max_target_length)]
            self.samples = "articles of {:,} tokens and summaries of {:,}".format(*self.lengths)
        self.size = self.options.num_processes
        on_node = min(self.size, self.options.processes_per_node)
        self.world = script.common.World(0, 0, self.size, on_node, torch.device("cpu"))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.size)
        sharing = getattr(self.args, "context_parallel_size", 1)  # processes that share a sequence, by lm-long-context
        if sharing > 1:
            script.Context.size = sharing
            script.Context.group = dist.new_subgroups(sharing)[0].group_name
        self.readers = self.size // sharing
        script.common.divide_batch(self.args, self.world._replace(size=self.readers), default=16 if self.is_lm else 32)
        # A mesh reads its ranks, so its tensors must not be fake.
        script.init_device_mesh = unset_fake_temporarily()(script.init_device_mesh)
        self.config = config_of(script, self.args, self.options.vocabulary)
        kind = script.AutoModelForCausalLM if self.is_lm else script.AutoModelForSeq2SeqLM
        load = functools.partial(without_weights, kind)
        with torch.device("meta"), mock.patch.object(kind, "from_pretrained", load):
            self.meta_model = script.load_model(self.args, self.config)

    def least(self) -> float:
        """Bytes that a process needs at least: its shard of the state, or parameters that stay gathered."""
        shards = self.script.mesh_shape(self.args, self.world)[1] if self.is_lm else self.size
        state = sum(p.nbytes + 12 * p.numel() * p.requires_grad for p in self.meta_model.parameters()) / shards
        stay = not self.script.RESHARD[self.args.sharding_strategy]
        gathered = 2 * stay * sum(p.numel() for p in self.meta_model.parameters())
        return gathered if self.args.cpu_offload else max(state, gathered)

    def build(self) -> None:
        """Get ready to make training steps. The script uses the one model on the meta device, and copies nothing: fake
        tensors cannot be copied."""
        self.meta_model.__deepcopy__ = lambda _: self.meta_model
        self.script.load_model = lambda *_: self.meta_model
        changes = {name: lambda value: value for name in ("meta_copy", "from_rank0")}
        changes["fill_shards"] = lambda model, *_: model.to_empty(device="cpu")
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)  # meta_model has meta tensors, which are not fake
        with self.fake, mock.patch.multiple(self.script.common, **changes):
            self.model, _, self.optimizer = self.script.build(self.args, self.world, self.config)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()  # creates the optimizer's state
            self.optimizer.zero_grad()
            self.model._get_fsdp_state()._lazy_init()
            for module in self.model.modules():  # creates the storages that every step gathers parameters into
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()

    def longest_batch(self):
        """The batch for train_step, with samples of the full length. All micro-batches but the first and the last need
        the same. So only one of them is traced, the second, and counts `repeats` times."""
        args = self.args
        count = args.global_batch_size // self.readers
        left_out = max(0, math.ceil(count / args.micro_batch_size) - MOST_TRACED)
        self.repeats = 1 + left_out
        rows = count - left_out * args.micro_batch_size
        if self.is_lm:
            return torch.ones(count, args.seq_length + 1, dtype=torch.long)[:rows]
        words = torch.ones(count, self.lengths[0], dtype=torch.long)
        labels = torch.ones(count, self.lengths[1], dtype=torch.long)
        return {"input_ids": words[:rows], "attention_mask": words.clone()[:rows], "labels": labels[:rows]}

    def step(self, at=(), modes=()) -> Tracker:
        """Make one training step. `at`: the indices of operations after which bytes are counted by kind. `modes`: other
        modes that watch the step."""
        backward = torch.Tensor.backward

        def in_backward(tensor, *arguments, **options):
            tracker.phase = "backward"
            backward(tensor, *arguments, **options)
            repeats = next(repeats_of_next, 1)
            for mode in modes:
                mode.repeats = repeats

        def in_phase(name):
            return lambda *_: setattr(tracker, "phase", name)

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fake)
            batch = self.longest_batch()
            repeats_of_next = iter([self.repeats])
            tracker = Tracker(self.model, self.optimizer, at, self.args.cpu_offload)
            stack.enter_context(mock.patch.object(torch.Tensor, "backward", in_backward))
            if self.options.attention == "gpu":
                stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", gpu_attention))
                stack.enter_context(mock.patch.object(F, "dropout", gpu_dropout))
            stack.callback(self.model.register_forward_pre_hook(in_phase("forward"), prepend=True).remove)
            stack.callback(self.optimizer.register_step_pre_hook(in_phase("optimizer")).remove)
            for mode in (tracker, *modes):
                stack.enter_context(mode)
            self.script.train_step(self.args, self.world, self.model, self.optimizer, batch)
        return tracker

    def peak(self) -> int:
        """The most bytes that the process holds in a step."""
        return max(self.step().totals)

    def cost(self) -> dict:
        """The peak in bytes, its breakdown and where it is; the bytes that a process sends in a step; its kernels."""
        totals = self.step().totals
        peak = totals.index(max(totals))
        sending = Sending(self.world.local_world_size)
        kernels = Kernels(GPUS[self.options.gpu])
        tracker = self.step({peak}, (sending, kernels))

        count = self.args.global_batch_size // self.readers
        at_once = f", {self.args.micro_batch_size} at once" if count > self.args.micro_batch_size else ""
        return {
            "peak": totals[peak],
            "kinds": tracker.kinds[peak],
            "at": f"{tracker.phases[peak]} ({tracker.operations[peak].removesuffix('.default')})",
            "kernels": kernels,
            "inside": sending.inside,
            "between": sending.between,
            "by node": sending.between * self.world.local_world_size,  # the processes of a node share its network link
            "tokens": self.args.global_batch_size * sum(self.lengths),
            "batch": f"{self.readers} x {count}{at_once}",
            "batch in words": f"{self.readers} x {count} {self.samples}{at_once}",
        }

    def largest_batch(self, usable: float) -> int:
        """The largest micro-batch that fits into these bytes, in a step without accumulation; 0 if none fits. After
        each operation, memory is a constant plus a term that grows with the batch, so two steps are enough to know
        both. Changes the batch of this run."""
        totals = []
        for size in (2, 4):
            self.args.micro_batch_size = size
            self.args.global_batch_size = size * self.readers
            totals.append(torch.tensor(self.step().totals, dtype=torch.float64))
        two, four = totals
        per_sample = (four - two) / 2
        constant = two - 2 * per_sample
        grows = per_sample > 0
        if constant.max() > usable:
            return 0
        return max(0, math.floor(((usable - constant[grows]) / per_sample[grows]).min()))


@contextlib.contextmanager
def traced(*arguments, build=True):
    """A `Run` for one `with` block, which then removes its process group. With `build` it can make training steps.
    `arguments`: those of this tool's command line."""
    try:
        run = Run(list(map(str, arguments)))
        if build:
            run.build()
        yield run
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def draw(file: str, gib: float, memory: str, steps: dict[str, Tracker]) -> None:
    """One panel per step: the memory of each kind after every operation."""
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 13
    colors = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#999999")  # Okabe and Ito's, for the color-blind
    size = (max(6, 3.6 * len(steps) + 0.8), 4.6)  # inches
    figure, panels = plt.subplots(1, len(steps), sharey=True, squeeze=False, figsize=size, layout="constrained")
    for panel, (title, tracker) in zip(panels[0], steps.items(), strict=True):
        kinds = tracker.kinds.values()
        heights = [[sizes[kind] / GIB for sizes in kinds] for kind in KINDS]
        panel.stackplot(range(len(kinds)), heights, labels=KINDS, colors=colors)
        panel.axhline(gib, color="black", linestyle="--")
        starts = [n for n, pair in enumerate(itertools.pairwise(tracker.phases), 1) if pair[0] != pair[1]]
        panel.set_xticks([0, *starts], [tracker.phases[n] for n in (0, *starts)], ha="left")
        panel.get_xticklabels()[-1].set_ha("right")  # the optimizer
        if len(starts) > 2:  # several micro-batches
            panel.tick_params(axis="x", rotation=90)
        panel.margins(x=0)
        panel.set_title(f"{title}: {max(tracker.totals) / GIB:.1f} GiB", fontsize="medium", fontweight="bold")
    panel.text(0.98, gib, memory, transform=panel.get_yaxis_transform(), ha="right", va="bottom")
    panels[0, 0].set_ylabel("GiB of one process")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=150)
    print(f"drawn in {file}: memory after each operation of a step")


def values_of(options) -> tuple[str, dict[str, list[str]]]:
    """The flag of --sweep, and the flags to add for each of its values. Without --sweep: one value, no flags."""
    name, _, values = options.sweep.partition("=")
    if name == "sharding-strategy" and not values:
        values = ",".join(load_script(options.script).RESHARD)
    is_own = name.replace("-", "_") in vars(options).keys() - {"num_processes"}
    if name and (is_own or not values):
        fail("--sweep takes num-processes=2,4, or any flag of the script with its values")
    return name, {value: [f"--{name}", value] if name else [] for value in values.split(",")}


def print_hardware(options, arguments: list[str]) -> None:
    """Print a table of the first strategy that fits, in the order of README.md, with a row for each value of
    --sweep and a column for each --hardware."""
    name, values = values_of(options)
    if {"--num-processes", "--sharding-strategy"} & {*arguments, f"--{name}"}:
        fail("--hardware chooses --num-processes and --sharding-strategy itself")
    of_script = load_script(options.script).RESHARD
    rows = []
    for value, more in tqdm(values.items(), "trace", leave=False, disable=None):
        rows.append({name or "script": value or Path(options.script).name})
        for machine in options.hardware:
            count, gib = map(float, machine.split("x"))
            strategies = ["SHARD_GRAD_OP", "FULL_SHARD"]
            if count == 1:  # SHARD_GRAD_OP equals NO_SHARD; FULL_SHARD holds fewer bf16 copies of parameters
                strategies[0] = "NO_SHARD"
            elif count > options.processes_per_node:
                strategies[:0] = "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD"
            cell = "no"
            for strategy in filter(of_script.__contains__, strategies):
                pair = ["--num-processes", int(count), "--sharding-strategy", strategy]
                with traced(*arguments, *more, *pair, build=False) as run:
                    needed = run.least()
                    if needed <= USABLE * gib * GIB:
                        run.build()
                        needed = run.peak()
                if needed <= USABLE * gib * GIB:
                    cell = f"{short(needed / GIB)} {strategy}"
                    break
            rows[-1][f"{count:g} x {gib:g} GiB"] = cell
    print_table(rows)
    print(f"\nGiB that a process holds at its peak, with {run.samples}; it may use {USABLE:.0%} of its GPU's memory")


def answer(options, arguments: list[str]) -> None:
    """Print whether the run fits, then one prediction, or a table with a row for each value of --sweep."""
    gpu = GPUS[options.gpu]
    gib = options.device_gib or gpu.memory_gib
    usable = USABLE * gib * GIB
    name, values = values_of(options)
    costs, steps = {}, {}  # by value
    for value, more in tqdm(values.items(), "trace", leave=False, disable=None):
        with traced(*arguments, *more) as run:
            costs[value] = cost = run.cost()
            if options.plot:
                steps[value or Path(options.script).name] = run.step(at=range(sys.maxsize))
            cost |= {"fits": cost["peak"] <= usable, "largest": run.largest_batch(usable)}

    fitting = sum(cost["fits"] for cost in costs.values())
    fit = f"{fitting} of {len(costs)} values of --{name} fit; a process"
    needs = fit if name else f"a process needs {cost['peak'] / GIB:.2f} GiB and"
    size = f"{gib:g} GiB" if options.device_gib else f"the {options.gpu}'s {gib:g} GiB"
    print(f"{'yes' if fitting else 'no'}: {needs} may use {usable / GIB:.3g} of {size}")
    if not fitting:
        print("these need less: --activation-checkpointing, a smaller --micro-batch-size, FULL_SHARD, --cpu-offload")
    print()
    networks = options.network_gbits if any(cost["between"] for cost in costs.values()) else [None]
    if name:
        print_sweep(name, costs, gpu, networks)
    else:
        print_prediction(cost, gpu, networks)
        print()
    if any(cost["inside"] + cost["between"] for cost in costs.values()):
        print("X to Y s: X if computing and sending overlap fully, Y if they do not overlap")
    if any(cost["kernels"].host_may_be_the_limit for cost in costs.values()):
        print("the host, which starts the kernels, may be the limit: try a larger micro-batch, --compile, or both")
    print("not counted: validation, --compile, and the time that --cpu-offload takes")
    if options.plot:
        draw(options.plot, gib, size, steps)


def short(value: float) -> str:
    """Three digits, or all digits of a large number."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def parts_of_step(cost: dict, gpu: Gpu, gbits: float | None) -> dict[str, float]:
    """The seconds of computing and of sending."""
    parts = {"computing": cost["kernels"].seconds, "inside a node": cost["inside"] / (gpu.link_gbytes * 1e9)}
    if gbits:
        parts["between nodes"] = cost["by node"] * 8 / (gbits * 1e9)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def bounds(parts: dict[str, float]) -> str:
    """A step takes as long as its longest part if all overlap, and the sum of its parts if none do."""
    least, most = short(max(parts.values())), short(sum(parts.values()))
    return f"{least} to {most}" if len(parts) > 1 else least


def find_fastest(costs: dict[str, dict], gpu: Gpu, gbits: float | None) -> str | None:
    """The value with the smallest upper bound of the time per token, among those that fit."""
    fitting = {value: cost for value, cost in costs.items() if cost["fits"]}
    upper = {value: sum(parts_of_step(cost, gpu, gbits).values()) / cost["tokens"] for value, cost in fitting.items()}
    return min(fitting, key=upper.get, default=None)


def print_prediction(cost: dict, gpu: Gpu, networks: list) -> None:
    peak = f"{cost['peak'] / GIB:.2f}"
    print(f"peak                      {peak} GiB, in {cost['at']}")
    for kind, size in cost["kinds"].items():
        print(f"  {kind:24}{size / GIB:{len(peak)}.2f} GiB")
    print(f"largest micro-batch       {cost['largest']:,}, in a step without accumulation")
    print(f"processes x samples       {cost['batch in words']}")
    inside, between, by_node = (short(cost[key] / GIB) for key in ("inside", "between", "by node"))
    if cost["inside"]:
        print(f"sent inside a node        {inside} GiB by each process, at {gpu.link_gbytes} GB/s")
    if cost["between"]:
        print(f"sent between nodes        {between} GiB by each process, {by_node} GiB by each node")
    kernels = cost["kernels"]
    products, memory = f"{short(kernels.product_seconds)} s of products", f"{short(kernels.memory_seconds)} s of memory"
    print(f"computing                 {products} and attention, {memory} traffic, {kernels.count:,} kernels")
    for gbits in networks:
        parts = parts_of_step(cost, gpu, gbits)
        least = max(parts.values())
        mfu = kernels.model_flops / (least * gpu.bf16_tflops * 1e12)
        longest_first = sorted(parts, key=parts.get, reverse=True)
        print(f"a step takes              {bounds(parts)} s" + (f" at {gbits:g} Gbit/s between nodes" if gbits else ""))
        if len(parts) > 1:
            print("  parts                   " + ", ".join(f"{name} {short(parts[name])} s" for name in longest_first))
        print(f"  at most                 {cost['tokens'] / least:,.0f} tokens/s, MFU {mfu:.1%}")


def print_sweep(name: str, costs: dict[str, dict], gpu: Gpu, networks: list) -> None:
    """A Markdown table with one row per value. `<-` marks the fastest at each speed of the network."""
    batches = {cost["batch in words"] for cost in costs.values()}
    rows = []
    for value, cost in costs.items():
        row = {name: value, "fits": "yes" if cost["fits"] else "no"}
        row |= {"peak, GiB": f"{cost['peak'] / GIB:.2f}", "max batch": f"{cost['largest']:,}"}
        if len(batches) > 1:
            row["processes x samples"] = cost["batch"]
        for gbits in networks:
            mark = " <-" if len(costs) > 1 and find_fastest(costs, gpu, gbits) == value else "   "
            column = f"s at {gbits:g} Gbit/s" if gbits else "a step takes, s"
            row[column] = bounds(parts_of_step(cost, gpu, gbits)) + mark
        rows.append(row)

    print_table(rows)
    print("\nmax batch: the largest micro-batch that fits, in a step without accumulation")
    if len(batches) == 1:
        print(f"processes x samples: {cost['batch in words']}")


def main() -> None:
    arguments = sys.argv[1:]
    options, _ = make_parser().parse_known_args(arguments)
    transformers.logging.set_verbosity_error()
    if options.hardware:
        print_hardware(options, arguments)
    else:
        answer(options, arguments)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # Compare the name: each copy of common.py has its own class.
        if not isinstance(error, OSError) and type(error).__name__ != "UserError":
            raise
        fail(" ".join(str(error).split()))
