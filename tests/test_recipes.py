"""docs/your-model-and-data.md: every diff applies to the scripts, and what they then do is what the page says."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import draw_trace
import numpy as np
import pytest
import tried_shapes
from conftest import CLOSE, ROOT, VERSIONS, check_curves, curve, make_model, records, run_many, succeed, write_csv
from shared import cell
from test_t5_data import load
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    M2M100Config,
)

import common
import lm_multinode
import t5_fsdp

PAGE = (ROOT / "docs" / "your-model-and-data.md").read_text()
DIFFS = {
    title: diff
    for title, text in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.M | re.S)
    for diff in re.findall(r"^```diff\n(.+?)^```$", text, re.M | re.S)
}
SEQ2SEQ, METRIC, SCHEDULE, LORA_T5, GPT2, LORA_LM, CHAT, BOARD, WANDB, PROFILER, SNAPSHOT = DIFFS


FEW_STEPS = ("--max-steps", 3, "--log-every", 1, "--num-validation-texts", 3, "--seq-length", 32, "--no-save-model")


def require(package):
    if not find_spec(package):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{package} is not installed")


def observe(script):
    """Also write what each process's model is at the last validation."""
    validate = script.validate

    def observe_and_validate(args, world, model, *rest):
        kinds = (FSDPModule, FullyShardedDataParallel)
        units = sum(isinstance(module, kinds) for module in model.modules())
        seen = {"units": units, "buffers": [buffer.clone() for buffer in model.buffers()]}
        torch.save(seen, args.output_dir / f"seen-{world.rank}.pt")
        return validate(args, world, model, *rest)

    script.validate = observe_and_validate


def patched(folder, *titles):
    """A user's copy of the scripts, with these diffs."""
    folder.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for title in titles:
        [name] = re.findall(r"^\+\+\+ b/(.+)", DIFFS[title], re.M)
        before = (folder / name).read_text()
        finished = subprocess.run(["git", "apply"], input=DIFFS[title], capture_output=True, text=True, cwd=folder)
        assert finished.returncode == 0, f"{title}\n{finished.stderr}"
        assert (folder / name).read_text() != before  # git skips what is not below its folder, in silence
    return folder


def launch(folder, script, settings, processes):
    """Run the copy's script once for each list of arguments, in one launch. Returns what is printed."""
    return run_many(folder / f"{script}.py", settings, processes, change=observe).stdout


def train(script, title, arguments, processes, root):
    """Train with this diff in both versions, on two processes also recomputing and in bf16: {name: output folder}.

    One run of FSDP2 saves its model.
    """
    names = {f"fsdp{version}": ["--fsdp-version", version] for version in VERSIONS}
    if processes == 2:
        names |= {f"{name} recomputing": [*version, "--activation-checkpointing"] for name, version in names.items()}
        names |= {f"{name} bf16": [*names[name], "--precision", "bf16"] for name in ("fsdp1", "fsdp2")}
    settings = [
        [*arguments, *more, "--output-dir", root / name, "--save-model" if name == "fsdp2" else "--no-save-model"]
        for name, more in names.items()
    ]
    shared = ["--precision", "fp32", "--log-every", 1]
    launch(patched(root / "copy", title), script, [[*shared, *setting] for setting in settings], processes)
    return {name: root / name for name in names}


def train_plainly(optimizer, losses, schedule=lambda step: 1e-3):
    """Steps on these losses, one after another, without FSDP: losses and gradient norms."""
    [*parameters] = (p for group in optimizer.param_groups for p in group["params"])
    values, norms = [], []
    for step, loss_of in enumerate(losses, 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]
    return values, norms


