"""The predicted peak of a training step is what a real one holds: every tensor that is alive, to 1%. The README's
table of strategies takes what the tool finds the fastest."""

import json
import re
import sys
from argparse import Namespace

import torch
from torch._subclasses import FakeTensorMode

import matplotlib.pyplot as plt
import pytest
import will_it_fit
from conftest import ROOT, make_model, make_tokenizer, run_many
from shared import patched
from step_time import GPUS
from test_models import CAUSAL, LENGTH
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig

from inside import LM_STRATEGIES, lm_mfu_per_token_per_second

pytestmark = pytest.mark.long

TOOL = "tests/benchmarks/will_it_fit.py"
GPU = Namespace(vocabulary=32_000, per_node=8, attention="gpu")
STEPS = ("--max-steps", 3, "--no-save-model", "--precision", "fp32")
LM = (*STEPS, "--seq-length", 128, "--micro-batch-size", 4, "--num-validation-texts", 3)
T5 = (*STEPS, "--no-run-validation", "--num-train-samples", 64, "--global-batch-size", 4)
T5 = (*T5, "--max-source-length", 16, "--max-target-length", 8)  # every article and summary is longer
ZERO2 = ("--sharding-strategy", "SHARD_GRAD_OP")
CASES = (
    ("--precision", "bf16", "--activation-checkpointing", "--global-batch-size", 8),
    ("--sharding-strategy", "_HYBRID_SHARD_ZERO2", "--shards-per-replica", 1, "--global-batch-size", 16),
    ("--gradient-sync", "every", "--global-batch-size", 16),
)


def test_a_gpus_dropout_keeps_one_byte_for_a_number():
    kept = []
    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        values = torch.empty(1000, dtype=torch.bfloat16, requires_grad=True)
        assert will_it_fit.gpu_dropout(values, 0.1, training=False) is values
        assert will_it_fit.gpu_dropout(values, 0.1).dtype == torch.bfloat16
    assert [tensor.nbytes for tensor in kept] == [1000]


@pytest.mark.parametrize(
    ("flags", "measured"),
    [(("bf16",), 0.0865), (("bf16", "--activation-checkpointing"), 0.1089), (("fp32",), 0.1714)],
)
def test_the_time_of_a_step_is_that_of_an_h100(flags, measured):
    """The rows of docs/results.md whose device was busy; the first and the last one fitted the shares."""
    llama = ("--model", "150m", "--seq-length", 1024, "--micro-batch-size", 16, "--global-batch-size", 16)
    options = Namespace(vocabulary=6666, per_node=8, attention="gpu")
    flags = (*llama, "--num-processes", 1, "--precision", *flags)
    with will_it_fit.traced("lm_multinode.py", flags, options) as run:
        kernels = run.cost()["kernels"]
        per_token = run.script.mfu_per_token_per_second(
            Namespace(peak_tflops=1, seq_length=1024), run.world, run.script.make_meta_model(run.config)
        )
    assert kernels.seconds == pytest.approx(measured, rel=0.05)
    assert not kernels.host_may_be_the_limit
    # MFU counts what the script's does: nothing that is computed again.
    assert kernels.model_flops == pytest.approx(1e12 * per_token * 16 * 1024, rel=0.01)


def check(script, settings, processes, tmp_path):
    """For each list of flags the prediction for a CPU is what a run of rank 0 held."""
    runs = {tmp_path / str(number): flags for number, flags in enumerate(settings)}
    run_many(script, runs, processes, change=("record_peak",))
    for folder, flags in runs.items():
        held = json.loads((folder / "peak-0.json").read_text())
        options = Namespace(vocabulary=held["vocabulary"], per_node=processes, attention="cpu")
        with will_it_fit.traced(script, [*flags, "--num-processes", processes], options) as run:
            assert run.peak() == pytest.approx(held["peak"], rel=0.01), flags


def test_the_prediction_is_what_a_real_step_holds(tmp_path):
    """With one micro-batch, and with two, which hold whole gradients, or shards of them with --gradient-sync every."""
    check("lm_multinode.py", [(*LM, *more) for more in CASES], 2, tmp_path)


