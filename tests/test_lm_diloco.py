"""DILOCO in lm_multinode.py against plain replicas in one process, with PyTorch's own SGD as the outer optimizer."""

import copy
import itertools
import json
import shutil
import sys

import torch
import torch.nn.functional as F

import numpy as np
import pytest
from collectives import count_collectives
from conftest import check_bad_input, records, run_many
from transformers import AutoConfig, AutoTokenizer

import lm_multinode
from common import World

PROCESSES, STEPS, BATCH, LENGTH = 4, 12, 16, 32
SETTINGS = (
    *("--sharding-strategy", "DILOCO", "--seq-length", LENGTH, "--global-batch-size", BATCH, "--max-steps", STEPS),
    *("--warmup-steps", 3, "--num-validation-texts", 3, "--log-every", 1, "--validate-every", 3, "--precision", "fp32"),
    *("--lr", 1e-3),
)
TWO, FOUR = ("--shards-per-replica", 2), ("--shards-per-replica", 1)  # replicas
RUNS = {
    "two": (*TWO, "--local-steps", 3),
    "two, accumulating": (*TWO, "--local-steps", 3, "--micro-batch-size", 2),
    "four": (*FOUR, "--local-steps", 3),
    "average": (*TWO, "--local-steps", 1, "--outer-lr", 1, "--outer-momentum", 0),
    "two, bf16": (*TWO, "--local-steps", 3, "--outer-precision", "bf16"),
}
SAVED = ("--checkpoint-every", 7)  # between two synchronizations, and at the end


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("diloco")
    settings = [[*SETTINGS, *more, *SAVED, "--output-dir", root / name] for name, more in RUNS.items()]
    run_many("lm_multinode.py", settings, PROCESSES)
    return {name: root / name for name in RUNS}


def curves(folder, since=-1):
    steps = [row for row in records(folder, "loss") if row["step"] > since]
    validation = [row["val_loss"] for row in records(folder, "val_loss") if row["step"] > since]
    return [row["loss"] for row in steps], [row["grad_norm"] for row in steps], validation


