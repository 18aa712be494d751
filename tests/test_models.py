"""Models that users bring: any causal language model of transformers, and any T5, each tiny and with random weights.

Their losses equal those of plain transformers, with the model's own eager attention: on one and two processes, under
each strategy, and after a resume on another number of processes.
"""

import collections
import itertools
import json
import math
import shutil
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
    make_llama,
    make_model,
    make_tokenizer,
    run_many,
    write_csv,
)
from plain import lm_batches, lm_validation_loss, t5_batches, t5_loss, t5_samples
from safetensors.torch import load_file
from sentencepiece import SentencePieceTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer

from inside import (
    LM_MODELS,
    LM_STRATEGIES,
    UserError,
    lm_mfu_per_token_per_second,
    lm_model,
    lm_shape,
    lm_trained_tokenizer,
    parse,
    t5_articles,
    t5_lengths_of_steps,
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
    "bert": {**SHAPE, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "opt": {**SHAPE, "word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0, "layerdrop": 0.5},
    "phi": SHAPE,
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "tie_word_embeddings": True},
    "gemma3_text": {**GROUPED, "sliding_window": LENGTH, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {**SHAPE, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    # Here a layer contains another layer.
    "zamba2": {**SHAPE, "hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1}
    | {"mamba_headdim": 16, "n_mamba_heads": 4, "mamba_d_state": 8, "chunk_size": 16, "num_key_value_heads": 4},
    # Two or four processes cannot divide three experts.
    "mixtral": {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {**SHAPE, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
CAUSAL = {kind: AutoConfig.for_model(kind, **options) for kind, options in KINDS.items()}


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    root = tmp_path_factory.mktemp("causal")
    make_tokenizer(root / "tokenizer")
    for name, config in CAUSAL.items():
        torch.manual_seed(0)
        config.initializer_range = 0.2
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
        if name == "gemma3_text":  # as in published ones, the id of a token for images is too large for the embedding
            tokenizer.add_tokens([f"<unused{index}>" for index in range(len(tokenizer), 1024)])
            tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
            assert len(tokenizer) == 1025
        tokenizer.save_pretrained(root / name)

    # The config says tied, but the file has two weights, so transformers does not tie them.
    model = AutoModelForCausalLM.from_pretrained(root / "qwen2")
    model.config.tie_word_embeddings = True
    model.save_pretrained(root / "qwen2")
    return root


EAGER = {"attn_implementation": "eager"}


def change(file, **settings):
    """Change settings in a JSON file. None removes one."""
    settings = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


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


FIRST = ("gpt2", "bert", "gemma3_text", "mixtral")
OTHERS = pytest.param([name for name in CAUSAL if name not in FIRST], marks=pytest.mark.long, id="others")


@pytest.mark.parametrize("names", [pytest.param(FIRST, id="first"), OTHERS])
def test_any_causal_model_has_the_losses_of_transformers(names, causal, tmp_path):
    for processes in (1, 2):
        settings = {tmp_path / f"{name}-{processes}": (*LM, "--model", causal / name) for name in names}
        run_many("lm_multinode.py", settings, processes)
    for name in names:
        check_model(causal / name, tmp_path / f"{name}-2")
        check_same(tmp_path / f"{name}-2", tmp_path / f"{name}-1")


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_neox", "gemma3_text", "mixtral"])
def test_models_train_alike_under_each_strategy_recomputing_offloading_and_resumed(name, causal, tmp_path):
    flags = (*LM, "--model", causal / name)
    run_many("lm_multinode.py", {tmp_path / "one": flags}, 1)
    settings = {}
    for strategy in LM_STRATEGIES:
        settings[tmp_path / strategy] = (*flags, "--sharding-strategy", strategy, "--shards-per-replica", 2)
    settings[tmp_path / "last"] = (*flags, "--gradient-sync", "last")
    settings[tmp_path / "recomputing"] = (*flags, "--activation-checkpointing", "--cpu-offload")
    settings[tmp_path / "resumed"] = (*flags, "--checkpoint-every", 2)
    run_many("lm_multinode.py", settings, 4)
    for folder in settings:
        check_model(causal / name, folder)
        check_same(folder, tmp_path / "one")

    # Resume from step 2, as if the run had stopped there.
    for path in (tmp_path / "resumed" / "checkpoints").glob(f"step-*{STEPS}"):
        (path / "progress.json").unlink()
    run_many("lm_multinode.py", {tmp_path / "resumed": (*flags, "--checkpoint-every", 2, "--resume")}, 2)
    check_model(causal / name, tmp_path / "resumed")
    assert curve(tmp_path / "resumed")[STEPS] == pytest.approx(curve(tmp_path / "one")[STEPS - 1], **AFTER_ADAM)


@pytest.mark.long
def test_compiled_models_keep_their_losses(causal, tmp_path):
    """The graphs run uncompiled: test_fsdp.py makes machine code once."""
    flags = (*LM, "--micro-batch-size", 3, "--activation-checkpointing", "--max-steps", 1, "--model")
    runs = {name: (*flags, causal / name) for name in ("gpt2", "gpt_neox", "gemma3_text", "qwen3_moe")}
    run_many("lm_multinode.py", {tmp_path / name: runs[name] for name in runs}, 2)
    settings = {tmp_path / f"{name}-compiled": (*runs[name], "--compile") for name in runs}
    run_many("lm_multinode.py", settings, 2, change=("capture_graphs",))
    for name in runs:
        check_same(tmp_path / f"{name}-compiled", tmp_path / name)


def test_mfu_counts_the_flops_of_a_token(causal):
    """PaLM's formula. Only the experts that a token uses count."""
    for name, share_of_experts in {"llama": 1, "gpt_neox": 1, "mixtral": 2 / 3, "qwen3_moe": 2 / 4}.items():
        model = lm_model(parse("lm_multinode.py", *LM, "--model", causal / name))
        count = sum(p.numel() * (share_of_experts if p.ndim == 3 else 1) for p in model.parameters() if p.ndim > 1)
        count -= model.get_input_embeddings().weight.numel()
        flops = 6 * count + 12 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * LENGTH
        mfu = lm_mfu_per_token_per_second(Namespace(peak_tflops=1, seq_length=LENGTH), world_of(), model)
        assert 1e12 * mfu == pytest.approx(flops, rel=1e-6), name


@pytest.mark.long
@pytest.mark.parametrize("name, setting", [("mixtral", "router_aux_loss_coef"), ("jetmoe", "aux_loss_coef")])
def test_experts_are_balanced_as_by_transformers(name, setting, causal, tmp_path):
    """If the config asks for it, gradients are those of transformers' own loss. `loss` is only the cross-entropy."""
    config = AutoConfig.from_pretrained(causal / name, output_router_logits=True, **{setting: 5.0})
    model = AutoModelForCausalLM.from_pretrained(causal / name, config=config)
    tokenizer = AutoTokenizer.from_pretrained(causal / name)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    flags = (*LM, "--micro-batch-size", 16, "--max-steps", 1)  # one micro-batch: the loss is not linear in it
    settings = {
        tmp_path / run: (*flags, "--model", folder)
        for run, folder in (("balanced", tmp_path / "model"), ("unbalanced", causal / name))
    }
    run_many("lm_multinode.py", settings, 1)
    args = parse("lm_multinode.py", *flags)
    batch = {name: torch.from_numpy(rows) for name, rows in next(lm_batches(args, tokenizer)).items()}
    output = model(input_ids=batch["input_ids"], shift_labels=batch["labels"], labels=batch["labels"])
    output.loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert curve(tmp_path / "balanced", "grad_norm") == [pytest.approx(norm, rel=1e-4)]
    assert abs(curve(tmp_path / "unbalanced", "grad_norm")[0] / norm - 1) > 1e-3
    assert curve(tmp_path / "balanced") == pytest.approx(curve(tmp_path / "unbalanced"), **CLOSE)
    expected = (output.loss - 5.0 * output.aux_loss).item()
    assert curve(tmp_path / "balanced") == [pytest.approx(expected, **CLOSE)]


def test_the_exported_model_ends_texts_as_its_tokenizer_does(tmp_path):
    """The base has another EOS, and its padding token is the tokenizer's EOS. That token is trained, too. The tokenizer
    pads left, as before."""
    models = {"one": 5, "several": [5, 1]}
    for name, eos in models.items():
        base = make_llama(tmp_path / name, pad_token_id=1)
        for file in ("config.json", "generation_config.json"):
            change(base / file, eos_token_id=eos)
        change(base / "tokenizer_config.json", padding_side="left")
    settings = {tmp_path / name / "out": (*LM, "--model", tmp_path / name) for name in models}
    run_many("lm_multinode.py", settings, 2)
    for name, eos in {"one": 1, "several": [5, 1]}.items():
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "out/model")
        assert exported.config.eos_token_id == exported.generation_config.eos_token_id == eos
        assert AutoTokenizer.from_pretrained(tmp_path / name / "out/model").padding_side == "left"
        base = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        # The texts depend on Python's version: EOS may be only in the last step, whose learning rate is low.
        assert (exported.get_input_embeddings().weight - base.get_input_embeddings().weight)[1].abs().max() > 5e-5


def test_a_tokenizer_is_as_large_as_its_model_wants(tmp_path):
    """As far as the texts have words. `--model tiny` gets 2,048 tokens."""
    sizes = {}
    for name in LM_MODELS:
        tokenizer = lm_trained_tokenizer(parse("lm_multinode.py", "--model", name))
        sizes[name] = len(tokenizer)
    assert sizes["tiny"] == 2048 and 4000 < sizes["150m"] <= 32_000
    assert {sizes[name] for name in LM_MODELS} == {sizes["tiny"], sizes["150m"]}


@pytest.mark.parametrize("shape", [(100, 352, 2, 3, 3), (128, 352, 2, 4, 3)])
def test_heads_must_divide(shape):
    with pytest.raises(UserError, match=r"MODELS: tiny .* multiple"):
        lm_shape("tiny", 2048, shape)


# ---- T5 --------------------------------------------------------------------------------------------------------------
T5 = ("--num-train-samples", 24, "--num-validation-samples", 0, "--global-batch-size", 8, "--max-steps", 2)
T5 = (*T5, "--micro-batch-size", 4, "--max-target-length", 15, "--log-every", 1, "--precision", "fp32")


def load_and_validate(folder, articles_csv):
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    _, articles = t5_articles(articles_csv)
    [batch] = t5_batches(t5_samples(articles, tokenizer, 512, 15), tokenizer, len(articles))
    with torch.no_grad():
        return model, t5_loss(model.eval(), batch).item()


def test_settings_in_a_t5s_files_do_not_change_what_it_learns(articles_csv, tmp_path):
    """Eager attention would attend to padding, and a tokenizer could cut the beginnings of texts. A T5Config() of one's
    own has no `decoder_start_token_id`."""
    base = make_model(tmp_path / "base")
    changed = {name: shutil.copytree(base, tmp_path / name) for name in ("eager", "left", "no start")}
    change(changed["eager"] / "config.json", attn_implementation="eager")
    change(changed["left"] / "tokenizer_config.json", padding_side="left", truncation_side="left")
    for file in ("config.json", "generation_config.json"):
        change(changed["no start"] / file, decoder_start_token_id=None)
    flags = (*T5, "--dataset", articles_csv, "--max-source-length", 20, "--model")
    run_many("t5_fsdp.py", {folder / "out": (*flags, folder) for folder in (base, *changed.values())}, 2)
    for folder in changed.values():
        check_same(folder / "out", base / "out")
        assert curve(folder / "out", "rouge1") == curve(base / "out", "rouge1")


@pytest.mark.parametrize("processes", [1, 2])
def test_no_article_is_left_out_more_often_because_of_its_length(processes):
    """Of 300 articles, 12 do not fill a batch of 32. In 100 epochs each is left out about 4 times."""
    seen = collections.Counter()
    lengths = [1 + index for index in range(300)]
    for rank in range(processes):
        seen.update(t5_lengths_of_steps(lengths, batch_size=32, steps=900, rank=rank, size=processes))
    left_out = [100 - seen[length] for length in lengths]
    assert sum(left_out) == 100 * 12
    for part in (left_out[:75], left_out[75:150], left_out[150:]):
        assert sum(part) / len(part) == pytest.approx(4, abs=1)


@pytest.mark.long
def test_sentencepiece_tokenizers_work(articles_csv, tmp_path):
    """mT5 and T5 1.1 have a spiece.model and no tokenizer.json. The script refuses summaries in letters that the
    tokenizer does not know."""
    model = make_model(tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    (tmp_path / "texts").write_text("\n".join(t5_articles(articles_csv)[0]["text"]))
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    prefix = str(tmp_path / "spiece")
    SentencePieceTrainer.train(input=str(tmp_path / "texts"), model_prefix=prefix, vocab_size=100, **ids)
    shutil.copy(f"{prefix}.model", model / "spiece.model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) > 90
    run_many("t5_fsdp.py", {model / "out": (*T5, "--dataset", articles_csv, "--model", model)}, 1)
    assert len(curve(model / "out")) == 2

    rows = [
        {"text": f"Вымойте яблоки и груши {index} раз, потом почистите.", "headline": "Вымойте груши."}
        for index in range(60)
    ]
    flags = (*T5, "--dataset", write_csv(tmp_path / "rows.csv", rows), "--model", model, "--output-dir", tmp_path)
    finished = run_many("t5_fsdp.py", [flags], 1, check=False)
    assert finished.returncode == 2 and "unknown to the tokenizer" in finished.stderr


@pytest.mark.long
def test_any_t5_trains_and_keeps_its_output_layer(articles_csv, tmp_path):
    models = {
        "t5": make_model(tmp_path / "t5"),
        "flan": make_model(tmp_path / "flan", is_tied=False, tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
        "mt5": make_model(tmp_path / "mt5", "mt5", is_tied=False),
        "mt5-tied": make_model(tmp_path / "mt5-tied", "mt5"),
        "umt5": make_model(tmp_path / "umt5", "umt5", is_tied=False),
        "byt5": make_model(tmp_path / "byt5", is_tied=False, vocab_size=384),
    }
    for file in models["byt5"].glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(models["byt5"])

    for processes in (1, 2):
        shared = (*T5, "--dataset", articles_csv)
        settings = {}
        for name, version in itertools.product(models, VERSIONS):
            folder = tmp_path / f"{name}-{version}-{processes}"
            settings[folder] = (*shared, "--model", models[name], *fsdp(version))
        run_many("t5_fsdp.py", settings, processes)

    for name, model in models.items():
        plain, loss = load_and_validate(model, articles_csv)
        for version, processes in itertools.product(VERSIONS, (1, 2)):
            folder = tmp_path / f"{name}-{version}-{processes}"
            check_same(folder, tmp_path / f"{name}-2-1")
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
