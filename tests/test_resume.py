"""Whatever ends a run, --resume continues it as if it had never stopped: losses are the same to the bit, or up to
rounding on another number of processes. It refuses what would not be the same run."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import (
    AFTER_ADAM,
    SMALL,
    curve,
    long,
    losses,
    make_llama,
    make_model,
    make_tokenizer,
    needs_peft,
    records,
    run_many,
    write_csv,
)
from shared import patched
from test_errors import refuse
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from inside import builtin_article, lm_is_held_out

LM_SCRIPT = "lm_multinode.py"
T5_SCRIPT = "t5_fsdp.py"
LM = (*SMALL, "--max-steps", 6, "--validate-every", 3, "--num-validation-texts", 1, "--micro-batch-size", 4)
# 64 articles in batches of 16 make 4 steps an epoch.
T5 = ("--num-train-samples", 64, "--global-batch-size", 16, "--epochs", 2, "--log-every", 1, "--precision", "fp32")
T5 = (*T5, "--max-target-length", 15)  # no summary is longer


def checkpoint(folder, step):
    return folder / "checkpoints" / f"step-{step:07d}"


def finished_checkpoints(folder):
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/*/progress.json"))


def results(folder):
    """The losses and validation losses of each step. If a step ran twice, the last loss counts."""
    values = {}
    for row in records(folder, "step"):
        for name in ("loss", "val_loss", "epoch_loss"):
            if name in row:
                values[name, row["step"]] = row[name]
    return values


@pytest.fixture
def flags_of(articles_csv, texts, tmp_path):
    """A function that makes a model, and returns the flags of a run."""

    def make(script, dropout):
        if script == T5_SCRIPT:
            return (*T5, "--dataset", articles_csv, "--model", make_model(tmp_path / "model", dropout_rate=dropout))
        return (*LM, "--dataset", texts, "--model", make_llama(tmp_path / "model", attention_dropout=dropout))

    return make


# ---- Chains of runs: each is ended, and the next one continues -------------------------------------------------------
KILL = ("signal_in_step", 1, 4)  # of rank 1, after its fourth update
KILL_IN_SAVE = ("kill_in_save", 2)  # in its second save: shards are written, but not the file that finishes them


def stop(step):
    """A SIGTERM to rank 0 in the step before. Ranks are asked before a step, and all save after it."""
    return ("signal_in_step", 0, step - 1, "SIGTERM")


# The script, or a recipe for it, its flags and dropout; then for each run of the chain: its number of processes, what
# ends it, and its last checkpoint.
CHAINS = {
    "lm": (LM_SCRIPT, ("--checkpoint-every", 2), 0.1, [(2, KILL_IN_SAVE, 2), (2, None, 6)]),
    "lm, other numbers": (LM_SCRIPT, (), 0.0, [(2, stop(2), 2), (4, stop(2), 4), (1, None, 4)]),
    "t5, fsdp1": (T5_SCRIPT, ("--max-steps", 6, "--fsdp-version", 1), 0.1, [(2, stop(3), 3), (2, None, 3)]),
}
LONG_CHAINS = {
    # Twelve streams
    "lm, three": (LM_SCRIPT, ("--global-batch-size", 24), 0.0, [(3, stop(2), 2), (2, stop(2), 4), (6, None, 4)]),
    "lm, two nodes": (LM_SCRIPT, ("--sharding-strategy", "HYBRID_SHARD"), 0.1, [(4, stop(4), 4), (4, None, 4)]),
    "t5, other numbers": (T5_SCRIPT, ("--checkpoint-every", 3), 0.0, [(2, KILL, 3), (4, stop(4), 7), (1, None, 8)]),
    # First it ends after an epoch, before the validation that is due.
    "t5": (T5_SCRIPT, (), 0.1, [(2, stop(4), 4), (2, stop(3), 7), (2, None, 7)]),
    "t5-fp16": (T5_SCRIPT, ("--precision", "fp16"), 0.1, [(2, stop(3), 3), (2, None, 3)]),
    "lm-muon": (LM_SCRIPT, ("--activation-checkpointing", "--lr", 2e-3), 0.1, [(2, stop(2), 2), (2, None, 2)]),
    "lm-muon, other numbers": (LM_SCRIPT, ("--lr", 2e-3), 0.0, [(2, stop(2), 2), (4, stop(2), 4), (1, None, 4)]),
    "lm-async-save": (LM_SCRIPT, ("--checkpoint-every", 2), 0.1, [(2, KILL_IN_SAVE, 2), (2, stop(2), 4), (2, None, 6)]),
    "lora, lm": (LM_SCRIPT, (), 0.1, [(2, stop(2), 2), (2, None, 2)]),
    "lora, t5": (T5_SCRIPT, (), 0.1, [(2, stop(3), 3), (2, None, 3)]),
}
LONG = [
    long(name, marks=[pytest.mark.long, needs_peft] if "lora" in name else pytest.mark.long) for name in LONG_CHAINS
]


@pytest.mark.parametrize("name", [*CHAINS, *LONG])
def test_a_chain_of_runs_equals_one_run(name, flags_of, tmp_path):
    script, flags, dropout, chain = (CHAINS | LONG_CHAINS)[name]
    flags = (*flags_of(script, dropout), *flags, "--no-save-model", "--resume")
    recipe = name.partition(",")[0]
    if recipe not in ("lm", "t5"):
        script = patched(tmp_path / "copy", recipe) / script
    per_node = 2 if name == "lm, two nodes" else None
    printed = run_many(script, {tmp_path / "whole": flags}, chain[0][0], per_node=per_node).stdout
    assert printed.count("resumed  nothing") == 1
    for processes, end, last_checkpoint in chain:
        is_killed = end in (KILL, KILL_IN_SAVE)
        options = {"change": end or (), "check": not is_killed, "per_node": per_node}
        finished = run_many(script, {tmp_path / "chain": flags}, processes, **options)
        assert (finished.returncode != 0) == is_killed
        assert [0, *finished_checkpoints(tmp_path / "chain")][-1] == last_checkpoint

    expected = results(tmp_path / "whole")
    if len({processes for processes, *_ in chain}) > 1:
        expected = {key: pytest.approx(value, **AFTER_ADAM) for key, value in expected.items()}
    assert results(tmp_path / "chain") == expected


@pytest.mark.long
def test_64_processes_stop_and_32_or_one_continue(tiny_llama, texts, tmp_path):
    """There are 64 streams, which one process has, too, if it resumes."""
    flags = (*SMALL, "--model", tiny_llama, "--dataset", texts, "--global-batch-size", 64, "--max-steps", 4)
    flags = (*flags, "--validate-every", 0, "--checkpoint-every", 2, "--no-save-model", "--resume")
    run_many(LM_SCRIPT, {tmp_path / "many": flags}, 64, change=stop(3))
    shutil.copytree(checkpoint(tmp_path / "many", 2), checkpoint(tmp_path / "one", 2))
    run_many(LM_SCRIPT, {tmp_path / "many": flags}, 32)
    run_many(LM_SCRIPT, {tmp_path / "one": flags}, 1)
    many, one = losses(tmp_path / "many"), losses(tmp_path / "one")
    assert list(many) == [1, 2, 3, 4] and list(one) == [3, 4]
    assert one == pytest.approx({step: many[step] for step in one}, **AFTER_ADAM)


@pytest.mark.long
def test_a_run_that_is_at_its_end_validates_and_exports(articles_csv, tiny_model, tmp_path):
    """It was stopped within its first epoch, and goes no further; or it trains for no epoch."""
    flags = (*T5, "--dataset", articles_csv, "--model", tiny_model, "--resume")
    run_many(T5_SCRIPT, {tmp_path / "stopped": flags}, change=stop(2))
    assert not (tmp_path / "stopped/best").exists()
    settings = {tmp_path / "stopped": (*flags, "--max-steps", 1), tmp_path / "none": (*flags, "--epochs", 0)}
    run_many(T5_SCRIPT, settings)
    for folder, step in zip(settings, (2, 0), strict=True):
        assert records(folder, "val_loss")[-1]["step"] == step
        AutoModelForSeq2SeqLM.from_pretrained(folder / "best")


@pytest.mark.long
def test_each_pass_over_the_texts_is_counted_once(tiny_llama, tmp_path):
    """Also after a resume, on another number of processes."""
    texts = [builtin_article(index)["text"] for index in range(100)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = (*SMALL, "--model", tiny_llama, "--dataset", tmp_path / "few.jsonl", "--validate-every", 0)
    flags = (*flags, "--no-save-model", "--log-every", 4, "--checkpoint-every", 20, "--resume")
    counts = []
    for processes, steps in ((2, 20), (1, 40)):
        run = {tmp_path: (*flags, "--max-steps", steps)}
        printed = run_many(LM_SCRIPT, run, processes, change=("single_texts",)).stdout
        counts += map(int, re.findall("^data .* at least (.+) time", printed, re.M))
    assert counts == sorted(set(counts))

    trained = [text for text in texts if not lm_is_held_out(text)]
    num_tokens = sum(map(len, AutoTokenizer.from_pretrained(tiny_llama)(trained)["input_ids"]))
    assert counts[-1] == pytest.approx(40 * 16 * 32 / num_tokens, abs=2)


# ---- What may change, and what may not -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(articles_csv, tiny_model, texts, tmp_path_factory):
    """The flags and the output folder of a run of each script that has a checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    flags = {
        LM_SCRIPT: (*LM, "--max-steps", 2, "--validate-every", 0, "--global-batch-size", 24, "--dataset", texts),
        T5_SCRIPT: (*T5, "--max-steps", 2, "--dataset", articles_csv, "--model", tiny_model),
    }
    runs = {}
    for script in flags:
        runs[script] = (*flags[script], "--no-save-model", "--checkpoint-every", 2), root / script
        run_many(script, {root / script: runs[script][0]}, 2)
    return runs


