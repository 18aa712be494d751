"""Will it fit, how long does a step take, and which strategy? What one process of a run holds at its peak, sends and
computes, before a GPU is rented. docs/will-it-fit.md reads the answers, and says how far to trust them.

    python tests/benchmarks/will_it_fit.py t5_fsdp.py --model google-t5/t5-3b --num-processes 4 --gpu A100-40
    python tests/benchmarks/will_it_fit.py lm_multinode.py --model 1b --seq-length 1024 --num-processes 64 \\
        --sharding-strategy HYBRID_SHARD --global-batch-size 512 --sweep micro-batch-size=1,2,4,8
    python tests/benchmarks/will_it_fit.py lm_multinode.py --model 7b --seq-length 1024 --num-processes 16 \\
        --activation-checkpointing --sweep sharding-strategy --network-gbits 100 400 --plot memory.png

The other flags are those of the run. The script's own parse_args, build and train_step make a step on tensors without
memory, in one process of a group that only pretends: no GPU, no weights, no data, also for a copy that you have
edited. Batches have the full lengths of the flags. `--model` is t5-small, t5-base, t5-large, t5-3b, t5-11b, a size of
the LM's `MODELS`, a name on the Hub, or a folder, which needs no more than a config.json. `--precision auto` is bf16.
`--device` is ignored, and `--compile` is not traced.
"""

import argparse
import contextlib
import importlib.util
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

    if hasattr(script, "load_config"):  # the LM's, which asks a tokenizer
        tokenizer = mock.MagicMock(vocab_size=0, eos_token_id=0, __len__=lambda _: vocabulary)
        return script.load_config(args, tokenizer)
    articles = None
    if args.model == "builtin":  # has as many words as its tokenizer learns from the articles
        with contextlib.redirect_stdout(None):
            articles, _ = script.common.load_articles(args.model, "text", "headline", args.max_summary_share)
    script.common.load_tokenizer = lambda _: None  # the folder need not have one
    return script.load_config_and_tokenizer(args, None, articles)[0]


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
    """Counts the bytes that a process sends in collectives to the next one of a ring, which leaves each node once:
    `inside` a node, and `between` nodes, as a node's mean."""

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
        self.args.compile = False
        self.is_lm = hasattr(self.args, "seq_length")
        self.size = self.args.num_processes or 2
        on_node = min(self.size, options.per_node)
        self.world = self.script.common.World(0, 0, self.size, on_node, torch.device("cpu"))
        self.script.common.divide_batch(self.args, self.world, default=16 if self.is_lm else 32)  # as its main

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

    def longest_batch(self):
        """What train_step gets: as long as the flags allow."""
        args = self.args
        count = args.global_batch_size // self.size
        at_once = args.micro_batch_size
        if self.is_lm:
            self.describe(count, f"sequences of {args.seq_length} tokens", args.seq_length)
            tokens = torch.ones(count, args.seq_length, dtype=torch.long)
            positions = tokens.cumsum(1) - 1  # of a recipe
            parts = zip(tokens.split(at_once), tokens.clone().split(at_once), positions.split(at_once), strict=True)
            return [{"input_ids": ids, "labels": labels, "positions": part} for ids, labels, part in parts]

        source, target = (8 * math.ceil(n / 8) for n in (args.max_source_length, args.max_target_length))
        self.describe(count, f"articles of {source} tokens and summaries of {target}", source + target)
        words = torch.ones(count, source, dtype=torch.long)
        labels = torch.ones(count, target, dtype=torch.long)
        return {"input_ids": words, "attention_mask": words.clone(), "labels": labels}

    def describe(self, count: int, samples: str, sample_tokens: int) -> None:
        """What a step is made of, for the answers."""
        self.step_tokens = count * self.size * sample_tokens  # of all processes
        self.batch = f"{self.size} processes x {count} {samples}"
        if count > self.args.micro_batch_size:
            self.batch += f", {self.args.micro_batch_size} at once"

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

    def cost(self, gpu: Gpu = GPUS["H100"]) -> dict:
        """The bytes that a process holds at its peak, of which kind and where; those that it sends in a step; and the
        kernels that its GPU runs."""
        totals = self.step().totals
        peak = totals.index(max(totals))
        sending = Sending(self.world.local_size)
        kernels = Kernels(gpu)
        tracker = self.step({peak}, (sending, kernels))
        found = {"peak": totals[peak], "kinds": tracker.kinds[peak]}
        found["at"] = f"{tracker.phases[peak]}, {tracker.operations[peak]}"
        return found | {"inside": sending.inside, "between": sending.between, "kernels": kernels}

    def set_batch(self, size: int) -> None:
        """So many samples at once, in a step of one micro-batch."""
        self.args.micro_batch_size = size
        self.args.global_batch_size = size * self.size

    def largest_batch(self, usable: float) -> int:
        """That these bytes have room for; 0 if not even one sample fits. After each operation memory is a constant and
        something for each sample, so two steps say all. They leave this run another batch."""
        self.set_batch(2)
        two = torch.tensor(self.step().totals, dtype=torch.float64)
        self.set_batch(4)
        four = torch.tensor(self.step().totals, dtype=torch.float64)
        each = (four - two) / 2
        constant = two - 2 * each
        grows = each > 0
        if constant.max() > usable:
            return 0
        return max(0, math.floor(((usable - constant[grows]) / each[grows]).min()))


