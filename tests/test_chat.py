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
from conftest import check_curves, fsdp, run_many
from test_recipes import CHAT, LORA_LM, adamw, global_batches, patched, train_plainly
from transformers import AutoModelForCausalLM, AutoTokenizer

import common

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


def split(batch):
    """For each packed sequence its conversations: token ids and labels. What is left of it has no labels."""
    for tokens, labels, positions in zip(batch["input_ids"], batch["labels"], batch["positions"], strict=True):
        starts = [*np.flatnonzero(positions == 0), len(positions)]
        parts = [(tokens[first:end], labels[first:end]) for first, end in itertools.pairwise(starts)]
        yield [part for part in parts if (part[1] != -100).any()]


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
    batches = list(itertools.islice(global_batches(script, args, tokenizer, PROCESSES), STEPS))
    to_validate = script.pack({"text": script.load_texts(args)[1]}, [0], args, tokenizer, [0])
    model = AutoModelForCausalLM.from_pretrained(data / "model").train()

    def mean_loss(batch):
        """Of the answers' tokens, each conversation alone."""
        total, count = 0.0, 0
        for tokens, labels in (part for sequence in split(batch) for part in sequence):
            logits = model(torch.from_numpy(tokens)[None]).logits[0]
            total = total + F.cross_entropy(logits, torch.from_numpy(labels), reduction="sum")
            count += (labels != -100).sum()
        return total / count

    with torch.no_grad():
        validation = [mean_loss(to_validate).item()]
    steps = [lambda batch=batch: mean_loss(batch) for batch in batches]
    plain = train_plainly(adamw(model, args.weight_decay), steps, lambda step: script.learning_rate(args, step))
    with torch.no_grad():
        validation.append(mean_loss(to_validate).item())
    for name in names:
        check_curves(tmp_path / name, (*plain, validation))

    sequences = [sequence for batch in batches for sequence in split(batch)]
    assert max(map(len, sequences)) >= 2  # conversations
    # What is learned is what an assistant says, to its end or to where it was cut off.
    said = [
        "".join(f"{message['content']}</s>" for message in conversation(number) if message["role"] == "assistant")
        for number in range(300)
    ]
    for _, labels in (part for sequence in sequences for part in sequence):
        answer = tokenizer.decode(labels[labels != -100])
        assert any(squeeze(whole).startswith(squeeze(answer)) for whole in said), answer


def squeeze(text):
    """Without spaces, of which the tokenizer makes some."""
    return "".join(text.split())


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
