"""Training without FSDP, in one process. On any number of processes the scripts must compute the same."""

import functools
import itertools
import math
import random

import torch
import torch.nn.functional as F

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import get_length_grouped_indices

from inside import lm_held_out, lm_steps, parse


def adamw(model, weight_decay):
    """The LM script's optimizer: matrices decay, norms and biases do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0}
    matrices = {"params": [parameter for parameter in trained if parameter.ndim >= 2]}
    return torch.optim.AdamW([matrices, vectors], betas=(0.9, 0.95), weight_decay=weight_decay)


def cross_entropy(model, batch):
    """The mean over all tokens of a batch of arrays."""
    logits = model(torch.from_numpy(batch["input_ids"])).logits
    return F.cross_entropy(logits.float().flatten(0, 1), torch.from_numpy(batch["labels"]).flatten())


def train_plainly(optimizer, losses, schedule=lambda step: 1e-3, clip=1.0):
    """Take one step for each function in `losses`, which computes its loss. `schedule`: the learning rate by step, from
    1 on. Returns losses and gradient norms."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = []
    norms = []
    for step, loss_of in enumerate(losses, 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)

        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip).item())
        optimizer.step()
        values.append(loss.item())
    return values, norms


def train_and_validate(model, optimizer, batches, to_validate, loss_of, schedule, clip=1.0):
    """Returns losses, gradient norms, validation losses before and after; and a function, a model's validation loss."""
    validate = functools.partial(loss_of, batch=to_validate)
    before = validate(model).item()
    losses = [functools.partial(loss_of, model, batch) for batch in batches]
    curves = train_plainly(optimizer, losses, schedule, clip)
    return (*curves, [before, validate(model).item()]), validate


def lm_rate(args, step):
    """Warm up to --lr, then follow a cosine to a tenth of it."""
    if step < args.warmup_steps:
        return args.lr * step / args.warmup_steps
    decay_steps = args.max_steps - args.warmup_steps
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup_steps) / max(1, decay_steps))))


def train_lm(model, tokenizer, args, loss_of=cross_entropy, size=1, **script):
    """Train as lm_multinode.py does. Returns what `train_and_validate` does."""
    batches = itertools.islice(lm_batches(args, tokenizer, size=size, **script), args.max_steps)
    held_out = lm_held_out(args, tokenizer, **script)
    rate = functools.partial(lm_rate, args)
    return train_and_validate(model, adamw(model, args.weight_decay), batches, held_out, loss_of, rate)


def lm_validation_loss(folder, *flags, **loading):
    """The validation loss of the model in a folder, by plain transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, **loading), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return cross_entropy(model, lm_held_out(parse("lm_multinode.py", *flags), tokenizer)).item()


def lm_batches(args, tokenizer, **script):
    """Yield each step's sequences, those of all processes, as one batch."""
    for streams in lm_steps(args, tokenizer, **script):
        yield {name: np.concatenate([batch[name] for batch in streams]) for name in streams[0]}


def lm_samples(args, tokenizer, count):
    """The sequences of the first `count` steps, in order, as lists."""
    steps = itertools.islice(lm_batches(args, tokenizer), count)
    rows = itertools.product(steps, range(args.global_batch_size))
    return [{name: array[row].tolist() for name, array in step.items()} for step, row in rows]


def t5_loss(model, batch):
    return model(**batch).loss


def t5_samples(articles, tokenizer, source_length, target_length, prefix="summarize: "):
    """The source and the target of each article, as token ids."""
    texts = [prefix + text for text in articles["text"]]
    sources = tokenizer(texts, max_length=source_length, truncation=True)["input_ids"]
    targets = tokenizer(articles["summary"][:], max_length=target_length, truncation=True)["input_ids"]
    return [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]


def t5_ordered(samples, batch_size, seed=1):
    """The samples of each step of the first epoch. Samples of a step have similar lengths; the steps are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(samples), generator=generator).tolist()[: len(samples) // batch_size * batch_size]
    lengths = [len(samples[index]["input_ids"]) for index in chosen]
    order = get_length_grouped_indices(lengths, batch_size, generator=generator)
    steps = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    random.Random(0).shuffle(steps)
    return [[samples[chosen[index]] for index in step] for step in steps]


def t5_batches(samples, tokenizer, batch_size, seed=1):
    """The padded batch of each step of the first epoch. `model(**batch).loss` is the mean over its target tokens."""
    return list(map(DataCollatorForSeq2Seq(tokenizer), t5_ordered(samples, batch_size, seed)))


def train_t5(model, tokenizer, samples, batch_size, held_out, steps, rate, seed=1):
    """Train as t5_fsdp.py does. `samples`: to train on, and to validate on. Only the first `held_out` are validated."""
    to_train, to_validate = samples
    batches = t5_batches(to_train, tokenizer, batch_size, seed)[:steps]
    [whole] = t5_batches(to_validate[:held_out], tokenizer, held_out)
    optimizer = torch.optim.AdamW(model.parameters())
    return train_and_validate(model, optimizer, batches, whole, t5_loss, lambda step: rate)
