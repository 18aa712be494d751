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
from conftest import AFTER_ADAM, CLOSE, SAVE_ON_CPU, SMALL, VERSIONS, check_curves, curve, make_llama, records, run_many
from plain import lm_samples, t5_ordered, t5_samples, train_lm, train_plainly, train_t5
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, T5ForConditionalGeneration

from inside import LM_STRATEGIES, NETWORKS, T5_STRATEGIES, builtin_article, draw_digits, parse, t5_articles

STEPS = 4
GLOBAL_BATCH = 24  # divisible by 1, 2, 3, 4 and 8 processes; the LM has eight streams, or six on 3 processes
SEED = 3  # no flag here has its default value, so a test would notice a flag that is ignored


def two_and_long(*long_counts):
    """Run a test on two processes, and as a long test on the other numbers."""
    counts = [2, *(pytest.param(count, marks=pytest.mark.long) for count in long_counts)]
    return pytest.mark.parametrize("processes", counts)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(json.dumps(builtin_article(index)) for index in range(200)))
    return path


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


def check_low_precision(folder, plain):
    """Losses stay within two percent of the plain ones, but differ from them, so the flag did something."""
    for name, exact in zip(("loss", "val_loss"), plain[::2], strict=True):
        assert curve(folder, name) == pytest.approx(exact, rel=0.02), folder
    assert curve(folder) != pytest.approx(plain[0], abs=1e-6), folder


def read_shards(folder, rank=0):
    return json.loads((folder / f"shards-{rank}.json").read_text())


# ---- t5_fsdp.py ------------------------------------------------------------------------------------------------------
LENGTHS = (40, 12)  # tokens of articles and of summaries; half of them are longer
HELD_OUT = 5  # articles
T5 = ("--max-source-length", LENGTHS[0], "--max-target-length", LENGTHS[1], "--num-train-samples", 0, "--lr", 2e-3)
T5 = (*T5, "--num-validation-samples", HELD_OUT, "--max-steps", STEPS, "--log-every", 1, "--no-save-model")
T5 = (*T5, "--precision", "fp32")


@functools.cache
def train_t5_plainly(model_folder, csv, held_out=HELD_OUT):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    samples = [t5_samples(articles, tokenizer, *LENGTHS) for articles in t5_articles(csv)]
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    return train_t5(model, tokenizer, samples, GLOBAL_BATCH, held_out, STEPS, 2e-3, SEED)[0]


@two_and_long(1, 3, 4)
def test_t5_equals_a_plain_loop(train, tiny_model, articles_csv, processes, tmp_path):
    settings = {"recomputing and offloading": ("--activation-checkpointing", "--cpu-offload")}
    for version, strategy in itertools.product(VERSIONS, T5_STRATEGIES):
        settings[f"fsdp{version} {strategy}"] = ("--fsdp-version", version, "--sharding-strategy", strategy)
    train("t5_fsdp.py", settings, processes, change=["record_shards"])
    for name, flags in settings.items():
        check_curves(tmp_path / name, train_t5_plainly(tiny_model, articles_csv))
        assert set(read_shards(tmp_path / name)["offloaded"]) <= {"--cpu-offload" in flags}, name


@pytest.mark.long
def test_speed_and_memory_settings_change_no_loss(train, tiny_model, articles_csv, tmp_path):
    """--test-batch-size changes none either. A single article counts once, although each process must validate one."""
    settings = {
        "fsdp1": ("--fsdp-version", 1, "--sharding-strategy", "SHARD_GRAD_OP", "--test-batch-size", 1),
        "fsdp1 recomputing": ("--fsdp-version", 1, "--activation-checkpointing"),
        "fsdp1 without prefetch": ("--fsdp-version", 1, "--backward-prefetch", "none"),
        "fsdp1 late prefetch": ("--fsdp-version", 1, "--backward-prefetch", "post"),
        "fsdp2": ("--fsdp-version", 2, "--sharding-strategy", "SHARD_GRAD_OP", "--test-batch-size", 1),
        "fsdp2 without prefetch": ("--fsdp-version", 2, "--backward-prefetch", "none"),
        "one article": ("--num-validation-samples", 1),
    }
    whole = ("--micro-batch-size", GLOBAL_BATCH)
    train("t5_fsdp.py", {name: (*whole, *flags) for name, flags in settings.items()}, 2)
    for name in settings:
        count = 1 if name == "one article" else HELD_OUT
        check_curves(tmp_path / name, train_t5_plainly(tiny_model, articles_csv, count))


