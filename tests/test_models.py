"""Models that users bring: each tested type of causal language model, and any T5, tiny and with random weights.

Their losses equal those of plain transformers, with the model's own eager attention.
"""

import itertools
import json
import math
from argparse import Namespace

import torch

import pytest
from conftest import (
    AFTER_ADAM,
    CLOSE,
    SAVE_ON_CPU,
    SMALL,
    VERSIONS,
    curve,
    fsdp,
    long,
    make_llama,
    make_model,
    make_tokenizer,
    run_many,
)
from plain import lm_validation_loss, t5_batches, t5_loss, t5_samples
from safetensors.torch import load_file
from sentencepiece import SentencePieceTrainer
from shared import patched
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer

from inside import (
    LM_MODELS,
    LM_TESTED,
    lm_mfu_per_token_per_second,
    lm_model,
    lm_shape,
    parse,
    t5_articles,
    world_of,
)

LENGTH = 32  # the --seq-length of SMALL
STEPS = 3
LM = (*SMALL, "--max-steps", STEPS, "--lr", 2e-3)

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"vocab_size": 1024, "max_position_embeddings": 64, "bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 1024, "eos_token_id": 1}
KINDS = {
    "gpt2": {**GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gpt_neox": SHAPE,
    "opt": {**SHAPE, "word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0, "layerdrop": 0.5},
    "phi": SHAPE,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": LENGTH},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "tie_word_embeddings": True},
    "olmo2": {**SHAPE, "num_key_value_heads": 2},
    "gemma3_text": {**GROUPED, "sliding_window": LENGTH, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {**SHAPE, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
}
CAUSAL = {kind: AutoConfig.for_model(kind, **KINDS[kind]) for kind in LM_TESTED}


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    root = tmp_path_factory.mktemp("causal")
    make_tokenizer(root / "tokenizer")
    for name, config in CAUSAL.items():
        torch.manual_seed(0)
        config.initializer_range = 0.2
        model = AutoModelForCausalLM.from_config(config)
        model.config.tie_word_embeddings |= name == "qwen2"  # two weights in the file: transformers does not tie them
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(root / "tokenizer").save_pretrained(root / name)
    return root


EAGER = {"attn_implementation": "eager"}


def change(file, **settings):
    """Change settings in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def check_model(model, folder):
    """The validation losses before and after training are those of the model that was read, and of the exported one."""
    before, *_, after = curve(folder, "val_loss")
    assert before == pytest.approx(lm_validation_loss(model, *LM, **EAGER), **CLOSE), folder
    assert after == pytest.approx(lm_validation_loss(folder / "model", *LM, **EAGER), **CLOSE), folder
    assert abs(after - before) > 1e-3, folder


def check_same(folder, reference):
    """Two runs have computed the same in different ways."""
    assert curve(folder)[0] == pytest.approx(curve(reference)[0], **CLOSE), folder
    assert curve(folder) == pytest.approx(curve(reference), **AFTER_ADAM), folder
    assert curve(folder, "grad_norm") == pytest.approx(curve(reference, "grad_norm"), rel=1e-3), folder


FIRST = ("gpt2", "gemma3_text")


@pytest.mark.parametrize("names", [FIRST, long([name for name in LM_TESTED if name not in FIRST])])
def test_tested_models_have_the_losses_of_transformers(names, causal, tmp_path):
    flags = {name: (*LM, "--model", causal / name) for name in names}
    alone = {tmp_path / "one" / name: (*flags[name], "--validate-every", 0, "--no-save-model") for name in names}
    run_many("lm_multinode.py", alone, 1)
    run_many("lm_multinode.py", {tmp_path / name: flags[name] for name in names}, 2)
    for name in names:
        check_model(causal / name, tmp_path / name)
        check_same(tmp_path / name, tmp_path / "one" / name)


@pytest.mark.long
def test_a_model_with_tied_weights_trains_alike_in_each_way(causal, tmp_path):
    flags = (*LM, "--model", causal / "gemma3_text")
    run_many("lm_multinode.py", {tmp_path / "one": (*flags, "--no-save-model")}, 1)
    settings = {}
    for strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD"):
        settings[tmp_path / strategy] = (*flags, "--sharding-strategy", strategy, "--shards-per-replica", 2)
    settings[tmp_path / "last"] = (*flags, "--gradient-sync", "last")
    settings[tmp_path / "recomputing"] = (*flags, "--activation-checkpointing", "--cpu-offload")
    run_many("lm_multinode.py", settings, 4)
    compiled = {tmp_path / "compiled": (*flags, "--compile", "--activation-checkpointing")}
    run_many("lm_multinode.py", compiled, 2, change=("capture_graphs",))  # test_fsdp.py makes machine code
    for folder in (*settings, *compiled):
        check_model(causal / "gemma3_text", folder)
        check_same(folder, tmp_path / "one")


@pytest.mark.long
def test_processes_share_sequences(causal, tmp_path):
    """Only LFM2 cannot: its convolution also needs its neighbors."""
    script = patched(tmp_path / "copy", "lm-long-context") / "lm_multinode.py"
    settings = {tmp_path / name: (*LM, "--model", causal / name, "--context-parallel-size", 2) for name in CAUSAL}
    wrong = [(*LM, "--context-parallel-size", count) for count in (0, 3)]
    for flags in (settings.pop(tmp_path / "lfm2"), *wrong):
        finished = run_many(script, {tmp_path / "refused": flags}, 2, check=False)
        assert finished.returncode == 2 and "error: --context-parallel-size" in finished.stderr
    run_many(script, settings, 2)
    for folder in settings:
        check_model(causal / folder.name, folder)


def test_mfu_counts_the_flops_of_a_token(causal):
    """PaLM's formula."""
    for name in ("llama", "gpt_neox"):
        model = lm_model(parse("lm_multinode.py", *LM, "--model", causal / name))
        count = sum(p.numel() for p in model.parameters() if p.ndim > 1) - model.get_input_embeddings().weight.numel()
        flops = 6 * count + 12 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * LENGTH
        mfu = lm_mfu_per_token_per_second(Namespace(peak_tflops=1, seq_length=LENGTH), world_of(), model)
        assert 1e12 * mfu == pytest.approx(flops, rel=1e-6), name


def test_an_exported_model_is_used_as_its_base_was(tmp_path):
    """Its tokenizer pads left. It ends texts at one of two tokens. EOS is also the padding token, and is trained."""
    base = make_llama(tmp_path / "base", pad_token_id=1)
    for file in ("config.json", "generation_config.json"):
        change(base / file, eos_token_id=[5, 1])
    change(base / "tokenizer_config.json", padding_side="left")
    run_many("lm_multinode.py", {tmp_path / "out": (*LM, "--model", base)}, 2)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    assert exported.config.eos_token_id == exported.generation_config.eos_token_id == [5, 1]
    assert AutoTokenizer.from_pretrained(tmp_path / "out/model").padding_side == "left"
    embeddings = [
        model.get_input_embeddings().weight for model in (exported, AutoModelForCausalLM.from_pretrained(base))
    ]
    # The texts depend on Python's version: EOS may be only in the last step, whose learning rate is low.
    assert (embeddings[0] - embeddings[1])[1].abs().max() > 5e-5


def test_rows_of_models_have_the_published_sizes():
    """They are the document's model, TinyLlama and Llama 2."""
    sizes = {"tiny": 8_594_048, "150m": 214_983_680, "1b": 1_100_048_384}
    sizes |= {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 68_976_648_192}
    assert {name: lm_shape(name, 32_000).num_parameters() for name in LM_MODELS} == sizes
    assert [lm_shape(name, 32_000).config.head_dim for name in LM_MODELS] == [32, 64, 64, 128, 128, 128]


# ---- T5 --------------------------------------------------------------------------------------------------------------
T5 = ("--num-train-samples", 24, "--num-validation-samples", 0, "--global-batch-size", 8, "--max-steps", 2)
T5 = (*T5, "--micro-batch-size", 4, "--max-source-length", 30, "--max-target-length", 15, "--log-every", 1)
T5 = (*T5, "--precision", "fp32")


def load_and_validate(folder, articles_csv):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right", truncation_side="right")
    _, articles = t5_articles(articles_csv)
    [batch] = t5_batches(t5_samples(articles, tokenizer, 30, 15), tokenizer, len(articles))
    with torch.no_grad():
        return model, t5_loss(model.eval(), batch).item()


def make_family(root, articles_csv):
    gated = {"is_tied": False, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    models = {
        "t5": make_model(root / "t5"),
        "flan": make_model(root / "flan", **gated),
        "mt5": make_model(root / "mt5", "mt5", is_tied=False),
        "umt5": make_model(root / "umt5", "umt5", is_tied=False),
        "byt5": make_model(root / "byt5", is_tied=False, vocab_size=384),
    }
    change(models["flan"] / "tokenizer_config.json", padding_side="left", truncation_side="left")
    change(models["t5"] / "config.json", attn_implementation="eager")  # in which transformers attends to padding
    for file in models["byt5"].glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(models["byt5"])

    # mT5 and T5 1.1 have a spiece.model and no tokenizer.json.
    for file in models["mt5"].glob("tokenizer*"):
        file.unlink()
    texts = root / "texts"
    texts.write_text("\n".join(t5_articles(articles_csv)[0]["text"]))
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    SentencePieceTrainer.train(input=str(texts), model_prefix=str(models["mt5"] / "spiece"), vocab_size=64, **ids)
    return models


@pytest.mark.long
def test_any_t5_trains_and_keeps_its_output_layer(articles_csv, tmp_path):
    models = make_family(tmp_path, articles_csv)
    settings = {}
    for name, version in itertools.product(models, VERSIONS):
        folder = tmp_path / f"{name}-{version}"
        settings[folder] = (*T5, "--dataset", articles_csv, "--model", models[name], *fsdp(version))
    run_many("t5_fsdp.py", settings, 2)

    for name, model in models.items():
        plain, loss = load_and_validate(model, articles_csv)
        for version in VERSIONS:
            folder = tmp_path / f"{name}-{version}"
            check_same(folder, tmp_path / f"{name}-2")
            assert curve(folder, "val_loss")[0] == pytest.approx(loss, **CLOSE), folder
            if version not in SAVE_ON_CPU:
                continue
            exported, loss_after = load_and_validate(folder / "best", articles_csv)
            assert min(curve(folder, "val_loss")[1:]) == pytest.approx(loss_after, **CLOSE), folder
            # Tied weights stay tied, and are stored once.
            weights = load_file(folder / "best" / "model.safetensors").values()
            assert sum(weight.numel() for weight in weights) == plain.num_parameters(), folder
            # transformers 4 obeys this flag. T5 1.1, FLAN-T5 and mT5 have a separate output layer.
            written = json.loads((folder / "best" / "config.json").read_text())
            assert written["tie_word_embeddings"] == (plain.lm_head.weight is plain.shared.weight), folder
            moved = (exported.lm_head.weight - plain.lm_head.weight).abs().max().item()
            assert moved > 1e-4 and not math.isnan(moved), folder