def nesterov(weights):
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def train_replicas(folder, replicas, local_steps=3, outer=nesterov):
    """Losses and gradient norms of the first replica, and validation losses of what they share."""
    sys.argv = ["lm_multinode.py", *map(str, SETTINGS), "--micro-batch-size", str(BATCH // PROCESSES)]
    sys.argv += ["--local-steps", str(local_steps)]
    args = lm_multinode.parse_args()
    config, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoConfig, AutoTokenizer))
    source, held_out = lm_multinode.load_texts(args)
    to_validate = lm_multinode.pack({"text": held_out}, [0], args, tokenizer, [0])
    shared = lm_multinode.load_model(args, config)
    outer_optimizer = outer(shared.parameters())
    models = [copy.deepcopy(shared) for _ in range(replicas)]
    optimizers = []
    for model in models:
        matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    worlds = [World(rank, rank, PROCESSES, PROCESSES, torch.device("cpu")) for rank in range(PROCESSES)]
    streams = [lm_multinode.Batches(args, world, source, tokenizer, [{}], 0) for world in worlds]

    def loss_of(model, *batches):
        inputs, labels = (
            torch.from_numpy(np.concatenate([b[key] for b in batches])) for key in ("input_ids", "labels")
        )
        return F.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())

    def validate():
        with torch.no_grad():
            return loss_of(shared, to_validate).item()

    losses, norms, validation, each = [], [], [validate()], PROCESSES // replicas
    for step, items in enumerate(itertools.islice(zip(*streams, strict=True), STEPS), 1):
        of_step = []
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(step / 3, 0.1 + 0.45 * (1 + np.cos(np.pi * (step - 3) / (STEPS - 3))))
            loss = loss_of(model, *(batch for batch, _ in items[number * each : (number + 1) * each]))
            optimizer.zero_grad()
            loss.backward()
            of_step.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
            optimizer.step()
        losses.append(of_step[0][0])
        norms.append(of_step[0][1])
        if step % local_steps == 0:
            for weight, *of_replicas in zip(shared.parameters(), *(m.parameters() for m in models), strict=True):
                weight.grad = weight.detach() - torch.stack([w.detach() for w in of_replicas]).mean(dim=0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(shared.state_dict())
        if step % 3 == 0:
            validation.append(validate())
    return losses, norms, validation


@pytest.mark.parametrize("name, replicas", [("two", 2), ("two, accumulating", 2), ("four", 4)])
def test_it_equals_plain_replicas_with_an_outer_optimizer(runs, name, replicas):
    losses, norms, validation = curves(runs[name])
    plain = train_replicas(runs[name], replicas)
    assert len(losses) == STEPS and len(validation) == 1 + STEPS // 3
    assert losses == pytest.approx(plain[0], rel=1e-6) and validation == pytest.approx(plain[2], rel=1e-6)
    assert norms == pytest.approx(plain[1], rel=1e-4)


def test_one_local_step_without_momentum_averages_weights(runs):
    """An outer learning rate of 1 takes all replicas to the mean of their weights."""
    plain = train_replicas(runs["average"], 2, 1, lambda weights: torch.optim.SGD(weights, lr=1.0))
    for found, wanted, tolerance in zip(curves(runs["average"]), plain, (1e-6, 1e-4, 1e-6), strict=True):
        assert found == pytest.approx(wanted, rel=tolerance)
    assert curves(runs["average"])[2] != pytest.approx(curves(runs["two"])[2], abs=1e-4)


def test_bf16_is_rounded_once_a_synchronization(runs):
    losses, others = curves(runs["two"])[0], curves(runs["two, bf16"])[0]
    assert others[:3] == losses[:3] and others[3:] != losses[3:]  # the first three are before anything is sent
    assert others == pytest.approx(losses, rel=0.01)


@pytest.mark.parametrize("name", ["two", "four"])
def test_it_resumes_exactly_between_synchronizations(runs, name, tmp_path):
    shutil.copytree(runs[name] / "checkpoints" / "step-0000007", tmp_path / "checkpoints" / "step-0000007")
    run_many("lm_multinode.py", [[*SETTINGS, *RUNS[name], "--resume", "--output-dir", tmp_path]], PROCESSES)
    assert curves(tmp_path) == curves(runs[name], since=7) and len(curves(tmp_path)[0]) == 5


def test_replicas_wait_for_each_other_only_at_synchronizations(tmp_path):
    """In between, no collective is over all processes: each would cost a round trip of a slow network in each step."""
    options = (*SETTINGS, *TWO, "--local-steps", 4, "--validate-every", 12, "--no-save-model", "--output-dir", tmp_path)
    run_many("lm_multinode.py", [options], PROCESSES, change=count_collectives)
    for rank in range(PROCESSES):
        counts = json.loads((tmp_path / f"collectives-{rank}.json").read_text())["steps"]
        assert counts.pop("0") > 0  # before the first step: the weights are sent, the start is validated
        assert set(counts) == {"4", "8", "12"}  # here one asks for stops


def test_what_it_cannot_do_is_one_sentence(runs, tmp_path):
    def resume(strategy, name):
        """From a copy of a run's checkpoints."""
        shutil.copytree(runs["two"] / "checkpoints", tmp_path / name / "checkpoints")
        return ("--sharding-strategy", strategy, "--resume", "--output-dir", tmp_path / name)

    base, output = (*SETTINGS, "--local-steps", 3), ("--output-dir", tmp_path / "new")
    as_forks = [
        ((*base, *TWO, *resume("DILOCO", "fewer")), 2, "more or fewer processes, which DILOCO's replicas cannot join"),
        ((*base, *FOUR, *resume("DILOCO", "four")), 4, "was made with --shards-per-replica 2"),
        ((*base, *resume("FULL_SHARD", "other")), 4, "of another model or strategy"),
        ((*base, "--fsdp-version", 1, "--no-save-model", *output), 2, "DILOCO needs --fsdp-version 2"),
        ((*base, "--validate-every", 4, *output), 2, "--validate-every must be a multiple of --local-steps"),
    ]
    check_bad_input("lm_multinode.py", [], as_forks)
