"""Whatever ends a run, --resume continues it as if it had never stopped: losses are the same to the bit, or up to
rounding on another number of processes."""

import json
import os
import shutil
import signal
import subprocess

import pytest
from conftest import (
    AFTER_ADAM,
    SMALL,
    curve,
    losses,
    make_llama,
    make_model,
    make_tokenizer,
    needs_peft,
    records,
    run_many,
    started,
    write_csv,
)
from shared import patched
from test_errors import refuse
from transformers import AutoModelForCausalLM, AutoTokenizer

from inside import UserError, builtin_article, check_settings, parse

LM_STEPS = 6
LM = (*SMALL, "--max-steps", LM_STEPS, "--validate-every", 3, "--checkpoint-every", 2, "--num-validation-texts", 20)
DILOCO = ("--sharding-strategy", "DILOCO", "--local-steps", 3)

# 64 articles in batches of 16 make 4 steps an epoch, with one checkpoint inside each epoch and one at its end.
T5_STEPS = 8
T5 = (
    *("--num-train-samples", 64, "--global-batch-size", 16, "--epochs", 2, "--log-every", 1, "--checkpoint-every", 3),
    *("--max-target-length", 15, "--sharding-strategy", "SHARD_GRAD_OP"),  # no summary is longer
    *("--precision", "fp32"),
)


def launch(script, *flags, processes=2, check=True, **options):
    return run_many(script, [flags], processes, check=check, **options)


@pytest.fixture(scope="module")
def lm(tiny_llama):
    return ["--model", tiny_llama, *LM]


