"""What a user of lm_multinode.py sees: it learns, exports and compares; bad input is one sentence."""

import contextlib
import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading

import torch
import torch.distributed as dist
from torch._dynamo import lookup_backend

import pytest
from conftest import (
    CLOSE,
    ROOT,
    SAVE_ON_CPU,
    VERSIONS,
    check_bad_input,
    curve,
    make_model,
    records,
    run,
    run_many,
    succeed,
)
from test_lm_data import write_shards
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from will_it_fit import state_bytes

import common
import lm_multinode

SMALL = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 2, "--num-validation-texts", 3),
    *("--warmup-steps", 3, "--log-every", 1, "--precision", "fp32"),
)


def loss_of(folder, length, count, monkeypatch):
    """Validation loss of a model in a folder, with nothing but transformers and the texts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr("sys.argv", ["lm_multinode.py", "--num-validation-texts", str(count)])
    args = lm_multinode.parse_args()
    args.seq_length, held_out = length, lm_multinode.load_texts(args)[1]
    rows = lm_multinode.pack({"text": held_out}, [0], args, tokenizer, [0])
    with torch.no_grad():
        logits = model(torch.from_numpy(rows["input_ids"])).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(rows["labels"]).flatten()).item()


def test_default_run_learns_and_exports_what_it_trained(tmp_path, monkeypatch):
    """The README's command, cut from 500 to 40 steps. Python alone starts two processes, and says how."""
    options = ("--max-steps", 40, "--log-every", 10, "--validate-every", 20, "--output-dir", tmp_path)
    finished = succeed("lm_multinode.py", *options)
    assert re.match(r"torchrun --standalone --nproc_per_node 2 .*lm_multinode.py --max-steps 40 ", finished.stdout)
    first, _, last = records(tmp_path, "val_loss")
    assert first["perplexity"] > 1500 and last["perplexity"] < 700
    steps = records(tmp_path, "loss")
    assert [step["step"] for step in steps] == [10, 20, 30, 40]
    assert steps[1]["lr"] == pytest.approx(5e-3) and steps[-1]["lr"] == pytest.approx(5e-4)
    for step in steps:
        assert 0.1 < step["peak_gb"] < 4 and "mfu" not in step  # which has no meaning on a CPU of unknown speed
    assert steps[0]["tokens/s"] * steps[0]["seconds"] > 10 * 16 * 128  # the seconds also count what comes before
    exported = tmp_path / "model"
    # bf16 where the CPU has it.
    assert loss_of(exported, 128, 500, monkeypatch) == pytest.approx(last["val_loss"], rel=0.005)
    parameters = AutoModelForCausalLM.from_pretrained(exported).num_parameters()
    state = 16 * parameters / 2 / 2**30
    assert re.search(f"^model .*tiny, {parameters:,} parameters.* {state:.3f} .*GB", finished.stdout, re.M)
    assert f"perplexity {last['perplexity']:,.1f}" in finished.stdout and f"model    {exported}\n" in finished.stdout


