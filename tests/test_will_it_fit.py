"""will_it_fit.py predicts the peak of a real training step to 1%, counting every tensor that is alive. The table of
strategies in README.md selects the strategy that the tool finds the fastest."""

import itertools
import json
import re

import pytest
import will_it_fit
from conftest import ROOT, make_model, make_tokenizer, needs_peft, run_many
from shared import patched
from step_time import GPUS
from test_models import CAUSAL, LENGTH
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config
from will_it_fit import find_fastest, short, traced

from inside import LM_STRATEGIES, lm_mfu_per_token_per_second

pytestmark = pytest.mark.long

TOOL = "tests/benchmarks/will_it_fit.py"
STEPS = ("--max-steps", 3, "--no-save-model", "--precision", "fp32")
LM = (*STEPS, "--seq-length", 128, "--micro-batch-size", 4, "--num-validation-texts", 3)
T5 = (*STEPS, "--no-run-validation", "--num-train-samples", 64, "--global-batch-size", 4)
T5 = (*T5, "--max-source-length", 16, "--max-target-length", 8)  # every article and summary is cut to these lengths
FOUR_ON_TWO_NODES = ("--num-processes", 4, "--processes-per-node", 2, "--vocabulary", 2048)


def cost_of(*flags):
    with traced(*flags) as run:
        return run.cost()


# ---- Memory ----------------------------------------------------------------------------------------------------------
def check(script, settings, processes, tmp_path):
    """Run the script with each list of flags. The prediction for a CPU must equal what rank 0 held."""
    runs = {tmp_path / str(index): flags for index, flags in enumerate(settings)}
    run_many(script, runs, processes, change=("record_peak",))
    for folder, flags in runs.items():
        held = json.loads((folder / "peak-0.json").read_text())
        own = ("--num-processes", processes, "--vocabulary", held["vocabulary"], "--attention", "cpu")
        with traced(script, *flags, *own) as run:
            assert run.peak() == pytest.approx(held["peak"], rel=0.01), flags


