"""FSDP changes where a model lives, not what it learns. Every script is compared with a loop without FSDP in one
process. T5 and the LM are also compared with transformers' own trainers, on models that transformers shards.

Losses, gradient norms and validation losses agree to 1e-5, after several steps of Adam to 1e-4: on two processes by
default, and in the long tests on one, three and four. All runs are compared with the same loop, so with each other too.
"""

import functools
import itertools
import json
import math

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

import pytest
from conftest import AFTER_ADAM, CLOSE, SAVE_ON_CPU, SMALL, VERSIONS, check_curves, curve, long, records, run_many
from plain import lm_samples, t5_ordered, t5_samples, train_lm, train_plainly, train_t5
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5ForConditionalGeneration

from inside import LM_STRATEGIES, NETWORKS, T5_STRATEGIES, draw_digits, parse, t5_articles

STEPS = 4
GLOBAL_BATCH = 24  # divisible by 1, 2, 3, 4 and 8 processes; the LM has eight streams, or twelve on 3 processes
SEED = 3  # no flag here has its default value, so a test would notice a flag that is ignored


@pytest.fixture
def train(tiny_model, articles_csv, tiny_llama, texts, small_mnist, tmp_path):
    """A function that runs a script with each setting, in one launch. A setting's output folder has its name."""

    def run(script, settings, processes, **options):
        if script == "t5_fsdp.py":
            shared = (*T5, "--model", tiny_model, "--dataset", articles_csv)
        elif script == "lm_multinode.py":
            shared = (*LM, "--model", tiny_llama, "--dataset", texts)
        else:
            shared = (*MNIST, "--data-dir", small_mnist)
        if not script.startswith("mnist"):
            # On 1, 2, 3 and 4 processes these make 5, 3, 2 and 2 micro-batches. The last one is smaller.
            shared = (*shared, "--global-batch-size", GLOBAL_BATCH, "--micro-batch-size", 5)
        settings = {tmp_path / name: (*shared, "--seed", SEED, *flags) for name, flags in settings.items()}
        return run_many(script, settings, processes, **options)

    return run


def read_shards(folder, rank=0):
    return json.loads((folder / f"shards-{rank}.json").read_text())


# ---- t5_fsdp.py ------------------------------------------------------------------------------------------------------
LENGTHS = (40, 12)  # tokens of articles and of summaries; half of them are longer
HELD_OUT = 5  # articles
T5 = ("--max-source-length", LENGTHS[0], "--max-target-length", LENGTHS[1], "--num-train-samples", 0, "--lr", 2e-3)
T5 = (*T5, "--num-validation-samples", HELD_OUT, "--max-steps", STEPS, "--log-every", 1, "--no-save-model")
T5 = (*T5, "--precision", "fp32")
T5_ROWS = {}
for version, strategy in itertools.product(VERSIONS, T5_STRATEGIES):
    T5_ROWS[f"fsdp{version} {strategy}"] = ("--fsdp-version", version, "--sharding-strategy", strategy)
T5_ROWS["fsdp2 SHARD_GRAD_OP"] += ("--activation-checkpointing", "--cpu-offload", "--layers-per-unit", 2)
# Speed and memory settings. A single article counts once, although each process must validate one.
MORE_T5_ROWS = {
    "fsdp1 recomputing": ("--fsdp-version", 1, "--activation-checkpointing"),
    "fsdp1 without prefetch": ("--fsdp-version", 1, "--backward-prefetch", "none"),
    "fsdp1 late prefetch": ("--fsdp-version", 1, "--backward-prefetch", "post"),
    "fsdp2 without prefetch": ("--backward-prefetch", "none"),
    "one micro-batch": ("--micro-batch-size", GLOBAL_BATCH, "--test-batch-size", 1),
    "one article": ("--num-validation-samples", 1),
}


@functools.cache
def train_t5_plainly(model_folder, csv, held_out=HELD_OUT):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    samples = [t5_samples(articles, tokenizer, *LENGTHS) for articles in t5_articles(csv)]
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    return train_t5(model, tokenizer, samples, GLOBAL_BATCH, held_out, STEPS, 2e-3, SEED)[0]


@pytest.mark.parametrize(
    "processes, rows",
    [(2, T5_ROWS), long(1, T5_ROWS), long(2, MORE_T5_ROWS), long(3, T5_ROWS), long(4, T5_ROWS)],
)
def test_t5_equals_a_plain_loop(train, tiny_model, articles_csv, processes, rows, tmp_path):
    train("t5_fsdp.py", rows, processes, change=["record_shards"])
    for name, flags in rows.items():
        held_out = 1 if name == "one article" else HELD_OUT
        check_curves(tmp_path / name, train_t5_plainly(tiny_model, articles_csv, held_out))
        assert set(read_shards(tmp_path / name)["offloaded"]) <= {"--cpu-offload" in flags}, name
        assert not read_shards(tmp_path / name)["cudnn"]  # its gradients may be NaN


