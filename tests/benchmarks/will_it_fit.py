"""Will it fit, how long does a step take, and which strategy? What one process of a run holds at its peak, sends and
computes, before a GPU is rented.

    python tests/benchmarks/will_it_fit.py t5_fsdp.py --model google-t5/t5-3b --num-processes 8 --batch-size 4
    python tests/benchmarks/will_it_fit.py lm_multinode.py --model 1b --seq-length 1024 --num-processes 64 \\
        --sharding-strategy HYBRID_SHARD --sweep micro-batch-size=1,2,4,8
    python tests/benchmarks/will_it_fit.py t5_fsdp.py --model google-t5/t5-3b --num-processes 4 --device-gb 24
    python tests/benchmarks/will_it_fit.py lm_multinode.py --model 1b --seq-length 1024 --num-processes 16 \\
        --sweep sharding-strategy --gpu A100-80 --network-gbits 100 400
    python tests/benchmarks/will_it_fit.py t5_fsdp.py --model google-t5/t5-base --num-processes 4 --plot memory.png \\
        --sweep sharding-strategy=FULL_SHARD,SHARD_GRAD_OP --device-gb 16
    python tests/benchmarks/will_it_fit.py --table              # that of docs/will-it-fit.md, in a quarter of an hour

The flags are those of the run. The script's own parse_args, build and train_step make a step on tensors without
memory, in one process of a group that only pretends: no GPU, no weights, no data, also for a copy that you have
edited. Batches have the full lengths of the flags. `--model` is t5-small, t5-base, t5-large, t5-3b, t5-11b, a size of
the LM's `MODELS`, a name on the Hub, or a folder, which needs no more than a config.json. A Llama of `MODELS` has
`--vocabulary` tokens. `--precision auto` is bf16. `--device` is ignored, and `--compile` is not traced.

Attention is PyTorch's flash or memory-efficient kernel for GPUs, and dropout keeps the mask of one byte that GPUs keep;
with `--attention cpu` both are those of CPUs. With `--cpu-offload`, what is in the CPU's memory is left out.

What is sent is counted from the collectives of the step, with ring algorithms: a process sends (n-1)/n of what n
processes gather or reduce-scatter, twice that of an all-reduce, to the next one of the ring; a ring leaves each node
once. GiB between nodes is the mean of a node's processes. docs/will-it-fit.md says what is not counted, and how far to
trust the answers.
"""

import argparse
import contextlib
import copy
import importlib.util
import io
import itertools
import math
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transformers
from memory_tracker import KINDS, Tracker
from shared import ROOT, print_table
from step_time import GPUS, Gpu, Kernels, grouped_mm
from tqdm import tqdm

GIB = 2**30
USABLE = 0.9  # of a GPU's memory: the rest is for what is not counted
T5 = {  # d_model, d_ff, layers, heads, d_kv of google-t5's
    "t5-small": (512, 2048, 6, 8, 64),
    "t5-base": (768, 3072, 12, 12, 64),
    "t5-large": (1024, 4096, 24, 16, 64),
    "t5-3b": (1024, 16384, 24, 32, 128),
    "t5-11b": (1024, 65536, 24, 128, 128),
}


