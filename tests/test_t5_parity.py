"""FSDP changes where a model lives and not what it learns: t5_fsdp.py against a plain loop in one process."""

import torch
import torch.nn.functional as F

import pytest
from conftest import reports, run_many
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration

import common
import t5_fsdp

GLOBAL_BATCH, STEPS = 8, 4
SUMMARY = 40  # tokens; no article has a summary as long, but an untrained model would not stop writing


@pytest.fixture(scope="session")
def plain_losses(tiny_model, articles_csv, tmp_path_factory):
    """The losses of STEPS optimizer steps, and of validation before and after them, without FSDP."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    data = common.load_summarization_data(str(articles_csv), "text", "headline", 0, 0, tmp_path_factory.mktemp("b"))

    def features(rows):
        texts = tokenizer([t5_fsdp.SOURCE_PREFIX + text for text in rows["text"]], max_length=64, truncation=True)
        labels = tokenizer(rows["summary"][:], max_length=SUMMARY, truncation=True)
        pairs = zip(texts["input_ids"], labels["input_ids"], strict=True)
        return [{"input_ids": text, "labels": label} for text, label in pairs]

    train, validation = features(data.train[:]), features(data.validation[:])
    collate = DataCollatorForSeq2Seq(tokenizer)
    model = T5ForConditionalGeneration.from_pretrained(tiny_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    def loss_of(samples):
        batch = collate(samples)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = model(**inputs, decoder_input_ids=model._shift_right(batch["labels"])).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    with torch.no_grad():
        before = loss_of(validation).item()
    keys = torch.tensor([1000 * len(sample["input_ids"]) + len(sample["labels"]) for sample in train])
    order = t5_fsdp.epoch_order(keys, GLOBAL_BATCH, seed=1 * 10_000 + 1, group_by_length=True)
    losses = []
    for step in range(STEPS):
        loss = loss_of([train[i] for i in order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        after = loss_of(validation).item()
    return losses, before, after


def settings_for(tiny_model, articles_csv, output_dir, processes, *extra):
    return [
        *("--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 0, "--num-validation-samples", 0),
        *("--batch-size", GLOBAL_BATCH // processes, "--max-steps", STEPS, "--max-source-length", 64),
        *("--log-every", 1, "--num-rouge-samples", 0, "--no-save-model", "--output-dir", output_dir),
        *("--max-target-length", SUMMARY, *extra),
    ]


FP32 = ("--precision", "fp32")
SETTINGS = {
    "fsdp2 full": ("--fsdp-version", 2, "--sharding-strategy", "FULL_SHARD", *FP32),
    "fsdp2 grad": ("--fsdp-version", 2, "--sharding-strategy", "SHARD_GRAD_OP", *FP32),
    "fsdp1 full": ("--fsdp-version", 1, "--sharding-strategy", "FULL_SHARD", *FP32),
    "fsdp1 grad": ("--fsdp-version", 1, "--sharding-strategy", "SHARD_GRAD_OP", *FP32),
}
VARIANTS = {
    f"fsdp{version} {name}": ("--fsdp-version", version, *arguments)
    for version in (1, 2)
    for name, arguments in {
        "checkpointing": (*FP32, "--activation-checkpointing"),
        "prefetch none": (*FP32, "--backward-prefetch", "none"),
        "bf16": ("--precision", "bf16"),
        "fp16": ("--precision", "fp16"),
        "grad-bf16": ("--precision", "grad-bf16"),
    }.items()
} | {
    "fsdp2 no clipping": (*FP32, "--max-grad-norm", 1e9),
    "fsdp2 all clipped": (*FP32, "--max-grad-norm", 1e-12),
    "fsdp2 shuffled": (*FP32, "--no-group-by-length"),
    "fsdp2 other seed": (*FP32, "--seed", 2),
    "fsdp1 prefetch post": ("--fsdp-version", 1, *FP32, "--backward-prefetch", "post"),
}


@pytest.fixture(scope="session")
def runs(tiny_model, articles_csv, tmp_path_factory):
    """Every setting, run once on each number of processes: {(processes, name): (step losses, epoch reports)}."""
    root, results = tmp_path_factory.mktemp("runs"), {}
    one = {"fsdp2 full": FP32}
    for processes, settings in ((1, one), (2, SETTINGS | VARIANTS), (3, one), (4, SETTINGS)):
        folders = {name: root / f"{processes} {name}" for name in settings}
        run_many(
            "t5_fsdp",
            [
                settings_for(tiny_model, articles_csv, folders[name], processes, *arguments)
                for name, arguments in settings.items()
            ],
            processes,
            fork=processes != 2,  # the largest part under torchrun
        )
        for name, folder in folders.items():
            losses = [report["train_loss"] for report in reports(folder, "step")]
            results[processes, name] = losses, reports(folder, "epoch")
    return results


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_step_losses_equal_a_plain_loop(runs, plain_losses, processes, name):
    losses, epochs = runs[processes, name]
    assert losses == pytest.approx(plain_losses[0], abs=1e-5)
    assert epochs[-1]["validation_loss"] == pytest.approx(plain_losses[2], abs=1e-5)


@pytest.mark.parametrize(
    "processes, name", [(2, "fsdp1 full"), (4, "fsdp2 grad"), (1, "fsdp2 full"), (3, "fsdp2 full")]
)
def test_validation_loss_is_exact_on_any_number_of_processes(runs, plain_losses, processes, name):
    before = runs[processes, name][1][0]
    assert before["validation_loss"] == pytest.approx(plain_losses[1], abs=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "prefetch" in name or "checkpointing" in name])
def test_prefetch_and_checkpointing_change_no_number(runs, plain_losses, name):
    assert runs[2, name][0] == pytest.approx(plain_losses[0], abs=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "16" in name])
def test_low_precision_stays_within_two_percent_and_differs(runs, plain_losses, name):
    losses = runs[2, name][0]
    assert losses == pytest.approx(plain_losses[0], rel=0.02)
    assert losses != pytest.approx(plain_losses[0], abs=1e-6)  # the policy did something


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_process_holds_its_share_of_the_state(runs, processes):
    whole = runs[1, "fsdp2 full"][1][-1]
    share = runs[processes, "fsdp2 full"][1][-1]
    for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert share[kind] == pytest.approx(whole[kind] / processes, rel=0.01)
    # AdamW keeps two numbers for each parameter, and a step count for each tensor.
    assert whole["optimizer_bytes"] == pytest.approx(2 * whole["parameter_bytes"], rel=0.01)


def test_clipping_order_and_seed_are_what_they_say(runs, plain_losses):
    assert runs[2, "fsdp2 no clipping"][0] != pytest.approx(plain_losses[0], abs=1e-5)
    first, *later = runs[2, "fsdp2 all clipped"][0]
    assert first == pytest.approx(plain_losses[0][0], abs=1e-5)
    assert runs[2, "fsdp2 all clipped"][1][-1]["validation_loss"] == pytest.approx(plain_losses[1], abs=0.1)
    assert later != pytest.approx(plain_losses[0][1:], abs=1e-2)  # gradients of 1e-12 moved the weights by nothing
    for name in ("fsdp2 shuffled", "fsdp2 other seed"):  # other samples in the first step
        assert runs[2, name][0][0] != pytest.approx(plain_losses[0][0], abs=1e-5)
        assert runs[2, name][1][0]["validation_loss"] == pytest.approx(plain_losses[1], abs=1e-5)
