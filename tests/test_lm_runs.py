"""What a user of lm_multinode.py sees: it learns, exports and compares; bad input is one sentence."""

import json
import re

import torch

import pytest
from conftest import check_bad_input, make_model, reports, run, run_many, succeed
from test_lm_data import write_shards
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import lm_multinode

SMALL = (
    *("--seq-length", 32, "--global-batch-size", 16, "--micro-batch-size", 2, "--num-validation-texts", 3),
    *("--shuffle-buffer", 20, "--warmup-steps", 3, "--log-every", 1),
)


def loss_of_exported(folder, length):
    """Validation loss of the exported model, with nothing but transformers and the texts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = lm_multinode.builtin_texts()[1]
    count = reports(folder.parent, "settings")[0]["num_validation_texts"]
    tokens = [token for text in texts[:count] for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(tokens)[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length)
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_default_run_learns_and_exports_what_it_trained(tmp_path):
    """The README's command, cut from 500 to 60 steps."""
    options = ("--max-steps", 60, "--sample", "The class", "--output-dir", tmp_path)
    finished = succeed("lm_multinode.py", *options, processes=2)
    first, _, last = reports(tmp_path, "validation")
    assert first["perplexity"] > 1500 and last["perplexity"] < 700
    [settings] = reports(tmp_path, "settings")
    steps = reports(tmp_path, "step")
    assert [step["step"] for step in steps] == [10, 20, 30, 40, 50, 60]
    assert steps[-1]["tokens_seen"] == 60 * 16 * 128
    assert all(0 <= step["data_wait_percent"] < 100 for step in steps)
    for step in steps:
        assert 0.001 < step["mfu"] < 1 and 0.1 < step["peak_memory_gb"] < 4
    assert steps[1]["learning_rate"] == pytest.approx(5e-3) and steps[-1]["learning_rate"] == pytest.approx(5e-4)
    [folder] = tmp_path.glob("lm-*")
    assert loss_of_exported(folder, 128) == pytest.approx(last["validation_loss"], rel=0.005)  # trained in bf16
    [sample] = reports(tmp_path, "sample")
    assert sample["text"].strip().startswith("The class") and sample["text"].strip() in finished.stdout
    assert settings["accumulation"] == 2
    assert f"{last['perplexity']:.1f}" in finished.stdout and "tiny, 926,336 parameters" in finished.stdout


def test_document_shapes_have_the_documents_parameters():
    for name, parameters, without_embeddings in (
        ("150m", 214_983_680, 149_447_680),
        ("1b", 1_100_048_384, 968_976_384),
    ):
        hidden, feed_forward, layers, heads, key_value_heads, vocabulary = lm_multinode.MODELS[name]
        with torch.device("meta"):
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=vocabulary,
                    hidden_size=hidden,
                    intermediate_size=feed_forward,
                    num_hidden_layers=layers,
                    num_attention_heads=heads,
                    num_key_value_heads=key_value_heads,
                )
            )
        assert model.num_parameters() == parameters
        assert parameters - 2 * vocabulary * hidden == without_embeddings


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory, exported):
    """A pretrained model whose output layer is its embedding, as Llama 3.2's smaller ones; with a tokenizer."""
    folder = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, eos_token_id=1, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A tiny model with a tokenizer, exported after one step."""
    folder = tmp_path_factory.mktemp("exported")
    run_many("lm_multinode", [[*SMALL, "--max-steps", 1, "--output-dir", folder]], 2)
    [model] = folder.glob("lm-*")
    return model


@pytest.mark.parametrize("version", [1, 2])
def test_pretrained_models_are_read_trained_and_exported(tied_llama, tmp_path, version):
    """Rank 0's weights reach all; an output layer that is the embedding stays it."""
    options = (*SMALL, "--model", tied_llama, "--dataset", "builtin", "--max-steps", 3, "--precision", "fp32")
    options += ("--sample", "Python", "--fsdp-version", version, "--output-dir", tmp_path, "--validate-every", 3)
    succeed("lm_multinode.py", *options, processes=2, fork=True)
    first, last = reports(tmp_path, "validation")
    [folder] = tmp_path.glob("lm-*")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert loss_of_exported(folder, 32) == pytest.approx(last["validation_loss"], abs=1e-5)
    before = AutoModelForCausalLM.from_pretrained(tied_llama)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    before.save_pretrained(folder)  # what it was before training, in its place
    assert loss_of_exported(folder, 32) == pytest.approx(first["validation_loss"], abs=1e-5)


