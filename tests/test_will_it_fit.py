"""The predicted peak of a training step is what a real one holds: every tensor that is alive, to 1%."""

import json
import re
import shutil
import sys
from argparse import Namespace

import torch
from torch._subclasses import FakeTensorMode

import matplotlib.pyplot as plt
import pytest
import will_it_fit
from conftest import ROOT, make_model, make_tokenizer, run_many
from shared import patched
from step_time import ATTENTION_SHARE, FP32_ATTENTION_SHARE, GPUS, MEMORY_SHARE, PRODUCTS_SHARE, Kernels, grouped_mm
from test_models import CAUSAL, LENGTH, SHAPE
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, MT5Config, T5Config, UMT5Config

# What a user may edit in a copy, before and after.
LM_WIDER = ("intermediate_size=352,", "intermediate_size=35200,")

TOOL = "tests/benchmarks/will_it_fit.py"
GPU = Namespace(vocabulary=32_000, per_node=8, attention="gpu")
STEPS = ("--max-steps", 3, "--no-save-model", "--precision", "fp32")
LM = (*STEPS, "--seq-length", 128, "--micro-batch-size", 4, "--num-validation-texts", 3)
T5 = (*STEPS, "--no-run-validation", "--num-train-samples", 64, "--batch-size", 2)
T5 = (*T5, "--max-source-length", 16, "--max-target-length", 8)  # every article and summary is longer
ZERO2 = ("--sharding-strategy", "SHARD_GRAD_OP")
CASES = (
    ("--precision", "bf16", "--activation-checkpointing", "--global-batch-size", 8),
    ("--sharding-strategy", "_HYBRID_SHARD_ZERO2", "--shards-per-replica", 1, "--global-batch-size", 16),
    ("--gradient-sync", "every", "--global-batch-size", 16),
)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_t5_gives_attention_a_mask_that_the_fused_kernels_of_gpus_take(precision, monkeypatch):
    """Of the query's dtype, and contiguous in its last dimension: else PyTorch takes plain attention in silence."""
    monkeypatch.setitem(will_it_fit.T5, "t5-small", (32, 64, 2, 4, 8))
    attention = will_it_fit.gpu_attention
    masks = []

    def record(query, key, value, attn_mask=None, **options):
        masks.append((attn_mask.stride(-1), attn_mask.dtype == query.dtype, attn_mask.requires_grad))
        return attention(query, key, value, attn_mask, **options)

    monkeypatch.setattr(will_it_fit, "gpu_attention", record)
    with will_it_fit.traced("t5_fsdp.py", ["--model", "google-t5/t5-small", "--precision", precision], GPU):
        pass  # it has made one step
    of_itself, of_the_articles = (1, True, True), (1, True, False)  # the second has no learned positions
    assert masks == [of_itself] * 2 + [of_itself, of_the_articles] * 2


def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_traffic():
    gpu = GPUS["A100-80"]
    memory, products = MEMORY_SHARE * 2039e9, PRODUCTS_SHARE * 312e12  # bytes/s, FLOP/s in bf16
    with FakeTensorMode():
        x = torch.empty(4096, 4096)  # 64 MiB
        y = x.bfloat16()
        one_number = torch.ones(()).expand(4096, 4096)
        query = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16)

        def seconds(function):
            with Kernels(gpu) as kernels:
                function()
            return kernels.count, kernels.product_seconds, kernels.memory_seconds

        size, attention_flops = x.nbytes, 2 * 2 * 16 * 1024 * 1024 * 64
        assert seconds(lambda: x.view(-1).t()) == (0, 0, 0)
        assert seconds(lambda: torch.empty(1000)) == (0, 0, 0)
        assert seconds(lambda: x + x) == (1, 0, pytest.approx(3 * size / memory))
        assert seconds(lambda: x + one_number) == (1, 0, pytest.approx(2 * size / memory, rel=1e-6))
        assert seconds(lambda: x.mul_(2)) == (1, 0, pytest.approx(2 * size / memory))
        assert seconds(lambda: x.copy_(y)) == (1, 0, pytest.approx(1.5 * size / memory))
        assert seconds(lambda: x.zero_()) == (1, 0, pytest.approx(size / memory))
        assert seconds(lambda: y @ y) == (1, pytest.approx(2 * 4096**3 / products), 0)
        assert seconds(lambda: x @ x) == (1, pytest.approx(2 * 4096**3 / (products * 156 / 312)), 0)
        assert seconds(lambda: x @ x[:, :1]) == (1, pytest.approx((size + 2 * size / 4096) / memory), 0)  # only reads
        attention = seconds(lambda: will_it_fit.gpu_attention(query, query, query))
        assert attention == (1, pytest.approx(attention_flops / (ATTENTION_SHARE * 312e12)), 0)
        whole = query.float()
        attention = seconds(lambda: will_it_fit.gpu_attention(whole, whole, whole))
        assert attention == (1, pytest.approx(attention_flops / (FP32_ATTENTION_SHARE * 156e12)), 0)
        two = whole[:, :2]  # heads, for groups of four: in fp32 no fused kernel takes them
        assert seconds(lambda: will_it_fit.gpu_attention(whole, two, two, enable_gqa=True))[0] > 2
        experts = seconds(lambda: grouped_mm(y, torch.empty(8, 4096, 512, dtype=torch.bfloat16), torch.empty(8)))
        assert experts == (1, pytest.approx(2 * 4096 * 4096 * 512 / products), 0)  # each row is of one expert