def test_a_finished_run_exports_and_can_be_extended(saved, tmp_path):
    """The strategy and the settings of the optimizer may change. A weight decay counts from the first update on."""
    flags, folder = saved[LM_SCRIPT]
    flags = (*flags, "--resume")
    for name in ("exporting", "longer", "decaying"):
        shutil.copytree(folder, tmp_path / name)
    run_many(LM_SCRIPT, {tmp_path / "exporting": (*flags, "--save-model")}, 1)
    assert curve(tmp_path / "exporting") == curve(folder)
    AutoModelForCausalLM.from_pretrained(tmp_path / "exporting" / "model")

    flags = (*flags, "--max-steps", 4, "--lr", 1e-3, "--sharding-strategy", "NO_SHARD")
    run_many(LM_SCRIPT, {tmp_path / "longer": flags, tmp_path / "decaying": (*flags, "--weight-decay", 50)}, 2)
    longer, decaying = losses(tmp_path / "longer"), losses(tmp_path / "decaying")
    assert list(longer) == [1, 2, 3, 4] and max(curve(tmp_path / "longer", "lr")[2:]) < 1e-3
    assert longer[3] == decaying[3] and abs(longer[4] - decaying[4]) > 1e-4


def test_another_run_is_refused(saved, texts, articles_csv, tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    lines = texts.read_text().splitlines(keepends=True)
    (tmp_path / "texts.jsonl").write_text("".join(reversed(lines)))
    (tmp_path / "texts").mkdir()
    for index in (0, 1):
        (tmp_path / f"texts/{index}.jsonl").write_text("".join(lines[index::2]))
    rows = [builtin_article(index) for index in range(200)]
    moved = write_csv(tmp_path / "moved.csv", rows[::-1])
    changed = write_csv(tmp_path / "changed.csv", [*rows[:7], rows[7] | {"headline": "Fry it."}, *rows[8:]])
    edited = patched(tmp_path / "copy") / LM_SCRIPT
    edited.write_text(edited.read_text().replace('"tiny": (128, 352,', '"tiny": (128, 320,'))
    for script, changed_flags, word in (
        (LM_SCRIPT, ("--seed", 2), "seed is 2, not 1"),
        (LM_SCRIPT, ("--tokenizer", tmp_path / "tokenizer"), "tokenizer"),
        (LM_SCRIPT, ("--dataset", tmp_path / "texts.jsonl"), "dataset"),
        (LM_SCRIPT, ("--dataset", tmp_path / "texts/*.jsonl"), "dataset"),
        (edited, (), "config"),
        (T5_SCRIPT, ("--max-target-length", 14), "max_target_length"),
        (T5_SCRIPT, ("--dataset", changed), "dataset"),
    ):
        flags, folder = saved[Path(script).name]
        flags = (*flags, "--resume", *changed_flags, "--output-dir", folder)
        refuse(script, *flags, words=[word, "checkpoint"])

    flags, folder = saved[LM_SCRIPT]  # it has eight streams
    flags = (*flags, "--max-steps", 3, "--resume", "--output-dir", folder)
    refuse(LM_SCRIPT, *flags, words=["divides 8", "on 3"], processes=3)
    flags, folder = saved[T5_SCRIPT]  # rows may be elsewhere, and in another order
    run_many(T5_SCRIPT, {folder: (*flags, "--resume", "--dataset", moved)}, 1)


@pytest.mark.parametrize("script", [LM_SCRIPT, T5_SCRIPT])
def test_a_resumed_run_keeps_its_tokenizer(script, saved, tmp_path):
    """Trained again or loaded again, it could be another one. A mark shows that the checkpoint's is used."""
    flags, folder = saved[script]
    shutil.copytree(folder, tmp_path / "run")
    config = checkpoint(tmp_path / "run", 2) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 77}))
    flags = (*flags, "--max-steps", 4, "--save-model", "--resume", *["--no-run-validation"] * (script == T5_SCRIPT))
    run_many(script, {tmp_path / "run": flags})
    [exported] = [*tmp_path.glob("run/model"), *tmp_path.glob("run/best")]
    assert AutoTokenizer.from_pretrained(exported).model_max_length == 77


