"""Every diff in docs/recipes applies to the scripts, which then do what docs/your-model-and-data.md promises."""

import copy
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import numpy as np
import pytest
from conftest import (
    AFTER_ADAM,
    CLOSE,
    ROOT,
    SMALL,
    check_curves,
    curve,
    fsdp,
    make_llama,
    make_model,
    needs_peft,
    records,
    run_many,
    write_csv,
)
from peft import LoraConfig, PeftModel, get_peft_model
from plain import (
    adamw,
    cross_entropy,
    lm_batches,
    lm_rate,
    lm_validation_loss,
    t5_samples,
    train_lm,
    train_plainly,
    train_t5,
)
from pyarrow.parquet import read_table
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file, save_file
from shared import patched
from test_models import GROUPED, KINDS
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from inside import builtin_article, lm_held_out, load_module, parse, t5_articles, train_tokenizer

PAGE = ROOT / "docs" / "your-model-and-data.md"
RECIPES = {path.stem: path for path in sorted((ROOT / "docs" / "recipes").glob("*.diff"))}


def snippet(title, **paths):
    """The Python code of a section of the page, with these paths instead of the printed ones."""
    code = re.search(rf"^## {re.escape(title)}\n.*?^```python\n(.+?)^```$", PAGE.read_text(), re.M | re.S)[1]
    for name, path in paths.items():
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(str(path)))
    return code


