"""Supervised fine-tuning as docs/your-model-and-data.md makes it: answers are learned, each conversation by itself."""

import importlib.util
import itertools
import json
import random
import shutil
import sys

import torch
import torch.nn.functional as F

import numpy as np
import pytest
from conftest import CLOSE, curve, fsdp, run_many
from test_recipes import CHAT, LORA_LM, patched
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import lm_multinode

TEMPLATE = """{% for message in messages %}[{{ message.role }}] {{ message.content }}</s>{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
PROCESSES, STEPS, LENGTH = 2, 3, 192


def conversation(number):
    """A question and an answer, or two of each."""
    choose = random.Random(number)
    messages = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
    for _ in range(1 + number % 2):
        article = common.builtin_article(choose.randrange(10_000))
        messages.append({"role": "user", "content": article["text"]})
        messages.append({"role": "assistant", "content": article["headline"]})
    return messages


@pytest.fixture(scope="module")
def data(tiny_llama, tmp_path_factory):
    """A model whose tokenizer has a chat template, and a file of conversations."""
    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(tiny_llama, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    with open(folder / "chats.jsonl", "w") as file:
        file.writelines(json.dumps({"messages": conversation(number)}) + "\n" for number in range(300))
    return folder


def load_copy(folder):
    """The edited script, under another name."""
    spec = importlib.util.spec_from_file_location("lm_of_chats", folder / "lm_multinode.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["lm_of_chats"] = script
    spec.loader.exec_module(script)
    return script


def split(sequence):
    """The conversations of a packed sequence: token ids and labels of each. What is left of it has no labels."""
    starts = [*np.flatnonzero(sequence["positions"] == 0), len(sequence["positions"])]
    for first, end in itertools.pairwise(starts):
        if (sequence["labels"][first:end] != -100).any():
            yield sequence["input_ids"][first:end], sequence["labels"][first:end]


def test_it_equals_a_plain_loop_over_single_conversations(data, tmp_path, monkeypatch):
    arguments = ["--model", data / "model", "--dataset", data / "chats.jsonl", "--text-column", "messages"]
    arguments += ["--seq-length", LENGTH, "--micro-batch-size", 2, "--global-batch-size", 8, "--precision", "fp32"]
    arguments += ["--max-steps", STEPS, "--log-every", 1, "--warmup-steps", 1, "--num-validation-texts", 8]
    names = {"fsdp1": fsdp(1), "fsdp2": fsdp(2)}
    settings = [[*arguments, *flags, "--output-dir", tmp_path / name] for name, flags in names.items()]
    folder = patched(tmp_path / "copy", CHAT)
    run_many(folder / "lm_multinode.py", settings, PROCESSES)

    script = load_copy(folder)
    monkeypatch.setattr(sys, "argv", ["", *map(str, arguments)])
    args, tokenizer = script.parse_args(), AutoTokenizer.from_pretrained(data / "model")
    source, held_out = script.load_texts(args)
    worlds = [common.World(rank, rank, PROCESSES, PROCESSES, "cpu") for rank in range(PROCESSES)]
    streams = [iter(script.Batches(args, world, source, tokenizer, [{}], 0)) for world in worlds]
    model = AutoModelForCausalLM.from_pretrained(data / "model").train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )

    def mean_loss(batches):
        """Of the answers' tokens, each conversation alone."""
        total, count = 0.0, 0
        for batch in batches:
            for row in range(len(batch["labels"])):
                for tokens, labels in split({name: values[row] for name, values in batch.items()}):
                    logits = model(torch.from_numpy(tokens)[None]).logits[0]
                    total = total + F.cross_entropy(logits, torch.from_numpy(labels), reduction="sum")
                    count += (labels != -100).sum()
        return total / count

    to_validate = script.pack({"text": held_out}, [0], args, tokenizer, [0])
    with torch.no_grad():
        validation = [mean_loss([to_validate]).item()]
    losses, answers, most = [], set(), 0
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = lm_multinode.learning_rate(args, step)
        batches = [batch for stream in streams for batch, _ in itertools.islice(stream, 2)]
        loss = mean_loss(batches)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        for batch in batches:
            for row in range(len(batch["labels"])):
                parts = list(split({name: values[row] for name, values in batch.items()}))
                most = max(most, len(parts))
                answers |= {tokenizer.decode(labels[labels != -100]) for _, labels in parts}
    with torch.no_grad():
        validation.append(mean_loss([to_validate]).item())
    for name in names:
        assert curve(tmp_path / name) == pytest.approx(losses, **CLOSE)
        assert curve(tmp_path / name, "val_loss") == pytest.approx(validation, **CLOSE)
    assert losses[-1] < losses[0] - 0.1 and most >= 2  # it learns, and sequences hold several conversations

    # What is learned is an assistant's message and its end, or the beginning of one that was cut off.
    known = set()
    for number in range(300):
        texts = [message["content"] for message in conversation(number) if message["role"] == "assistant"]
        known.add("".join(f" {text}</s>" for text in texts).replace("\n", " "))
    clean = {" " + " ".join(answer.split()) for answer in answers}
    assert all(any(" ".join(one.split()).startswith(" ".join(answer.split())) for one in known) for answer in clean)


def test_a_template_that_changes_earlier_messages_is_refused(data, tmp_path):
    """As Qwen3's, which takes the thoughts out of earlier answers."""
    script = load_copy(patched(tmp_path / "copy", CHAT))
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    tokenizer.chat_template = "{{ messages | length }} " + TEMPLATE
    with pytest.raises(common.UserError, match="changes earlier messages"):
        script.encode(conversation(1), tokenizer)


def test_conversations_without_an_answer_are_left_out(data, tmp_path, monkeypatch):
    """A block of records may have no other; and one may begin with an assistant, who has no prompt then."""
    script = load_copy(patched(tmp_path / "copy", CHAT))
    monkeypatch.setattr(sys, "argv", ["", "--text-column", "messages", "--seq-length", str(LENGTH)])
    args, tokenizer = script.parse_args(), AutoTokenizer.from_pretrained(data / "model")
    question, answer = conversation(1)[:2]
    records = [json.dumps({"messages": messages}) for messages in ([question], [answer], [question, answer])]
    assert script.pack({"text": records[:2]}, [0], args, tokenizer, [0])["labels"].shape == (0, LENGTH)
    [labels] = script.pack({"text": records}, [0], args, tokenizer, [0])["labels"]
    assert tokenizer.decode(labels[labels != -100]).split() == f"{answer['content']}</s>".split()


def test_lora_applies_on_top(data, tmp_path):
    folder = patched(tmp_path / "copy", CHAT, LORA_LM)
    arguments = ["--model", data / "model", "--dataset", data / "chats.jsonl", "--text-column", "messages"]
    arguments += ["--seq-length", LENGTH, "--max-steps", 2, "--num-validation-texts", 8, "--output-dir", tmp_path]
    run_many(folder / "lm_multinode.py", [arguments], PROCESSES)
    assert (tmp_path / "model" / "adapter_model.safetensors").exists()