def fail(message: str) -> None:
    print(f"will_it_fit.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def load_script(path: str):
    """A script as a module, with the `common.py` beside it."""
    path = Path(path) if Path(path).exists() else ROOT / path
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def config_of(script, args, vocabulary: int) -> transformers.PreTrainedConfig:
    """Of `--model`, without weights. The script's own UserError where it cannot train such a model."""
    name = args.model.removeprefix("google-t5/")
    if name in T5:
        hidden, width, layers, heads, each = T5[name]
        shape = {"d_model": hidden, "d_ff": width, "num_layers": layers, "num_heads": heads, "d_kv": each}
        return transformers.T5Config(**shape, decoder_start_token_id=0)

    if name in getattr(script, "MODELS", {}):
        config = copy.deepcopy(script.MODELS[name])
        config.vocab_size = vocabulary
        config.max_position_embeddings = args.seq_length
        config._attn_implementation = script.ATTENTION
        return config

    if hasattr(script, "load_config"):
        return script.load_config(args)
    articles = None
    if args.model == "builtin":  # has as many words as its tokenizer learns from the articles
        with contextlib.redirect_stdout(io.StringIO()):
            articles, _ = script.common.load_articles(args.model, "text", "headline", args.max_summary_share)
    script.common.load_tokenizer = lambda _: None  # the folder need not have one
    return script.load_config_and_tokenizer(args, articles)[0]


def make_meta_model(script, world, config):
    """What the script's main gives to `build`. The script asks a checkpoint whether its output layer is tied. Without
    one, mT5's and UMT5's is not, nor that of FLAN-T5 and T5 v1.1, whose config has scale_decoder_outputs=False."""
    meta_model = script.make_meta_model(config)
    if config.model_type in ("mt5", "umt5") or not getattr(config, "scale_decoder_outputs", True):
        tied = meta_model.all_tied_weights_keys.keys() - {"lm_head.weight"}
        script.common.untie(meta_model, argparse.Namespace(all_tied_weights_keys=tied), world)
    return meta_model


def gpu_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> torch.Tensor:
    """The kernel that PyTorch takes on a GPU: flash attention, or the memory-efficient one for fp32 and for masks. The
    latter does not let heads share keys and values: there PyTorch takes plain matrix products."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        math = aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def gpu_dropout(values, p=0.5, training=True, inplace=False):
    """One kernel, and a mask of one byte for each number. A CPU keeps the mask in the dtype of the numbers."""
    if not training or p == 0:
        return values
    return torch.native_dropout(values, p, True)[0]


# How often a ring sends what is gathered or reduced, but for one part of n; the first that a collective's name has.
ROUNDS = {"gather": 1, "reduce_scatter": 1, "broadcast": 1, "alltoall": 1, "all_to_all": 1, "reduce": 2}


class Sending(TorchDispatchMode):
    """Counts the bytes that a process sends in collectives, `inside` a node and `between` nodes, as a node's mean."""

    def __init__(self, per_node: int) -> None:
        super().__init__()
        self.per_node = per_node
        self.inside = 0.0
        self.between = 0.0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        rounds = [ROUNDS[name] for name in ROUNDS if name in function._schema.name]
        if "c10d" in function.namespace and rounds:
            objects = [argument for argument in arguments if isinstance(argument, torch.ScriptObject)]
            groups = [dist.ProcessGroup.unbox(some) for some in objects if "ProcessGroup" in str(some._type())]
            [group] = groups or [dist.distributed_c10d._resolve_process_group(arguments[-1])]  # a name
            ranks = dist.get_process_group_ranks(group)
            on_node = sum(rank < self.per_node for rank in ranks)  # this is rank 0

            sizes = []  # a shard's, and the whole's
            for value in (*arguments, result):
                sizes.append(sum(leaf.nbytes for leaf in tree_leaves(value) if torch.is_tensor(leaf)))
            sent = rounds[0] * max(sizes) * (len(ranks) - 1) / len(ranks)
            leaves = sent / on_node if len(ranks) > on_node else 0
            self.between += leaves
            self.inside += sent - leaves
        return result


class Run:
    """One process of a run on fake tensors: it makes steps, as often as it is asked to."""

    def __init__(self, path: str, flags: list[str], options) -> None:
        sys.argv = [path, *flags, "--device", "cpu"]  # whatever the run's is
        self.script = load_script(path)
        self.options = options
        self.args = self.script.parse_args()
        if not hasattr(self.args, "precision"):
            fail("only t5_fsdp.py, lm_multinode.py and copies of them are traced")
        if getattr(self.args, "fsdp_version", 2) != 2:
            fail("FSDP1 is not traced; leave --fsdp-version out")
        if self.args.precision == "auto":
            self.args.precision = "bf16"
        self.would_compile = getattr(self.args, "compile", False)
        self.args.compile = False
        self.is_lm = hasattr(self.args, "micro_batch_size")
        self.global_batch_size = self.args.global_batch_size if self.is_lm else 0
        self.size = self.args.num_processes or 2
        on_node = min(self.size, options.per_node)
        self.world = self.script.common.World(0, 0, self.size, on_node, torch.device("cpu"))

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=self.size)
        # A mesh has real numbers.
        self.script.init_device_mesh = unset_fake_temporarily()(self.script.init_device_mesh)
        self.script.common.load_weights = lambda model, *_: model.to_empty(device="cpu")
        self.config = config_of(self.script, self.args, options.vocabulary)
        meta_model = make_meta_model(self.script, self.world, self.config)
        meta_model.__deepcopy__ = lambda _: meta_model  # for `build`; fake tensors fail to copy buffers
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)  # meta_model has others
        with self.fake:
            self.model, self.optimizer = self.script.build(self.args, self.world, None, meta_model)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()  # makes its state
            self.optimizer.zero_grad()
        self.step()  # the first one allocates what the others use again

    def print_what_is_left_out(self) -> None:
        """Of a language model validation takes less than a step: its batches are as large, without gradients."""
        if not self.is_lm:
            print("counted with fused attention, as T5 has it since transformers 5.20; not yet measured on a GPU")
            if self.args.run_validation:
                print(f"not counted: validation, which generates with --test-batch-size {self.args.test_batch_size}")
        if self.would_compile:
            print("traced without --compile, whose kernels are fewer and take less time and memory")
        if self.args.cpu_offload:
            print("not counted: the time of --cpu-offload, of its copies and of the optimizer on the CPU")

    def longest_batch(self):
        """What train_step gets: as long as the flags allow."""
        args = self.args
        if self.is_lm:
            smallest = args.micro_batch_size * self.size
            args.global_batch_size = self.global_batch_size or math.ceil(16 / smallest) * smallest  # as its main
            if args.global_batch_size % smallest != 0:
                fail(f"--global-batch-size must be a multiple of {smallest}")
            self.sample, self.lengths = "sequence", f"of {args.seq_length} tokens"
            count = args.global_batch_size // smallest
            self.describe(count, args.micro_batch_size, args.seq_length)
            tokens = torch.ones(count, args.micro_batch_size, args.seq_length, dtype=torch.long)
            positions = tokens.cumsum(2) - 1  # of a recipe
            parts = zip(tokens, tokens.clone(), positions, strict=True)
            return [{"input_ids": ids, "labels": labels, "positions": part} for ids, labels, part in parts]

        source, target = (8 * math.ceil(n / 8) for n in (args.max_source_length, args.max_target_length))
        self.sample, self.lengths = "article", f"of {source} tokens and summaries of {target}"
        self.describe(args.accumulation_steps, args.batch_size, source + target)
        samples = args.batch_size * args.accumulation_steps
        words = torch.ones(samples, source, dtype=torch.long)
        labels = torch.ones(samples, target, dtype=torch.long)
        return {"input_ids": words, "attention_mask": words.clone(), "labels": labels}

    def describe(self, micro_batches: int, batch_size: int, sample_tokens: int) -> None:
        """What a step is made of, for the answers."""
        global_batch = micro_batches * batch_size * self.size
        self.step_tokens = global_batch * sample_tokens  # of all processes
        self.batch = (
            f"{plural(micro_batches, 'micro-batch', 'es')} of {plural(batch_size, self.sample)} {self.lengths}:"
            f" global batch {global_batch} on {plural(self.size, 'process', 'es')}"
        )

    def step(self, at=(), modes=()) -> Tracker:
        """One training step. `at`: the operations after which to tell kinds apart. `modes`: what else looks on."""
        backward = torch.Tensor.backward

        def in_backward(tensor, *arguments, **options):
            tracker.phase = "backward"
            backward(tensor, *arguments, **options)

        def in_phase(name):
            return lambda *_: setattr(tracker, "phase", name)

        with contextlib.ExitStack() as ends:
            ends.enter_context(self.fake)
            batch = self.longest_batch()
            tracker = Tracker(self.model, self.optimizer, at, self.args.cpu_offload)
            ends.enter_context(mock.patch.object(torch.Tensor, "backward", in_backward))
            ends.enter_context(mock.patch.object(F, "grouped_mm", grouped_mm))
            if self.options.attention == "gpu":
                ends.enter_context(mock.patch.object(F, "scaled_dot_product_attention", gpu_attention))
                ends.enter_context(mock.patch.object(F, "dropout", gpu_dropout))
            ends.callback(self.model.register_forward_pre_hook(in_phase("forward"), prepend=True).remove)
            ends.callback(self.optimizer.register_step_pre_hook(in_phase("optimizer")).remove)
            ends.enter_context(tracker)
            for mode in modes:
                ends.enter_context(mode)
            self.script.train_step(self.args, self.world, self.model, self.optimizer, batch)
        return tracker

    def peak(self) -> int:
        """Bytes."""
        return max(self.step().totals)

    def over_a_step(self) -> Tracker:
        """With the bytes of each kind after every operation."""
        return self.step(at=range(sys.maxsize))

    def row(self) -> dict:
        """The GiB of each kind at the peak, and where that is."""
        totals = self.step().totals
        peak = totals.index(max(totals))
        tracker = self.step({peak})
        gb = {f"{kind}, GiB": tracker.kinds[peak][kind] / GIB for kind in KINDS}
        return gb | {"sum, GiB": sum(gb.values()), "at": f"{tracker.phases[peak]}, {tracker.operations[peak]}"}

    def cost(self, gpu: Gpu = GPUS["H100"]) -> dict:
        """The bytes that a process holds at its peak and sends in a step, and the kernels that its GPU runs."""
        sending = Sending(self.world.local_size)
        kernels = Kernels(gpu)
        tracker = self.step(modes=(sending, kernels))
        found = {"inside": sending.inside, "between": sending.between, "kernels": kernels, "flops": kernels.flops}
        return found | {"peak": max(tracker.totals)}

    def set_batch(self, size: int) -> None:
        """So many samples at once, in a step of one micro-batch."""
        if self.is_lm:
            self.args.micro_batch_size = size
            self.global_batch_size = size * self.size
        else:
            self.args.batch_size = size
            self.args.accumulation_steps = 1

    def largest_batches(self, device_gbs) -> list[int]:
        """For each of these GPUs, with a tenth of its memory to spare; 0 if not even one sample fits.

        After each operation memory is a constant and something for each sample, so two steps say all.
        """
        self.set_batch(2)
        two = torch.tensor(self.step().totals, dtype=torch.float64)
        self.set_batch(4)
        four = torch.tensor(self.step().totals, dtype=torch.float64)
        each = (four - two) / 2
        constant = two - 2 * each
        grows = each > 0
        found = []
        for device_gb in device_gbs:
            usable = USABLE * device_gb * GIB
            largest = ((usable - constant[grows]) / each[grows]).min().item()
            fits = largest >= 1 and constant.max().item() <= usable
            found.append(math.floor(largest) if fits else 0)
        return found