def test_the_prediction_is_what_a_real_step_holds(tmp_path):
    """The first run has one micro-batch. The next two have two, and keep shards of gradients, or whole gradients. The
    last one's model ties its output layer."""
    gpt2 = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=1024, n_embd=128, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(gpt2)
    make_tokenizer(gpt2)
    settings = [
        (*LM, "--global-batch-size", 16, "--precision", "bf16", "--activation-checkpointing"),
        (*LM, "--global-batch-size", 32, "--sharding-strategy", "_HYBRID_SHARD_ZERO2", "--shards-per-replica", 2),
        (*LM, "--global-batch-size", 32, "--gradient-sync", "last", "--layers-per-unit", 2),
        (*LM, "--model", gpt2, "--seq-length", 32, "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2),
    ]
    check("lm_multinode.py", settings, 4, tmp_path)


def test_the_prediction_is_what_a_real_step_of_t5_holds(tiny_model, articles_csv, tmp_path):
    """The first run has micro-batches of 4 and 2. The second has an untied output layer, as in FLAN-T5."""
    tiny = (*T5, "--model", tiny_model, "--dataset", articles_csv)
    zero2 = ("--sharding-strategy", "SHARD_GRAD_OP", "--precision", "grad-bf16", "--global-batch-size", 12)
    flan = ("--model", make_model(tmp_path / "flan", is_tied=False, tie_word_embeddings=False))
    settings = [
        (*tiny, *zero2, "--micro-batch-size", 4),
        (*tiny, *flan, "--precision", "bf16", "--micro-batch-size", 1),
        (*T5, "--activation-checkpointing", "--backward-prefetch", "none"),
    ]
    check("t5_fsdp.py", settings, 2, tmp_path)


@needs_peft
def test_frozen_weights_have_no_gradients(tiny_llama, tmp_path):
    script = patched(tmp_path / "copy", "lora") / "lm_multinode.py"
    check(script, [(*LM, "--model", tiny_llama, "--global-batch-size", 16)], 2, tmp_path)


def test_a_folder_with_a_config_suffices(tiny_llama, tmp_path):
    """mT5 and UMT5 do not tie the output layer. A row of MODELS has the vocabulary of --tokenizer."""
    for name in ("gpt2", "gemma3_text", "lfm2"):
        CAUSAL[name].save_pretrained(tmp_path / name)
        assert cost_of("lm_multinode.py", "--model", tmp_path / name, "--seq-length", LENGTH)["peak"] > 0
    for kind in ("t5", "mt5", "umt5"):
        shape = {"vocab_size": 1024, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "decoder_start_token_id": 0}
        AutoConfig.for_model(kind, **shape).save_pretrained(tmp_path / kind)
        with traced("t5_fsdp.py", "--model", tmp_path / kind, build=False) as run:
            assert (run.meta_model.lm_head.weight is run.meta_model.shared.weight) == (kind == "t5")
    for tokenizer, least, most in (("", 32_000, 32_000), (tiny_llama, 400, 1000)):
        with traced("lm_multinode.py", "--tokenizer", tokenizer, build=False) as run:
            assert least <= run.config.vocab_size <= most


# ---- Bytes that are sent, and time -----------------------------------------------------------------------------------
def test_what_is_sent_is_what_the_formulas_say():
    """The formulas are in docs/multi-node.md. Here are two micro-batches in bf16, on two nodes of two processes."""
    flags = (*FOUR_ON_TWO_NODES, "--precision", "bf16", "--global-batch-size", 32)
    with traced("lm_multinode.py", *flags) as run:
        whole, layers = (sum(p.numel() for p in part.parameters()) for part in (run.model, run.model.model.layers))
    once, twice, reduced = 2 * whole, 2 * 2 * (whole + layers), 4 * whole
    # Inside a node, and between nodes. One of the two processes of a node sends to the other node.
    expected = {
        "FULL_SHARD": [3 / 8 * (twice + 2 * reduced)] * 2,
        "FULL_SHARD --gradient-sync last": [3 / 8 * (twice + reduced)] * 2,
        "SHARD_GRAD_OP": [3 / 8 * (once + 2 * reduced)] * 2,
        "HYBRID_SHARD": [1 / 2 * (twice + 2 * reduced), reduced / 2],  # each replica reduces twice
        "HYBRID_SHARD --gradient-sync last": [1 / 2 * (twice + reduced), reduced / 2],
        "HYBRID_SHARD --shards-per-replica 4": [3 / 8 * (twice + 2 * reduced)] * 2,
        "_HYBRID_SHARD_ZERO2": [1 / 2 * (once + 2 * reduced), reduced / 2],
        "NO_SHARD": [3 / 4 * reduced] * 2,
    }
    for strategy, sent in expected.items():
        cost = cost_of("lm_multinode.py", *flags, "--sharding-strategy", *strategy.split())
        assert [cost["inside"], cost["between"]] == pytest.approx(sent, rel=0.01), strategy


def test_a_process_holds_and_sends_its_part_of_a_sequence(tmp_path):
    """In a layer it sends four tensors of its tokens, forward and backward."""
    script = patched(tmp_path / "copy", "lm-long-context") / "lm_multinode.py"
    check(script, [(*LM, "--context-parallel-size", 2, "--global-batch-size", 4)], 2, tmp_path)
    flags = (script, *LM, "--num-processes", 2, "--vocabulary", 2048)
    one, two = (cost_of(*flags, "--context-parallel-size", n, "--global-batch-size", 8 // n) for n in (1, 2))
    layers, width, tokens, share = 2, 128, 4 * 128 / 2, 1 / 2
    assert two["inside"] - one["inside"] == layers * 2 * 4 * tokens * width * 4 * share


LLAMA = ("--model", "150m", "--vocabulary", 6666, "--seq-length", 1024)


@pytest.mark.parametrize(
    ("gpu", "batch", "precision", "flags", "milliseconds"),
    [
        ("H100", 16, "bf16", LLAMA, 86.5),
        ("H100", 16, "bf16", (*LLAMA, "--activation-checkpointing"), 108.9),
        ("H100", 16, "fp32", LLAMA, 171.4),
        ("H200", 16, "bf16", LLAMA, 77.5),
        ("H200", 64, "bf16", LLAMA, 260.1),
        ("H200", 1, "bf16", ("--model", "7b", "--seq-length", 4096, "--activation-checkpointing"), 608),
    ],
)
def test_the_predicted_time_is_that_of_a_gpu(gpu, batch, precision, flags, milliseconds):
    """Of steps that were measured on GPUs. In the fourth the host is the limit."""
    one_step = ("--num-processes", 1, "--gpu", gpu, "--micro-batch-size", batch, "--global-batch-size", batch)
    more = ("--precision", precision, "--peak-tflops", 1)
    with traced("lm_multinode.py", *flags, *one_step, *more, build=False) as run:
        per_token = lm_mfu_per_token_per_second(run.args, run.world, run.meta_model)
        run.build()
        cost = run.cost()
    kernels = cost["kernels"]
    assert kernels.host_may_be_the_limit == (milliseconds == 77.5)
    assert kernels.seconds * 1e3 == pytest.approx(milliseconds, rel=0.2 if kernels.host_may_be_the_limit else 0.1)
    # The tool's MFU counts the same FLOPs as the script's: recomputed layers count once.
    assert kernels.model_flops == pytest.approx(1e12 * per_token * cost["tokens"], rel=0.01)


@pytest.mark.parametrize(
    "flags",
    [
        (4, "--sharding-strategy", "SHARD_GRAD_OP"),
        (2, "--sharding-strategy", "HYBRID_SHARD", "--gradient-sync", "last"),
    ],
)
def test_three_micro_batches_predict_a_step_of_many(flags, monkeypatch):
    """18 samples leave a rest after micro-batches of 4."""
    predicted = []
    with traced("lm_multinode.py", *FOUR_ON_TWO_NODES, "--global-batch-size", 72, "--micro-batch-size", *flags) as run:
        for most in (will_it_fit.MOST_TRACED, 99):
            monkeypatch.setattr(will_it_fit, "MOST_TRACED", most)
            cost = run.cost()
            kernels = cost["kernels"]
            exact = [cost[key] for key in ("peak", "tokens", "batch", "at")] + [kernels.count, kernels.forward_flops]
            predicted.append((exact, [cost["inside"], cost["between"], kernels.seconds * 1e9]))
    assert predicted[0][0] == predicted[1][0]
    assert predicted[0][1] == pytest.approx(predicted[1][1], rel=1e-9)


# ---- What is printed and drawn ---------------------------------------------------------------------------------------
def test_what_is_printed_and_the_largest_batch(tmp_path):
    four = ("lm_multinode.py", "--num-processes", 4)
    two_nodes = ("--processes-per-node", 2, "--network-gbits", 1, "--device-gib", 1)
    settings = [
        ("--sweep", "micro-batch-size=1,4", "--plot", tmp_path / "memory.png"),
        ("--sweep", "sharding-strategy=FULL_SHARD,HYBRID_SHARD,_HYBRID_SHARD_ZERO2", *two_nodes),
        ("--cpu-offload",),
        ("--device", "cuda", "--compile", *two_nodes),  # neither --device nor --compile is traced
    ]
    printed = run_many(TOOL, [[*four, *flags] for flags in settings]).stdout
    assert (tmp_path / "memory.png").exists()
    assert printed.count("the host, which starts") == 4  # the model is tiny
    assert re.findall(r"^\| (\w+) .*\| +(4 x 4\S*)", printed, re.M) == [("1", "4 x 4,"), ("4", "4 x 4")]
    offloaded, compiled = (dict(re.findall(r"^ *(.+?)  +(.+)", text, re.M)) for text in printed.split("yes: ")[3:])
    assert offloaded["parameters"] == offloaded["optimizer state"] == "0.00 GiB"  # they are in the CPU's memory
    assert f"yes: a process needs {compiled['peak'].split(',')[0]}" in printed
    assert compiled["processes x samples"] == "4 x 4 sequences of 128 tokens"
    least, _, most, *_ = compiled["a step takes"].split()
    parts = [float(part.split()[-2]) for part in compiled["parts"].split(", ")]
    assert [max(parts), sum(parts)] == pytest.approx([float(least), float(most)], rel=0.01)
    assert float(least) * float(compiled["at most"].split()[0].replace(",", "")) == pytest.approx(16 * 128, rel=0.01)
    # The network is slow, so the strategy that sends the least between nodes is the fastest.
    assert re.findall(r"^\| (\w+) .*<-", printed, re.M) == ["4", "_HYBRID_SHARD_ZERO2"]
    largest = int(compiled["largest micro-batch"].partition(",")[0])
    assert largest > 4 and re.search(rf"^\| FULL_SHARD .* {largest} \|", printed, re.M)
    batches = [("--micro-batch-size", size, "--global-batch-size", 4 * size) for size in (largest, largest + 1)]
    answers = run_many(TOOL, [[*four, *two_nodes, *batch] for batch in batches]).stdout
    assert re.findall("^(yes|no): ", answers, re.M) == ["yes", "no"]  # a tenth of 1 GiB stays free


def test_the_table_of_what_fits_has_the_first_strategy_that_fits():
    """Memory between the peaks of two strategies fits one. On one node each hybrid equals another strategy."""
    question = ("--seq-length", 32, "--global-batch-size", 32)
    peaks = {}
    for count, strategy in (1, "NO_SHARD"), (4, "SHARD_GRAD_OP"), (4, "FULL_SHARD"), (16, "HYBRID_SHARD"):
        flags = (*question, "--model", "tiny", "--num-processes", count, "--sharding-strategy", strategy)
        with traced("lm_multinode.py", *flags) as run:
            peaks[count, strategy] = peak = run.peak() / 2**30
            assert run.least() / 2**30 < peak
    gibs = {case: 1.01 * peak / 0.9 for case, peak in peaks.items()}
    machines = [f"{count}x{gib}" for (count, _), gib in gibs.items()]
    flags = [*question, "--sweep", "model=tiny", "--hardware", *machines, f"4x{0.9 * gibs[4, 'FULL_SHARD']}"]
    [row] = re.findall(r"^\| tiny +\| (.+) \|", run_many(TOOL, [["lm_multinode.py", *flags]]).stdout, re.M)
    cells = [f"{short(peak)} {strategy}" for (_, strategy), peak in peaks.items()]
    assert [cell.strip() for cell in row.split("|")] == [*cells, "no"]


def test_what_the_tool_cannot_trace_ends_with_a_sentence(tiny_llama):
    mistakes = {
        f"lm_multinode.py --model {tiny_llama} --seq-length 4096": "2048 at most",  # the script's own sentence
        "lm_multinode.py --model absent": "huggingface.co",
        "lm_multinode.py --num-processes 3 --global-batch-size 16": "multiple of 3",
        "lm_multinode.py --typo 1": "--typo",
        "t5_fsdp.py --fsdp-version 1": "FSDP1",
        "mnist_fsdp.py": "t5_fsdp.py",
        "lm_multinode.py --sweep seed": "--sweep",
        "lm_multinode.py --sweep gpu=H100,H200": "--sweep",
        "lm_multinode.py --hardware 8x40 --sweep sharding-strategy": "itself",
    }
    for command, word in mistakes.items():
        finished = run_many(TOOL, [command.split()], check=False)
        assert finished.returncode == 2 and "Traceback" not in finished.stderr, command
        assert word in finished.stderr, command


# ---- The table of strategies -----------------------------------------------------------------------------------------
def test_the_table_of_strategies_takes_what_the_tool_finds_the_fastest():
    """On two nodes of eight GPUs, which have these bytes for each parameter of the model, beside the activations."""
    costs = {}
    for strategy in LM_STRATEGIES:
        batch = ("--seq-length", 1024, "--micro-batch-size", 1, "--global-batch-size", 16)
        flags = ("--model", "150m", "--num-processes", 16, "--sharding-strategy", strategy)
        with traced("lm_multinode.py", *flags, *batch) as run:
            costs[strategy] = run.cost()  # the time of computing hardly depends on the strategy
            count = run.model.num_parameters()
    activations = costs["FULL_SHARD"]["peak"] - count

    rows = re.findall(r"^\| several \| `(\w+)`.* \| 16/(n|s)( \+ 2)? \|", (ROOT / "README.md").read_text(), re.M)
    chosen = set()
    for gpu, gbits, per_parameter in itertools.product(("H100", "RTX4090"), (10, 100, 400), (100, 6, 2.6, 1.3)):
        for cost in costs.values():
            cost["fits"] = cost["peak"] <= activations + per_parameter * count
        needs = {strategy: {"n": 1, "s": 2}[shards] + 2 * bool(gathered) for strategy, shards, gathered in rows}
        fitting = [strategy for strategy, needed in needs.items() if needed <= per_parameter]
        assert find_fastest(costs, GPUS[gpu], gbits) == fitting[0], (gpu, gbits, per_parameter)
        chosen.add(fitting[0])
    assert chosen == {"_HYBRID_SHARD_ZERO2", "HYBRID_SHARD", "FULL_SHARD"}