def test_the_prediction_is_what_other_models_hold(tmp_path):
    """Replicas of two processes, which cannot divide three experts, reduce in both micro-batches; GPT-2 is tied."""
    tiny = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny |= {"vocab_size": 1024, "num_key_value_heads": 4}
    experts = MixtralConfig(**tiny, num_local_experts=3, num_experts_per_tok=2)
    gpt2 = GPT2Config(vocab_size=1024, n_embd=128, n_layer=2, n_head=4)
    settings = []
    for config in (experts, gpt2):
        folder = tmp_path / config.model_type
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        make_tokenizer(folder)
        flags = ("--model", folder, "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2)
        settings.append((*LM, *flags, "--seq-length", 32, "--micro-batch-size", 1, "--global-batch-size", 8))
    check("lm_multinode.py", settings, 4, tmp_path)


def test_the_prediction_is_what_a_real_step_of_t5_holds(tiny_model, articles_csv, tmp_path):
    """With micro-batches of 4 and 2; of 1 and 1, with an output layer of its own, as in FLAN-T5; and of what the script
    makes itself."""
    tiny = (*T5, "--model", tiny_model, "--dataset", articles_csv)
    grad_bf16 = ("--precision", "grad-bf16", "--global-batch-size", 12)
    flan = ("--model", make_model(tmp_path / "flan", is_tied=False, tie_word_embeddings=False))
    ways = [
        (*tiny, *grad_bf16, *ZERO2, "--micro-batch-size", 4),
        (*tiny, *flan, "--precision", "bf16", "--micro-batch-size", 1),
        (*T5, "--activation-checkpointing", "--backward-prefetch", "none"),
    ]
    check("t5_fsdp.py", ways, 2, tmp_path)


def test_a_folder_with_a_config_suffices(tmp_path):
    """Of any model. Of experts a token computes those that it uses; mT5 and UMT5 have an output layer of their own."""
    for name, config in CAUSAL.items():
        config.save_pretrained(tmp_path / name)
        flags = ("--model", tmp_path / name, "--seq-length", LENGTH, "--num-processes", 4)
        with will_it_fit.traced("lm_multinode.py", flags, GPU) as run:
            kernels = run.cost()["kernels"]
        if name == "mixtral":
            model = run.script.make_meta_model(run.config)
            per_token = lm_mfu_per_token_per_second(Namespace(peak_tflops=1, seq_length=LENGTH), run.world, model)
            assert kernels.model_flops == pytest.approx(1e12 * per_token * 4 * 4 * LENGTH, rel=0.01)

    for kind in ("t5", "mt5", "umt5"):
        shape = {"vocab_size": 1024, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "decoder_start_token_id": 0}
        AutoConfig.for_model(kind, **shape).save_pretrained(tmp_path / kind)
        with will_it_fit.traced("t5_fsdp.py", ("--model", tmp_path / kind), GPU) as run:
            assert (run.model.lm_head.weight is run.model.shared.weight) == (kind == "t5")


@pytest.mark.parametrize("name", ["t5-lora", "lm-lora"])
def test_frozen_weights_have_no_gradients(name, tiny_model, tiny_llama, articles_csv, tmp_path):
    copy = patched(tmp_path / "copy", name)
    if name == "lm-lora":
        check(copy / "lm_multinode.py", [(*LM, "--model", tiny_llama, "--global-batch-size", 16)], 2, tmp_path)
    else:
        check(copy / "t5_fsdp.py", [(*T5, "--model", tiny_model, "--dataset", articles_csv)], 2, tmp_path)


def test_what_is_sent_is_what_the_formulas_say():
    """Those of docs/multi-node.md: two micro-batches in bf16 on two nodes of two processes."""
    options = Namespace(vocabulary=2048, per_node=2, attention="gpu")
    flags = ("--precision", "bf16", "--num-processes", 4, "--global-batch-size", 32, "--sharding-strategy")
    with will_it_fit.traced("lm_multinode.py", [*flags, "FULL_SHARD"], options) as run:
        whole, layers = (sum(p.numel() for p in part.parameters()) for part in (run.model, run.model.model.layers))
    once, twice, reduced = 2 * whole, 2 * 2 * (whole + layers), 4 * whole
    # Inside a node and between nodes. Of two processes of a node one sends the other's, too.
    expected = {
        "FULL_SHARD": [3 / 8 * (twice + reduced)] * 2,
        "FULL_SHARD --gradient-sync every": [3 / 8 * (twice + 2 * reduced)] * 2,
        "SHARD_GRAD_OP": [3 / 8 * (once + reduced)] * 2,
        "HYBRID_SHARD": [1 / 2 * (twice + 2 * reduced), reduced / 2],  # in each replica after each micro-batch
        "HYBRID_SHARD --shards-per-replica 4": [3 / 8 * (twice + reduced)] * 2,
        "_HYBRID_SHARD_ZERO2": [1 / 2 * (once + 2 * reduced), reduced / 2],
        "NO_SHARD": [3 / 4 * reduced] * 2,
    }
    for strategy, sent in expected.items():
        with will_it_fit.traced("lm_multinode.py", [*flags, *strategy.split()], options) as run:
            cost = run.cost()
        assert [cost["inside"], cost["between"]] == pytest.approx(sent, rel=0.01), strategy


def test_sweeps_offload_and_the_largest_batch():
    tiny = ("lm_multinode.py", "--model", "tiny", "--num-processes", 4)
    two_nodes = ("--processes-per-node", 2, "--network-gbits", 1, "--device-gib", 1)
    ways = [("--sweep", "micro-batch-size=1,4"), ("--cpu-offload",), ("--sweep", "sharding-strategy", *two_nodes)]
    ways.append(("--device", "cuda", "--compile"))  # neither is traced
    printed = run_many(TOOL, [[*tiny, *flags] for flags in ways]).stdout
    rows = [line.split(" | ") for line in printed.splitlines() if line.count(" | ") > 10]
    (one, four), offloaded, compiled = rows[1:3], rows[4], rows[-1]
    # 16 sequences on 4 processes, as in the run: the first accumulates four micro-batches, and has whole gradients.
    assert float(one[4]) > 3 * float(four[4])
    assert float(one[5]) < float(four[5])
    assert offloaded[:2] == ["| 0", "0"]  # parameters and optimizer are in the CPU's memory
    for counted in ("4 processes x 4 sequences of 128 tokens |", "4 processes x 4 sequences of 128 tokens, 1 at once"):
        assert counted in printed
    assert f"yes: a process needs {float(compiled[5]):.2f} GiB" in printed
    assert printed.count("the host, which starts") == 4  # the model is tiny

    counted, timed = re.findall(r"^\| FULL_SHARD \| (.+) \|$", printed, re.M)
    least, _, speed, *_ = (cell.replace(",", "") for cell in timed.split(" | "))
    assert float(least) * float(speed) == pytest.approx(16 * 128, rel=0.01)
    assert re.findall(r"^\| (\w+) .*<-", printed, re.M) == ["4", "_HYBRID_SHARD_ZERO2"]  # the slow link decides
    with will_it_fit.traced("lm_multinode.py", ["--num-processes", 4], GPU) as run:
        largest = run.largest_batch(0.9 * 2**30)
        assert largest == int(counted.split(" | ")[-1]) > 4
        for size in (largest, largest + 1):
            run.set_batch(size)
            assert (run.peak() <= 0.9 * 2**30) == (size == largest)  # a tenth is to spare


def test_the_first_word_is_yes_or_no_and_a_no_names_the_flags_that_make_it_fit():
    peaks = []
    for size in (1, 4):
        with will_it_fit.traced("lm_multinode.py", ["--num-processes", 4, "--micro-batch-size", size], GPU) as run:
            peaks.append(run.peak() / 2**30)
    question = ["lm_multinode.py", "--num-processes", 4, "--device-gib", sum(peaks) / 2 / 0.9]
    no = run_many(TOOL, [question]).stdout.splitlines()[0]
    flags = re.search("fits with (.+)", no)[1].split()
    assert no.startswith("no") and "--micro-batch-size" in flags and "--cpu-offload" not in flags
    assert run_many(TOOL, [[*question, *flags]]).stdout.startswith("yes")


def test_what_the_tool_cannot_trace_ends_with_a_sentence(tiny_llama):
    mistakes = {
        "lm_multinode.py --model absent": "huggingface.co",
        f"lm_multinode.py --model {tiny_llama} --seq-length 4096": "--seq-length of 2048",  # the script's own sentences
        f"t5_fsdp.py --model {tiny_llama}": "is not a T5",
        "t5_fsdp.py --fsdp-version 1": "FSDP1",
        "t5.py": "t5.py",
        "mnist_fsdp.py": "t5_fsdp.py",
        "lm_multinode.py --sweep seed": "=",
        "lm_multinode.py --attn cpu": "--attn",  # no flag is abbreviated
        "lm_multinode.py --num-processes 3 --global-batch-size 16": "multiple of 3",
        "lm_multinode.py --num-processes 12 --sharding-strategy HYBRID_SHARD": "--shards-per-replica",
    }
    for command, word in mistakes.items():
        finished = run_many(TOOL, [command.split()], check=False)
        assert finished.returncode == 2 and "Traceback" not in finished.stderr, command
        assert word in finished.stderr.splitlines()[-1]


def test_a_drawing_has_the_bytes_of_the_table(tmp_path, monkeypatch, capsys):
    """Stacked, after each operation: the highest point is the sum."""
    flags = "lm_multinode.py --num-processes 4 --precision fp32 --global-batch-size 16".split()
    flags += ["--sweep", "sharding-strategy=NO_SHARD,FULL_SHARD", "--plot", str(tmp_path / "memory.png")]
    monkeypatch.setattr(sys, "argv", ["will_it_fit.py", *flags])
    will_it_fit.main()
    rows = re.findall(r"^\| (?:NO|FULL)_SHARD \| (.+)", capsys.readouterr().out, re.M)
    assert (tmp_path / "memory.png").exists()
    for panel, row in zip(plt.gcf().axes, rows[:2], strict=True):
        parameters, moments, *_, total = map(float, row.split(" | ")[:6])
        heights = [area.get_paths()[0].vertices[:, 1].max() for area in panel.collections]
        assert heights[:2] == pytest.approx([parameters, parameters + moments], rel=1e-3)
        assert heights[-1] == pytest.approx(total, rel=1e-3)


# ---- The README's table of strategies --------------------------------------------------------------------------------
def chosen_by_the_table(state, parameters, per_node, nodes, memory):
    """The strategy of the first row that fits."""
    section = re.search(r"^## Which strategy\?\n(.+?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    rows = re.findall(r"^\| (one|several) \| 16/(n|s)( \+ 2)? \| `(\w+)`", section, re.M)
    assert len(rows) == 6
    for where, shards, gathered, strategy in rows:
        needed = state / (per_node * nodes if shards == "n" else per_node) + bool(gathered) * parameters
        if (where == "one") == (nodes == 1) and needed <= memory:
            return strategy


@pytest.mark.parametrize("model", ["150m", "1b", "7b"])
def test_the_table_of_strategies_takes_what_the_tool_finds_the_fastest(model):
    """Activations are few, so that the largest model fits the smallest machine."""
    one_sequence = ("--seq-length", 1024, "--micro-batch-size", 1)
    for nodes, machines in (1, [("H100", None), ("RTX4090", None)]), (2, [("H100", gbits) for gbits in (10, 100, 400)]):
        size = 8 * nodes
        flags = ("--model", model, "--num-processes", size, *one_sequence, "--global-batch-size", size)
        costs = {}
        for strategy in LM_STRATEGIES:
            is_hybrid = "HYBRID" in strategy  # on one node they are the same as two others
            if is_hybrid and nodes == 1:
                continue
            with will_it_fit.traced("lm_multinode.py", [*flags, "--sharding-strategy", strategy], GPU) as run:
                costs[strategy] = run.cost()  # computing is the same for all
                count = run.model.num_parameters()
        state, parameters = 16 * count, 2 * count
        activations = costs["FULL_SHARD"]["peak"] - state / size

        for name, gbits in machines:
            usable = 0.9 * GPUS[name].memory_gib * 2**30
            rows = []
            for strategy, cost in costs.items():
                row = {"strategy": strategy, "fits": cost["peak"] <= usable}
                rows.append(row | will_it_fit.bounds(run, cost, GPUS[name], gbits))
            [fastest] = [
                row["strategy"] for row in will_it_fit.mark_the_fastest(rows) if "<-" in row["what takes the time"]
            ]
            assert fastest == chosen_by_the_table(state, parameters, 8, nodes, usable - activations), (name, gbits)