@contextlib.contextmanager
def traced(path: str, flags, options):
    """A `Run`, whose group is gone when the block ends."""
    try:
        yield Run(path, list(map(str, flags)), options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- What is printed and drawn ---------------------------------------------------------------------------------------


def draw(options, steps: dict[str, Tracker]) -> None:
    """Into the file of --plot: a panel for each step, with the memory of each kind after every operation."""
    import matplotlib.pyplot as plt

    size = (max(8, 4 * len(steps) + 1), 4)  # inches
    figure, panels = plt.subplots(1, len(steps), sharey=True, squeeze=False, figsize=size, layout="constrained")
    for panel, (title, tracker) in zip(panels[0], steps.items(), strict=True):
        kinds = tracker.kinds.values()
        panel.stackplot(range(len(kinds)), [[one[kind] / GIB for one in kinds] for kind in KINDS], labels=KINDS)
        if options.device_gb:
            panel.axhline(options.device_gb, color="black", linestyle="--", label=f"a GPU of {options.device_gb:g} GB")
        starts = [n for n, pair in enumerate(itertools.pairwise(tracker.phases), 1) if pair[0] != pair[1]]
        panel.set_xticks([0, *starts], [tracker.phases[n] for n in (0, *starts)], rotation=90)
        panel.margins(x=0)
        panel.set_title(title)
    panels[0, 0].set_ylabel("GiB of one process")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(options.plot, dpi=150)
    print(f"drawn in {options.plot}: memory after each operation of a step")


def sweep(options, flags: list[str], steps: dict[str, Tracker]):
    """Yield a row for each value of a flag. `steps` gets what is to be drawn."""
    name, _, values = options.sweep.partition("=")
    for value in values.split(","):
        with traced(options.script, [*flags, f"--{name}", value], options) as run:
            yield {name: value} | run.row() | {"a step": run.batch}
            if options.plot:
                steps[value] = run.over_a_step()
    run.print_what_is_left_out()


def compare(options, flags: list[str], steps: dict[str, Tracker]) -> None:
    """A row for each strategy: what a process holds and sends. Then for each network the time of a step."""
    gpu = GPUS[options.gpu]
    device_gb = options.device_gb or gpu.memory_gb
    rows = []
    tables = {gbits: [] for gbits in options.network_gbits}
    for strategy in tqdm(load_script(options.script).RESHARD, "trace", leave=False, disable=None):
        with traced(options.script, [*flags, "--sharding-strategy", strategy], options) as run:
            cost = run.cost(gpu)
            kernels = cost["kernels"]
            replicas, shards = run.script.mesh_shape(run.args, run.world) if run.is_lm else (1, run.size)
            if options.plot:
                steps[strategy] = run.over_a_step()
            fits = cost["peak"] <= USABLE * device_gb * GIB
            row = {"strategy": strategy, "mesh": f"{replicas} x {shards}", "peak, GiB": cost["peak"] / GIB}
            row[f"fits {device_gb:g} GB with a tenth to spare"] = "yes" if fits else "no"
            row |= {"sent inside a node, GiB": cost["inside"] / GIB, "between nodes, GiB": cost["between"] / GIB}
            row["TFLOP"] = cost["flops"] / 1e12
            if run.size <= options.per_node:
                tables = {None: tables.get(None, [])}  # one node has no network
            for gbits, found in tables.items():
                found.append({"strategy": strategy, "fits": fits} | bounds(run, cost, gpu, gbits))

            batch = run.batch  # which largest_batches changes
            [row["largest micro-batch"]] = run.largest_batches([device_gb])
            rows.append(row)

    print_table(rows)
    for gbits, found in tables.items():
        nodes = "one node" if gbits is None else f"{run.size // options.per_node} nodes with {gbits:g} Gbit/s each"
        print(f"\na step on {nodes}, with the {gpu.name}'s {gpu.link_gbytes} GB/s between the GPUs of a node:")
        print_table(mark_the_fastest(found))

    print(f"\ncounted for one process: a step of {batch}; for the largest micro-batch a step of only one")
    print("<-: of what fits, the least upper bound of the time")
    run.print_what_is_left_out()
    if kernels.host_may_be_the_limit:
        print(f"computing: the host must start {kernels.count:,} kernels in that time; it may be the limit")
    if not tables:
        print("for the time of a step, name the network of a node: --network-gbits 100")


def bounds(run: Run, cost: dict, gpu: Gpu, gbits: float | None) -> dict:
    """The seconds of a step if computing and sending all overlap, and if nothing does; and what takes them."""
    seconds = {
        "computing": cost["kernels"].seconds,
        "sending inside a node": cost["inside"] / (gpu.link_gbytes * 1e9),
    }
    if gbits is not None:  # a node's processes share its link
        seconds["network"] = cost["between"] * run.world.local_size * 8 / (gbits * 1e9)
    least = max(seconds.values())
    flops_at_peak = least * gpu.bf16_tflops * 1e12
    longest_first = sorted(seconds.items(), key=lambda part: part[1], reverse=True)
    return {
        "least, s": least,
        "most, s": sum(seconds.values()),
        "tokens/s, at most": run.step_tokens / least,
        "MFU, at most": f"{cost['kernels'].model_flops / flops_at_peak:.1%}",
        "what takes the time": ", ".join(f"{name} {value:.3g} s" for name, value in longest_first if value > 0),
    }


def mark_the_fastest(rows: list[dict]) -> list[dict]:
    """Of those that fit, by the most that a step takes."""
    candidates = [row for row in rows if row.pop("fits")]
    if candidates:
        fastest = min(candidates, key=lambda row: row["most, s"])
        fastest["what takes the time"] += " <-"
    return rows


MODELS = {  # of the page's table: script and flags
    "t5-base": ("t5_fsdp.py", "--model", "google-t5/t5-base"),
    "t5-3b": ("t5_fsdp.py", "--model", "google-t5/t5-3b"),
    "t5-11b": ("t5_fsdp.py", "--model", "google-t5/t5-11b"),
    "150m": ("lm_multinode.py", "--model", "150m", "--seq-length", 1024),
    "1b": ("lm_multinode.py", "--model", "1b", "--seq-length", 1024),
    "7b": ("lm_multinode.py", "--model", "7b", "--seq-length", 1024),
}
NUM_GPUS = (1, 4, 8, 64)
DEVICE_GB = (24, 40, 80)


def table(options, models=tuple(MODELS), gpus=NUM_GPUS):
    """Yield the page's rows: the largest batch of a process without and with recomputing, FULL_SHARD, bf16."""
    for model, count in itertools.product(models, gpus):
        cells = {f"{device_gb} GB": [] for device_gb in DEVICE_GB}
        for switch in ((), ("--activation-checkpointing",)):
            script, *flags = MODELS[model]
            with traced(script, [*flags, *switch, "--num-processes", count], options) as run:
                largest = run.largest_batches(DEVICE_GB)
            for name, size in zip(cells, largest, strict=True):
                cells[name].append(str(size or "-"))
        yield {"model": model, "GPUs": count} | {name: " / ".join(sizes) for name, sizes in cells.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", nargs="?", help="t5_fsdp.py, lm_multinode.py, or your copy of one")
    parser.add_argument("--sweep", help="flag=value,value: a row for each; sharding-strategy: what each sends, too")
    parser.add_argument("--gpu", default="H100", choices=GPUS, help="whose time, memory and link to its neighbours")
    parser.add_argument("--device-gb", type=float, help="find the largest micro-batch, one in a step; --plot: a line")
    parser.add_argument(
        "--plot", help="draw the memory over a step into this file, a panel for each row; needs matplotlib"
    )
    parser.add_argument("--network-gbits", type=float, nargs="+", default=[], help="Gbit/s of a node's link")
    parser.add_argument("--attention", default="gpu", choices=("gpu", "cpu"), help="whose kernel")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="of a Llama in MODELS")
    parser.add_argument("--processes-per-node", dest="per_node", type=int, default=8)
    parser.add_argument("--table", action="store_true", help="print that of docs/will-it-fit.md")
    options, more = parser.parse_known_args()
    transformers.logging.set_verbosity_error()
    if options.table:
        print_table(table(options))
        return
    if not options.script:
        parser.error("name a script, or --table")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.network_gbits and options.sweep != "sharding-strategy":
        parser.error("--network-gbits needs --sweep sharding-strategy")

    steps = {}
    if options.sweep == "sharding-strategy":
        compare(options, more, steps)
    elif options.sweep:
        print_table(sweep(options, more, steps))
    elif options.device_gb and not options.plot:
        print_largest_batch(options, more)
    else:
        print_answer(options, more, steps)
    if options.plot:
        draw(options, steps)


def print_largest_batch(options, flags: list[str]) -> None:
    if "--global-batch-size" in flags:
        fail("--device-gb looks for steps of one micro-batch: leave out --global-batch-size")
    with traced(options.script, flags, options) as run:
        [largest] = run.largest_batches([options.device_gb])
    run.print_what_is_left_out()
    print(
        f"largest batch of a process in a step of one micro-batch on {plural(run.size, 'process', 'es')}, in"
        f" {run.sample}s {run.lengths}, with a tenth of {options.device_gb:g} GB kept to spare: {largest}"
    )


def print_answer(options, flags: list[str], steps: dict[str, Tracker]) -> None:
    """What a process holds, sends and computes in a step, and the GPUs that it fits."""
    began = time.perf_counter()
    with traced(options.script, flags, options) as run:
        row = run.row()
        cost = run.cost(GPUS[options.gpu])
        if options.plot:
            steps[Path(options.script).name] = run.over_a_step()
    peak_gib = row["sum, GiB"]
    print_table([row])
    print(f"traced in {time.perf_counter() - began:.0f} s")
    print(f"counted: a step of {run.batch}")
    run.print_what_is_left_out()
    print(
        f"a process sends {cost['inside'] / GIB:.3f} GiB inside a node and {cost['between'] / GIB:.3f} GiB between"
        f" nodes, and computes {cost['flops'] / 1e12:.2f} TFLOP"
    )
    if options.attention == "gpu":
        kernels = cost["kernels"]
        print(
            f"a step takes {kernels.seconds:.3g} s of one {kernels.gpu.name}: {kernels.product_seconds:.3g} s of matrix"
            f" products and attention, {kernels.memory_seconds:.3g} s of memory traffic, {kernels.count:,} kernels,"
            " which the host must start in that time",
            end="",
        )
        print("; the host may be the limit: a larger batch, or --compile" if kernels.host_may_be_the_limit else "")
    sizes = [size for size in (16, 24, 32, 40, 48, 80, 96, 141, 192) if peak_gib < USABLE * size]
    fits = f"fits GPUs of {sizes[0]} GB or more" if sizes else "fits no GPU of up to 192 GB"
    print(f"peak {peak_gib:.2f} GiB a process; with a tenth of the memory kept to spare it {fits}")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # By name: the class is of the common.py beside the script, which may be a user's copy.
        if not isinstance(error, OSError) and type(error).__name__ != "UserError":
            raise
        fail(" ".join(str(error).split()))