def test_local_shards_train_and_their_broken_records_are_reported(tmp_path):
    pattern = write_shards(tmp_path, [60, 60])
    options = (*SMALL, "--dataset", pattern, "--tokenizer", "builtin", "--max-steps", 2, "--output-dir", tmp_path / "o")
    finished = succeed("lm_multinode.py", *options, processes=2, fork=True)
    assert "the run ends before its 3 steps of warm-up do" in finished.stdout
    assert "2 files" in finished.stdout and "broken_records_skipped" not in finished.stdout
    with open(tmp_path / "c4.json", "w") as file:  # not packed, and only every second line is a record
        file.writelines('{"text": "a text of some words"}\n{"te\n' for _ in range(300))
    options = (*SMALL, "--dataset", tmp_path / "c4.json", "--tokenizer", "builtin", "--max-steps", 1)
    options += ("--num-validation-texts", 30, "--output-dir", tmp_path / "p")
    succeed("lm_multinode.py", *options, processes=1, fork=True)
    assert reports(tmp_path / "p", "step")[0]["broken_records_skipped"] > 5


def test_compile_checkpointing_and_the_profiler_change_no_loss(tmp_path):
    """The graphs are captured and run, but not made into machine code; the test below does that once."""
    settings = (*SMALL, "--max-steps", 4, "--precision", "fp32", "--no-save-model")
    options = ("--compile", "--activation-checkpointing", "--profile-steps", 2)
    run_many(
        "lm_multinode",
        [
            [*settings, "--output-dir", tmp_path / "plain"],
            [*settings, *options, "--output-dir", tmp_path / "2"],
            [*settings, *options, "--output-dir", tmp_path / "1", "--fsdp-version", 1],
        ],
        2,
        "graphs-only",
    )
    plain, *others = ([r["train_loss"] for r in reports(tmp_path / name, "step")] for name in ("plain", "1", "2"))
    for other in others:
        assert other == pytest.approx(plain, abs=1e-5)
    for version in ("1", "2"):
        events = json.loads((tmp_path / version / "trace.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert any("Torch-Compiled Region" in name for name in names)
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2


def test_compile_makes_kernels_and_keeps_the_losses(tmp_path):
    options = (*SMALL, "--max-steps", 1, "--precision", "fp32", "--no-save-model")
    settings = [[*options, switch, "--output-dir", tmp_path / switch] for switch in ("--no-compile", "--compile")]
    run_many("lm_multinode", settings, 1, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kernels"))
    assert list((tmp_path / "kernels").rglob("*.so"))
    [plain], [compiled] = (reports(tmp_path / switch, "step") for switch in ("--no-compile", "--compile"))
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-5)
    assert compiled["grad_norm"] == pytest.approx(plain["grad_norm"], abs=1e-4)


def bytes_by_hand(name, layers, root, processes, shards):
    """What a process sends in a step of two micro-batches in fp32. Gloo's reduce-scatter is an all-reduce."""
    both, sharded, replicas = 4 * (layers + root), (shards - 1) / shards, processes // shards
    gathered = both if "GRAD" in name or "ZERO2" in name else 2 * 4 * (2 * layers + root)
    return sharded * (gathered + 2 * both) + 2 * (replicas - 1) / replicas * both / shards


@pytest.mark.parametrize("version", [1, 2])
def test_strategies_are_compared(tmp_path, version):
    """Rows for all that fit, the bytes by the formula, the state by the shards, and a line that names the fastest."""
    options = (*SMALL, "--compare-strategies", "--compare-steps", 1, "--fsdp-version", version, "--precision", "fp32")
    options += ("--shards-per-replica", 2, "--peak-tflops", 0.5, "--output-dir", tmp_path)
    finished = succeed("lm_multinode.py", *options, processes=4, fork=True)
    rows = {row["strategy"]: row for row in reports(tmp_path, "strategy")}
    assert list(rows) == list(lm_multinode.STRATEGIES)
    hidden, feed_forward, layers, *_ = lm_multinode.MODELS["tiny"]
    words = int(re.search(r"of ([\d,]+) tokens$", finished.stdout, re.M)[1].replace(",", ""))
    layer = 4 * hidden**2 + 3 * hidden * feed_forward + 2 * hidden
    root = 2 * words * hidden + hidden
    flops = 6 * (layers * layer + root - words * hidden) + 12 * layers * hidden * 32
    for name, row in rows.items():
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * flops / (4 * 0.5e12))
        assert len(row["all_step_seconds"]) == 1
        shards = {"NO_SHARD": 1, "FULL_SHARD": 4, "SHARD_GRAD_OP": 4}.get(name, 2)
        assert row["replicas_x_shards"] == f"{4 // shards} x {shards}"
        assert row["state_gb"] * 2**30 == pytest.approx(16 * (layers * layer + root) / shards, rel=0.02)
        sent = bytes_by_hand(name, layers * layer, root, 4, shards)
        assert row["sent_gb_per_step"] * 2**30 == pytest.approx(sent, rel=1e-6)
        assert row["leaves_node_gb_per_step"] == 0
        assert f"{row['tokens_per_second']:,.1f}" in finished.stdout
    best = max(rows.values(), key=lambda row: row["tokens_per_second"])
    assert f"fastest    {best['strategy']}: {best['tokens_per_second']:,.0f} tokens/s" in finished.stdout
    assert not (tmp_path / "checkpoints").exists()


def test_what_does_not_fit_or_is_the_same_is_left_out(tmp_path):
    options = (*SMALL, "--compare-strategies", "--compare-steps", 1, "--output-dir", tmp_path)
    finished = run("lm_multinode.py", *options, "--memory-limit-gb", 0.01, processes=2, fork=True)
    assert "left out   NO_SHARD: a process needs 0.0138" in finished.stdout
    assert "left out   HYBRID_SHARD: with one replica it is its counterpart without replicas" in finished.stdout
    assert [row["strategy"] for row in reports(tmp_path, "strategy")] == ["SHARD_GRAD_OP", "FULL_SHARD"]
    assert finished.returncode == 2 and "no strategy fits into 0.01 GB; try" in finished.stderr  # Python alone is more


def test_a_strategy_that_runs_out_of_memory_is_left_out(tmp_path):
    options = (*SMALL, "--compare-strategies", "--compare-steps", 1, "--output-dir", tmp_path)
    finished = run_many("lm_multinode", [options], 2, "out-of-memory")
    assert "left out   FULL_SHARD: out of memory" in finished.stdout
    assert [row["strategy"] for row in reports(tmp_path, "strategy")] == ["NO_SHARD", "SHARD_GRAD_OP"]


def test_bad_input_is_one_sentence(tmp_path):
    """Exit code 2 and one line on stderr without a traceback; torchrun adds its own report below."""
    output = ("--output-dir", tmp_path / "output")
    t5, gpt = tmp_path / "t5", tmp_path / "gpt"
    make_model(t5)
    gpt.mkdir()
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_text('{"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 64}')
    (gpt / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}')
    (tmp_path / "file").write_text("")
    hybrid = ("--sharding-strategy", "HYBRID_SHARD")
    as_users = [
        (("--seq-length", 0), None, "must be a whole number of at least 1, not '0'"),
        (("--global-batch-size", 20, *output), 2, "20 cannot be divided into .* of 4 on 2 processes; 16 or 24 can"),
    ]
    as_forks = [
        (("--global-batch-size", 3, *output), None, "into micro-batches of 4 on 1 processes; 4 can"),
        (("--weight-decay", -1), None, "--weight-decay: must be a number of at least 0, not '-1'"),
        (("--shards-per-replica", 2), None, "is for the hybrid strategies, not for FULL_SHARD"),
        (("--accumulate-sharded",), None, "needs --fsdp-version 2 and a hybrid --sharding-strategy"),
        (
            (*hybrid, "--fsdp-version", 1, "--shards-per-replica", 1, *output),
            2,
            r"would never average .*pytorch#154888",
        ),
        (
            (*hybrid, "--shards-per-replica", 2, "--global-batch-size", 12, *output),
            3,
            "3 processes cannot be divided into replicas of 2; set",
        ),
        (("--dataset", tmp_path / "absent*", "--tokenizer", "builtin", *output), 2, "no such file; builtin and c4"),
        (("--dataset", "c4", "--tokenizer", "builtin", *output), 2, "c4 could not be read from the Hugging Face Hub"),
        (
            ("--dataset", "c4", *output),
            2,
            "--tokenizer mistralai/.* no tokenizer could be read in a local folder or on the Hugging .*; check",
        ),
        (("--model", "absent", "--tokenizer", "builtin", *output), None, "no model configuration could be read"),
        (
            ("--model", t5, "--tokenizer", "builtin", *output),
            None,
            "has 2,048 tokens and --model .* knows 1,024; leave out",
        ),
        (("--model", gpt, "--tokenizer", "builtin", "--global-batch-size", 8, *output), None, "is a gpt2, whose parts"),
        (
            ("--model", short, "--tokenizer", "builtin", "--seq-length", 128, *output),
            None,
            "knows 64 positions, less than --seq-length 128; lower it",
        ),
        (("--seq-length", 99_999, *output), None, "less than one sequence; raise --num-validation-texts or lower"),
        (("--output-dir", tmp_path / "file"), 2, "cannot be written"),
    ]

    if not torch.cuda.is_available():
        as_forks.append((("--device", "cuda"), 2, "finds no such device; use --device cpu"))
    check_bad_input("lm_multinode.py", as_users, as_forks)
