"""Runs as users start them: scripts learn, save, compare, report what runs, and end when they should."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import torch

import pytest
from conftest import CLOSE, ROOT, SMALL, curve, hub, make_llama, make_model, records, run, run_many, succeed
from plain import lm_validation_loss, t5_samples
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import inside

ROUGE = ("rouge1", "rouge2", "rougeL")
LM = (*SMALL, "--global-batch-size", 16, "--micro-batch-size", 2)


def check_width(printed):
    """Each line of metrics fits into a terminal of 100 columns."""
    rows = [line for line in printed.splitlines() if " | " in line]
    assert rows and max(map(len, rows)) <= 100


def torchrun_command(processes, script, flags):
    """A pattern for the equivalent torchrun command, which `python SCRIPT FLAGS` prints."""
    return rf"^torchrun .*--nproc_per_node {processes} \S*{script} {' '.join(map(str, flags))} "


# ---- MNIST: both halves ----------------------------------------------------------------------------------------------
def test_mnist_compares_its_two_halves(small_mnist, tmp_path):
    """`python mnist_fsdp.py`, with fewer images in smaller batches. Under FSDP a process holds half of the state."""
    flags = ("--model", "shallow", "--dataset", "mnist", "--data-dir", small_mnist, "--global-batch-size", 16)
    flags = (*flags, "--epochs", 1)
    flags = (*flags, "--min-num-params", 10_000_000)  # one unit, whose gathered weights must not count as state
    # PET_NNODES is torchrun's, perhaps left from another command.
    finished = succeed("mnist_fsdp.py", *flags, "--save-model", "--output-dir", tmp_path, PET_NNODES="2")
    assert re.search(torchrun_command(2, "mnist_fsdp.py", flags), finished.stdout, re.MULTILINE)
    local, sharded = records(tmp_path, "loss")
    assert (local["mode"], local["processes"]) == ("local", 1)
    assert (sharded["mode"], sharded["processes"]) == ("fsdp", 2)
    check_width(finished.stdout)
    lines = re.findall(r"^shallow +\| .*", finished.stdout, re.MULTILINE)  # each half's epoch, then both again
    assert len(lines) == 4 and lines[2:] == lines[:2]
    assert local["state_gib"] == pytest.approx(16 * 1_199_882 / 2**30, rel=0.01)
    assert sharded["state_gib"] == pytest.approx(local["state_gib"] / 2, rel=0.02)

    for row in (local, sharded):
        [saved] = tmp_path.rglob(f"shallow-{row['mode']}*/**/*.safetensors")
        assert saved.stat().st_mode == (tmp_path / "metrics.jsonl").stat().st_mode


@pytest.mark.long
def test_the_xpu_script_runs_on_a_cpu(small_mnist, tmp_path):
    """It trains on MNIST's images, with three processes, which do not divide 64."""
    flags = ("--dataset", "mnist", "--data-dir", small_mnist, "--num-processes", 3)
    flags = (*flags, "--epochs", 3, "--lr", 0.1, "--save-model")
    finished = succeed("mnist_fsdp_xpu.py", *flags, "--output-dir", tmp_path)
    assert re.search(torchrun_command(3, "mnist_fsdp_xpu.py", flags), finished.stdout, re.MULTILINE)
    assert "3 x cpu" in finished.stdout
    assert "FSDPConv2d(1, 32" in finished.stdout  # a unit for every 100 parameters
    check_width(finished.stdout)
    rows = records(tmp_path, "loss")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert curve(tmp_path, "state_gib") == [pytest.approx(16 * 1_199_882 / 3 / 2**30, rel=0.02)]
    [saved] = tmp_path.rglob("*.safetensors")
    assert saved.stat().st_mode == (tmp_path / "metrics.jsonl").stat().st_mode


