"""FSDP changes where a model lives and not what it learns: t5_fsdp.py against a plain loop in one process."""

import math
from argparse import Namespace

import torch
import torch.nn.functional as F

import pytest
from conftest import CLOSE, VERSIONS, curve, run_many
from test_t5_data import load
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration

import common
import t5_fsdp

GLOBAL_BATCH, STEPS, SOURCE, SUMMARY = 8, 4, 40, 12  # tokens: half of the articles and of the summaries are longer
FP32 = ("--precision", "fp32")
SETTINGS = {
    f"fsdp{version} {strategy}": (*FP32, "--fsdp-version", version, "--sharding-strategy", strategy)
    for version in VERSIONS
    for strategy in t5_fsdp.RESHARD
}
VARIANTS = {
    f"fsdp{version} {' '.join(arguments)}": (*FP32, "--fsdp-version", version, *arguments)
    for version in VERSIONS
    for arguments in (
        ("--activation-checkpointing",),
        ("--backward-prefetch", "none"),
        ("--backward-prefetch", "post"),
        ("--batch-size", "1", "--accumulation-steps", "4"),  # on two processes
        ("--cpu-offload",),
    )
    if (version, arguments[-1]) not in ((2, "post"), (1, "--cpu-offload"))
}
LOW_PRECISION = {
    f"fsdp{version} {precision}": ("--fsdp-version", version, "--precision", precision)
    for version in VERSIONS
    for precision in ("bf16", "fp16", "grad-bf16")
}


def train_plainly(tiny_model, articles_csv, clip, prepare=lambda model: model):
    """Validate, make STEPS optimizer steps, and validate again, without FSDP: the records of a run, and the model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def features(rows):
        texts = tokenizer(["summarize: " + text for text in rows["text"]], max_length=SOURCE, truncation=True)
        labels = tokenizer(rows["summary"][:], max_length=SUMMARY, truncation=True)
        pairs = zip(texts["input_ids"], labels["input_ids"], strict=True)
        return [{"input_ids": text, "labels": label} for text, label in pairs]

    train, validation = map(features, load(articles_csv))
    collate = DataCollatorForSeq2Seq(tokenizer)
    model = prepare(T5ForConditionalGeneration.from_pretrained(tiny_model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(samples):
        batch = collate(samples)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = model(**inputs, decoder_input_ids=model._shift_right(batch["labels"])).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def validate():
        with torch.no_grad():
            return loss_of(validation).item()

    world = common.World(0, 0, 1, 1, torch.device("cpu"))
    lengths = torch.tensor([len(sample["input_ids"]) for sample in train])
    args = Namespace(batch_size=GLOBAL_BATCH, accumulation_steps=1, seed=1)
    steps = t5_fsdp.split_epoch(args, world, lengths, 1)
    result = {"before": validate(), "losses": [], "norms": [], "one": loss_of(validation[:1]).item()}
    for step in steps[:STEPS]:
        loss = loss_of([train[number] for number in step])
        optimizer.zero_grad()
        loss.backward()
        result["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        result["losses"].append(loss.item())
    return result | {"after": validate(), "model": model}


@pytest.fixture(scope="session")
def plain(tiny_model, articles_csv):
    return train_plainly(tiny_model, articles_csv, clip=1.0)


@pytest.fixture(scope="session")
def train(tiny_model, articles_csv, tmp_path_factory):
    """A function that runs settings in one launch, and returns {name: what `train_plainly` does}."""

    def run(processes, settings):
        root = tmp_path_factory.mktemp(f"on-{processes}")
        shared = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 0, "--log-every", 1]
        shared += ["--num-validation-samples", 0, "--batch-size", GLOBAL_BATCH // processes, "--test-batch-size", 3]
        shared += ["--max-steps", STEPS, "--max-source-length", SOURCE, "--max-target-length", SUMMARY]
        shared += ["--no-save-model"]
        runs = [[*shared, "--output-dir", root / name, *arguments] for name, arguments in settings.items()]
        run_many("t5_fsdp.py", runs, processes)
        results = {}
        for name in settings:
            before, after = curve(root / name, "val_loss")
            results[name] = {"losses": curve(root / name), "norms": curve(root / name, "grad_norm")}
            results[name] |= {"before": before, "after": after}
        return results

    return run


# One launch for each number of processes, and others for what may fail by itself.
@pytest.fixture(scope="session")
def exact(train):
    one = {"fsdp2 FULL_SHARD": FP32}
    few = one | {"one article": (*FP32, "--num-validation-samples", 1)}
    seed = SETTINGS | {"seed 2": (*FP32, "--seed", 2)}
    return {number: train(number, part) for number, part in ((1, one), (2, seed), (3, few), (4, SETTINGS))}


@pytest.fixture(scope="session")
def variants(train):
    return train(2, VARIANTS)


@pytest.fixture(scope="session")
def low_precision(train):
    return train(2, LOW_PRECISION)


@pytest.fixture(scope="session")
def low_precision_accumulating(train):
    """On one process, where FSDP1 shards nothing."""
    accumulating = ("--batch-size", 4, "--accumulation-steps", 2)
    return train(1, {name: (*flags, *accumulating) for name, flags in LOW_PRECISION.items()})


def assert_equal(run, plain):
    for name in ("losses", "before", "after"):
        assert run[name] == pytest.approx(plain[name], **CLOSE), name
    assert run["norms"] == pytest.approx(plain["norms"], abs=1e-4)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_equals_a_plain_loop(exact, plain, processes, name):
    assert_equal(exact[processes][name], plain)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_validation_is_exact_on_any_number_of_processes(exact, plain, processes):
    assert exact[processes]["fsdp2 FULL_SHARD"]["before"] == pytest.approx(plain["before"], **CLOSE)


def test_one_article_can_be_validated_on_three_processes(exact, plain):
    assert exact[3]["one article"]["before"] == pytest.approx(plain["one"], **CLOSE)


def test_gradients_are_clipped_to_1(plain, tiny_model, articles_csv):
    """Without clipping, the plain loop that all others equal is another one."""
    unclipped = train_plainly(tiny_model, articles_csv, clip=math.inf)
    assert max(plain["norms"]) > 1 and unclipped["after"] != pytest.approx(plain["after"], abs=1e-4)


def test_another_seed_is_another_order(exact, plain):
    assert exact[2]["seed 2"]["before"] == pytest.approx(plain["before"], **CLOSE)
    assert exact[2]["seed 2"]["losses"][0] != pytest.approx(plain["losses"][0], abs=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_checkpointing_prefetch_accumulation_and_offload_change_no_number(variants, plain, name):
    assert_equal(variants[name], plain)


@pytest.mark.parametrize("runs", ["low_precision", "low_precision_accumulating"])
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_stays_within_two_percent_and_differs(runs, plain, name, request):
    run = request.getfixturevalue(runs)[name]
    assert run["losses"] == pytest.approx(plain["losses"], rel=0.02)
    assert run["after"] == pytest.approx(plain["after"], rel=0.02)
    assert run["losses"] != pytest.approx(plain["losses"], abs=1e-6)  # the policy did something