@contextlib.contextmanager
def traced(path: str, flags, options):
    """A `Run`, whose group is gone when the block ends."""
    try:
        yield Run(path, list(map(str, flags)), options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- What is printed and drawn ---------------------------------------------------------------------------------------


def draw(file: str, gib: float, steps: dict[str, Tracker]) -> None:
    """A panel for each step, with the memory of each kind after every operation."""
    import matplotlib.pyplot as plt

    size = (max(8, 4 * len(steps) + 1), 4)  # inches
    figure, panels = plt.subplots(1, len(steps), sharey=True, squeeze=False, figsize=size, layout="constrained")
    for panel, (title, tracker) in zip(panels[0], steps.items(), strict=True):
        kinds = tracker.kinds.values()
        panel.stackplot(range(len(kinds)), [[one[kind] / GIB for one in kinds] for kind in KINDS], labels=KINDS)
        panel.axhline(gib, color="black", linestyle="--", label=f"a GPU of {gib:g} GiB")
        starts = [n for n, pair in enumerate(itertools.pairwise(tracker.phases), 1) if pair[0] != pair[1]]
        panel.set_xticks([0, *starts], [tracker.phases[n] for n in (0, *starts)], rotation=90)
        panel.margins(x=0)
        panel.set_title(title)
    panels[0, 0].set_ylabel("GiB of one process")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=150)
    print(f"drawn in {file}: memory after each operation of a step")