def global_batches(script, args, tokenizer, processes):
    """Yield what all ranks of the LM script train on in a step, as arrays of all sequences."""
    source, _ = script.load_texts(args)
    worlds = [common.World(rank, rank, processes, processes, "cpu") for rank in range(processes)]
    streams = [iter(script.Batches(args, world, source, tokenizer, [{}], 0)) for world in worlds]
    micro_batches = args.global_batch_size // (args.micro_batch_size * processes)
    while True:
        parts = [batch for stream in streams for batch, _ in itertools.islice(stream, micro_batches)]
        yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def adamw(model, weight_decay):
    """As the LM script has it: of what is trained, matrices decay and vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def cross_entropy(model, batch):
    """The mean over all tokens."""
    logits = model(torch.from_numpy(batch["input_ids"])).logits
    return F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["labels"]).flatten())


def assert_equal(folder, plain):
    tolerance = {"rel": 0.02} if "bf16" in folder.name else CLOSE
    check_curves(folder, plain, **tolerance)


@pytest.mark.parametrize("title", DIFFS)
def test_every_diff_applies_and_leaves_no_name_undefined(title, tmp_path):
    folder = patched(tmp_path / "copy", title)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", ROOT / "pyproject.toml"]
    ruff += ["--ignore", "I001,F401"]
    finished = subprocess.run([*ruff, *folder.glob("*.py")], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


def test_the_places_that_the_table_names_are_there():
    rows = re.findall(r"^\| `(\w+)\.py` \|(.+)", PAGE, re.M)
    assert len(rows) == 4
    for script, cells in rows:
        text = (ROOT / f"{script}.py").read_text()
        for name in re.findall(r"`(.+?)`", cells):
            module, _, function = name.rpartition(".")
            assert function in ((ROOT / f"{module}.py").read_text() if module else text), (script, name)


# ---- Models of the Hub -----------------------------------------------------------------------------------------
def test_the_table_of_models_has_their_sizes():
    rows = re.findall(r"^\| (\S+/\S+) \| ([\d,]+) \| (\S+) \| (\S+) \|", PAGE, re.M)
    assert len(rows) >= 10
    for name, *printed in rows:
        config, file_bytes = tried_shapes.MODELS[name]
        script = t5_fsdp if tried_shapes.is_t5(config) else lm_multinode
        count = script.empty_model(config).num_parameters()
        assert printed == [f"{count:,}", cell(count * file_bytes / 2**30), cell(16 * count / 2**30)], name


def test_models_of_the_hub_train(tmp_path):
    """Two of the table: one that normalizes queries and keys, and one that attends to 512 tokens, and not one more."""
    names = ("Qwen/Qwen3-0.6B", "google/gemma-3-270m")
    runs = []
    for name in names:
        config, _ = tried_shapes.MODELS[name]
        tried_shapes.write_model(config, tmp_path / name / "model")
        script, flags, _ = tried_shapes.run_of(config, tmp_path / name)
        runs.append([*flags, "--no-save-model"])
    run_many(script, runs, 2)
    for name in names:
        assert len(curve(tmp_path / name / "output")) == 2
    finished = run_many(script, [[*flags, "--seq-length", 513]], 2, check=False)
    assert finished.returncode == 2 and "attends to 512 tokens only; --seq-length must not be longer" in finished.stderr


# ---- T5 script: BART and M2M100 --------------------------------------------------------------------------------
GLOBAL_BATCH, STEPS, SOURCE, SUMMARY, LAYERS = 8, 4, 40, 12, 2
CONFIGS = {"bart": BartConfig, "m2m_100": M2M100Config}


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tiny_model, tmp_path_factory):
    """A pretrained model as it may come: in fp16, with LayerDrop, with a buffer that has been trained."""
    sizes = {"d_model": 32, "vocab_size": 1024, "max_position_embeddings": 64}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": LAYERS, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
        sizes |= {f"{part}_layerdrop": 0.5}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "decoder_start_token_id": 1}
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[request.param](**sizes, **special, **off))
    if request.param == "bart":
        model.final_logits_bias.normal_()
    return save(model.half(), tiny_model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(folder, articles_csv):
    """Losses and gradient norms without FSDP, by the model's own loss; the model, and the batch of the next step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    articles = load(articles_csv)[0]
    texts = tokenizer(articles["text"][:], max_length=SOURCE, truncation=True)
    labels = tokenizer(articles["summary"][:], max_length=SUMMARY, truncation=True)
    pairs = zip(texts["input_ids"], labels["input_ids"], strict=True)
    samples = [{"input_ids": text, "labels": label} for text, label in pairs]
    off = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, **off).train()
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    args, world = Namespace(batch_size=GLOBAL_BATCH, accumulation_steps=1, seed=1), common.World(0, 0, 1, 1, "cpu")
    steps = t5_fsdp.split_epoch(args, world, lengths, 1)[: STEPS + 1]
    collate = DataCollatorForSeq2Seq(tokenizer)
    *batches, following = (collate([samples[number] for number in step]) for step in steps)
    losses = [lambda batch=batch: model(**batch).loss for batch in batches]
    return train_plainly(torch.optim.AdamW(model.parameters()), losses), model, following


