"""A strategy changes where a model lives, not what it learns: lm_multinode.py against a plain loop in one process."""

import sys

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import numpy as np
import pytest
from conftest import reports, run_many, succeed
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import lm_multinode
from common import World

PROCESSES, GLOBAL_BATCH, LENGTH, STEPS = 4, 16, 32, 10
SETTINGS = (
    *("--seq-length", LENGTH, "--global-batch-size", GLOBAL_BATCH, "--max-steps", STEPS, "--warmup-steps", 3),
    *("--num-validation-texts", 3, "--shuffle-buffer", 20, "--log-every", 1, "--validate-every", STEPS),
)
MICRO = ("--micro-batch-size", 2)  # two micro-batches in a step
STRATEGIES = {
    "NO_SHARD": (),
    "SHARD_GRAD_OP": (),
    "FULL_SHARD": (),
    "HYBRID_SHARD": ("--shards-per-replica", 2),
    "_HYBRID_SHARD_ZERO2": ("--shards-per-replica", 2),
}
EXACT = {
    f"fsdp{version} {name}": ("--fsdp-version", version, "--sharding-strategy", name, *MICRO, *more)
    for version in (1, 2)
    for name, more in STRATEGIES.items()
} | {
    "one large batch": ("--micro-batch-size", 4),
    "fsdp2 recomputing": (*MICRO, "--activation-checkpointing", "--chunked-loss"),
    "fsdp1 recomputing": (*MICRO, "--activation-checkpointing", "--chunked-loss", "--fsdp-version", 1),
    "sharded sums": (*MICRO, "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 2, "--accumulate-sharded"),
    "one shard": (*MICRO, "--sharding-strategy", "HYBRID_SHARD", "--shards-per-replica", 1),
}
SHORT = (*MICRO, "--max-steps", 3)  # the warm-up, which is the same in a longer run
OTHER = {
    "fsdp2 bf16": (*SHORT, "--precision", "bf16"),
    "fsdp1 bf16": (*SHORT, "--precision", "bf16", "--fsdp-version", 1),
    "other seed": (*SHORT, "--seed", 2),
    "no decay": (*SHORT, "--weight-decay", 0),
    "no clipping": (*SHORT, "--max-grad-norm", 1e9),
    "other block": (*SHORT, "--shuffle-buffer", 5),
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Each setting's folder, from one launch of 4 processes."""
    root = tmp_path_factory.mktemp("lm")
    names = EXACT | OTHER
    settings = [
        [*SETTINGS, "--precision", "fp32", *arguments, "--output-dir", root / name] for name, arguments in names.items()
    ]
    run_many("lm_multinode", settings, PROCESSES, "record-shards")
    return {name: root / name for name in names}


def curve(folder):
    """Losses and gradient norms of all steps, and the validation losses before and after them."""
    steps = reports(folder, "step")
    validation = [report["validation_loss"] for report in reports(folder, "validation")]
    return [r["train_loss"] for r in steps], [r["grad_norm"] for r in steps], validation


@pytest.fixture(scope="session")
def plain(runs):
    """The same three without FSDP, on the batches of all ranks together."""
    sys.argv = ["lm_multinode.py", *map(str, SETTINGS), "--micro-batch-size", str(GLOBAL_BATCH // PROCESSES)]
    args = lm_multinode.parse_args()
    [folder] = runs["fsdp2 FULL_SHARD"].glob("lm-*")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    world = World(0, 0, 1, 1, torch.device("cpu"), "gloo")
    source, held_out = lm_multinode.load_texts(args, world)
    model = lm_multinode.skeleton(args, lm_multinode.load_config(args, tokenizer), world.device)
    for index, (name, parameter) in enumerate(list(model.named_parameters())):
        values = lm_multinode.initial_values(index, parameter.shape, 0.02, args.seed, world.device)
        module, _, name = name.rpartition(".")
        setattr(model.get_submodule(module), name, torch.nn.Parameter(values))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    worlds = [world._replace(rank=rank, world_size=PROCESSES) for rank in range(PROCESSES)]
    streams = [iter(lm_multinode.PackedTexts(source, tokenizer, args, each, lm_multinode.START)) for each in worlds]
    held_out = torch.tensor([token for text in held_out for token in [*tokenizer(text)["input_ids"], 1]])
    count = (len(held_out) - 1) // LENGTH * LENGTH

    def loss_of(inputs, labels):
        return F.cross_entropy(model(inputs.view(-1, LENGTH)).logits.flatten(0, 1), labels.flatten())

    losses, norms, validation = [], [], []
    for step in range(1, STEPS + 2):
        if step in (1, STEPS + 1):
            with torch.no_grad():
                validation.append(loss_of(held_out[:count], held_out[1 : count + 1]).item())
        if step > STEPS:
            break
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(step / 3, 0.1 + 0.45 * (1 + np.cos(np.pi * (step - 3) / (STEPS - 3))))
        batches = [next(stream) for stream in streams]
        loss = loss_of(*(torch.from_numpy(np.stack([b[key] for b in batches])) for key in ("input_ids", "labels")))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, validation


@pytest.mark.parametrize("name", EXACT)
def test_every_strategy_equals_a_plain_loop(runs, plain, name):
    losses, norms, validation = curve(runs[name])
    assert len(losses) == STEPS
    assert losses == pytest.approx(plain[0], abs=1e-5)
    assert norms == pytest.approx(plain[1], rel=1e-4)
    assert validation == pytest.approx(plain[2], abs=1e-5)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", [name for name in EXACT if "NO_SHARD" in name or "HYBRID" in name or "one" in name])
def test_replicas_stay_equal(runs, name):
    """The sums of every process's own shards, in float64, after the last step: replicas hold the same bits."""
    shards = {"NO_SHARD": 1, "one shard": 1, "one large batch": 4}.get(
        name.removeprefix("fsdp1 ").removeprefix("fsdp2 "), 2
    )
    sums = [torch.load(runs[name] / f"shards-{rank}.pt", weights_only=True) for rank in range(PROCESSES)]
    for rank in range(PROCESSES):
        assert torch.equal(sums[rank], sums[rank % shards])
    assert len({tuple(each.tolist()) for each in sums}) == shards  # and it is a sum of the shard, not of the whole


def test_other_settings_are_other_runs(runs, plain):
    losses, norms, validation = plain
    for name in ("fsdp2 bf16", "fsdp1 bf16"):
        others, _, _ = curve(runs[name])
        assert others == pytest.approx(losses[:3], rel=0.01)
        assert others != pytest.approx(losses[:3], abs=1e-6)  # the policy did something
    for name in ("no decay", "no clipping"):
        others, other_norms, _ = curve(runs[name])
        assert (others[0], other_norms[0]) == pytest.approx((losses[0], norms[0]), rel=1e-4)
        assert others != pytest.approx(losses[:3], abs=1e-6)
    for name, same_weights in (("other seed", False), ("other block", True)):
        others, _, other_validation = curve(runs[name])
        assert others[0] != pytest.approx(losses[0], abs=1e-5)
        assert (other_validation[0] == pytest.approx(validation[0], abs=1e-5)) is same_weights


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        tensors = [tensor for tensor in tree_leaves(result) if torch.is_tensor(tensor)]
        self.elements = max(self.elements, *(tensor.numel() for tensor in tensors), 0)
        return result


def test_chunked_loss_never_holds_all_logits():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape))
    tokens = torch.randint(1000, (4, 1025))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    results = []
    for chunked in (False, True):
        if chunked:
            lm_multinode.return_chunked_loss(model)
        model.zero_grad()
        with Largest() as largest:
            loss = lm_multinode.summed_loss(model, batch, chunked)
            loss.backward()
        results.append((loss.item(), [parameter.grad for parameter in model.parameters()], largest.elements))
    (loss, gradients, elements), (chunked_loss, chunked_gradients, chunked_elements) = results
    assert chunked_loss == pytest.approx(loss, rel=1e-6)
    for ours, theirs in zip(chunked_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert (elements, chunked_elements) == (4096 * 1000, lm_multinode.CHUNK * 1000)
    assert model(tokens[:, :8]).logits.shape == (4, 8, 1000)  # without targets it is still the model


@pytest.mark.parametrize("processes", [None, 3])
def test_weights_and_validation_are_the_same_on_any_number_of_processes(plain, processes, tmp_path):
    options = ("--precision", "fp32", "--global-batch-size", 12, "--micro-batch-size", 2, "--max-steps", 1)
    fork = processes is not None  # the other one starts as a user's would: by python alone
    succeed("lm_multinode.py", *SETTINGS, *options, "--output-dir", tmp_path, processes=processes, fork=fork)
    first = reports(tmp_path, "validation")[0]
    assert first["validation_loss"] == pytest.approx(plain[2][0], abs=1e-5)
    assert first["perplexity"] == pytest.approx(np.exp(plain[2][0]), rel=1e-4)