@pytest.fixture(scope="module")
def lm_whole(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    launch("lm_multinode.py", *lm, "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def t5(articles_csv, tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("dropout"), dropout_rate=0.1)
    return ["--model", model, "--dataset", articles_csv, *T5]


@pytest.fixture(scope="module")
def t5_whole(t5, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    launch("t5_fsdp.py", *t5, "--no-save-model", "--output-dir", folder)
    return folder


def results(folder, since=-1):
    """The losses and validation losses after step `since`. If a step ran twice, the last loss counts."""
    values = {}
    for row in records(folder, "step"):
        for name in ("loss", "val_loss"):
            if name in row and row["step"] > since:
                values[name, row["step"]] = row[name]
    return values


def checkpoint(folder, step):
    return folder / "checkpoints" / f"step-{step:07d}"


def finished_checkpoints(folder):
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/*/progress.json"))


def progress(folder, step):
    """What a checkpoint holds besides tensors and flags."""
    content = json.loads((checkpoint(folder, step) / "progress.json").read_text())
    return {name: value for name, value in content.items() if name != "settings"}


def check_resume(script, flag_lists, root, processes=2, **options):
    """With each list of flags, a run resumes from its last checkpoint but one as if it had never stopped."""
    settings = {root / str(index): (*flags, "--no-save-model") for index, flags in enumerate(flag_lists)}
    run_many(script, settings, processes, **options)
    whole = {}
    for folder in settings:
        _, last = finished_checkpoints(folder)
        whole[folder] = results(folder), progress(folder, last)
        shutil.rmtree(checkpoint(folder, last))
    run_many(script, {folder: (*settings[folder], "--resume") for folder in settings}, processes, **options)
    for folder in settings:
        *_, last = finished_checkpoints(folder)
        assert (results(folder), progress(folder, last)) == whole[folder]


def test_a_run_that_is_killed_twice_loses_nothing(lm, lm_whole, tmp_path):
    """First after an update, then in a save: its shards are written, but not the file that finishes a checkpoint."""
    flags = (*lm, "--resume", "--no-save-model", "--output-dir", tmp_path)
    finished = launch("lm_multinode.py", *flags, change=("signal_in_step", 1, 4), check=False)
    assert finished.returncode != 0
    assert list(losses(tmp_path)) == [1, 2, 3]

    finished = launch("lm_multinode.py", *flags, change=("kill_in_save", 0, 1), check=False)
    assert finished.returncode != 0
    assert list(checkpoint(tmp_path, 4).glob("*.distcp"))
    assert finished_checkpoints(tmp_path) == [2]

    launch("lm_multinode.py", *flags)
    assert results(tmp_path) == results(lm_whole)
    assert finished_checkpoints(tmp_path) == [4, 6]  # the newest two


@pytest.mark.parametrize("script, step", [("lm_multinode.py", 3), ("t5_fsdp.py", 3), ("t5_fsdp.py", 7)])
def test_sigterm_to_one_process_saves_and_exits_with_code_0(script, step, lm, lm_whole, t5, t5_whole, tmp_path):
    """T5 is stopped at the end of an epoch, before the validation: the resumed run validates first."""
    flags, whole = (lm, lm_whole) if script == "lm_multinode.py" else (t5, t5_whole)
    flags = (*flags, "--checkpoint-every", 0, "--no-save-model", "--output-dir", tmp_path)
    finished = launch(script, *flags, change=("signal_in_step", 1, step, "SIGTERM"))
    assert "--resume" in finished.stdout
    assert finished_checkpoints(tmp_path) == [step + 1]  # ranks are asked before a step

    launch(script, *flags, "--resume")
    assert curve(tmp_path, "loss") == curve(whole, "loss")  # no step ran twice
    assert results(tmp_path) == results(whole)


def test_replicas_on_two_nodes_resume_with_the_same_dropout(lm, tmp_path):
    model = make_llama(tmp_path / "model", attention_dropout=0.1)
    flags = (*lm, "--model", model, "--sharding-strategy", "HYBRID_SHARD", "--num-processes", 2)  # on each node
    check_resume("lm_multinode.py", [flags], tmp_path, processes=4, per_node=2)


@pytest.mark.long
def test_diloco_replicas_resume_between_synchronizations(lm, tmp_path):
    """Each replica keeps its own weights. The script refuses another mesh, strategy or outer optimizer."""
    script = patched(tmp_path / "copy", "lm-diloco") / "lm_multinode.py"
    check_resume(script, [(*lm, *DILOCO)], tmp_path, processes=4, per_node=2)
    flags = (*lm, *DILOCO, "--resume", "--output-dir", tmp_path / "0")
    for changed_flag, word in {
        ("--outer-lr", 0.5): "--outer-lr 0.7",
        ("--shards-per-replica", 4): "DILOCO",
        ("--sharding-strategy", "FULL_SHARD"): "checkpoint",
    }.items():
        refuse(script, *flags, *changed_flag, words=[word], processes=4, per_node=2)


@pytest.mark.parametrize("processes", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("script", ["lm_multinode.py", "t5_fsdp.py"])
def test_another_number_of_processes_continues_with_the_same_losses(
    script, processes, lm, lm_whole, tiny_model, articles_csv, tmp_path
):
    """Two processes saved it. No flag is needed, and the micro-batch may be smaller. T5 resumes inside an epoch."""
    whole, step, flags = lm_whole, 4, lm
    if script == "t5_fsdp.py":
        whole, step = tmp_path / "whole", 6
        flags = ("--model", tiny_model, "--dataset", articles_csv, *T5)
        launch(script, *flags, "--no-save-model", "--output-dir", whole)
    resumed = tmp_path / "resumed"
    shutil.copytree(checkpoint(whole, step), checkpoint(resumed, step))
    flags = (*flags, "--resume", "--no-save-model", "--output-dir", resumed)
    launch(script, *flags, "--micro-batch-size", 3, processes=processes)
    assert min(losses(resumed)) == step + 1
    expected = results(whole, since=step)
    assert results(resumed) == {key: pytest.approx(value, **AFTER_ADAM) for key, value in expected.items()}


@pytest.mark.long
def test_processes_that_do_not_divide_the_streams_are_refused(lm, tmp_path):
    """A batch of 24 has eight streams on two processes."""
    flags = (*lm, "--global-batch-size", 24, "--output-dir", tmp_path)
    launch("lm_multinode.py", *flags, "--no-save-model")
    flags = (*flags, "--resume", "--max-steps", LM_STEPS + 1)
    refuse("lm_multinode.py", *flags, words=["3 processes", "8 streams"], processes=3)


@pytest.mark.long
def test_a_finished_run_can_be_extended(lm, lm_whole, tmp_path):
    """Learning rate, precision and strategy may change. Only the new steps are trained."""
    shutil.copytree(checkpoint(lm_whole, LM_STEPS), checkpoint(tmp_path, LM_STEPS))
    flags = (*lm, "--resume", "--max-steps", 9, "--lr", 1e-4, "--warmup-steps", 0, "--precision", "bf16")
    launch("lm_multinode.py", *flags, "--sharding-strategy", "NO_SHARD", "--output-dir", tmp_path)
    rates = curve(tmp_path, "lr")
    assert list(losses(tmp_path)) == [7, 8, 9] and 1e-4 > rates[0] > rates[1] > rates[2] == pytest.approx(1e-5)


def test_t5_resumes_with_dropout_in_the_second_epoch(t5, tmp_path):
    check_resume("t5_fsdp.py", [(*t5, "--fsdp-version", version) for version in (1, 2)], tmp_path)
    rates = {row["epoch"]: row["lr"] for row in records(tmp_path / "0", "loss")}
    assert rates == {1: pytest.approx(1e-3), 2: pytest.approx(0.8e-3)}  # the default --gamma


def test_the_best_model_stays_the_best_after_a_resume(t5, tmp_path):
    """A resumed run first validates, and saves if need be, the model that the run before has ended with."""
    flags = (*t5, "--epochs", 1, "--lr", 5, "--checkpoint-every", 1000, "--resume", "--output-dir", tmp_path)
    launch("t5_fsdp.py", *flags, "--max-steps", 1, "--no-save-model")
    assert not (tmp_path / "best").exists()
    launch("t5_fsdp.py", *flags, "--max-steps", 2)
    launch("t5_fsdp.py", *flags, "--max-steps", 3)
    _, *values = curve(tmp_path, "val_loss")
    best, again, worse, worse_again, worst = values
    assert best == again < worse == worse_again and best < worst

    finished = launch("t5_fsdp.py", *flags, "--max-steps", 3)
    assert "from step 3 of 3" in finished.stdout and len(losses(tmp_path)) == 3
    launch("t5_fsdp.py", *flags, "--max-steps", 1, "--output-dir", tmp_path / "one")
    exported = [(folder / "best" / "model.safetensors").read_bytes() for folder in (tmp_path, tmp_path / "one")]
    assert exported[0] == exported[1]


def test_only_folders_named_step_and_digits_are_checkpoints(t5, t5_whole, tmp_path):
    """Runs do not resume from other folders, and do not delete them."""
    start = shutil.copytree(checkpoint(t5_whole, T5_STEPS), checkpoint(tmp_path, T5_STEPS))
    kept = ("best", "step-9999999-best", "step-")
    for name in kept:
        (start.parent / name).mkdir()
        (start.parent / name / "progress.json").touch()
    checkpoint(tmp_path, 11).mkdir()  # half-written
    older = start.parent / "step-7"  # numbers decide, not names
    older.mkdir()
    (older / "progress.json").touch()
    (start.parent / "notes.txt").touch()

    flags = (*t5, "--checkpoint-every", 1, "--no-run-validation", "--no-save-model", "--resume")
    flags = (*flags, "--output-dir", tmp_path, "--max-steps")
    run_many("t5_fsdp.py", [(*flags, 9), (*flags, 10)], 2)
    assert list(losses(tmp_path)) == [9, 10]
    names = {path.name for path in start.parent.iterdir()}
    assert names == {*kept, "notes.txt", "step-0000009", "step-0000010"}


@pytest.mark.parametrize("micro_batch, only_gradient", [(9, False), (13, True)])
def test_a_loss_or_gradient_that_is_not_finite_stops_all_and_is_not_saved(micro_batch, only_gradient, lm, tmp_path):
    """The loss is in step 3, the gradient in step 4, which has a finite loss. The save of step 4 notices either."""
    flags = (*lm, "--log-every", 10, "--output-dir", tmp_path)
    change = ("infinite_loss", 1, micro_batch, True, only_gradient)
    refuse("lm_multinode.py", *flags, words=["--lr"], processes=2, change=change)
    assert finished_checkpoints(tmp_path) == [2]


@pytest.mark.long
def test_a_validation_loss_that_is_not_finite_is_not_saved(t5, tmp_path):
    flags = (*t5, "--checkpoint-every", 1000, "--output-dir", tmp_path)
    refuse("t5_fsdp.py", *flags, words=["--lr"], change=("infinite_loss", 0, 2, False))
    assert curve(tmp_path, "val_loss") and not (tmp_path / "best").exists()


@pytest.mark.long
def test_ctrl_c_saves_and_ends_with_code_130(lm, tmp_path):
    """A terminal sends it to all processes, also to the one that started the others."""
    flags = [*lm, "--max-steps", 10**6, "--checkpoint-every", 0, "--no-save-model", "--output-dir", tmp_path]
    with started("lm_multinode.py", *flags, stderr=subprocess.STDOUT) as running:
        printed = ""
        for line in running.stdout:
            printed += line
            if line.startswith("step") and "| loss" in line:
                break
        os.killpg(running.pid, signal.SIGINT)
        printed += running.communicate()[0]
    assert running.returncode == 130, printed
    assert "Traceback" not in printed
    [saved] = finished_checkpoints(tmp_path)
    assert max(losses(tmp_path)) == saved


def test_rows_may_be_reordered_or_elsewhere_but_not_changed(t5, tmp_path):
    """Some rows have the same text, and some are equal. The resumed run reads another file."""
    dataset = tmp_path / "articles.csv"
    rows = [builtin_article(index // 3) | {"headline": f"Peel {index % 2}."} for index in range(200)]
    write_csv(dataset, rows)
    flags = (*t5, "--dataset", dataset, "--resume", "--no-save-model", "--output-dir")
    launch("t5_fsdp.py", *flags, tmp_path / "whole")
    shutil.copytree(checkpoint(tmp_path / "whole", 6), checkpoint(tmp_path / "again", 6))
    moved = write_csv(tmp_path / "moved.csv", rows[::-1])
    launch("t5_fsdp.py", *flags, tmp_path / "again", "--dataset", moved)
    assert results(tmp_path / "again") == results(tmp_path / "whole", since=6)

    rows[7] = rows[7] | {"headline": "Fry 1."}
    write_csv(dataset, rows)
    refuse("t5_fsdp.py", *flags, tmp_path / "again", words=["--dataset", "has changed"], processes=2)


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("script", ["lm_multinode.py", "t5_fsdp.py"])
def test_a_resumed_run_keeps_its_tokenizer(script, has_tokenizer, articles_csv, tiny_model, tiny_llama, tmp_path):
    """Trained again or loaded again, it could be another one. A mark shows that the checkpoint's is used."""
    flags = ("--dataset", articles_csv, "--no-run-validation", "--max-source-length", 16)
    flags += ("--model", tiny_model) if has_tokenizer else ()
    if script == "lm_multinode.py":
        flags = ("--validate-every", 0, *(("--tokenizer", tiny_llama) if has_tokenizer else ()))
    flags = (*flags, "--checkpoint-every", 1, "--resume", "--output-dir", tmp_path, "--max-steps")
    run_many(script, [(*flags, 1)], 1)
    config = checkpoint(tmp_path, 1) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 77}))
    run_many(script, [(*flags, 2)], 1)
    [exported] = [*tmp_path.glob("model"), *tmp_path.glob("best")]
    assert AutoTokenizer.from_pretrained(exported).model_max_length == 77


@pytest.mark.long
def test_a_damaged_checkpoint_is_one_sentence_and_the_one_before_resumes(lm, lm_whole, tmp_path):
    shutil.copytree(lm_whole / "checkpoints", tmp_path / "checkpoints")
    flags = (*lm, "--no-save-model", "--resume", "--output-dir", tmp_path)
    newest = checkpoint(tmp_path, 6)
    for path in sorted(newest.glob("*.distcp")):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        refuse("lm_multinode.py", *flags, words=["checkpoint"], processes=2)
        path.unlink()
        refuse("lm_multinode.py", *flags, words=["checkpoint", path.name], processes=2)
        path.write_bytes(content)

    shutil.rmtree(newest)
    launch("lm_multinode.py", *flags)
    assert results(tmp_path) == results(lm_whole, since=4)


# A run does not resume if one of these flags has another value.
MATCHED = {
    "lm_multinode.py": "model tokenizer seq_length global_batch_size seed",
    "t5_fsdp.py": "model num_train_samples num_validation_samples max_source_length max_target_length"
    " global_batch_size seed",
}


@pytest.mark.parametrize("script", MATCHED)
def test_a_run_resumes_only_if_its_flags_match(script, lm, lm_whole, t5, t5_whole):
    flags, whole = (lm, lm_whole) if script == "lm_multinode.py" else (t5, t5_whole)
    for name in [None, *MATCHED[script].split()]:
        args = parse(script, *flags, "--resume", "--output-dir", whole)
        if name is None:
            check_settings(script, args)
            continue
        assert hasattr(args, name)
        setattr(args, name, "another value")
        with pytest.raises(UserError, match=f"with --{name.replace('_', '-')} "):
            check_settings(script, args)


def test_the_optimizer_has_the_settings_of_this_run_and_the_model_those_of_the_checkpoint(lm, tiny_llama, tmp_path):
    """A changed weight decay counts after a resume, from the first update on. A changed config is refused."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    flags = (*lm, "--model", model, "--no-save-model", "--output-dir")
    launch("lm_multinode.py", *flags, tmp_path / "whole")
    shutil.copytree(checkpoint(tmp_path / "whole", 4), checkpoint(tmp_path / "again", 4))
    launch("lm_multinode.py", *flags, tmp_path / "again", "--resume", "--weight-decay", 50)
    whole, again = losses(tmp_path / "whole"), losses(tmp_path / "again")
    assert again[5] == whole[5] and abs(again[6] - whole[6]) > 1e-4

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "head_dim": 16}))
    refuse("lm_multinode.py", *flags, tmp_path / "again", "--resume", words=["config of --model"], processes=2)


@pytest.mark.parametrize("script", ["lm_multinode.py", "t5_fsdp.py"])
def test_a_failed_export_loses_nothing(script, lm, t5, tmp_path):
    """A file is in the place of the model's folder. The resumed run saves the model and makes no step."""
    flags, folder = (
        ((*lm, "--max-steps", 2), "model") if script == "lm_multinode.py" else ((*t5, "--epochs", 1), "best")
    )
    flags = (*flags, "--output-dir", tmp_path)
    (tmp_path / folder).touch()
    refuse(script, *flags, words=[f"cannot save the model to {tmp_path / folder}", "--resume"], processes=2)
    steps = losses(tmp_path)
    assert finished_checkpoints(tmp_path)[-1] == max(steps)

    (tmp_path / folder).unlink()
    launch(script, *flags, "--resume")
    assert losses(tmp_path) == steps and len(curve(tmp_path)) == len(steps)
    assert list((tmp_path / folder).glob("*.safetensors"))


def test_an_export_replaces_an_older_model_and_no_other_file(lm, tmp_path):
    """All its files have the same mode."""
    model = tmp_path / "model"
    model.mkdir()
    old = {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    old |= {"adapter_model.safetensors", "adapter_config.json"}
    kept = {"README.md", "base_model.safetensors", "model_2.safetensors", "model.py", "adapter_notes.md"}
    for name in old | kept:
        (model / name).touch()
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.chat_template = {"default": "", "tools": ""}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer.save_pretrained(model)  # it stores one template in a folder
    flags = (*lm, "--tokenizer", tmp_path / "tokenizer", "--max-steps", 1, "--checkpoint-every", 0)
    flags = (*flags, "--output-dir", tmp_path)
    launch("lm_multinode.py", *flags, processes=1)

    names = {path.name for path in model.iterdir()}
    assert not names & old and kept < names
    assert len({path.stat().st_mode for path in model.iterdir() if path.is_file()}) == 1
    AutoModelForCausalLM.from_pretrained(model)


@pytest.mark.long
def test_a_killed_export_leaves_no_mixture_of_two_models(lm, tmp_path):
    """Old weights are removed before new ones arrive. The next run writes everything."""
    flags = (*lm, "--max-steps", 1, "--checkpoint-every", 0, "--output-dir", tmp_path)
    launch("lm_multinode.py", *flags, processes=1)
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    launch("lm_multinode.py", *flags, processes=1, check=False, change=("kill_in_export", 2))
    assert (weights.parent / ".partial" / weights.name).read_bytes() == content
    with pytest.raises(OSError, match="no file"):
        AutoModelForCausalLM.from_pretrained(weights.parent)
    launch("lm_multinode.py", *flags, processes=1)
    assert weights.read_bytes() == content


@pytest.mark.long
def test_the_loss_scale_of_fp16_resumes(t5, tmp_path):
    copy = patched(tmp_path / "copy", "t5-fp16")
    flag_lists = [(*t5, "--fsdp-version", version, "--precision", "fp16") for version in (1, 2)]
    check_resume(copy / "t5_fsdp.py", flag_lists, tmp_path)
    assert progress(tmp_path / "0", T5_STEPS)["scaler"]["_growth_tracker"] > 0  # the scaler counts steps


@needs_peft
@pytest.mark.long
@pytest.mark.parametrize("name", ["t5-lora", "lm-lora"])
def test_adapters_resume(name, t5, lm, tmp_path):
    """Most weights are frozen. T5 uses FSDP1."""
    script, flags = ("lm_multinode.py", lm) if name == "lm-lora" else ("t5_fsdp.py", (*t5, "--fsdp-version", 1))
    check_resume(patched(tmp_path / "copy", name) / script, [flags], tmp_path)