@pytest.mark.long
def test_equal_layers_learn_the_same_on_any_number_of_processes(tmp_path):
    """Ten steps, with FSDP2 and FSDP1, each half started alone. Peak memory falls with the state."""
    sizes = {"layers": 51_451_274, "deep": 94_104_234, "shallow": 1_199_882}
    with torch.device("meta"):
        for name, size in sizes.items():
            assert sum(parameter.numel() for parameter in inside.NETWORKS[name]().parameters()) == size

    flags = ("--model", "layers", "--output-dir", tmp_path)
    finished = succeed("mnist_fsdp.py", *flags, "--mode", "local")
    assert f"{sizes['layers']:,}" in finished.stdout
    succeed("mnist_fsdp.py", *flags, processes=2)
    for processes, version in ((1, 2), (4, 1)):
        fsdp_flags = ("--mode", "fsdp", "--fsdp-version", version, "--print-model")
        finished = succeed("mnist_fsdp.py", *flags, *fsdp_flags, processes=processes, fork=True)
    assert finished.stdout.count("(fc1): FullyShardedDataParallel(") == 1
    rows = records(tmp_path, "loss")
    local, sharded = rows[:2]
    assert [row["processes"] for row in rows] == [1, 2, 1, 4]
    for row in rows:
        assert row["state_gib"] == pytest.approx(16 * sizes["layers"] / row["processes"] / 2**30, rel=0.02)
        for name in ("loss", "test_loss"):
            assert row[name] == pytest.approx(local[name], abs=5e-5), row  # up to the printed digits
        assert row["accuracy"] == pytest.approx(local["accuracy"], abs=6e-4), row  # at most one image differs
    if not math.isnan(local["peak_gib"]):  # not every system reports it
        assert local["peak_gib"] - sharded["peak_gib"] > (local["state_gib"] - sharded["state_gib"]) / 2


# ---- T5 --------------------------------------------------------------------------------------------------------------
NUM_VALIDATED = 103  # articles, which neither 2 nor 3 processes can divide


@pytest.fixture(scope="module")
def trained_t5(tmp_path_factory):
    """The output folder of a shorter `python t5_fsdp.py`, which must print what runs."""
    folder = tmp_path_factory.mktemp("t5")
    flags = ("--num-train-samples", 480, "--epochs", 1, "--global-batch-size", 16, "--lr", 3e-3, "--precision", "fp32")
    flags += ("--num-validation-samples", NUM_VALIDATED, "--max-target-length", 40, "--output-dir", folder)
    printed = succeed("t5_fsdp.py", *flags).stdout
    size = AutoModelForSeq2SeqLM.from_pretrained(folder / "best").num_parameters()
    facts = ["2 x cpu", torch.__version__, "FSDP2", "FULL_SHARD", f"{size:,}", "10,000", "metrics.jsonl"]
    facts += [f"{name} {curve(folder, name)[-1]:.4f}" for name in ROUGE]
    for fact in (*facts, "\narticle ", "\nreference ", "\nsummary "):
        assert fact in printed
    return folder


def test_rouge_equals_that_of_plain_transformers_on_any_number_of_processes(trained_t5, tmp_path):
    """rouge_score scores the first 100 articles. The script must count each once, in several batches."""
    flags = ("--model", trained_t5 / "best", "--num-train-samples", 48, "--num-validation-samples", NUM_VALIDATED)
    flags += ("--test-batch-size", 7, "--max-target-length", 40, "--max-steps", 1, "--precision", "fp32")
    flags += ("--no-save-model", "--output-dir", tmp_path)
    succeed("t5_fsdp.py", *flags, processes=3, fork=True)
    articles = inside.t5_articles("builtin")[1].take(100)
    model, tokenizer = (kind.from_pretrained(trained_t5 / "best") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    batch = DataCollatorForSeq2Seq(tokenizer)(t5_samples(articles, tokenizer, 512, 40))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40), skip_special_tokens=True)
    scorer = RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(reference, text) for reference, text in zip(articles["summary"], texts, strict=True)]
    for name in ROUGE:
        expected = sum(score[name].fmeasure for score in scores) / len(scores)
        assert curve(trained_t5, name)[-1] == pytest.approx(expected, abs=0.005)  # one word may differ, if two tie
        assert curve(tmp_path, name)[0] == pytest.approx(expected, abs=0.005)