@pytest.mark.long
@pytest.mark.parametrize("processes, versions", [(1, (1,)), (2, VERSIONS)])
def test_t5_in_low_precision_is_close(train, tiny_model, articles_csv, processes, versions, tmp_path):
    """With gradient accumulation, and also on one process, where FSDP1 shards nothing."""
    settings = {}
    for version, precision in itertools.product(versions, ("bf16", "bf16-reduce", "grad-bf16")):
        settings[f"fsdp{version} {precision}"] = ("--fsdp-version", version, "--precision", precision)
    train("t5_fsdp.py", settings, processes)
    for name in settings:
        check_low_precision(tmp_path / name, train_t5_plainly(tiny_model, articles_csv))


# ---- lm_multinode.py -------------------------------------------------------------------------------------------------
LM = (*SMALL, "--lr", 5e-3, "--weight-decay", 0.5, "--max-steps", STEPS, "--no-save-model")


@functools.cache
def train_lm_plainly(model_folder, texts, processes=1):
    args = parse("lm_multinode.py", *LM, "--dataset", texts, "--global-batch-size", GLOBAL_BATCH, "--seed", SEED)
    model, tokenizer = (kind.from_pretrained(model_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    return train_lm(model, tokenizer, args, size=processes)[0]


@two_and_long(1, 3, 4)
def test_the_lm_equals_a_plain_loop(train, tiny_llama, texts, processes, tmp_path):
    shards = 2 if processes == 4 else 1
    settings = {name: ("--sharding-strategy", name, "--shards-per-replica", shards) for name in LM_STRATEGIES}
    settings["recomputing and offloading"] = ("--activation-checkpointing", "--cpu-offload")
    settings["reduced once"] = ("--gradient-sync", "last")
    train("lm_multinode.py", settings, processes, change=["record_shards"])
    for name, flags in settings.items():
        # Each of 3 processes has two of six streams.
        check_curves(tmp_path / name, train_lm_plainly(tiny_llama, texts, 3 if processes == 3 else 1))
        assert set(read_shards(tmp_path / name)["offloaded"]) <= {"--cpu-offload" in flags}, name
        # Processes that hold the same shard hold the same bits. No others do.
        num_shards = shards if "HYBRID" in name else {"NO_SHARD": 1}.get(name, processes)
        sums = [read_shards(tmp_path / name, rank)["sums"] for rank in range(processes)]
        assert sums == [sums[rank % num_shards] for rank in range(processes)], name
        assert len(set(map(tuple, sums))) == num_shards, name


@pytest.mark.long
def test_the_lm_in_one_large_micro_batch_in_bf16_and_in_auto_which_is_fp32_on_a_cpu(train, tiny_llama, texts, tmp_path):
    settings = {name: ("--precision", name) for name in ("auto", "bf16")}
    settings["large"] = ("--micro-batch-size", GLOBAL_BATCH)
    train("lm_multinode.py", settings, 2)
    check_curves(tmp_path / "large", train_lm_plainly(tiny_llama, texts))
    check_curves(tmp_path / "auto", train_lm_plainly(tiny_llama, texts))
    check_low_precision(tmp_path / "bf16", train_lm_plainly(tiny_llama, texts))


@pytest.mark.long
def test_the_seed_alone_decides_the_first_weights_of_a_built_in_model(train, tmp_path):
    first = {}  # the validation losses before training, one for each seed
    for processes in (1, 3):
        runs = {f"{processes} {seed}": ("--model", "tiny", "--max-steps", 1, "--seed", seed) for seed in (1, 2)}
        train("lm_multinode.py", runs, processes)
        first[processes] = [curve(tmp_path / name, "val_loss")[0] for name in runs]
    assert first[3] == pytest.approx(first[1], **CLOSE)
    assert abs(first[1][0] - first[1][1]) > 1e-3


# ---- transformers' own trainers --------------------------------------------------------------------------------------
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2}  # two cannot divide three


@two_and_long(1)
@pytest.mark.parametrize("kind", ["dense", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("experts", "T5"))])
def test_transformers_own_trainer_learns_the_same(
    train, kind, processes, tiny_llama, texts, tiny_model, articles_csv, tmp_path
):
    """transformers shards the model and gets the same samples, in other micro-batches."""
    script, model = "lm_multinode.py", tiny_llama
    if kind == "T5":
        script, model = "t5_fsdp.py", tiny_model
    elif kind == "experts":
        model = make_llama(tmp_path / "experts", MixtralConfig, **EXPERTS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if kind == "T5":
        steps = t5_ordered(t5_samples(t5_articles(articles_csv)[0], tokenizer, *LENGTHS), GLOBAL_BATCH, seed=SEED)
        samples = list(itertools.chain.from_iterable(steps[:STEPS]))
    else:
        args = parse(script, *LM, "--dataset", texts, "--global-batch-size", GLOBAL_BATCH, "--seed", SEED)
        samples = lm_samples(args, tokenizer, STEPS)
    decay = () if kind == "T5" else ("--weight-decay", 0.1)  # as in tests/oracle.py
    train(script, {"ours": ("--model", model, *decay)}, processes)

    task = {"model": str(model), "samples": samples, "batch_size": GLOBAL_BATCH, "micro_batch_size": 3, "log_every": 1}
    task["rates"] = curve(tmp_path / "ours", "lr")
    (tmp_path / "task.json").write_text(json.dumps(task))
    settings = {tmp_path / "theirs": [tmp_path / "task.json"]}
    run_many("tests/oracle.py", settings, processes if processes > 1 else None, CUDA_VISIBLE_DEVICES="")
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
@two_and_long(3, 4)
def test_mnist_equals_a_plain_loop(train, processes, network, tmp_path):
    """Three processes cannot divide 100 test images, nor the weights. A saved model has the score that was reported."""
    script, shared, tolerance = "mnist_fsdp.py", ("--model", "shallow", "--lr", RATES[network]), AFTER_ADAM
    if network == "xpu":
        script, shared, tolerance = "mnist_fsdp_xpu.py", ("--gamma", 0.5, "--lr", RATES[network]), CLOSE
    else:
        train(script, {"local": (*shared, "--mode", "local", "--save-model")}, None, change=["no_dropout"])
    settings = {"small units": (*shared, "--min-num-params", 2000, "--test-batch-size", 21)}
    for version in VERSIONS:
        saving = "--save-model" if version in SAVE_ON_CPU else "--no-save-model"
        settings[f"fsdp{version}"] = (*shared, "--fsdp-version", version, saving)
    train(script, settings, processes, change=["no_dropout"])

    plain = train_mnist_plainly(network)
    for folder in tmp_path.iterdir():
        assert epochs_of(folder) == [pytest.approx(row, **tolerance) for row in plain], folder
    saved = list(tmp_path.rglob("*.safetensors"))
    assert len(saved) == len(SAVE_ON_CPU) + (network == "shallow")
    for path in saved:
        model = NETWORKS[network]().eval()
        model.load_state_dict(load_file(path))
        folder = path.parent if network == "xpu" else path.parents[1]
        assert score(model) == pytest.approx(epochs_of(folder)[-1][1:], **CLOSE), path
