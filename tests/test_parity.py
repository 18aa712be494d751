"""FSDP changes where a model lives and not what it learns: every script against a loop without FSDP in one process.

Losses, gradient norms and validation losses agree to 1e-5, after several steps of Adam to 1e-4: on two processes by
default, in the long tests on one, three and four. All are compared with the same loop, and so with each other.
"""

import functools
import itertools
import json
import math

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

import pytest
from conftest import AFTER_ADAM, CLOSE, CURVES, SAVE_ON_CPU, VERSIONS, check_curves, curve, near, records, run_many
from plain import adamw, cross_entropy, lm_batches, t5_batches, t5_loss, t5_samples, train_and_validate, train_plainly
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5ForConditionalGeneration

from inside import (
    LM_STRATEGIES,
    NETWORKS,
    T5_STRATEGIES,
    builtin_article,
    draw_digits,
    lm_held_out,
    parse,
    t5_articles,
)

STEPS = 4
GLOBAL_BATCH = 12  # for 1, 2, 3 and 4 processes


def two_and_long(*others):
    """A test on two processes; on others it is long."""
    numbers = [2, *(pytest.param(number, marks=pytest.mark.long) for number in others)]
    return pytest.mark.parametrize("processes", numbers)


def micro_batch(processes):
    """The articles of each of the two micro-batches in a step; on 4 processes there are three."""
    return GLOBAL_BATCH // processes // 2


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """200 of the built-in articles, one a line."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(json.dumps(builtin_article(number)) for number in range(200)))
    return path


@pytest.fixture
def train(tiny_model, articles_csv, tiny_llama, texts, small_mnist, tmp_path):
    """A function that runs a script with each setting, into a folder with the setting's name, all in one launch."""

    def run(script, settings, processes, **options):
        size = micro_batch(processes)
        if script == "t5_fsdp.py":
            shared = (*T5, "--model", tiny_model, "--dataset", articles_csv, "--batch-size", size)
            shared = (*shared, "--accumulation-steps", GLOBAL_BATCH // processes // size)
        elif script == "lm_multinode.py":
            shared = (*LM, "--model", tiny_llama, "--dataset", texts)
        else:
            shared = (*MNIST, "--data-dir", small_mnist, "--batch-size", GLOBAL_BATCH)
        settings = {tmp_path / name: (*shared, *flags) for name, flags in settings.items()}
        return run_many(script, settings, processes, **options)

    return run


def differs(values, others, least):
    return max(abs(value - other) for value, other in zip(values, others, strict=True)) > least


def check_low_precision(folder, exact):
    """Losses stay within two percent, and show that the flag did something."""
    assert curve(folder) == pytest.approx(exact, rel=0.02), folder
    assert differs(curve(folder), exact, 1e-6), folder


def check_offloading(folder, flags):
    """All units offload, or none; which on a CPU changes no number."""
    seen = torch.load(folder / "model-0.pt")
    assert (seen["offloading"] > 1) == ("--cpu-offload" in flags), folder


# ---- t5_fsdp.py ------------------------------------------------------------------------------------------------------
LENGTHS = (40, 12)  # tokens of articles and of summaries, of which half are longer
HELD_OUT = 5  # articles
T5 = ("--max-source-length", LENGTHS[0], "--max-target-length", LENGTHS[1], "--num-train-samples", 0)
T5 = (*T5, "--num-validation-samples", HELD_OUT, "--max-steps", STEPS, "--log-every", 1)
T5 = (*T5, "--precision", "fp32", "--no-save-model")


@functools.cache
def train_t5_plainly(model_folder, csv, seed=1, clip=1.0, held_out=HELD_OUT):
    """Losses and gradient norms of all steps, and the validation losses before and after them."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    to_train, to_validate = (t5_samples(articles, tokenizer, *LENGTHS) for articles in t5_articles(csv))
    batches = t5_batches(to_train, tokenizer, GLOBAL_BATCH, seed)[:STEPS]
    [whole] = t5_batches(to_validate[:held_out], tokenizer, held_out)
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    optimizer = torch.optim.AdamW(model.parameters())
    return train_and_validate(model, optimizer, batches, whole, t5_loss, lambda step: 1e-3, clip)[0]


@pytest.fixture
def plain_t5(tiny_model, articles_csv):
    return functools.partial(train_t5_plainly, tiny_model, articles_csv)


@two_and_long(1, 3, 4)
def test_t5_equals_a_plain_loop(train, plain_t5, processes, tmp_path):
    """Under each strategy, while accumulating."""
    settings = {"recomputing and offloading": ("--activation-checkpointing", "--cpu-offload")}
    for version, strategy in itertools.product(VERSIONS, T5_STRATEGIES):
        settings[f"fsdp{version} {strategy}"] = ("--fsdp-version", version, "--sharding-strategy", strategy)
    train("t5_fsdp.py", settings, processes, change=["record_model"])
    for name, flags in settings.items():
        check_curves(tmp_path / name, plain_t5())
        check_offloading(tmp_path / name, flags)


@pytest.mark.long
def test_settings_of_speed_and_memory_change_no_number(train, plain_t5, tmp_path):
    """Nor the number of articles in a batch. One is counted once, also where each process must validate one."""
    settings = {
        "fsdp1": ("--fsdp-version", 1, "--sharding-strategy", "SHARD_GRAD_OP", "--test-batch-size", 1),
        "fsdp1 recomputing": ("--fsdp-version", 1, "--activation-checkpointing"),
        "fsdp1 without prefetch": ("--fsdp-version", 1, "--backward-prefetch", "none"),
        "fsdp1 late prefetch": ("--fsdp-version", 1, "--backward-prefetch", "post"),
        "fsdp2": ("--fsdp-version", 2, "--sharding-strategy", "SHARD_GRAD_OP", "--test-batch-size", 1),
        "fsdp2 without prefetch": ("--fsdp-version", 2, "--backward-prefetch", "none"),
    }
    others = {"seed": ("--seed", 2), "one article": ("--num-validation-samples", 1)}
    whole = ("--batch-size", GLOBAL_BATCH // 2, "--accumulation-steps", 1)
    train("t5_fsdp.py", {name: (*whole, *flags) for name, flags in (settings | others).items()}, 2)
    for name in settings:
        check_curves(tmp_path / name, plain_t5())
    check_curves(tmp_path / "seed", plain_t5(seed=2))
    check_curves(tmp_path / "one article", plain_t5(held_out=1))


@pytest.mark.long
@pytest.mark.parametrize("processes, versions", [(1, (1,)), (2, VERSIONS)])
def test_t5_in_low_precision_is_close(train, plain_t5, processes, versions, tmp_path):
    """While accumulating, also on one process, where FSDP1 shards nothing."""
    settings = {}
    for version, precision in itertools.product(versions, ("bf16", "grad-bf16")):
        settings[f"fsdp{version} {precision}"] = ("--fsdp-version", version, "--precision", precision)
    train("t5_fsdp.py", settings, processes)
    for name in settings:
        check_low_precision(tmp_path / name, plain_t5()[0])
        assert curve(tmp_path / name, "val_loss") == pytest.approx(plain_t5()[2], rel=0.02)


# ---- lm_multinode.py -------------------------------------------------------------------------------------------------
LM = ("--seq-length", 32, "--global-batch-size", GLOBAL_BATCH, "--num-validation-texts", 3, "--warmup-steps", 2)
LM = (
    *LM,
    "--micro-batch-size",
    1,
    "--lr",
    5e-3,
    "--max-steps",
    STEPS,
    "--log-every",
    1,
    "--precision",
    "fp32",
    "--no-save-model",
)

SHARDS = {1: 1, 2: 1, 3: 1, 4: 2}  # of a replica of the hybrids, by the number of processes


def lm_settings(processes):
    settings = {}
    for strategy in LM_STRATEGIES:
        settings[strategy] = ("--sharding-strategy", strategy)
        if strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            settings[strategy] += ("--shards-per-replica", SHARDS[processes])
    return settings


def lm_rate(step):
    """A warm-up of two steps to the default, then a cosine to a tenth of it."""
    if step < 2:
        return 5e-3 * step / 2
    return 5e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2))))


@functools.cache
def train_lm_plainly(model_folder, texts, seed=1, micro_batch=1, weight_decay=0.1, clip=1.0):
    """Losses and gradient norms of all steps, and the validation losses before and after them."""
    args = parse("lm_multinode.py", *LM, "--dataset", texts, "--micro-batch-size", micro_batch, "--seed", seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    batches = itertools.islice(lm_batches(args, tokenizer), STEPS)
    held_out = lm_held_out(args, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    optimizer = adamw(model, weight_decay)
    return train_and_validate(model, optimizer, batches, held_out, cross_entropy, lm_rate, clip)[0]


@pytest.fixture
def plain_lm(tiny_llama, texts):
    return functools.partial(train_lm_plainly, tiny_llama, texts)


def check_replicas(folder, processes, flags):
    """The processes that hold the same shards hold the same bits; no others do."""
    shards = processes
    if "NO_SHARD" in flags:
        shards = 1
    elif "--shards-per-replica" in flags:
        shards = flags[flags.index("--shards-per-replica") + 1]
    sums = [torch.load(folder / f"model-{rank}.pt")["sums"].tolist() for rank in range(processes)]
    assert sums == [sums[rank % shards] for rank in range(processes)], folder
    assert len(set(map(tuple, sums))) == shards, folder


@two_and_long(1, 3, 4)
def test_the_lm_equals_a_plain_loop(train, plain_lm, processes, tmp_path):
    """Under each strategy, while accumulating."""
    settings = lm_settings(processes)
    settings["recomputing and offloading"] = ("--activation-checkpointing", "--cpu-offload")
    train("lm_multinode.py", settings, processes, change=["record_model"])
    for name, flags in settings.items():
        check_curves(tmp_path / name, plain_lm())
        check_replicas(tmp_path / name, processes, flags)
        check_offloading(tmp_path / name, flags)


@pytest.mark.long
def test_the_lm_equals_a_plain_loop_with_other_settings(train, plain_lm, tmp_path):
    settings = {
        "hybrid of one shard": (("--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 1), {}),
        "one large batch": (("--micro-batch-size", GLOBAL_BATCH // 2), {"micro_batch": GLOBAL_BATCH // 2}),
        "other seed": (("--seed", 2), {"seed": 2}),
        "no decay": (("--weight-decay", 0), {"weight_decay": 0}),
    }
    train("lm_multinode.py", {name: flags for name, (flags, _) in settings.items()}, 2)
    for name, (_, changes) in settings.items():
        check_curves(tmp_path / name, plain_lm(**changes))
    for record in records(tmp_path / "no decay", "val_loss"):
        assert record["perplexity"] == pytest.approx(math.exp(record["val_loss"]))


@pytest.mark.long
def test_built_in_weights_are_those_of_the_seed_on_any_number_of_processes(train, tmp_path):
    first = {}  # the validation loss before training, by processes and seed
    for processes in (1, 3):
        runs = {f"{processes} {seed}": ("--model", "tiny", "--max-steps", 1, "--seed", seed) for seed in (1, 2)}
        train("lm_multinode.py", runs, processes)
        first |= {name: curve(tmp_path / name, "val_loss")[0] for name in runs}
    for seed in (1, 2):
        assert first[f"3 {seed}"] == pytest.approx(first[f"1 {seed}"], **CLOSE)
    assert abs(first["1 1"] - first["1 2"]) > 1e-3


@pytest.mark.long
def test_the_lm_in_bf16_is_close_and_auto_is_fp32_on_a_cpu(train, plain_lm, tmp_path):
    train("lm_multinode.py", {name: ("--precision", name) for name in ("auto", "bf16")}, 2)
    check_curves(tmp_path / "auto", plain_lm())
    check_low_precision(tmp_path / "bf16", plain_lm()[0])


# ---- mnist_fsdp.py and its twin --------------------------------------------------------------------------------------
IMAGES = 3 * GLOBAL_BATCH
MNIST = ("--dataset", "mnist", "--num-train-samples", IMAGES, "--epochs", 2)


def digits(count, seed):
    """The images that `small_mnist` holds, in the notebook's scale, and their labels."""
    images, labels = draw_digits(count, seed).tensors
    return ((images.clamp(0, 1) * 255).round() / 255 - 0.1307) / 0.3081, labels


@torch.no_grad()
def score(model):
    """The loss and the accuracy over the 100 test images."""
    images, labels = digits(100, 1)
    outputs = model(images)
    return F.nll_loss(outputs, labels).item(), (outputs.argmax(1) == labels).sum().item() / 100


@functools.cache
def train_mnist_plainly(network, epochs=2, seed=1, lr=None, batch_size=GLOBAL_BATCH, images=IMAGES):
    """The loss, the test loss and the accuracy of each epoch.

    Adam gets the gradient of the mean over a step's images. Adadelta gets that of the sum, as in its document.
    """
    pixels, labels = (tensor[:images] for tensor in digits(192, 0))
    order = DistributedSampler(pixels, num_replicas=1, rank=0, seed=seed)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    for dropout in (model.dropout1, model.dropout2):
        dropout.p = 0.0
    optimizer, first_rate, gamma, reduction = torch.optim.Adam(model.parameters()), lr or 0.001, 1.0, "mean"
    if network == "xpu":
        optimizer, first_rate, gamma, reduction = torch.optim.Adadelta(model.parameters()), lr or 0.1, 0.5, "sum"

    def loss_of(numbers):
        return F.nll_loss(model(pixels[numbers]), labels[numbers], reduction=reduction)

    results = []
    for epoch in range(1, epochs + 1):
        order.set_epoch(epoch)
        losses = [functools.partial(loss_of, numbers) for numbers in torch.tensor(list(order)).split(batch_size)]
        epoch_rate = first_rate * gamma ** (epoch - 1)
        values, _ = train_plainly(optimizer, losses, lambda step, rate=epoch_rate: rate, clip=math.inf)
        total = sum(values) * (batch_size if reduction == "mean" else 1)
        results.append((total / images, *score(model)))
    return results


def epochs_of(folder):
    return [(row["loss"], row["test_loss"], row["accuracy"]) for row in records(folder, "loss")]


def check_epochs(folder, plain, tolerance):
    assert epochs_of(folder) == [pytest.approx(row, **tolerance) for row in plain], folder


def check_saved(root, network, count):
    """The networks that were saved below a folder have the scores that were reported."""
    paths = list(root.rglob("*.safetensors"))
    assert len(paths) == count
    for path in paths:
        model = NETWORKS[network]().eval()
        model.load_state_dict(load_file(path))
        folder = path.parent if network == "xpu" else path.parents[1]
        assert score(model) == pytest.approx(epochs_of(folder)[-1][1:], **CLOSE), path


@pytest.mark.parametrize("network", ["shallow", "xpu"])
@two_and_long(3, 4)
def test_digits_are_learned_as_by_a_plain_loop(train, processes, network, tmp_path):
    """By Adam, and by Adadelta with a learning rate that falls; so the sharded half of MNIST learns what the local one
    does. Three cannot divide 100 test images, nor the weights. What is saved has the score that is reported."""
    script, shared, tolerance = "mnist_fsdp.py", ("--model", "shallow"), AFTER_ADAM
    if network == "xpu":
        script, shared, tolerance = "mnist_fsdp_xpu.py", ("--lr", 0.1, "--gamma", 0.5), CLOSE
    elif processes == 2:
        train(script, {"local": (*shared, "--mode", "local", "--save-model")}, 1, change=["no_dropout"])
    settings = {"small units": (*shared, "--min-num-params", 2000, "--test-batch-size", 7 * processes)}
    for version in VERSIONS:
        saving = "--save-model" if version in SAVE_ON_CPU else "--no-save-model"
        settings[f"fsdp{version}"] = (*shared, "--fsdp-version", version, saving)
    shown = train(script, settings, processes, change=["show_test_batches"]).stdout
    assert shown.count("test batches of 7\n") == 2 * processes  # epochs, in all processes

    plain = train_mnist_plainly(network)
    for name in settings:
        check_epochs(tmp_path / name, plain, tolerance)
    if (tmp_path / "local").exists():
        check_epochs(tmp_path / "local", plain, tolerance)
    check_saved(tmp_path, network, len(SAVE_ON_CPU) + (tmp_path / "local").exists())


@pytest.mark.long
@pytest.mark.parametrize("network, script", [("shallow", "mnist_fsdp.py"), ("xpu", "mnist_fsdp_xpu.py")])
def test_each_flag_of_mnist_is_what_it_says(train, network, script, tmp_path):
    """One at a time, against the plain loop with the same change."""
    changes = {"epochs": 1, "seed": 2, "lr": 0.01, "batch_size": 6, "images": 24}
    shared = ("--lr", 0.1, "--gamma", 0.5) if network == "xpu" else ("--model", network)
    settings = {}
    for name, value in changes.items():
        flag = "--num-train-samples" if name == "images" else f"--{name.replace('_', '-')}"
        settings[name] = (*shared, flag, value)
    train(script, settings, 1, change=["no_dropout"])
    for name, value in changes.items():
        plain = train_mnist_plainly(network, **{name: value})
        check_epochs(tmp_path / name, plain, AFTER_ADAM if network == "shallow" else CLOSE)


# ---- The comparison --------------------------------------------------------------------------------------------------
def furthest(curves, other):
    """How many times what the tests above allow is between some value of two plain loops."""
    times = []
    for name, values, others in zip(CURVES, curves, other, strict=True):
        allowed = [expected.tolerance for expected in near(name, values)]
        times += [abs(value - o) / limit for value, o, limit in zip(values, others, allowed, strict=True)]
    return max(times)


def test_other_clipping_decay_or_order_would_be_noticed(plain_t5, plain_lm):
    """Each changes a loss or a gradient norm of the plain loops by more than ten times what the tests above allow."""
    for other in (plain_t5(clip=math.inf), plain_t5(seed=2)):
        assert furthest(plain_t5(), other) > 10
    for other in (plain_lm(clip=math.inf), plain_lm(seed=2), plain_lm(weight_decay=0)):
        assert furthest(plain_lm(), other) > 10