@pytest.mark.parametrize("processes", [1, 2])
def test_bart_and_m2m100_train_as_a_plain_loop_does(folder, plain, articles_csv, processes, tmp_path):
    arguments = ["--model", folder, "--dataset", articles_csv, "--num-train-samples", 0, "--max-steps", STEPS]
    arguments += ["--batch-size", GLOBAL_BATCH // processes, "--num-validation-samples", 4]
    arguments += ["--max-source-length", SOURCE, "--max-target-length", SUMMARY]
    runs = train("t5_fsdp", SEQ2SEQ, arguments, processes, tmp_path)
    curve, model, following = plain
    # What the model makes when it is built, but BART's bias, which is a weight in all but name.
    made = [*AutoModelForSeq2SeqLM.from_config(model.config).buffers()]
    if model.config.model_type == "bart":
        made = [AutoModelForSeq2SeqLM.from_pretrained(folder).final_logits_bias.float()]
    assert made and all(buffer.std() > 0.5 for buffer in made)
    for name, run in runs.items():
        assert_equal(run, curve)
        for rank in range(processes):
            seen = torch.load(run / f"seen-{rank}.pt")
            assert seen["units"] == 2 * LAYERS + 1, name
            assert len(seen["buffers"]) == len(made) and all(map(torch.equal, seen["buffers"], made)), name
    exported = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "fsdp2" / "best")
    assert exported(**following).loss.item() == pytest.approx(model(**following).loss.item(), abs=1e-5)


# ---- T5 script: a CSV, a metric, a schedule --------------------------------------------------------------------
WARMUP, EPOCHS = 6, 2
STOPS = {1: (14, 0), 2: (5, 14, 0)}  # of each version: in the second epoch, in the warm-up; 0: at the end


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """200 rows in other columns: 190 usable, of which the summaries of 20 are longer than the texts."""
    rows = []
    for number in range(200):
        text = common.builtin_article(number)["text"]
        abstract = "Peel the beans." if number % 4 == 0 else "Wash the tomatoes."
        if number < 20:
            text = abstract[:-1] if number % 2 else abstract[:10]
        rows.append({"body": "" if 20 <= number < 30 else text, "abstract": abstract})
    return write_csv(tmp_path_factory.mktemp("csv") / "my.csv", rows)


@pytest.fixture(scope="module")
def runs(csv, tmp_path_factory):
    """For each version a run with both diffs, and one that is stopped twice; what they printed."""
    root = tmp_path_factory.mktemp("runs")
    [command] = re.findall(r"^python t5_fsdp.py (--dataset my.csv .+)", PAGE, re.M)
    arguments = shlex.split(command.replace("my.csv", str(csv)))
    arguments += ["--model", make_model(root / "model", dropout=0.1), "--precision", "fp32", "--batch-size", 8]
    arguments += ["--lr", 0.01, "--warmup-steps", WARMUP, "--epochs", EPOCHS, "--log-every", 1]
    arguments += ["--max-source-length", SOURCE, "--max-target-length", SUMMARY, "--checkpoint-every", 100]
    settings = []
    for version in (1, 2):
        versioned = [*arguments, "--fsdp-version", version, "--save-model" if version == 2 else "--no-save-model"]
        settings.append([*versioned, "--output-dir", root / f"whole{version}"])
        for stop in STOPS[version]:
            settings.append([*versioned, "--output-dir", root / f"parts{version}", "--max-steps", stop, "--resume"])
    return root, launch(patched(root / "copy", METRIC, SCHEDULE), "t5_fsdp", settings, 2)


def test_the_flags_read_another_csv(runs, csv):
    [train, validation] = map(int, re.search(r"^data +(\d+) articles .*, (\d+) to validate", runs[1], re.M).groups())
    assert train + validation == 190
    assert sum(map(len, load(csv, text="body", summary="abstract"))) == 170  # without --max-summary-share