def test_a_gpus_dropout_keeps_one_byte_for_a_number():
    kept = []
    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        values = torch.empty(1000, dtype=torch.bfloat16, requires_grad=True)
        assert will_it_fit.gpu_dropout(values, 0.1, training=False) is values
        assert will_it_fit.gpu_dropout(values, 0.1).dtype == torch.bfloat16
    assert [tensor.nbytes for tensor in kept] == [1000]


def test_bounds_of_a_step_and_what_takes_its_time():
    """On two nodes of eight H100 with 100 Gbit/s: 12.5 GB/s for eight processes."""
    run = Namespace(world=Namespace(local_size=8), step_tokens=80_000)
    kernels = Namespace(seconds=0.2, model_flops=0.8 * 989e12)
    found = will_it_fit.bounds(run, {"kernels": kernels, "inside": 45e9, "between": 2.5e9}, GPUS["H100"], 100)
    assert (found["least, s"], found["most, s"]) == pytest.approx((1.6, 1.6 + 0.2 + 0.1))
    assert found["tokens/s, at most"] == pytest.approx(50_000)
    assert found["MFU, at most"] == "50.0%"
    assert found["what takes the time"] == "network 1.6 s, computing 0.2 s, sending inside a node 0.1 s"
    on_one_node = will_it_fit.bounds(run, {"kernels": kernels, "inside": 45e9, "between": 0}, GPUS["H100"], None)
    assert on_one_node["what takes the time"] == "computing 0.2 s, sending inside a node 0.1 s"


@pytest.mark.long
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


@pytest.mark.long
def test_the_host_may_limit_a_small_batch_of_t5():
    flags = ("--model", "google-t5/t5-base", "--num-processes", 1, "--max-target-length", 152, "--batch-size")
    limits = []
    for batch_size in (16, 64):
        with will_it_fit.traced("t5_fsdp.py", [*flags, batch_size], GPU) as run:
            limits.append(run.cost()["kernels"].host_may_be_the_limit)
    assert limits == [True, False]


def check(script, settings, processes, tmp_path):
    """For each list of flags the prediction for a CPU is what a run of rank 0 held."""
    runs = {tmp_path / str(number): flags for number, flags in enumerate(settings)}
    run_many(script, runs, processes, change=("record_peak",))
    for folder, flags in runs.items():
        held = json.loads((folder / "peak-0.json").read_text())
        options = Namespace(vocabulary=held["vocabulary"], per_node=processes, attention="cpu")
        with will_it_fit.traced(script, [*flags, "--num-processes", processes], options) as run:
            assert run.peak() == pytest.approx(held["peak"], rel=0.01), flags


@pytest.mark.long
def test_the_prediction_is_what_a_real_step_holds(tmp_path):
    """With one micro-batch, and with two, which hold whole gradients, or shards of them with --gradient-sync every."""
    check("lm_multinode.py", [(*LM, *more) for more in CASES], 2, tmp_path)