def check_names(folder):
    """No name in the scripts is undefined."""
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", ROOT / "pyproject.toml"]
    finished = subprocess.run([*ruff, "--ignore", "I001,F401", folder], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


def test_every_diff_applies_also_to_an_edited_copy_and_leaves_no_name_undefined(tmp_path):
    def edit(text):
        text = re.sub(r"^import (?=copy|contextlib)", "# A line of mine\n" * 20 + "import ", text, count=1, flags=re.M)
        return re.sub(r"(    (?:max_steps|epochs): int =) \d+", r"\1 7", text)

    for name, diff in RECIPES.items():
        folder = patched(tmp_path / name, name)
        scripts = re.findall(r"^\+\+\+ b/(.+)", diff.read_text(), re.M)
        if len(scripts) == 1:  # the copy has another name
            mine = folder / "my_copy.py"
            mine.write_text(edit((ROOT / scripts[0]).read_text()))
            subprocess.run(["patch", mine, diff], check=True, capture_output=True)
            assert mine.read_text() == edit((folder / scripts[0]).read_text()), name
    check_names(tmp_path)


@pytest.mark.long
def test_recipes_apply_together_in_any_order(tmp_path):
    """All pairs but those that the page excludes."""
    [sentence] = re.findall("^Those of one script apply together, in any order, except (.+)", PAGE.read_text(), re.M)
    groups = [re.findall("`(.+?)`", part) for part in sentence.split(";")]
    for pair in itertools.combinations(RECIPES, 2):
        if not any(group[0] in pair and {*pair} <= {*group} for group in groups):
            one, other = (patched(tmp_path / "-".join(names), *names) for names in (pair, pair[::-1]))
            for script in ("common.py", "lm_multinode.py", "t5_fsdp.py"):
                lines = [sorted((folder / script).read_text().splitlines()) for folder in (one, other)]
                assert lines[0] == lines[1], pair
    check_names(tmp_path)


def check_refused(script, words, *flags, processes=2, change=()):
    """The script ends with one sentence, which has these words."""
    finished = run_many(script, {script.parent / "refused": flags}, processes, change=change, check=False)
    assert finished.returncode == 2 and words in finished.stderr and "Traceback" not in finished.stderr, words


def test_the_functions_that_the_table_names_exist():
    rows = re.findall(r"^\| `(\w+\.py)` \|(.+)", PAGE.read_text(), re.M)
    assert len(rows) == 4
    for script, cells in rows:
        for name in re.findall(r"`(.+?)`", cells):
            module, _, function = name.rpartition(".")
            assert function in (ROOT / (f"{module}.py" if module else script)).read_text(), (script, name)


STEPS, LAYERS, SOURCE, SUMMARY = 4, 2, 40, 12
RATE = 2e-3
VARIANTS = {"fsdp2": (), "fsdp2 recomputing and offloading": ("--activation-checkpointing", "--cpu-offload")}
SHARED = ("--precision", "fp32", "--log-every", 1, "--max-steps", STEPS, "--lr", RATE)
T5 = (*SHARED, "--num-train-samples", 0, "--num-validation-samples", 4, "--global-batch-size", 8, "--epochs", 1)
T5 = (*T5, "--max-source-length", SOURCE, "--max-target-length", SUMMARY)
LM = (*SMALL, *SHARED, "--global-batch-size", 8, "--micro-batch-size", 2, "--num-validation-texts", 8)
LM = (*LM, "--warmup-steps", STEPS)


# ---- Against loops without FSDP --------------------------------------------------------------------------------------
def check_training(script, flags, plain, load, root, variants=VARIANTS):
    """On two processes, each variant trains as the plain loop did and exports its model. Returns the output."""
    if Path(script).name == "t5_fsdp.py":
        variants = variants | {"fsdp1": fsdp(1)}
    folders = {name: root / name for name in variants}
    settings = {folders[name]: (*flags, *variants[name]) for name in variants}
    printed = run_many(script, settings, 2).stdout
    curves, loss_of = plain
    assert abs(curves[2][0] - curves[2][1]) > 1e-3  # it has learned something
    for name, folder in folders.items():
        check_curves(folder, curves)
        exported = [*folder.glob("best"), *folder.glob("model")]
        assert len(exported) == ("--no-save-model" not in variants[name]), name
        for path in exported:
            assert loss_of(load(path)).item() == pytest.approx(curve(folder, "val_loss")[1], **CLOSE)
    return printed


@pytest.mark.long
def test_a_checkpoint_becomes_the_model_that_the_run_exports(articles_csv, tmp_path):
    """By the page's code, to the bit: with tied weights, with T5's own output layer, and of FSDP1."""
    narrow = {"dtype": torch.bfloat16}
    lm = {name: make_llama(tmp_path / name, tie_word_embeddings=name == "tied", **narrow) for name in ("llama", "tied")}
    t5 = {"1": make_model(tmp_path / "t5", **narrow)}
    t5["2"] = make_model(tmp_path / "flan", is_tied=False, tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    settings = {tmp_path / f"{name}-out": (*LM, "--model", lm[name], "--checkpoint-every", 4) for name in lm}
    run_many("lm_multinode.py", settings, 2)
    flags = (*T5, "--dataset", articles_csv, "--checkpoint-every", 4, "--no-run-validation")
    settings = {tmp_path / f"{name}-out": (*flags, "--model", t5[name], *fsdp(int(name))) for name in t5}
    run_many("t5_fsdp.py", settings, 2)
    for name in (*lm, *t5):
        checkpoint = {"output/lm_multinode/checkpoints/step-0000200": tmp_path / f"{name}-out/checkpoints/step-0000004"}
        code = snippet("Make a model of a checkpoint", **checkpoint, made=tmp_path / f"{name}-made")
        exec(code if name in lm else code.replace("CausalLM", "Seq2SeqLM"), {})
        for exported in [*tmp_path.glob(f"{name}-out/model"), *tmp_path.glob(f"{name}-out/best")]:
            for file in exported.iterdir():
                assert file.read_bytes() == (tmp_path / f"{name}-made" / file.name).read_bytes(), (name, file)


def train_t5_plainly(model, tokenizer, csv, prefix="summarize: "):
    samples = [t5_samples(part, tokenizer, SOURCE, SUMMARY, prefix) for part in t5_articles(csv)]
    return train_t5(model, tokenizer, samples, 8, 4, STEPS, RATE)


@pytest.mark.long
def test_bart_trains_as_a_plain_loop_does(tiny_model, articles_csv, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shape = {"d_model": 32, "vocab_size": 1024, "dropout": 0.0, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    for part in ("encoder", "decoder"):
        shape |= {f"{part}_layers": LAYERS, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **shape, **special))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bart")
    off = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "bart", **off).train()
    plain = train_t5_plainly(model, tokenizer, articles_csv, prefix="")

    script = patched(tmp_path / "copy", "t5-bart") / "t5_fsdp.py"
    flags = (*T5, "--model", tmp_path / "bart", "--dataset", articles_csv, "--print-model")
    printed = check_training(script, flags, plain, AutoModelForSeq2SeqLM.from_pretrained, tmp_path)
    assert len(re.findall(rf"{LAYERS} x FSDP\w+Layer\(", printed)) == 2  # units, in encoder and decoder
    for kind in ("mbart", "m2m_100"):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        check_refused(script, "is not a BART", *flags, "--model", tmp_path / kind)


def add_adapters(model, *names):
    """Add LoRA by peft's own class, with the recipe's settings."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=list(names)))


@needs_peft
@pytest.mark.long
def test_t5_with_lora_trains_as_peft_does(tiny_model, articles_csv, tmp_path):
    def load(adapter):
        return PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tiny_model), adapter)

    model = add_adapters(AutoModelForSeq2SeqLM.from_pretrained(tiny_model), "q", "v")
    plain = train_t5_plainly(model, AutoTokenizer.from_pretrained(tiny_model), articles_csv)
    script = patched(tmp_path / "copy", "lora") / "t5_fsdp.py"
    check_training(script, (*T5, "--model", tiny_model, "--dataset", articles_csv), plain, load, tmp_path)


@needs_peft
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lm_with_lora_trains_as_peft_does(dtype, tiny_llama, tmp_path):
    """A base in bf16 computes with rounded weights. The page's code merges the adapter into its base."""

    def load(adapter):
        paths = {"BASE": tiny_llama, "output/lm_multinode/model": adapter, "merged": tmp_path / "merged"}
        exec(snippet("LoRA", **paths), {})
        return AutoModelForCausalLM.from_pretrained(tmp_path / "merged")

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=dtype).float()
    model = add_adapters(base, "q_proj", "v_proj")
    flags = (*LM, "--model", tiny_llama)
    plain = train_lm(model, AutoTokenizer.from_pretrained(tiny_llama), parse("lm_multinode.py", *flags))
    folder = patched(tmp_path / "copy", "lora", "lm-long-context")
    common = folder / "common.py"
    common.write_text(common.read_text().replace("frozen = torch.float32", f"frozen = {dtype}"))
    variants = VARIANTS | {"sharing": BY_TWO} if dtype == torch.float32 else {"fsdp2": ("--no-save-model",)}
    printed = check_training(folder / "lm_multinode.py", flags, plain, load, tmp_path, variants)
    trained, count = model.get_nb_trainable_parameters()
    gib = (16 * trained + dtype.itemsize * (count - trained)) / 2 / 2**30
    assert f"{trained:,} trained parameters, {gib:.3f} GiB" in printed


# Two processes cannot divide three experts.
EXPERTS = {
    "mixtral": {"num_local_experts": 3, "output_router_logits": True},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True},
    "olmoe": {"num_experts": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", EXPERTS)
def test_models_with_experts_train_as_by_transformers(kind, tmp_path):
    """`loss` has no balancing loss, but gradients have transformers' own, of each micro-batch. Here each process has
    one micro-batch."""
    shape = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "router_aux_loss_coef": 5.0, "pad_token_id": 0}
    model = make_llama(tmp_path / "model", partial(AutoConfig.for_model, kind), **shape, **EXPERTS[kind])
    tokenizer = AutoTokenizer.from_pretrained(model)
    script = patched(tmp_path / "copy", "lm-experts") / "lm_multinode.py"

    def own_loss(model, batch, processes):
        losses = []
        for tokens, labels in zip(*(torch.from_numpy(part).chunk(processes) for part in batch.values()), strict=True):
            output = model(input_ids=tokens, labels=labels, shift_labels=labels.contiguous())
            balance = 0.0 if output.aux_loss is None else 5.0 * output.aux_loss.detach()
            losses.append(output.loss - balance)
        return sum(losses) / processes

    norms = []
    for processes in (1, 2):
        flags = (*LM, "--model", model, "--micro-batch-size", 8 // processes)
        settings = {tmp_path / f"{processes} {name}": (*flags, *VARIANTS[name]) for name in VARIANTS}
        run_many(script, settings, processes, change=["record_shards"])
        eager = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
        loss_of = partial(own_loss, processes=processes)
        curves, _ = train_lm(eager, tokenizer, parse("lm_multinode.py", *flags), loss_of, size=processes)
        for folder in settings:
            check_curves(folder, curves)
        norms.append(curves[1][0])
    # The balancing loss depends on the micro-batches.
    assert (abs(norms[0] / norms[1] - 1) > 1e-3) == ("output_router_logits" in EXPERTS[kind])

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "2 fsdp2" / "model")
    sums = json.loads((tmp_path / "2 fsdp2" / "shards-0.json").read_text())["sums"]
    for weight, shard in zip(exported.parameters(), sums, strict=True):
        rows = int(weight.ndim == 3 and kind == "mixtral")  # the dimension of an expert's rows
        assert weight.double().chunk(2, dim=rows)[0].sum().item() == pytest.approx(shard, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_chunked_loss_trains_as_a_plain_loop_does(is_tied, tmp_path):
    """It refuses a model that changes its logits."""
    script = patched(tmp_path / "copy", "lm-chunked-loss") / "lm_multinode.py"
    script.write_text(script.read_text().replace("CHUNK = 2048", "CHUNK = 24"))  # 64 tokens in a micro-batch
    folder = make_llama(tmp_path / "model", tie_word_embeddings=is_tied)
    flags = (*LM, "--model", folder)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    plain = train_lm(model, tokenizer, parse("lm_multinode.py", *flags))
    check_training(script, flags, plain, AutoModelForCausalLM.from_pretrained, tmp_path)
    run_many(script, {tmp_path / "compiled": (*flags, "--compile")}, 2, change=("capture_graphs",))
    check_curves(tmp_path / "compiled", plain[0])

    gemma = partial(AutoConfig.for_model, "gemma3_text", head_dim=8, num_key_value_heads=2)
    gemma = make_llama(tmp_path / "gemma", gemma, final_logit_softcapping=30.0)
    check_refused(script, "lm-chunked-loss", *LM, "--model", gemma)


@pytest.mark.long
def test_t5_in_fp16_is_close_to_a_plain_loop(tiny_model, articles_csv, tmp_path):
    """With gradient accumulation, and also on one process, where FSDP1 shards nothing."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_model)
    (exact, _, validation), _ = train_t5_plainly(model, tokenizer, articles_csv)
    script = patched(tmp_path / "copy", "t5-fp16") / "t5_fsdp.py"
    flags = (*T5, "--model", tiny_model, "--dataset", articles_csv, "--precision", "fp16", "--no-save-model")
    for processes, version in ((1, 1), (2, 1), (2, 2)):
        folder = tmp_path / f"{processes}-{version}"
        run_many(script, {folder: (*flags, "--micro-batch-size", 2, "--fsdp-version", version)}, processes)
        assert curve(folder) == pytest.approx(exact, rel=0.02) and curve(folder) != pytest.approx(exact, abs=1e-6)
        assert curve(folder, "val_loss") == pytest.approx(validation, rel=0.02)


# ---- DiLoCo ----------------------------------------------------------------------------------------------------------
def train_replicas_plainly(folder, flags, replicas, lr, momentum):
    """Train as four processes do that synchronize every two steps. Returns the means of the losses between
    synchronizations, the first replica's gradient norms, and the validation losses of the shared model. The outer
    optimizer is PyTorch's own SGD."""
    args = parse("lm_multinode.py", *flags)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = lm_held_out(args, tokenizer)
    shared = AutoModelForCausalLM.from_pretrained(folder)
    outer = torch.optim.SGD(shared.parameters(), lr, momentum, nesterov=momentum > 0)
    models = [copy.deepcopy(shared) for _ in range(replicas)]
    optimizers = [adamw(model, weight_decay=0.1) for model in models]
    steps = [*itertools.islice(lm_batches(args, tokenizer, size=4), STEPS)]

    def loss_of(replica, step):
        return cross_entropy(models[replica], {name: np.split(rows, replicas)[replica] for name, rows in step.items()})

    losses, norms, validation = [], [], [cross_entropy(shared, held_out).item()]
    for first in range(0, STEPS, 2):
        curves = []
        for replica in range(replicas):
            local = [partial(loss_of, replica, step) for step in steps[first : first + 2]]
            rates = [lm_rate(args, first + step) for step in range(3)]
            curves.append(train_plainly(optimizers[replica], local, rates.__getitem__))
        losses.append(np.mean([values for values, _ in curves]))
        norms.append(curves[0][1][-1])
        for weight, *of_replicas in zip(shared.parameters(), *(model.parameters() for model in models), strict=True):
            weight.grad = weight.detach() - torch.stack([w.detach() for w in of_replicas]).mean(dim=0)
        outer.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
        validation.append(cross_entropy(shared, held_out).item())
    return losses, norms, validation


@pytest.mark.long
def test_diloco_equals_plain_replicas_with_an_outer_optimizer(tiny_llama, tmp_path):
    """After a synchronization all replicas hold the same bits. In "averaging", all continue from their mean weights.
    A run resumes from a checkpoint as if it had never stopped."""
    script = patched(tmp_path / "copy", "lm-diloco") / "lm_multinode.py"
    flags = (*LM, "--model", tiny_llama, "--validate-every", 2, "--micro-batch-size", 1, "--no-save-model")
    flags = (*flags, "--checkpoint-every", 2)
    runs = {"two": (2, 0.7, 0.9), "averaging": (2, 1.0, 0.0), "four": (4, 0.7, 0.9)}
    settings = {}
    for name, (replicas, lr, momentum) in runs.items():
        outer = ("--local-steps", 2, "--outer-lr", lr, "--outer-momentum", momentum)
        mesh = ("--sharding-strategy", "DILOCO", "--shards-per-replica", 4 // replicas)
        settings[tmp_path / name] = (*flags, *mesh, *outer)
    run_many(script, settings, 4, change=["record_shards"])
    for name, outer in runs.items():
        check_curves(tmp_path / name, train_replicas_plainly(tiny_llama, flags, *outer))
        sums = [json.loads((tmp_path / name / f"shards-{rank}.json").read_text())["sums"] for rank in range(4)]
        assert sums == [sums[rank % (4 // outer[0])] for rank in range(4)]

    check_refused(script, "--local-steps 0", *flags, "--local-steps", 0)
    check_refused(script, "and 2 one must divide", *flags, "--local-steps", 3)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / f"step-{STEPS:07d}")
    run_many(script, {tmp_path / "two": (*settings[tmp_path / "two"], "--resume")}, 4)
    for name in ("loss", "grad_norm", "val_loss"):
        *_, whole, resumed = curve(tmp_path / "two", name)
        assert whole == resumed


# ---- Conversations, tokens and labels --------------------------------------------------------------------------------
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PHI3 = CHATML.replace("im_end", "end").replace("im_start|>{{ message.role }}", "{{ message.role }}|>")
PHI3 = PHI3.replace("im_start|>assistant", "assistant|>").replace("{% endif %}", "{% else %}</s>{% endif %}")
# Only the last answer has thoughts, perhaps empty ones.
QWEN3 = CHATML.replace(
    "{{ message.content }}",
    "{% set parts = message.content.split('</think>') %}{% if loop.last and message.role == 'assistant' %}<think>\n"
    "{{ parts[0].split('<think>')[1].strip() if parts[1:] }}\n</think>\n\n{% endif %}{{ parts[-1].strip() }}",
)
CALL = "{% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
RESULT = "message.content | tojson if message.role == 'tool' else message.content }}"
CALLS = CHATML.replace("message.content }}", RESULT + CALL)
TOOLS = "{% if tools is not none %}Functions: {{ tools | tojson }}\n{% endif %}" + CALLS  # as Llama 3.1
GLM4 = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
SEARCH = {"tools": [{"type": "function", "function": {"name": "search", "parameters": {}}}]}


def chat(*contents):
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def answer_with(**keys):
    return [CHAT[0], CHAT[1] | keys]


def calls(*arguments, content=None):
    """A conversation in which the assistant calls functions, and gets a result with quotes."""
    made = [{"type": "function", "function": {"name": "search", "arguments": each}} for each in arguments]
    return [*answer_with(content=content, tool_calls=made), {"role": "tool", "content": 'a "b"'}, CHAT[1]]


CHAT, PEELED = chat("Peel?", "Peel the beans."), "Peelthebeans.<|im_end|>"
LEARNED = [  # template, messages, other keys, what is learned without spaces, which decoding adds
    (TOOLS, calls({"at": "2024-01-01", "n": 1}), SEARCH, 'search{"at":"2024-01-01","n":1}<|im_end|>', PEELED),
    (TOOLS, calls({"n": 1}, {"n": 1.5}), SEARCH, 'search{"n":1}search{"n":1.5}<|im_end|>', PEELED),
    (TOOLS, calls('{"arguments": "5"}', ""), SEARCH, 'search{"arguments":"5"}search{}<|im_end|>', PEELED),
    (TOOLS, answer_with(weight=None, tool_calls=[]), {"tools": []}, PEELED),
    (QWEN3, chat("Peel?", "<think>a</think>b"), {}, "<think>\na\n</think>\n\nb<|im_end|>"),
    ("{{ strftime_now('%Y') }}" + CHATML, [CHAT[1], *CHAT], {}, PEELED),  # what begins has no prompt
    (CHATML, chat("Peel?", "\n\nA."), {}, "\n\n\nA.<|im_end|>"),  # the first token begins in the prompt
    (PHI3, chat("Peel?", "  A. ") + CHAT, {}, "A.<|end|>", "Peelthebeans.<|end|></s>"),  # swallows spaces
]
REFUSED = [
    *((key, CHATML, answer_with(**{key: 0})) for key in ("reasoning", "reasoning_content", "thinking", "weight")),
    *((key, CHATML, CHAT, {key: 0}) for key in ("system_prompt", "weight", "train", "loss_mask")),
    ("function_call", CHATML, answer_with(content="", function_call={"name": "search", "arguments": "{}"})),
    ("gpt", CHATML, answer_with(role="gpt")),
    ("not one text", CHATML, answer_with(content=[{"type": "text", "text": "a"}])),
    ("assistant says nothing", CHATML, answer_with(content=" ")),
    ("no answer", CHATML, CHAT[1:]),
    ("not an object", TOOLS, calls("5"), SEARCH),
    ("shows no tools", CHATML, CHAT, SEARCH),
    ("shows no tools", CALLS, calls({}), SEARCH),
    ("leaves out or moves 'search'", CHATML, calls({}, content="")),
    ("leaves out or moves 'a thought'", QWEN3, [*chat("Peel?", "<think>a thought</think>b"), *CHAT]),
    ("leaves out or moves 'Peel?'", CHATML.replace("message.content", "message.content[-3:]"), CHAT),
    ("changes or never ends message 2", GLM4, CHAT),
    ("changes or never ends message 2", "{{ messages | length > 2 }}" + CHATML, [*CHAT, *CHAT]),
    ("changes or never ends message 2", QWEN3, [*CHAT, *CHAT]),
    ("changes or never ends message 2", "{{ strftime_now('%f') }}" + CHATML, CHAT),  # as at midnight
    ("odd", "{{ raise_exception('odd') }}" + CHATML, CHAT),
]


def make_rows(model, folder, *lines):
    """Run docs/chats.py, always on a file of the same name. Returns what it prints, and the rows."""
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    finished = run_many("docs/chats.py", [(model, folder / "chats.jsonl", folder / "tokens.parquet")], check=False)
    rows = read_table(folder / "tokens.parquet").to_pylist() if finished.returncode == 0 else None
    return finished.stdout + finished.stderr, rows


@pytest.mark.long
def test_only_answers_are_learned_and_what_is_not_understood_is_refused_with_its_line(tmp_path):
    tokenizer = train_tokenizer(["\n\n\n Wash the beans. Peel", "..."], 400, append_eos=False)
    swallowing = [AddedToken(f"<|{name}|>", rstrip=True, special=True) for name in ("user", "assistant", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *swallowing]})
    for tokenizer.chat_template, messages, keys, *learned in LEARNED:
        tokenizer.save_pretrained(tmp_path)
        printed, [row] = make_rows(tmp_path, tmp_path, {"messages": messages, "source": "mine"} | keys)
        assert all(label in (token, -100) for token, label in zip(*row.values(), strict=True))
        is_learned = np.array(row["labels"]) != -100
        parts = np.split(row["input_ids"], np.flatnonzero(np.diff(is_learned)) + 1)
        assert [tokenizer.decode(part).replace(" ", "") for part in parts[1::2]] == learned and not is_learned[0]
        shown = re.findall(r"\[\[(.*?)\]\]", printed, re.S)
        assert [part.replace(" ", "") for part in shown] == learned and "{'source'}" in printed
        assert ("Functions" in printed) == (keys == SEARCH)

    for words, tokenizer.chat_template, messages, *keys in REFUSED:
        tokenizer.save_pretrained(tmp_path)
        printed, rows = make_rows(tmp_path, tmp_path, {"messages": CHAT}, {"messages": messages} | dict(*keys))
        line = 1 if messages == CHAT and not keys else 2  # some templates fit no conversation
        assert rows is None and f"chats.jsonl, line {line}: " in printed and words in printed, printed


@pytest.fixture(scope="module")
def labels(tiny_llama, tmp_path_factory):
    """The edited script; its flags, for rows of tokens and labels; the tokenizer; the rows."""
    root = tmp_path_factory.mktemp("labels")
    folder = patched(root / "copy", "lm-labels")
    (folder / "lm_multinode.py").rename(folder / "lm_of_labels.py")  # otherwise it would replace the module
    shutil.copytree(tiny_llama, root / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = "[{{ messages[0].role }}] {{ messages[0].content }}</s>[assistant]"
    tokenizer.chat_template += "{% if not add_generation_prompt %} {{ messages[1].content }}</s>{% endif %}"
    tokenizer.save_pretrained(root / "model")
    articles = map(builtin_article, range(400))
    chats = [{"messages": chat(article["text"], article["headline"])} for article in articles]
    _, rows = make_rows(root / "model", root, *chats)
    flags = (*LM, "--model", root / "model", "--dataset", root / "tokens.parquet", "--text-column", "input_ids")
    return load_module(folder / "lm_of_labels.py"), (*flags, "--seq-length", 192), tokenizer, rows


def text_loss(model, batch):
    """The mean over the labels of the packed texts, computed one by one."""
    total, count = 0.0, 0
    for inputs, targets in zip(batch["input_ids"], batch["labels"], strict=True):
        for first, end in itertools.pairwise([*np.flatnonzero(inputs[:, 2] == 0), len(inputs)]):
            tokens, labels = torch.from_numpy(inputs[first:end, 0]), torch.from_numpy(targets[first:end, 1])
            if (labels != -100).any():  # not the unused end of a sequence
                total = total + F.cross_entropy(model(tokens[None]).logits[0], labels, reduction="sum")
                count += (labels != -100).sum()
    return total / count


@pytest.mark.long
def test_labels_train_as_a_plain_loop_over_single_texts(labels, tiny_llama, tmp_path):
    """On one process and two. A line says how many labels lie within --seq-length, which cuts longer rows."""
    script, flags, tokenizer, rows = labels
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    plain = train_lm(model, tokenizer, parse("lm_multinode.py", *flags), text_loss, script=script)
    path = script.__file__
    check_training(path, flags, plain, AutoModelForCausalLM.from_pretrained, tmp_path, {"fsdp2": ()})
    run_many(path, {tmp_path / "one": flags}, 1)
    check_curves(tmp_path / "one", plain[0])

    printed = run_many(path, {tmp_path / "short": (*flags, "--seq-length", 60, "--max-steps", 1)}, 2).stdout
    trained = [row["labels"] for row in rows if not script.is_held_out(json.dumps([*row.values()]))]
    places = [place for row in trained for place, label in enumerate(row) if label != -100]
    inside = sum(place <= 60 for place in places)
    assert 0 < inside < len(places) and f"labels   {inside:,} of {len(places):,} lie within" in printed


@pytest.mark.long
def test_rows_that_are_not_tokens_and_labels_are_refused(labels, tmp_path):
    script, flags, _, rows = labels
    path, file = Path(script.__file__), tmp_path / "rows.jsonl"

    def late(tokens, own):
        """Only held-out rows have labels within --seq-length. Without a sequence, a step would wait without end."""
        is_held_out = script.is_held_out(json.dumps([tokens, own]))
        return (tokens, own) if is_held_out else ([*tokens, *[7] * 200], [*[-100] * (len(tokens) + 199), 7])

    for words, change in {
        "not the next one": lambda tokens, own: (tokens, [*own[1:], -100]),
        "or its own token": lambda tokens, _: (tokens, None),
        "is not in the tokenizer": lambda tokens, own: ([*tokens, 5000], [*own, 5000]),
        "held-out rows fill no sequence": lambda tokens, own: (tokens, [tokens[0], *[-100] * (len(own) - 1)]),
        "no column labels": lambda tokens, _: (tokens,),
        "nothing to learn within": late,
    }.items():
        changed = (change(row["input_ids"], row["labels"]) for row in rows)
        named = [dict(zip(("input_ids", "labels"), columns, strict=False)) for columns in changed]
        file.write_text("\n".join(map(json.dumps, named)))
        check_refused(path, words, *flags, "--dataset", file, processes=1)
    for wrong in (("--dataset", "builtin"), ("--model", "tiny")):
        check_refused(path, "with labels, and", *flags, *wrong, processes=1)


@pytest.mark.long
def test_a_base_model_learns_to_stop_where_rows_end(labels, tiny_llama, tmp_path):
    """Its EOS is another token. A line break is an added token, as in Gemma, and ends each row, as with TRL. Settings
    of generation contradict each other, as Vicuna's."""
    script, flags, *_ = labels
    base, file = shutil.copytree(tiny_llama, tmp_path / "base"), tmp_path / "rows.jsonl"
    (base / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.add_tokens(["\n", "<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(base)
    _, rows = make_rows(base, tmp_path, *({"messages": chat(f"{index}?", "Yes.\nNo.")} for index in range(99)))
    learned = " Yes.\n No.<|im_end|>"  # decoding adds spaces
    for row in rows:
        assert tokenizer.decode([label for label in row["labels"] if label != -100]) == learned
        row["labels"][-1] = row["input_ids"][-1]
        row["prompt"] = "another column of TRL's"
    file.write_text("\n".join(map(json.dumps, rows)))
    flags = (*flags, "--model", base, "--dataset", file, "--max-steps", 40, "--lr", 1e-2)
    assert "rows end with <|im_end|>;" in run_many(script.__file__, {tmp_path: flags}, 2).stdout

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generation_config.eos_token_id == [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompt = tokenizer.apply_chat_template(chat("7?"), add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens) == learned


@pytest.mark.long
def test_a_text_does_not_see_its_neighbors(labels, tmp_path):
    """The loss of packed texts is that of single ones. Types of models that see more are refused."""
    script, flags, tokenizer, _ = labels
    plain_loss, settings = {}, {}
    for kind in (*KINDS, *EXPERTS):
        shape = {"max_position_embeddings": 192, "sliding_window": 192, "initializer_range": 0.2}
        shape = KINDS.get(kind, GROUPED | EXPERTS.get(kind, {}) | {"num_experts_per_tok": 2}) | shape
        folder = make_llama(tmp_path / kind, lambda kind=kind, shape=shape, **_: AutoConfig.for_model(kind, **shape))
        tokenizer.save_pretrained(folder)
        settings[kind] = (*flags, "--model", folder, "--max-steps", 0, "--no-save-model")
        held_out = lm_held_out(parse("lm_multinode.py", *settings[kind]), AutoTokenizer.from_pretrained(folder), script)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            plain_loss[kind] = text_loss(model, held_out).item()

    script = patched(tmp_path / "copy", "lm-labels", "lm-experts") / "lm_multinode.py"
    for kind in ("opt", "lfm2"):
        check_refused(script, f"is of type {kind}", *settings.pop(kind), processes=1)
    run_many(script, {tmp_path / f"{kind} output": flags for kind, flags in settings.items()}, 1)
    for kind in settings:
        assert curve(tmp_path / f"{kind} output", "val_loss") == [pytest.approx(plain_loss[kind], **CLOSE)], kind


@needs_peft
@pytest.mark.long
def test_labels_and_lora_have_the_same_losses_in_chunks(labels, tmp_path):
    flags = (*labels[1], "--max-steps", 2, "--lr", 0.01, "--no-save-model")
    folders = []
    for names in (("lm-labels", "lora"), ("lora", "lm-chunked-loss", "lm-labels")):
        script = patched(tmp_path / str(len(names)), *names) / "lm_multinode.py"
        script.write_text(script.read_text().replace("CHUNK = 2048", "CHUNK = 100"))
        folders.append(script.parent / "output")
        run_many(script, {folders[-1]: flags}, 2)
    for name in ("loss", "val_loss"):
        one, other = (curve(folder, name) for folder in folders)
        assert one[0] != one[1] and one == pytest.approx(other, **CLOSE)


# ---- Sequences on several processes ----------------------------------------------------------------------------------
BY_TWO, BY_FOUR = ("--context-parallel-size", 2), ("--context-parallel-size", 4)
SHARING = {
    "FULL_SHARD": (*BY_FOUR, "--peak-tflops", 1, "--checkpoint-every", 2),
    "HYBRID_SHARD": (*BY_TWO, "--peak-tflops", 1),
    "SHARD_GRAD_OP": (*BY_TWO, "--gradient-sync", "last"),
    "_HYBRID_SHARD_ZERO2": (*BY_FOUR, "--activation-checkpointing", "--cpu-offload"),
    "NO_SHARD": ("--peak-tflops", 1),
}


@pytest.mark.long
def test_processes_that_share_sequences_train_as_a_plain_loop_does(tmp_path):
    """Also with fewer key-value heads than processes, and after a resume without sharing. MFU counts attention once."""
    script = patched(tmp_path / "copy", "lm-long-context", "lm-chunked-loss") / "lm_multinode.py"
    folder = make_llama(tmp_path / "model", num_key_value_heads=2)
    flags = (*LM, "--model", folder, "--micro-batch-size", 1, "--shards-per-replica", 2)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    plain, loss_of = train_lm(model, tokenizer, parse("lm_multinode.py", *LM))
    run_many(script, {tmp_path / "two": (*flags, *BY_TWO, "--compile")}, 2, change=("capture_graphs",))
    settings = {tmp_path / name: (*flags, "--sharding-strategy", name, *SHARING[name]) for name in SHARING}
    run_many(script, settings, 4)
    for path in (tmp_path / "two", *settings):
        check_curves(path, plain)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")
    assert loss_of(trained).item() == pytest.approx(plain[2][1], **AFTER_ADAM)
    flops = [row["mfu"] / row["tokens/s"] for path in settings for row in records(path, "mfu")]
    assert flops == pytest.approx([flops[0]] * 3 * STEPS)

    shutil.rmtree(tmp_path / "FULL_SHARD" / "checkpoints" / f"step-{STEPS:07d}")
    run_many(script, {tmp_path / "FULL_SHARD": (*flags, "--resume")}, 2)
    assert curve(tmp_path / "FULL_SHARD")[STEPS:] == pytest.approx(plain[0][2:], **AFTER_ADAM)

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = make_llama(tmp_path / "longrope", rope_parameters=rope | {"original_max_position_embeddings": 16})
    check_refused(script, "longrope", *flags, "--model", folder, *BY_TWO)


# ---- Metrics and schedules -------------------------------------------------------------------------------------------
# The learning rate as a share of --lr. The warm-up has 6 steps.
SHARES = {
    "linear": lambda step, steps: min(step / 6, 1 - max(0, step - 6) / (steps - 5)),
    "cosine": lambda step, steps: min(step / 6, 0.5 * (1 + math.cos(math.pi * max(0, step - 6) / (steps - 5)))),
}


@pytest.mark.long
@pytest.mark.parametrize("decay", SHARES)
def test_metric_and_schedules_compute_what_they_promise(decay, tmp_path):
    """The page's code then summarizes with the trained model."""
    rows = [builtin_article(index) for index in range(200)]
    for index, row in enumerate(rows):
        row["headline"] = "Peel the beans." if index % 4 == 0 else "Wash the tomatoes."
    csv = write_csv(tmp_path / "articles.csv", rows)
    flags = (*T5, "--model", make_model(tmp_path / "model"), "--dataset", csv, "--num-validation-samples", 0)
    flags = (*flags, "--max-steps", 0, "--epochs", 2, "--lr", 0.01, "--warmup-steps", 6, "--decay", decay)
    script = patched(tmp_path / "copy", "t5-metric", "t5-rouge", "t5-schedule") / "t5_fsdp.py"
    run_many(script, {tmp_path: flags}, 2)

    to_train, to_validate = t5_articles(csv)
    steps = 2 * (len(to_train) // 8)
    assert curve(tmp_path, "lr") == pytest.approx([0.01 * SHARES[decay](step, steps) for step in range(1, steps + 1)])

    best = min(records(tmp_path, "val_loss")[1:], key=lambda row: row["val_loss"])
    names = {}
    exec(snippet("T5 script: summarize with the trained model", **{"output/t5_fsdp/best": tmp_path / "best"}), names)
    tokenizer, model = names["tokenizer"], names["model"]
    assert "summarize: Drop" in tokenizer.decode(names["source"]["input_ids"][0])
    num_equal = 0
    for article in to_validate:
        source = tokenizer("summarize: " + article["text"], max_length=SOURCE, truncation=True, return_tensors="pt")
        written = model.generate(source["input_ids"], max_new_tokens=SUMMARY, do_sample=False)[0]
        num_equal += tokenizer.decode(written, skip_special_tokens=True).strip() == article["summary"]
    assert best["exact"] == pytest.approx(num_equal / len(to_validate)) and num_equal


def test_rouge_counts_the_words_of_russian_and_the_characters_of_chinese(tmp_path):
    script = patched(tmp_path / "copy", "t5-rouge") / "t5_fsdp.py"
    scorer = RougeScorer(["rouge1"], tokenizer=load_module(script.rename(script.with_name("t5_rouge.py"))).Words())
    for reference, summary, share in (
        ("Вымойте груши, потом почистите.", "вымойте Груши", 4 / 6),
        ("洗苹果。", "洗梨", 2 / 5),
        ("Wash 2 pears.", "wash 2 apples", 4 / 6),
    ):
        assert scorer.score(reference, summary)["rouge1"].fmeasure == pytest.approx(share)


# ---- Slices of a model, float8 ---------------------------------------------------------------------------------------
SLICED = {
    "llama": {},
    "gpt2": {},  # with dropout, and a head that is the embedding
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "bfloat16"},
}


@pytest.mark.long
def test_slices_of_a_model_train_and_are_saved_as_the_whole_model_is(tmp_path):
    """Files in bf16 are read in fp32 and written in bf16. Files of earlier models are not read."""
    script = patched(tmp_path / "copy", "lm-slices") / "lm_multinode.py"
    settings = {}
    for kind, shape in SLICED.items():
        model = make_llama(tmp_path / kind, partial(AutoConfig.for_model, kind), pad_token_id=1, **shape)
        (model / "generation_config.json").unlink()
        if kind != "qwen3":
            (model / "generation_config.json").write_text('{"eos_token_id": [1, 5], "do_sample": true, "top_k": 9}')
        if kind == "gpt2":
            AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "parts", max_shard_size="100KB")
            (model / "model.safetensors").unlink()
            for file in (tmp_path / "parts").glob("model*"):
                shutil.copy(file, model)
            assert len([*model.glob("model-0000*")]) > 2
        save_file({"model.norm.weight": torch.zeros(32)}, model / "old.safetensors")
        settings[f"{kind} fsdp2"] = (*LM, "--model", model)
    settings["llama offloading"] = (*LM, "--model", tmp_path / "llama", "--activation-checkpointing", "--cpu-offload")
    left = tmp_path / "slices" / "llama fsdp2" / "model" / "slices" / "sharded"
    left.mkdir(parents=True)
    (left / "shard-00003.safetensors").write_text("of 3 processes")
    for name, path in (("whole", "lm_multinode.py"), ("slices", script)):
        run_many(path, {tmp_path / name / run: flags for run, flags in settings.items()}, 2)
    for run in settings:
        whole, slices = (tmp_path / name / run for name in ("whole", "slices"))
        for name in ("loss", "grad_norm", "val_loss"):
            assert curve(slices, name) == curve(whole, name), run
        weights = [load_file(file) for folder in (whole, slices) for file in folder.glob("model/*.safetensors")]
        assert weights[0].keys() == weights[1].keys() and len(weights) == 2, run
        for name, weight in weights[0].items():
            # In bf16 each process rounds its slices at random.
            step = 2**-7 if weight.dtype == torch.bfloat16 else 0
            torch.testing.assert_close(weight, weights[1][name], rtol=step, atol=0, msg=f"{run} {name}")
        for file in {*whole.glob("model/*.json")} - {tmp_path / "whole/qwen3 fsdp2/model/generation_config.json"}:
            assert file.read_bytes() == (slices / "model" / file.name).read_bytes(), (run, file)
        assert not [path for path in (slices / "model").iterdir() if path.is_dir()]


@pytest.mark.long
def test_no_process_has_memory_for_a_whole_model_in_slices(tmp_path):
    model = make_llama(tmp_path / "model", hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
    gib = (model / "model.safetensors").stat().st_size / 2**30
    flags = (*LM, "--model", model, "--max-steps", 0, "--validate-every", 0)
    peaks = []
    for names in ((), ("lm-slices",)):
        script = patched(tmp_path / f"copy{len(names)}", *names) / "lm_multinode.py"
        after = '    common.say(f"peak {common.peak_gib(world.device)}")\n    common.reset_peak(world.device)\n'
        text = script.read_text().replace("    vocabulary = f", f"{after}    vocabulary = f")
        script.write_text(text.replace('\n\nif __name__ == "__main__"', f'{after}\n\nif __name__ == "__main__"'))
        printed = run_many(script, {tmp_path / script.parent.name / "output": flags}, 4).stdout
        peaks.append([float(peak) for peak in re.findall(r"^peak (\S+)$", printed, re.M)])
    for whole, slices in zip(*peaks, strict=True):  # of rank 0, at the start and in the export
        assert whole - slices > 0.4 * gib, peaks


@pytest.mark.long
def test_slices_refuse_other_names_and_folders_that_are_not_shared(tmp_path):
    script = patched(tmp_path / "copy", "lm-slices") / "lm_multinode.py"
    first = make_llama(tmp_path / "first", partial(AutoConfig.for_model, "gpt2"))  # as the Hub's first GPT-2s are
    file = first / "model.safetensors"
    weights = {name.removeprefix("transformer."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    check_refused(script, "'h.0.attn.c_attn.bias'", *LM, "--model", first, "--max-steps", 1)

    begin = "def main(args, world):\n"
    script.write_text(script.read_text().replace(begin, f"{begin}    args.output_dir /= str(world.rank)\n"))
    old = tmp_path / "copy" / "refused" / "0" / "model"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_text("an older model")
    check_refused(script, "--output-dir", *LM, "--model", make_llama(tmp_path / "llama"), "--max-steps", 1)
    assert (old / "model.safetensors").read_text() == "an older model"


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchao") is None, reason="the recipe needs torchao, which .ci/run installs at its end")
def test_float8_has_nearly_the_losses_of_bf16_and_saves_plain_weights(tiny_llama, tmp_path):
    """Emulated, because a CPU's own products in float8 are very slow."""
    flags = (*LM, "--model", tiny_llama, "--precision", "bf16")
    run_many("lm_multinode.py", {tmp_path / "bf16": flags}, 2)
    folders = [tmp_path / name for name in ("one", "two", "compiled")]
    script = patched(tmp_path / "copy", "lm-float8", "lm-long-context") / "lm_multinode.py"
    before, config, after = script.read_text().partition('Float8LinearConfig.from_recipe_name("tensorwise")')
    script.write_text(f"{before}__import__('dataclasses').replace({config}, emulate=True){after}")
    run_many(script, {folders[0]: (*flags, "--micro-batch-size", 8)}, 1)
    settings = {folders[1]: (*flags, *BY_TWO), folders[2]: (*flags, "--activation-checkpointing", "--compile")}
    run_many(script, settings, 2, change=["capture_graphs"])
    for folder in folders:
        for name in ("loss", "val_loss"):
            expected = curve(tmp_path / "bf16", name)
            assert curve(folder, name) == pytest.approx(expected, rel=0.01), folder
            assert curve(folder, name) != pytest.approx(expected, rel=1e-5), folder

    base, weights = (load_file(path / "model.safetensors") for path in (tiny_llama, folder / "model"))
    assert {name: weight.dtype for name, weight in weights.items()} == dict.fromkeys(base, torch.float32)
    assert lm_validation_loss(folder / "model", *flags) == pytest.approx(curve(folder, "val_loss")[-1], rel=0.01)


# ---- After a run: generate, plot, watch ------------------------------------------------------------------------------
@pytest.mark.long
def test_the_pages_code_generates_and_plots(tmp_path, capsys):
    run_many("lm_multinode.py", {tmp_path: LM}, 2)
    exec(snippet("LM script: write with the trained model", **{"output/lm_multinode/model": tmp_path / "model"}), {})
    assert "class" in capsys.readouterr().out
    paths = {"output/lm_multinode/metrics.jsonl": tmp_path / "metrics.jsonl", "loss.png": tmp_path / "loss.png"}
    exec(snippet("metrics.jsonl, and a plot", **paths), {})
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.long
def test_a_lost_connection_to_weights_and_biases_does_not_end_a_run(tiny_llama, tmp_path):
    """This stands in for its package: its process has been killed, and every call fails."""
    script = patched(tmp_path / "copy", "wandb") / "lm_multinode.py"
    broken = "class Run:\n    def log(self, *_, **__):\n        raise ConnectionResetError\n"
    (script.parent / "wandb.py").write_text(f"{broken}\ndef init(**_):\n    return Run()\n")
    flags = (*LM, "--model", tiny_llama, "--max-steps", 2, "--checkpoint-every", 2)
    run_many(script, {tmp_path / "output": flags}, 2)
    assert len(curve(tmp_path / "output")) == 2 and (tmp_path / "output" / "model").exists()


@pytest.mark.long
def test_tensorboard_has_every_value_and_the_profiler_two_steps(tiny_llama, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = patched(tmp_path / "copy", "tensorboard", "lm-trace") / "lm_multinode.py"
    run_many(script, [[*LM, "--model", tiny_llama, "--max-steps", 14, "--output-dir", tmp_path]], 2)
    board = EventAccumulator(str(tmp_path)).Reload()
    assert {"loss", "grad_norm", "lr", "tokens/s", "val_loss"} < set(board.Tags()["scalars"])
    for name in board.Tags()["scalars"]:
        shown = {point.step: point.value for point in board.Scalars(name)}
        assert shown == pytest.approx({row["step"]: row[name] for row in records(tmp_path, name)}, nan_ok=True), name

    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert len([name for name in names if name.startswith("ProfilerStep")]) == 2
        assert any("all_gather" in name and "layers.1" in name for name in names)
    flags = (*LM, "--model", tiny_llama, "--max-steps", 14)
    run_many(script, {tmp_path / "stopped": flags}, 2, change=("signal_in_step", 0, 11, "SIGTERM"))
    check_refused(script, "needs 13 steps", *flags, "--max-steps", 12)


# ---- Muon, saving while training -------------------------------------------------------------------------------------
def muon_and_adamw(model, weight_decay):
    """Muon for the matrices in layers and AdamW for the rest, as one optimizer."""
    in_layers = {*model.get_decoder().layers.parameters()}
    for_muon = [parameter for parameter in model.parameters() if parameter in in_layers and parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter not in {*for_muon}]
    optimizers = [
        torch.optim.Muon(for_muon, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        adamw(SimpleNamespace(parameters=lambda: rest), weight_decay),
    ]
    return SimpleNamespace(
        param_groups=[group for optimizer in optimizers for group in optimizer.param_groups],
        zero_grad=model.zero_grad,
        step=lambda: [optimizer.step() for optimizer in optimizers],
    )


@pytest.mark.long
def test_muon_trains_as_a_plain_loop_does(tmp_path, monkeypatch):
    """Each process orthogonalizes some of the matrices, whose rows four cannot divide. Replicas are bit-identical."""
    monkeypatch.setattr("plain.adamw", muon_and_adamw)
    script = patched(tmp_path / "copy", "lm-muon", "lm-long-context") / "lm_multinode.py"
    heads = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 2}
    path = make_llama(tmp_path / "llama", hidden_size=30, intermediate_size=67, num_hidden_layers=4, **heads)
    flags = (*LM, "--model", path)
    model, tokenizer = (kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    expected = train_lm(model, tokenizer, parse("lm_multinode.py", *flags))
    check_training(script, flags, expected, AutoModelForCausalLM.from_pretrained, tmp_path)

    run_many(script, {tmp_path / "1": flags}, 1)
    hybrid = (*flags, *BY_TWO, "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2)
    run_many(script, {tmp_path / "4": flags, tmp_path / "2 x 2": hybrid}, 4, change=["record_shards"])
    for name in ("1", "4", "2 x 2"):
        check_curves(tmp_path / name, expected[0])
    seen = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*/shards-?.json"))]  # "2 x 2" is first
    assert [of_rank["orthogonalized"] for of_rank in seen] == [STEPS * 7 * 4 / 4] * 8
    sums = [of_rank["sums"] for of_rank in seen[:4]]
    assert sums == [*sums[:2], *sums[:2]] and sums[0] != sums[1]


# The first save writes its shards after the next step. If that step waited for the save, none would end.
WRITE_LATER = """
write_data = dcp.FileSystemWriter.write_data

def write_later(writer, *arguments):
    metrics = Path(writer.path).parents[1] / "metrics.jsonl"
    while Path(writer.path).name == "step-0000002" and '"step": 3' not in metrics.read_text():
        time.sleep(0.1)
    time.sleep(1)
    return write_data(writer, *arguments)

dcp.FileSystemWriter.write_data = write_later
"""


@pytest.mark.long
def test_training_goes_on_while_a_checkpoint_is_written(tiny_llama, tmp_path):
    """It holds the same bits as without the recipe. Its error ends the run. After another error, it is finished."""
    folder = patched(tmp_path / "copy", "lm-async-save")
    flags = (*LM, "--model", tiny_llama, "--checkpoint-every", 2)
    check_refused(folder / "lm_multinode.py", "lacks shards", *flags, change=["own_folders"])

    with (folder / "common.py").open("a") as file:
        file.write(WRITE_LATER)
    for script, output in (("lm_multinode.py", "waiting"), (folder / "lm_multinode.py", "during")):
        run_many(script, {tmp_path / output: flags}, 2, timeout=100)
    saved, expected = (sorted(tmp_path.glob(f"{name}/checkpoints/*/*.distcp")) for name in ("during", "waiting"))
    assert len(saved) == 4 and [path.read_bytes() for path in saved] == [path.read_bytes() for path in expected]
    assert len([*tmp_path.glob("during/checkpoints/*/progress.json")]) == 2

    script, line = folder / "lm_multinode.py", "        loss_sum += step_loss\n"
    broken = f"{line}        loss_sum += math.nan if step == {STEPS} else 0.0\n"
    script.write_text(script.read_text().replace(line, broken))
    finished = run_many(script, {tmp_path / "nan": flags}, 2, check=False)
    assert finished.returncode == 2 and "not finite" in finished.stderr
    files, expected = (sorted(tmp_path.glob(f"{name}/checkpoints/*2/*")) for name in ("nan", "waiting"))
    assert [file.name for file in files] == [file.name for file in expected]
