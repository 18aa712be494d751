"""Make tokens and labels of conversations, for docs/recipes/lm-labels.diff.

    python docs/chats.py Qwen/Qwen3-0.6B chats.jsonl tokens.parquet

A line has `messages`, perhaps `tools`. Shows what is learned of the first in [[ ]]: edit a copy.
"""

import json
import os
import sys

import numpy as np
import pyarrow.parquet
from tqdm import tqdm
from transformers import AutoTokenizer

ROLES = {"system", "developer", "user", "assistant", "tool"}
KEYS = {"role", "content", "tool_calls", "tool_call_id", "name"}  # of a message
# Beside `messages` and `tools`, these would change what the model sees or learns.
REFUSED = "system system_prompt documents functions chat_template_kwargs weight train loss_mask"


def check(condition, message: str):
    if not condition:
        raise ValueError(message)


def read(message: dict) -> tuple[dict, list[str]]:
    """Return a message without empty keys, and its parts, which the template must keep."""
    message = {key: value for key, value in message.items() if value not in (None, [])}
    role, content = message.get("role"), message.get("content", "")
    unknown = {role} - ROLES or message.keys() - KEYS
    check(not unknown, f"a message has the unknown role or keys {unknown}")
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    for call in calls:
        if isinstance(call["arguments"], str):  # JSON, as OpenAI has it
            call["arguments"] = json.loads(call["arguments"] or "{}")
        check(isinstance(call["arguments"], dict), "the arguments of a call are not an object")
    check(isinstance(content, str), "the content of a message is not one text")
    check(content.strip() or calls or role == "tool", f"the {role} says nothing")
    parts = content.replace("</think>", "<think>").split("<think>") + [c["name"] for c in calls]
    return message, [part.strip() for part in parts]  # Qwen3's template writes <think> anew


def make_row(tokenizer, messages: list[dict], tools: list[dict] | None):
    """Return tokens and labels. A label is the token itself in an answer, and -100 elsewhere."""
    messages, parts = map(list, zip(*map(read, messages), strict=True))
    apply = tokenizer.apply_chat_template
    text, place = apply(messages, tools, tokenize=False), 0
    check(not tools or text != apply(messages, tokenize=False), "the template shows no tools")
    for part in [part for of_message in parts for part in of_message]:
        in_json = json.dumps(part, ensure_ascii=False)[1:-1]  # as Llama 3.1 has a tool's result
        place = max(text.find(part, place), text.find(in_json, place))
        check(place >= 0, f"the template leaves out or moves {part[:50]!r}")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, (starts, ends) = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"]).T
    # An answer's first token may begin in the prompt. An added one may swallow spaces after it.
    is_added = np.isin(tokens, list(tokenizer.added_tokens_decoder))
    starts = np.where(is_added, starts, np.maximum(starts, ends - 1))
    labels = np.full_like(tokens, -100)
    for index in [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > 0]:
        prompt = apply(messages[:index], tools, tokenize=False, add_generation_prompt=True)
        through = apply(messages[: index + 1], tools, tokenize=False)
        end = len(os.path.commonprefix([text, through]))  # noqa: RUF071
        inside = np.flatnonzero((starts >= len(prompt)) & (ends <= end))
        last = max((i for i in inside if text[starts[i] : ends[i]].strip()), default=0)
        is_kept = text.startswith(prompt) and parts[index][-1] in text[len(prompt) : starts[last]]
        check(is_kept and is_added[last], f"the template changes or never ends message {index + 1}")
        labels[inside[0] : last + 1] = tokens[inside[0] : last + 1]  # without a line break after it
    check((labels != -100).any(), "there is no answer to a message")
    return tokens, labels


model, file, output = sys.argv[1:]
tokenizer, rows, unused = AutoTokenizer.from_pretrained(model), [], set()
for number, line in enumerate(tqdm(open(file, encoding="utf-8")), start=1):  # noqa: SIM115
    try:
        row = {key: value for key, value in json.loads(line).items() if value not in (None, [])}
        check(not row.keys() & REFUSED.split(), f"it has {row.keys() & REFUSED.split()}")
        tokens, labels = make_row(tokenizer, row.pop("messages"), row.pop("tools", None))
    except Exception as error:  # each template raises its own kind
        sys.exit(f"{file}, line {number}: {error!r}")
    if number == 1:
        parts = np.split(tokens, np.flatnonzero(np.diff(labels == -100)) + 1)
        texts = enumerate(map(tokenizer.decode, parts))
        print("".join(f"[[{text}]]" if i % 2 else text for i, text in texts))
    unused.update(row)
    rows.append({"input_ids": tokens, "labels": labels})
print("keys that were not used:", unused or "none")
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), output, row_group_size=1000)