def test_only_folders_named_step_and_seven_digits_are_checkpoints(saved, tmp_path):
    """Runs do not resume from other folders, and do not delete them."""
    flags, folder = saved[LM_SCRIPT]
    start = shutil.copytree(checkpoint(folder, 2), checkpoint(tmp_path, 2))
    kept = {"best", "step-9999999-best", "step-7", "step-keep015"}
    for name in kept:
        (start.parent / name).mkdir()
        (start.parent / name / "progress.json").touch()
    checkpoint(tmp_path, 9).mkdir()  # half-written
    run_many(LM_SCRIPT, {tmp_path: (*flags, "--max-steps", 4, "--checkpoint-every", 1, "--resume")}, 1)
    assert list(losses(tmp_path)) == [3, 4]
    assert {path.name for path in start.parent.iterdir()} == {*kept, "step-0000003", "step-0000004"}


@pytest.mark.long
def test_a_damaged_checkpoint_is_one_sentence(saved, tmp_path):
    flags, folder = saved[LM_SCRIPT]
    shutil.copytree(folder, tmp_path / "run")
    [path, *_] = sorted(checkpoint(tmp_path / "run", 2).glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:99])
    flags = (*flags, "--resume", "--output-dir", tmp_path / "run")
    refuse(LM_SCRIPT, *flags, words=["checkpoint"], processes=2)