@pytest.mark.parametrize("version", [1, 2])
def test_the_linear_schedule_is_followed_and_a_resumed_run_repeats_it(runs, csv, version):
    whole, parts = (records(runs[0] / f"{name}{version}", "loss") for name in ("whole", "parts"))
    samples = len(load(csv, text="body", summary="abstract", longest=2)[0])
    steps = samples // 16
    assert [row["step"] for row in whole] == list(range(1, EPOCHS * steps + 1))
    done = [(step // steps + step % steps * 16 / samples) / EPOCHS for step in range(EPOCHS * steps)]
    expected = [0.01 * min(step / WARMUP, 1 - part) for step, part in enumerate(done, 1)]
    assert [row["lr"] for row in whole] == pytest.approx(expected)
    assert max(expected) > 0.008 and expected[WARMUP - 1 :] == sorted(expected[WARMUP - 1 :], reverse=True)
    assert 0 < expected[-1] < 0.001
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [row[name] for row in parts] == [row[name] for row in whole]


def test_exact_match_is_the_share_of_equal_summaries(runs, csv):
    root, printed = runs
    before, *rows = records(root / "whole2", "val_loss")
    best = min(rows, key=lambda row: row["val_loss"])
    tokenizer = AutoTokenizer.from_pretrained(root / "whole2" / "best")
    model = AutoModelForSeq2SeqLM.from_pretrained(root / "whole2" / "best").eval()
    equal = []
    for article in load(csv, text="body", summary="abstract", longest=2)[1]:
        source = tokenizer("summarize: " + article["text"], max_length=SOURCE, truncation=True, return_tensors="pt")
        written = model.generate(source["input_ids"], max_new_tokens=SUMMARY, do_sample=False)[0]
        equal.append(tokenizer.decode(written, skip_special_tokens=True).strip() == article["summary"])
    assert before["exact"] == 0 and 0 < best["exact"] < 1
    assert best["exact"] == pytest.approx(sum(equal) / len(equal))
    assert re.search(rf"^step .* \| rougeL .* \| exact {best['exact']:.4f}$", printed, re.M)


# ---- LM script: GPT-2 ------------------------------------------------------------------------------------------
LENGTH, WARM, LM_STEPS = 32, 2, 6


@pytest.fixture(scope="module")
def gpt2(tiny_model, tmp_path_factory):
    """No parameter is zero, so that weight decay of the wrong ones shows."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1024, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=4, eos_token_id=1, **off)
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return save(model, tiny_model, tmp_path_factory.mktemp("gpt2"))


@pytest.mark.parametrize("processes", [1, 2])
def test_gpt2_trains_as_a_plain_loop_does(gpt2, processes, tmp_path, monkeypatch):
    arguments = ["--model", gpt2, "--seq-length", LENGTH, "--global-batch-size", 8, "--max-steps", LM_STEPS]
    arguments += ["--warmup-steps", WARM, "--weight-decay", 1.0, "--num-validation-texts", 3]
    runs = train("lm_multinode", GPT2, arguments, processes, tmp_path)
    monkeypatch.setattr(sys, "argv", ["", *map(str, arguments), "--micro-batch-size", str(8 // processes)])
    args, tokenizer = lm_multinode.parse_args(), AutoTokenizer.from_pretrained(gpt2)
    batches = itertools.islice(global_batches(lm_multinode, args, tokenizer, processes), LM_STEPS + 1)
    model = GPT2LMHeadModel.from_pretrained(gpt2).train()
    *losses, after = (lambda model=model, batch=batch: cross_entropy(model, batch) for batch in batches)
    plain = train_plainly(adamw(model, weight_decay=1.0), losses, lambda step: lm_multinode.learning_rate(args, step))
    for name, run in runs.items():
        assert_equal(run, plain)
        assert torch.load(run / "seen-0.pt")["units"] == LAYERS + 1, name
    exported = GPT2LMHeadModel.from_pretrained(runs["fsdp2"] / "model")
    assert after(exported).item() == pytest.approx(after().item(), abs=1e-5)


# ---- LM script: write with a checkpoint ---------------------------------------------------------------------------
def test_a_checkpoint_writes_without_fsdp(tmp_path):
    """From two processes; its weights are those of the export of the same step."""
    flags = ("--max-steps", 2, "--checkpoint-every", 2, "--num-validation-texts", 3)
    succeed("lm_multinode.py", *flags, "--output-dir", tmp_path / "output", processes=2, fork=True)
    [code] = re.findall(r"^## LM script: write with .+?^```python\n(.+?)^```$", PAGE, re.M | re.S)
    assert '"output/lm_multinode"' in code
    code = code.replace('"output/lm_multinode"', repr(str(tmp_path / "output")))
    (tmp_path / "write.py").write_text(f"{code}\ntorch.save(model.state_dict(), {str(tmp_path / 'weights.pt')!r})\n")
    printed = succeed(tmp_path / "write.py", fork=True).stdout
    assert f"{tmp_path / 'output' / 'checkpoints' / 'step-0000002'}\n The class definition" in printed
    weights = torch.load(tmp_path / "weights.pt")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "output" / "model").state_dict()
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], exported[name]) for name in weights)


# ---- Weights & Biases ------------------------------------------------------------------------------------------
def read_wandb(path):
    """The records of a .wandb file: LevelDB's log, in blocks of 32 KiB, of Protocol Buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""  # after its header
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:  # too few for a header
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        place += 7 + length
        parts += data[place - length : place]
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_weights_and_biases_has_every_value(tmp_path):
    require("wandb")
    flags = [*FEW_STEPS, "--output-dir", tmp_path / "output"]
    folder = patched(tmp_path / "copy", WANDB)
    run_many(folder / "lm_multinode.py", [flags], 2, fork=False, WANDB_MODE="offline", WANDB_SILENT="true")
    [file] = (tmp_path / "output").glob("wandb/offline-run-*/*.wandb")
    logged = {}
    for record in read_wandb(file):
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            logged.setdefault(name, {})[row["_step"]] = value
    for name in ("loss", "val_loss", "grad_norm", "lr", "tokens/s", "perplexity"):
        written = {row["step"]: row[name] for row in records(tmp_path / "output", name)}
        assert len(written) >= 2 and logged[name] == pytest.approx(written), name


# ---- Where time and memory go ----------------------------------------------------------------------------------
def test_a_trace_has_steps_and_units(tmp_path):
    """Of every rank, and the picture is drawn from it."""
    flags = [*FEW_STEPS, "--max-steps", 14, "--output-dir", tmp_path]
    folder = patched(tmp_path / "copy", PROFILER)
    run_many(folder / "lm_multinode.py", [flags], 2)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#11", "ProfilerStep#12"]
        assert names.count("FSDP::all_gather (model.layers.1)") == 2 * 2 * 2  # steps, micro-batches, passes
    found = draw_trace.spans(*draw_trace.read_step(tmp_path / "trace-0.json")[:2])
    assert {kind for _, kind in found} == set(draw_trace.KINDS)
    assert all(begin >= 0 and length > 0 for places in found.values() for begin, length in places)


def note_snapshots(script):
    """What the recipe asks of CUDA's allocator, where there is none."""
    calls = []
    torch.cuda.memory._record_memory_history = lambda: calls.append("record")
    torch.cuda.memory._dump_snapshot = lambda path: Path(path).write_text(" ".join(calls))


def test_a_snapshot_is_written_in_the_third_step(tmp_path):
    """PyTorch has both functions; on a GPU they are called as here."""
    assert torch.cuda.memory._record_memory_history and torch.cuda.memory._dump_snapshot
    folder = patched(tmp_path / "copy", SNAPSHOT)
    run_many(folder / "lm_multinode.py", [[*FEW_STEPS, "--output-dir", tmp_path]], 2, change=note_snapshots)
    assert [(tmp_path / f"memory-{rank}.pickle").read_text() for rank in range(2)] == ["record", "record"]


# ---- TensorBoard -----------------------------------------------------------------------------------------------
def test_tensorboard_has_every_value(tiny_model, articles_csv, tmp_path):
    require("tensorboard")
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 16, "--batch-size", 8]
    arguments += ["--epochs", 2, "--log-every", 1, "--max-target-length", SUMMARY, "--no-save-model"]
    settings = [[*arguments, "--output-dir", tmp_path / "output"]]
    launch(patched(tmp_path / "copy", BOARD), "t5_fsdp", settings, processes=1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "output")).Reload()
    names = {"loss", "val_loss", "rouge1", "rouge2", "rougeL", "grad_norm", "lr", "tokens/s", "peak_gb"}
    assert set(board.Tags()["scalars"]) == names
    for name in names:
        shown, written = board.Scalars(name), records(tmp_path / "output", name)
        assert len(written) >= 3 and [point.step for point in shown] == [row["step"] for row in written]
        assert [point.value for point in shown] == pytest.approx([row[name] for row in written], rel=1e-6)