# ---- lm_multinode.py -------------------------------------------------------------------------------------------------
LM = (*SMALL, "--lr", 5e-3, "--weight-decay", 0.5, "--max-steps", STEPS, "--no-save-model")
LM = (*LM, "--num-validation-texts", 1)
LM_ROWS = {name: ("--sharding-strategy", name) for name in LM_STRATEGIES}
LM_ROWS["_HYBRID_SHARD_ZERO2"] += ("--activation-checkpointing", "--cpu-offload")
LM_ROWS["SHARD_GRAD_OP"] += ("--gradient-sync", "last")
LM_ROWS["HYBRID_SHARD"] += ("--layers-per-unit", 2)


@functools.cache
def train_lm_plainly(model_folder, texts, processes=1):
    args = parse("lm_multinode.py", *LM, "--dataset", texts, "--global-batch-size", GLOBAL_BATCH, "--seed", SEED)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    return train_lm(model, AutoTokenizer.from_pretrained(model_folder), args, size=processes)[0]


@pytest.mark.parametrize("processes", [2, long(1), long(3), long(4)])
def test_the_lm_equals_a_plain_loop(train, tiny_llama, texts, processes, tmp_path):
    shards = 2 if processes == 4 else 1
    rows = {name: (*flags, "--shards-per-replica", shards) for name, flags in LM_ROWS.items()}
    train("lm_multinode.py", rows, processes, change=["record_shards"])
    for name, flags in rows.items():
        # Each of 3 processes has four of twelve streams.
        check_curves(tmp_path / name, train_lm_plainly(tiny_llama, texts, 3 if processes == 3 else 1))
        assert set(read_shards(tmp_path / name)["offloaded"]) <= {"--cpu-offload" in flags}, name
        # Processes that hold the same shard hold the same bits. No others do.
        num_shards = shards if "HYBRID" in name else {"NO_SHARD": 1}.get(name, processes)
        sums = [read_shards(tmp_path / name, rank)["sums"] for rank in range(processes)]
        assert sums == [sums[rank % num_shards] for rank in range(processes)], name
        assert len(set(map(tuple, sums))) == num_shards, name


@pytest.mark.long
def test_bf16_is_close_and_auto_is_fp32_on_a_cpu(train, tiny_llama, texts, tiny_model, articles_csv, tmp_path):
    """In bf16, losses stay within two percent of the plain ones, but differ from them, so the flag did something."""
    auto = ("--precision", "auto", "--device", "cpu")
    train("lm_multinode.py", {"auto": auto, "lm bf16": ("--precision", "bf16")}, 2)
    check_curves(tmp_path / "auto", train_lm_plainly(tiny_llama, texts))
    rows = {}
    for version, precision in itertools.product(VERSIONS, ("bf16", "bf16-reduce", "grad-bf16")):
        rows[f"t5 fsdp{version} {precision}"] = ("--fsdp-version", version, "--precision", precision)
    train("t5_fsdp.py", rows, 2)
    for folder in (tmp_path / name for name in ("lm bf16", *rows)):
        is_lm = folder.name.startswith("lm")
        plain = train_lm_plainly(tiny_llama, texts) if is_lm else train_t5_plainly(tiny_model, articles_csv)
        assert curve(folder) == pytest.approx(plain[0], rel=0.02), folder
        assert curve(folder, "val_loss") == pytest.approx(plain[2], rel=0.02), folder
        assert curve(folder) != pytest.approx(plain[0], abs=1e-6), folder


# ---- transformers' own trainers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", ["lm_multinode.py", long("t5_fsdp.py")])
def test_transformers_own_trainer_learns_the_same(train, script, tiny_llama, texts, tiny_model, articles_csv, tmp_path):
    """transformers shards the model and gets the same samples, in other micro-batches."""
    if script == "t5_fsdp.py":
        model, decay = tiny_model, ()
        samples = t5_samples(t5_articles(articles_csv)[0], AutoTokenizer.from_pretrained(model), *LENGTHS)
        samples = list(itertools.chain.from_iterable(t5_ordered(samples, GLOBAL_BATCH, seed=SEED)[:STEPS]))
    else:
        model, decay = tiny_llama, ("--weight-decay", 0.1)  # as in tests/oracle.py
        args = parse(script, *LM, "--dataset", texts, "--global-batch-size", GLOBAL_BATCH, "--seed", SEED)
        samples = lm_samples(args, AutoTokenizer.from_pretrained(model), STEPS)
    train(script, {"ours": decay}, 2)

    task = {"model": str(model), "samples": samples, "batch_size": GLOBAL_BATCH, "micro_batch_size": 3, "log_every": 1}
    task["rates"] = curve(tmp_path / "ours", "lr")
    (tmp_path / "task.json").write_text(json.dumps(task))
    run_many("tests/oracle.py", {tmp_path / "theirs": [tmp_path / "task.json"]}, 2, CUDA_VISIBLE_DEVICES="")
    check_curves(tmp_path / "ours", [curve(tmp_path / "theirs")])
    assert curve(tmp_path / "ours", "grad_norm") == pytest.approx(curve(tmp_path / "theirs", "grad_norm"), rel=1e-3)