@pytest.mark.parametrize("name, parameters", [("150m", 214_983_680), ("1b", 1_100_048_384)])
def test_document_shapes_have_the_documents_parameters(monkeypatch, name, parameters):
    """With the documents' 32,000 tokens."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(32_000)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1")
    monkeypatch.setattr(common, "train_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setattr(common, "first_on_node", contextlib.nullcontext)
    monkeypatch.setattr("sys.argv", ["lm_multinode.py", "--model", name])
    args = lm_multinode.parse_args()
    config, _ = lm_multinode.load_config_and_tokenizer(args, None, lm_multinode.load_texts(args)[0])
    with torch.device("meta"):
        model = lm_multinode.load_model(args, config)
    assert model.num_parameters() == parameters
    without_embeddings = {"150m": 149_447_680, "1b": 968_976_384}[name]
    assert model.num_parameters() - 2 * model.model.embed_tokens.weight.numel() == without_embeddings


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A tiny model with a tokenizer, exported after one step."""
    folder = tmp_path_factory.mktemp("exported")
    run_many("lm_multinode.py", [[*SMALL, "--max-steps", 1, "--output-dir", folder]], 2)
    return folder / "model"


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory, exported):
    """A pretrained model whose output layer is its embedding and whose positions are scaled, as Llama 3.2's smaller
    ones; with a tokenizer."""
    folder = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    positions = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16}
    positions |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shape |= {"rope_parameters": positions, "initializer_range": 0.5, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, eos_token_id=1, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_pretrained_models_are_read_trained_and_exported(tied_llama, tmp_path, monkeypatch):
    """Every process has rank 0's weights and frequencies; an output layer that is the embedding stays it."""
    options = (*SMALL, "--model", tied_llama, "--max-steps", 3, "--lr", 0.01)
    settings = [
        [*options, "--fsdp-version", version, "--output-dir", tmp_path / f"{version}"] for version in SAVE_ON_CPU
    ]
    run_many("lm_multinode.py", settings, 2)
    for version in SAVE_ON_CPU:
        first, last = records(tmp_path / f"{version}", "val_loss")
        assert first["val_loss"] == pytest.approx(loss_of(tied_llama, 32, 3, monkeypatch), abs=1e-5)
        folder = tmp_path / f"{version}" / "model"
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert last["val_loss"] < first["val_loss"] - 0.05
        assert loss_of(folder, 32, 3, monkeypatch) == pytest.approx(last["val_loss"], abs=1e-5)


def test_dropout_has_a_seed_in_both_versions(tied_llama, tmp_path):
    """Which masks a process draws must not depend on who loaded the model."""
    shutil.copytree(tied_llama, tmp_path / "model")
    config = LlamaConfig.from_pretrained(tied_llama, attention_dropout=0.5)
    config.save_pretrained(tmp_path / "model")
    options = (*SMALL, "--max-steps", 3, "--no-save-model", "--fsdp-version")
    settings = {"1": tmp_path / "model", "2": tmp_path / "model", "none": tied_llama}
    arguments = [
        [*options, 1 if name == "1" else 2, "--model", model, "--output-dir", tmp_path / name]
        for name, model in settings.items()
    ]
    run_many("lm_multinode.py", arguments, 2)
    one, two, none = (curve(tmp_path / name) for name in settings)
    assert one == pytest.approx(two, **CLOSE) and abs(one[0] - none[0]) > 1e-4


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(method, tmp_path):
    """As on macOS and, from Python 3.14, on Linux: what a worker calls reaches it as a pickle, with shards of its
    own, and with texts that all processes divide."""
    settings = ("--max-steps", 1, "--no-save-model", "--output-dir", tmp_path)
    data = () if method == "spawn" else ("--dataset", write_shards(tmp_path, [2000]))
    succeed("lm_multinode.py", *SMALL, *settings, *data, processes=2, fork=True, START_METHOD=method)
    assert len(records(tmp_path, "loss")) == 1


def test_files_of_ones_own_are_trained_on(tmp_path):
    """Packed shards, and one file that is not packed and of which only every second line is a record."""
    pattern = write_shards(tmp_path, [300, 300])
    with open(tmp_path / "c4.json", "w") as file:
        file.writelines(f'{{"text": "text {number} of some words"}}\n{{"te\n' for number in range(2000))
    options = (*SMALL, "--num-validation-texts", 50, "--max-steps", 2, "--no-save-model")
    data = {"shards": (pattern, 2), "one": (tmp_path / "c4.json", 1)}
    settings = [[*options, "--dataset", files, "--output-dir", tmp_path / name] for name, (files, _) in data.items()]
    finished = run_many("lm_multinode.py", settings, 2)
    for name, (files, count) in data.items():
        assert len(records(tmp_path / name, "loss")) == 2
        assert f"data     {files}, {count} files" in finished.stdout
        assert not (tmp_path / name / "model").exists()


def capture_graphs_only(script):
    """--compile captures and runs graphs, but makes no machine code of them."""
    run_graph = lookup_backend("aot_eager")

    def count_graph(graph, inputs):
        print("graph captured", file=sys.stderr, flush=True)
        return run_graph(graph, inputs)

    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend=count_graph)