@pytest.mark.long
def test_the_prediction_is_what_other_models_hold(tmp_path):
    """Replicas of two processes, which cannot divide three experts, reduce in both micro-batches; GPT-2 is tied. With
    few tokens, the peak is that of parameters and gradients."""
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


@pytest.mark.long
def test_the_prediction_is_what_a_real_step_of_t5_holds(tiny_model, articles_csv, tmp_path):
    """The second is like FLAN-T5, with an output layer of its own. The last is what the script makes itself."""
    tiny = (*T5, "--model", tiny_model, "--dataset", articles_csv)
    grad_bf16 = ("--precision", "grad-bf16", "--accumulation-steps", 2)
    flan = ("--model", make_model(tmp_path / "flan", tie_word_embeddings=False))
    ways = [
        (*tiny, *grad_bf16, *ZERO2),
        (*tiny, *flan),
        (*T5, "--activation-checkpointing", "--backward-prefetch", "none"),
    ]
    check("t5_fsdp.py", ways, 2, tmp_path)


@pytest.mark.long
def test_a_folder_with_a_config_suffices(tmp_path):
    """Of any model. Of experts a token computes those that it uses; mT5 and UMT5 have an output layer of their own."""
    for name, config in CAUSAL.items():
        config.save_pretrained(tmp_path / name)
        flags = ("--model", tmp_path / name, "--seq-length", LENGTH, "--num-processes", 4)
        with will_it_fit.traced("lm_multinode.py", flags, GPU) as run:
            kernels = run.cost()["kernels"]
        of_experts = {"mixtral": 2 / 3, "qwen3_moe": 2 / 4}.get(name)
        if of_experts:
            count = sum(p.numel() * (of_experts if p.ndim == 3 else 1) for p in run.model.parameters() if p.ndim > 1)
            count -= run.model.get_input_embeddings().weight.numel()
            attention = 12 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * LENGTH
            assert kernels.model_flops == pytest.approx(4 * LENGTH * (6 * count + attention), rel=0.01), name

    for config_class in (T5Config, MT5Config, UMT5Config):
        config = config_class(vocab_size=1024, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2)
        config.decoder_start_token_id = 0
        config.save_pretrained(tmp_path / config.model_type)
        with will_it_fit.traced("t5_fsdp.py", ("--model", tmp_path / config.model_type), GPU) as run:
            is_tied = run.model.lm_head.weight is run.model.shared.weight
            assert is_tied == (config_class is T5Config)
            assert run.model.encoder.embed_tokens.weight is run.model.shared.weight


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5-lora", "lm-lora"])
def test_frozen_weights_have_no_gradients(name, tiny_model, tiny_llama, articles_csv, tmp_path):
    """In a copy with LoRA."""
    copy = patched(tmp_path / "copy", name)
    if name == "lm-lora":
        check(copy / "lm_multinode.py", [(*LM, "--model", tiny_llama, "--global-batch-size", 16)], 2, tmp_path)
    else:
        check(copy / "t5_fsdp.py", [(*T5, "--model", tiny_model, "--dataset", articles_csv)], 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "FULL_SHARD every", "HYBRID_SHARD", "NO_SHARD"])
def test_what_is_sent_is_what_the_formulas_say(strategy):
    """Those of docs/multi-node.md: two micro-batches in bf16 on two nodes of two processes."""
    name, _, sync = strategy.partition(" ")
    flags = ("--sharding-strategy", name, "--precision", "bf16", "--num-processes", 4, "--global-batch-size", 32)
    flags = (*flags, "--gradient-sync", sync or "last")
    options = Namespace(vocabulary=2048, per_node=2, attention="gpu")
    with will_it_fit.traced("lm_multinode.py", flags, options) as run:
        whole, layers = (sum(p.numel() for p in part.parameters()) for part in (run.model, run.model.model.layers))
        cost = run.cost()
    gathered, reduced = 2 * 2 * (whole + layers), 4 * whole
    everything = 3 / 4 * (gathered + reduced)  # leaves a node once, of two processes
    in_replica = 1 / 2 * (gathered + 2 * reduced)  # after each micro-batch
    every = 3 / 4 * (gathered + 2 * reduced)
    expected = {
        "FULL_SHARD": (everything / 2, everything / 2),
        "FULL_SHARD every": (every / 2, every / 2),
        "HYBRID_SHARD": (in_replica, reduced / 2),
        "NO_SHARD": (3 / 4 * reduced, 3 / 4 * reduced),
    }
    assert (cost["inside"], cost["between"]) == pytest.approx(expected[strategy], rel=0.01)
    per_token = 6 * (whole - 2048 * 128) + 12 * 2 * 128 * 128  # PaLM's appendix B
    assert cost["kernels"].model_flops == pytest.approx(8 * 128 * per_token, rel=0.01)