# ---- mnist_fsdp.py and its twin --------------------------------------------------------------------------------------
IMAGES = 3 * GLOBAL_BATCH  # out of 90 training images; an incomplete last batch is left out
EPOCHS = 2
RATES = {"shallow": 0.002, "xpu": 0.1}  # learning rates
MNIST = ("--dataset", "mnist", "--epochs", EPOCHS, "--global-batch-size", GLOBAL_BATCH)


def digits(count, seed):
    """The images of `small_mnist`, normalized as in the notebook, and their labels."""
    images, labels = draw_digits(count, seed).tensors
    return ((images.clamp(0, 1) * 255).round() / 255 - 0.1307) / 0.3081, labels


@torch.no_grad()
def score(model):
    images, labels = digits(100, 1)
    outputs = model(images)
    return F.nll_loss(outputs, labels).item(), (outputs.argmax(1) == labels).sum().item() / 100


@functools.cache
def train_mnist_plainly(network):
    """Adam gets the gradient of the mean over a step's images. Adadelta gets that of the sum, as in its document."""
    pixels, labels = digits(90, 0)
    order = DistributedSampler(pixels, num_replicas=1, rank=0, seed=SEED)
    torch.manual_seed(SEED)
    model = NETWORKS[network]()
    for dropout in (model.dropout1, model.dropout2):
        dropout.p = 0.0
    optimizer, gamma, reduction = torch.optim.Adam(model.parameters()), 1.0, "mean"
    if network == "xpu":
        optimizer, gamma, reduction = torch.optim.Adadelta(model.parameters()), 0.5, "sum"

    def loss_of(indices):
        return F.nll_loss(model(pixels[indices]), labels[indices], reduction=reduction)

    results = []
    for epoch in range(1, EPOCHS + 1):
        order.set_epoch(epoch)
        batches = torch.tensor(list(order)[:IMAGES]).split(GLOBAL_BATCH)
        losses = [functools.partial(loss_of, indices) for indices in batches]
        epoch_rate = RATES[network] * gamma ** (epoch - 1)
        values, _ = train_plainly(optimizer, losses, lambda step, rate=epoch_rate: rate, clip=math.inf)
        total = sum(values) * (GLOBAL_BATCH if reduction == "mean" else 1)
        results.append((total / IMAGES, *score(model)))
    return results


def epochs_of(folder):
    return [(row["loss"], row["test_loss"], row["accuracy"]) for row in records(folder, "loss")]


@pytest.mark.parametrize("network", ["shallow", "xpu"])
@pytest.mark.parametrize("processes", [2, long(3), long(4)])
def test_mnist_equals_a_plain_loop(train, processes, network, tmp_path):
    """Three processes cannot divide 100 test images, nor the weights. A saved model has the score that was reported."""
    script, shared, tolerance = "mnist_fsdp.py", ("--model", "shallow", "--lr", RATES[network]), AFTER_ADAM
    if network == "xpu":
        script, shared, tolerance = "mnist_fsdp_xpu.py", ("--gamma", 0.5, "--lr", RATES[network]), CLOSE
    if processes == 2:
        train(script, {"local": (*shared, "--save-model")}, None, change=["no_dropout"])
    rows = {"small units": (*shared, "--min-num-params", 2000, "--test-batch-size", 21)}
    for version in VERSIONS:
        saving = "--save-model" if version in SAVE_ON_CPU else "--no-save-model"
        rows[f"fsdp{version}"] = (*shared, "--fsdp-version", version, saving)
    train(script, rows, processes, change=["no_dropout"])

    for folder in tmp_path.iterdir():
        plain = [pytest.approx(row, **tolerance) for row in train_mnist_plainly(network)]
        assert epochs_of(folder) == plain, folder
        for saved in folder.rglob("*.safetensors"):
            model = NETWORKS[network]().eval()
            model.load_state_dict(load_file(saved))
            assert score(model) == pytest.approx(epochs_of(folder)[-1][1:], **CLOSE), saved
    num_saved = len(SAVE_ON_CPU) + (tmp_path / "local").exists()
    assert len(list(tmp_path.rglob("*.safetensors"))) == num_saved