def test_compile_and_checkpointing_change_no_loss(tied_llama, tmp_path):
    """The graphs are captured and run, but not made into machine code; the test below does that once."""
    settings = (*SMALL, "--model", tied_llama, "--max-steps", 4, "--no-save-model")
    options = ("--compile", "--activation-checkpointing")
    runs = {"plain": (), "2": options, "1": (*options, "--fsdp-version", 1)}
    texts = [[*settings, *flags, "--output-dir", tmp_path / name] for name, flags in runs.items()]
    finished = run_many("lm_multinode.py", texts, 2, change=capture_graphs_only)
    assert finished.stderr.count("graph captured") >= 2 * 2  # in both processes, in both versions
    plain, *others = (curve(tmp_path / name) for name in runs)
    for other in others:
        assert other == pytest.approx(plain, **CLOSE)


def test_compile_makes_kernels_and_keeps_the_losses(tied_llama, tmp_path):
    flags = {"plain": (), "compiled": ("--compile",)}
    settings = [
        [*SMALL, "--model", tied_llama, "--max-steps", 1, "--no-save-model", *more, "--output-dir", tmp_path / name]
        for name, more in flags.items()
    ]
    run_many("lm_multinode.py", settings, 1, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kernels"))
    assert list((tmp_path / "kernels").rglob("*.so"))
    for name in ("loss", "grad_norm"):
        assert curve(tmp_path / "compiled", name) == pytest.approx(curve(tmp_path / "plain", name), abs=1e-4)


def test_strategies_are_compared(tmp_path, exported):
    """A row for each: the state by its shards, 16 bytes a parameter; the share of the peak by PaLM's formula."""
    options = (*SMALL, "--compare-strategies", "--shards-per-replica", 2, "--peak-tflops", 0.5, "--no-save-model")
    options = (*options, "--global-batch-size", 8)
    settings = [[*options, "--fsdp-version", version, "--output-dir", tmp_path / f"{version}"] for version in VERSIONS]
    finished = run_many("lm_multinode.py", settings, 4)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    hidden, feed_forward, layers = (lm_multinode.MODELS["tiny"][name] for name in names)
    words = LlamaConfig.from_pretrained(exported).vocab_size
    layer = 4 * hidden**2 + 3 * hidden * feed_forward + 2 * hidden
    root = 2 * words * hidden + hidden
    flops = 6 * (layers * layer + root - words * hidden) + 12 * layers * hidden * 32
    for version in VERSIONS:
        rows = {row["strategy"]: row for row in records(tmp_path / f"{version}", "strategy")}
        diloco = ["DILOCO"] if version == 2 else []
        from_least_memory = ("FULL_SHARD", "HYBRID_SHARD", *diloco, "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
        assert tuple(rows) == from_least_memory
        for name, row in rows.items():
            assert row["tokens/s"] == pytest.approx(8 * 32 / row["step_seconds"])
            assert row["mfu"] == pytest.approx(row["tokens/s"] * flops / (4 * 0.5e12))
            shards = {"NO_SHARD": 1, "FULL_SHARD": 4, "SHARD_GRAD_OP": 4}.get(name, 2)
            assert (row["replicas"], row["shards"]) == (4 // shards, shards)
            state = state_bytes(layers * layer + root, name, 4, replica=2)
            assert row["state_gb"] * 2**30 == pytest.approx(state, rel=0.02)
            speed, state = f"{row['tokens/s']:,.0f} tokens/s", f"state {row['state_gb']:.4f} GB"
            assert re.search(rf"^{name} .* {speed} .* {state} .* mfu {row['mfu']:.1%}$", finished.stdout, re.M)
        assert not (tmp_path / f"{version}" / "checkpoints").exists()


def run_out_of_memory(script):
    """A step of rank 1 does not fit under SHARD_GRAD_OP; the other ranks wait for it."""
    train_step = script.train_step

    def too_large(args, *arguments):
        if args.sharding_strategy == "SHARD_GRAD_OP" and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return train_step(args, *arguments)

    script.train_step = too_large
    script.common.HEAD_START = 1  # for rank 0, which has nothing to say


@pytest.mark.parametrize("version", VERSIONS)
def test_a_process_that_runs_out_of_memory_ends_the_comparison_with_a_sentence(version, tmp_path):
    """One process: the other waits for it, and has no error. The rows of what fits are there."""
    options = (*SMALL, "--compare-strategies", "--no-save-model", "--fsdp-version", version, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *options, processes=2, fork=True, change=run_out_of_memory)
    assert finished.returncode == 2, finished.stderr[-2000:]
    assert "error: SHARD_GRAD_OP runs out of memory; what follows takes more in most cases" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert [row["strategy"] for row in records(tmp_path, "strategy")] == ["FULL_SHARD", "HYBRID_SHARD", "DILOCO"][
        : 1 + version
    ]


def test_a_gated_tokenizer_is_a_sentence_that_names_the_way_out(tmp_path):
    """From a server that answers as the Hub does."""

    class Gate(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(401)
            self.send_header("X-Error-Code", "GatedRepo")
            self.end_headers()

        do_GET, log_message = do_HEAD, lambda *_: None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        options = ("--tokenizer", "mistralai/Mistral-7B-v0.1", "--output-dir", tmp_path)
        check_bad_input("lm_multinode.py", [(options, 1, "gated repo.* access .*run `hf auth login`")], [], **hub)
        server.shutdown()


def test_a_run_whose_output_nobody_reads_ends(tmp_path):
    """As in `python lm_multinode.py 2>&1 | head`; the worker that packs texts must not keep it."""
    options = (*SMALL, "--device", "cpu", "--num-processes", 1, "--max-steps", 100_000, "--output-dir", tmp_path)
    command = [sys.executable, ROOT / "lm_multinode.py", *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            assert any(re.match("step +2 [|] loss", line) for line in running.stdout)
            running.stdout.close()
            assert running.wait(timeout=60) == 2
        finally:
            running.kill()


def test_bad_input_is_one_sentence(tmp_path):
    """Exit code 2 and one line on stderr without a traceback, also where python alone starts two processes."""
    output = ("--output-dir", tmp_path / "output")
    t5, gpt, short = (tmp_path / name for name in ("t5", "gpt", "short"))
    make_model(t5)
    shapes = (GPT2Config(n_layer=1, n_embd=8, n_head=2), LlamaConfig(max_position_embeddings=64))
    for folder, config in zip((gpt, short), shapes, strict=True):
        common.train_tokenizer(["0 1"], 300, append_eos=False).save_pretrained(folder)
        config.save_pretrained(folder)
    GPT2LMHeadModel(shapes[0]).save_pretrained(gpt)
    (tmp_path / "file").write_text("")
    hybrid = ("--sharding-strategy", "HYBRID_SHARD")
    as_users = [(("--global-batch-size", 20, *output), None, "must be a multiple of .* 2 processes")]
    as_forks = [
        (("--seq-length", 0), None, "--seq-length: 0 is not a whole number of at least 1"),
        (("--weight-decay", -1), None, "--weight-decay: -1 is not a number of at least 0"),
        (("--lr", "nan"), None, "--lr: nan is not a number of at least 0"),
        (("--max-step", 5), None, "unrecognized arguments: --max-step 5"),
        (
            (*hybrid, "--fsdp-version", 1, "--no-save-model", "--shards-per-replica", 1, *output),
            2,
            r"FSDP1 never averages .*\(pytorch#154888\); use FSDP2",
        ),
        (
            (*hybrid, "--shards-per-replica", 2, "--global-batch-size", 12, *output),
            3,
            "3 processes cannot form replicas of 2; set --shards-per-replica",
        ),
        (("--dataset", "c4", *output), 1, "offline mode is enabled"),
        (("--tokenizer", "absent/one", *output), 1, "couldn't find them in the cached files"),
        (("--model", "absent/one", *output), 1, "couldn't find them in the cached files"),
        (("--model", t5, *output), 1, f"--model {t5} "),
        (("--model", gpt, *output), 1, f"--model {gpt} "),
        (("--model", short, *output), 1, f"--model {short} has .* positions"),
        (("--seq-length", 99_999, *output), 1, "less than one sequence; use more texts or a lower --seq-length"),
        (("--output-dir", tmp_path / "file"), 2, "/file cannot be written"),
    ]
    as_forks.append((("--device", "tpu"), 2, "--device tpu: .* finds none; install its build or use --device cpu"))
    check_bad_input("lm_multinode.py", as_users, as_forks)