@pytest.mark.long
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
    for counted in ("4 processes x 1 x 4 sequences of 128", "4 processes x 4 x 1 sequences of 128"):
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


@pytest.mark.long
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


@pytest.mark.long
def test_what_the_tool_cannot_trace_ends_with_a_sentence(tiny_llama):
    mistakes = {
        "lm_multinode.py --model absent": "huggingface.co",
        f"lm_multinode.py --model {tiny_llama} --seq-length 4096": "--seq-length of 2048",  # the script's own sentences
        f"t5_fsdp.py --model {tiny_llama}": "is not a T5",
        "t5_fsdp.py --fsdp-version 1": "FSDP1",
        "t5.py": "t5.py",
        "mnist_fsdp.py": "t5_fsdp.py",
        "lm_multinode.py --gpu H1": "invalid choice",
        "lm_multinode.py --sweep seed": "=",
        "lm_multinode.py --attn cpu": "--attn",  # no flag is abbreviated
        "lm_multinode.py --num-processes 12 --sharding-strategy HYBRID_SHARD": "--shards-per-replica",
    }
    for command, word in mistakes.items():
        finished = run_many(TOOL, [command.split()], check=False)
        assert finished.returncode == 2 and "Traceback" not in finished.stderr, command
        assert word in finished.stderr.splitlines()[-1]


@pytest.mark.long
def test_a_drawing_has_the_bytes_of_the_table(tmp_path, monkeypatch, capsys):
    """Stacked, and after each operation: the highest point is the sum, and the end has the state alone."""
    flags = "lm_multinode.py --num-processes 4 --precision fp32 --global-batch-size 16 --device-gib 2".split()
    strategies = ("NO_SHARD", "FULL_SHARD")
    sweep = ["--sweep", f"sharding-strategy={','.join(strategies)}", "--plot", str(tmp_path / "memory.png")]
    monkeypatch.setattr(sys, "argv", ["will_it_fit.py", *flags, *sweep])
    will_it_fit.main()
    rows = re.findall(r"^\| (?:NO|FULL)_SHARD \| (.+)", capsys.readouterr().out, re.M)

    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    panels = plt.gcf().axes
    assert [panel.get_title() for panel in panels] == [*strategies]
    for panel, row in zip(panels, rows[:2], strict=True):
        parameters, moments, *_, total = map(float, row.split(" | ")[:6])
        heights = [area.get_paths()[0].vertices[:, 1].max() for area in panel.collections]
        assert heights[:2] == pytest.approx([parameters, parameters + moments], rel=1e-3)
        assert heights[-1] == pytest.approx(total, rel=1e-3)
        assert [label.get_text() for label in panel.get_xticklabels()] == ["forward", "backward", "optimizer"]
        assert panel.lines[0].get_ydata()[0] == 2
    assert heights[0] == pytest.approx(panels[0].collections[0].get_paths()[0].vertices[:, 1].max() / 4, rel=0.01)


@pytest.mark.long
def test_an_edited_copy_is_traced(tmp_path):
    """With layers a hundred times as wide it needs more."""
    shutil.copy(ROOT / "common.py", tmp_path)
    copy = tmp_path / "lm_multinode.py"
    text = (ROOT / "lm_multinode.py").read_text()
    copy.write_text(text.replace(*LM_WIDER))
    printed = run_many(TOOL, [["lm_multinode.py"], [copy]]).stdout
    mine, edited = re.findall(r"needs ([\d.]+) GiB", printed)
    assert float(edited) > float(mine) + 0.1