# ---- The language model ----------------------------------------------------------------------------------------------
def test_the_lm_exports_what_it_trained(tmp_path):
    """A shorter `python lm_multinode.py`, with 30 instead of 500 steps, must also print what runs."""
    flags = ("--max-steps", 30, "--warmup-steps", 5, "--num-validation-texts", 50, "--precision", "fp32")
    flags = (*flags, "--log-every", 10, "--output-dir", tmp_path)
    scratch = tmp_path / (100 * "x")  # too long for a socket
    scratch.mkdir()
    finished = succeed("lm_multinode.py", *flags, processes=2, fork=True, TMPDIR=str(scratch))
    *_, last = records(tmp_path, "val_loss")
    assert last["perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    steps = records(tmp_path, "loss", "grad_norm", "lr", "tokens/s", "peak_gib")
    assert [step["step"] for step in steps] == [10, 20, 30]
    assert "mfu" not in steps[0]  # it has no meaning on a CPU of unknown speed
    model = tmp_path / "model"
    assert lm_validation_loss(model, "--num-validation-texts", 50) == pytest.approx(last["val_loss"], **CLOSE)
    size = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    facts = ("2 x cpu", torch.__version__, "FULL_SHARD", f"{size:,}", f"{last['val_loss']:.4f}", str(model))
    for fact in facts:
        assert fact in finished.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_a_saved_model_has_the_dtype_that_it_began_with(dtype, tiny_model, tiny_llama, tmp_path):
    """In bf16 it also has the validation loss that training reported. Without a dtype in its config, it is fp32."""
    kinds = {"lm_multinode.py": (AutoModelForCausalLM, tiny_llama), "t5_fsdp.py": (AutoModelForSeq2SeqLM, tiny_model)}
    for script, (kind, source) in kinds.items():
        start = shutil.copytree(source, tmp_path / script)
        if dtype:
            kind.from_pretrained(source, dtype=dtype).save_pretrained(start)
        else:
            config = json.loads((start / "config.json").read_text())
            (start / "config.json").write_text(json.dumps(config | {"dtype": None}))
        flags = ("--model", start, "--max-steps", 2, "--precision", "bf16", "--num-validation-samples", 8)
        if script == "lm_multinode.py":
            flags = (*LM, *flags[:-2], "--precision", "bf16")
        run_many(script, {tmp_path / "output" / script: flags}, 2)
        [saved] = (tmp_path / "output" / script).glob("*/model.safetensors")
        assert {str(tensor.dtype) for tensor in load_file(saved).values()} == {f"torch.{dtype or 'float32'}"}
        assert kind.from_pretrained(saved.parent, dtype="auto").dtype == getattr(torch, dtype or "float32")
    loss = lm_validation_loss(tmp_path / "output/lm_multinode.py/model", *LM, dtype=torch.bfloat16)
    assert loss == pytest.approx(curve(tmp_path / "output/lm_multinode.py", "val_loss")[-1], abs=2e-3)


def test_built_in_shapes_have_the_published_sizes():
    """They are the document's model, TinyLlama and Llama 2."""
    sizes = {"tiny": 8_594_048, "150m": 214_983_680, "1b": 1_100_048_384, "7b": 6_738_415_616}
    sizes |= {"13b": 13_015_864_320, "70b": 68_976_648_192}
    heads = {"tiny": 32, "150m": 64, "1b": 64, "7b": 128, "13b": 128, "70b": 128}
    for name in inside.LM_MODELS:
        model = inside.lm_shape(name, 32_000)
        assert (model.num_parameters(), model.config.head_dim) == (sizes[name], heads[name])


@pytest.mark.long
def test_strategies_are_compared(tmp_path, tiny_llama):
    """Each strategy has a row, the one with the least memory first. Hybrids divide the state by a node's processes. A
    checkpoint in the folder does not matter."""
    (tmp_path / "checkpoints" / "step-0000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-0000001" / "progress.json").touch()
    processes, shards = 4, 2
    flags = (*LM, "--model", tiny_llama, "--compare-strategies", "--peak-tflops", 0.5, "--no-save-model")
    flags = (*flags, "--output-dir", tmp_path)
    finished = succeed("lm_multinode.py", *flags, processes=processes, fork=True, per_node=shards)
    rows = records(tmp_path, "strategy")
    assert [row["strategy"] for row in rows] == list(inside.LM_STRATEGIES)
    args = inside.parse("lm_multinode.py", *flags)
    model = inside.lm_model(args)
    mfu_per_speed = inside.lm_mfu_per_token_per_second(args, inside.world_of(size=processes), model)
    for row in rows:
        name = row["strategy"]
        num_shards = {"NO_SHARD": 1, "FULL_SHARD": processes, "SHARD_GRAD_OP": processes}.get(name, shards)
        assert row["state_gib"] * 2**30 == pytest.approx(16 * model.num_parameters() / num_shards, rel=0.02)
        assert row["mfu"] == pytest.approx(row["tokens/s"] * mfu_per_speed)
        shown = rf"^strategy {name} .*tokens/s +{row['tokens/s']:,.0f} .*mfu {row['mfu']:.2f}"
        assert re.search(shown, finished.stdout, re.MULTILINE)
    check_width(finished.stdout)


@pytest.mark.long
def test_a_pretrained_model_trains_with_its_dropout(tmp_path):
    """`from_pretrained` returns it in eval(), without dropout."""
    losses = []
    for dropout in (0.0, 0.5):
        models = {
            "lm_multinode.py": make_llama(tmp_path / f"llama{dropout}", attention_dropout=dropout),
            "t5_fsdp.py": make_model(tmp_path / f"t5{dropout}", dropout_rate=dropout),
        }
        for script, model in models.items():
            flags = ("--model", model, "--max-steps", 1, "--log-every", 1, "--no-save-model")
            run_many(script, {model / "output": flags}, 1)
            losses += curve(model / "output")
    assert abs(losses[0] - losses[2]) > 1e-4 and abs(losses[1] - losses[3]) > 1e-4


# ---- Requests to the Hub ---------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("script", ["lm_multinode.py", "t5_fsdp.py"])
def test_only_one_process_asks_the_hub(script, tiny_llama, tiny_model, articles_csv, tmp_path):
    """One process of each node asks for config and tokenizer, and rank 0 for the weights."""
    folder, flags = tiny_llama, LM
    if script == "t5_fsdp.py":
        folder, flags = tiny_model, ("--dataset", articles_csv, "--num-validation-samples", 3)
    requests_of_runs = []
    for processes in (1, 2):
        flags = (*flags, "--model", "someone/model", "--num-processes", processes, "--max-steps", 1, "--no-save-model")
        with hub(folder) as (variables, requests):
            # No fork: the Hub's library reads the address when it is imported.
            output = tmp_path / str(processes)
            succeed(script, *flags, "--output-dir", output, **variables, HF_HOME=str(tmp_path / f"cache{processes}"))
        requests_of_runs.append(sorted(requests))
    assert any("model.safetensors" in request for request in requests_of_runs[0])
    assert requests_of_runs[0] == requests_of_runs[1]


# ---- How runs end ----------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(
    "fate, code, cause",
    [("mistake", 2, "error: a mistake"), ("killed", 1, "SIGKILL"), ("crash 1", 1, "ZeroDivisionError: a bug")],
)
def test_processes_that_python_started_end_together(fate, code, cause, tmp_path):
    """They end long before a collective would time out, and stderr has the cause."""
    script = tmp_path / "small.py"
    script.write_text(inside.SMALL_SCRIPT)
    finished = run(script, fate, PYTHONPATH=str(ROOT))
    assert finished.stdout.count("together 2") == 2
    assert finished.returncode == code
    assert finished.stderr.count(cause) == 1
    assert "elastic" not in finished.stderr  # torchrun's own report
    assert fate != "mistake" or "Traceback" not in finished.stderr


@pytest.mark.long
def test_a_printed_command_can_be_pasted(tmp_path):
    """Even if a shell splits the script's name, and the host cannot resolve its own."""
    script = tmp_path / "my script.py"
    script.write_text(f"import socket\nsocket.getfqdn = lambda *_: 'unknown.invalid'\n{inside.SMALL_SCRIPT}")
    environment = {"PYTHONPATH": str(ROOT)}
    [command, *_] = succeed(script, "no $fate; at all", **environment).stdout.splitlines()
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    again = subprocess.run(command, shell=True, capture_output=True, text=True, env=os.environ | environment)
    assert again.returncode == 0 and again.stdout.count("together 2") == 2, again.stderr