def answer(options, flags: list[str]) -> None:
    """Whether it fits. Then what a process holds, and for each network the time of a step: a row for each value of
    --sweep."""
    gpu = GPUS[options.gpu]
    gib = options.device_gib or gpu.memory_gib
    usable = USABLE * gib * GIB
    name, _, values = options.sweep.partition("=")
    if name == "sharding-strategy" and not values:
        values = ",".join(load_script(options.script).RESHARD)
    if name and not values:
        fail(f"--sweep {name} needs values: {name}=1,2")
    rows = []
    peaks = {}  # of each value
    times = {gbits: [] for gbits in options.network_gbits}
    steps = {}
    for value in tqdm(values.split(","), "trace", leave=False, disable=None):
        label = {name: value} if name else {}
        more = [f"--{name}", value] if name else []
        with traced(options.script, [*flags, *more], options) as run:
            cost = run.cost(gpu)
            peaks[value] = cost["peak"]
            fits = cost["peak"] <= usable
            if run.size <= options.per_node:
                times = {None: times.get(None, [])}  # one node has no network
            for gbits, found in times.items():
                found.append(label | {"fits": fits} | bounds(run, cost, gpu, gbits))
            if options.plot:
                steps[value or Path(options.script).name] = run.over_a_step()
            row = label | {f"{kind}, GiB": size / GIB for kind, size in cost["kinds"].items()}
            row |= {"sum, GiB": cost["peak"] / GIB, "at": cost["at"], "fits": "yes" if fits else "no"}
            row |= {"sent inside a node, GiB": cost["inside"] / GIB, "between nodes, GiB": cost["between"] / GIB}
            row["a step"] = run.batch
            settings = vars(run.args).copy()  # largest_batch changes them
            row["largest micro-batch"] = run.largest_batch(usable)
            rows.append(row)

    fitting = [value for value, peak in peaks.items() if peak <= usable]
    needs = f"needs {'at least ' if name else ''}{min(peaks.values()) / GIB:.2f} GiB"
    verdict = f"a process {needs}, and may fill {usable / GIB:.1f} of {gib:g}"
    if fitting:
        print(f"yes{f', with --{name} ' if name else ''}{' or '.join(fitting)}: {verdict}")
    else:
        print(f"no: {verdict}; it fits with {find_cure(options, flags, settings, usable)}")
    print_table(rows)
    for gbits, found in times.items():
        nodes = "one node" if gbits is None else f"{run.size // options.per_node} nodes with {gbits:g} Gbit/s each"
        print(f"\na step on {nodes}, on the {gpu.name} with {gpu.link_gbytes} GB/s to the others of its node:")
        print_table(mark_the_fastest(found))
    kernels = cost["kernels"]
    which = f" with --{name} {value}" if name else ""
    print(
        f"\ncomputing{which}: {kernels.product_seconds:.3g} s of matrix products and attention,"
        f" {kernels.memory_seconds:.3g} s of memory traffic, in {kernels.count:,} kernels"
    )
    if kernels.host_may_be_the_limit:
        print("the host, which starts the kernels, may be the limit: a larger micro-batch, or --compile")
    print("not counted: validation, --compile, and the time of --cpu-offload")
    if options.plot:
        draw(options.plot, gib, steps)


# What makes a run fit, where the script has the flag.
CURES = {
    "activation_checkpointing": True,
    "micro_batch_size": 1,
    "gradient_sync": "every",
    "sharding_strategy": "FULL_SHARD",
    "cpu_offload": True,
}


def find_cure(options, flags: list[str], settings: dict, usable: float) -> str:
    """The flags of CURES, one after the other until the run fits."""
    added = []
    for name, value in CURES.items():
        if settings.get(name, value) == value:
            continue
        added.append(f"--{name.replace('_', '-')}")
        if value is not True:
            added.append(str(value))
        with traced(options.script, [*flags, *added], options) as run:
            if run.peak() <= usable:
                return " ".join(added)
    return "more GPUs, or larger ones"


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
    """Of several those that fit, by the most that a token takes."""
    candidates = [row for row in rows if row.pop("fits")]
    if candidates and len(rows) > 1:
        fastest = min(candidates, key=lambda row: row["most, s"] / (row["least, s"] * row["tokens/s, at most"]))
        fastest["what takes the time"] += " <-"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("script", help="t5_fsdp.py, lm_multinode.py, or your copy of one")
    add("--gpu", default="H100", choices=GPUS, help="whose memory, speed and link to its neighbours")
    add("--device-gib", type=float, help="GiB of another GPU's memory, as PyTorch sees it")
    add("--sweep", default="", help="flag=value,value: a row for each; sharding-strategy alone: all of them")
    add("--network-gbits", type=float, nargs="+", default=[100], help="Gbit/s of a node's link; a table for each")
    add("--processes-per-node", dest="per_node", type=int, default=8, help="GPUs of a node")
    add("--vocabulary", type=int, default=32_000, help="tokens of the tokenizer, for a model of the LM's MODELS")
    add("--attention", default="gpu", choices=("gpu", "cpu"), help="whose kernels; with them goes dropout's mask")
    add("--plot", help="draw the memory over a step into this file, a panel for each row; needs matplotlib")
    options, flags = parser.parse_known_args()
    transformers.logging.set_verbosity_error()
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    answer(options, flags)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # By name: the class is of the common.py beside the script, which may be a user's copy.
        if not isinstance(error, OSError) and type(error).__name__ != "UserError":
            raise
        fail(" ".join(str(error).split()))