# ---- What is saved ---------------------------------------------------------------------------------------------------
# The rank and its micro-batch, whether it trains, whether only the gradient is infinite; and what has been saved.
@pytest.mark.parametrize(
    "script, change, saved_steps",
    [
        (LM_SCRIPT, (1, 7, True, True), [2]),  # in step 4, which has a finite loss
        long(LM_SCRIPT, (1, 5, True), [2]),  # in step 3, which is not printed
        long(T5_SCRIPT, (0, 2, False), [2, 4]),  # in the second validation
    ],
)
def test_what_is_not_finite_stops_all_and_is_not_saved(script, change, saved_steps, flags_of, tmp_path):
    run = tmp_path / "run"
    flags = (*flags_of(script, 0.0), "--checkpoint-every", 2, "--log-every", 10, "--output-dir", run)
    refuse(script, *flags, words=["--lr"], processes=2, change=("infinite_loss", *change))
    assert finished_checkpoints(run) == saved_steps and not (run / "best").exists()


@pytest.mark.long
def test_the_best_model_stays_the_best_after_a_resume(tiny_model, articles_csv, tmp_path):
    """A resumed run first validates, and saves if need be, the model that the run before has ended with."""
    flags = (*T5, "--model", tiny_model, "--dataset", articles_csv, "--checkpoint-every", 9, "--resume")
    run_many(T5_SCRIPT, {tmp_path / "one": (*flags, "--max-steps", 1)}, 2)
    weights = (tmp_path / "one" / "best" / "model.safetensors").read_bytes()
    for steps, *more in ((1, "--no-save-model"), (2, "--lr", 5), (3, "--lr", 5)):
        run_many(T5_SCRIPT, {tmp_path / "three": (*flags, "--max-steps", steps, *more)}, 2)
    _, best, again, worse, worse_again, worst = curve(tmp_path / "three", "val_loss")
    assert best == again < worse == worse_again and best < worst
    assert (tmp_path / "three" / "best" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("script", [LM_SCRIPT, T5_SCRIPT])
def test_a_killed_export_is_repeated_and_leaves_other_files(script, tiny_llama, saved, tmp_path):
    """The model's folder is a link, with an older model. It is filled, not renamed. In between, no mixture of two
    models can be loaded: old weights are removed first, and new ones come last."""
    kind, name = (AutoModelForCausalLM, "model") if script == LM_SCRIPT else (AutoModelForSeq2SeqLM, "best")
    flags, folder = saved[script]
    shutil.copytree(folder, tmp_path / "run")
    model = tmp_path / "run" / name
    model.symlink_to(shutil.copytree(tiny_llama, tmp_path / "elsewhere"))
    (model / "notes.txt").touch()
    flags = (*flags, "--save-model", "--resume")
    finished = run_many(script, {tmp_path / "run": flags}, 1, change=("kill_in_export",), check=False)
    assert finished.returncode != 0
    with pytest.raises(OSError, match="no file"):
        kind.from_pretrained(model)

    run_many(script, {tmp_path / "run": flags}, 1)
    kind.from_pretrained(model)
    assert curve(tmp_path / "run") == curve(folder)  # it makes no step
    assert model.is_symlink() and (model / "notes.txt").exists()
    assert len({path.stat().st_mode for path in model.iterdir()}) == 1
