"""The texts of lm_multinode.py: packed without a gap, read on from any place, and C4's files with their faults."""

import gzip
import itertools
import json
import sys

import torch

import datasets
import numpy as np
import pytest
from conftest import train_tokenizer

import common
import lm_multinode
from common import World
from lm_multinode import START, PackedTexts


def write_shards(folder, counts, first=0, word="lorem"):
    """Files in C4's format with `counts` records each; text i is "i word word ..." of a length of its own."""
    numbers = itertools.count(first)
    for shard, count in enumerate(counts):
        texts = [f"{i} " + " ".join([word] * (i * 7 % 23)) for i in itertools.islice(numbers, count)]
        records = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "http://x"} for text in texts]
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return str(folder / "*.json.gz")


def parse(*arguments):
    sys.argv = ["lm_multinode.py", "--micro-batch-size", "2", "--seq-length", "16", *map(str, arguments)]
    return lm_multinode.parse_args()


def world_of(rank, world_size):
    return World(rank, rank, world_size, world_size, torch.device("cpu"), "gloo")


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["0 1 2 3 4 5 6 7 8 9 lorem ipsum"], append_eos=False)


def packed_texts(args, tokenizer, rank=0, world_size=1, position=START, source=None):
    world = world_of(rank, world_size)
    source = source or lm_multinode.load_texts(args, world)[0]
    return PackedTexts(source, tokenizer, args, world, position)


def stream(*arguments, **options):
    return iter(packed_texts(*arguments, **options))


def texts_in(tokenizer, batches):
    """The numbers of the texts that are whole in these batches, in order, and the stream of tokens."""
    tokens = np.concatenate([batch["input_ids"].ravel() for batch in batches])
    texts = tokenizer.decode(tokens).split("</s>")
    return [int(text.split()[0]) for text in texts[1:-1] if text.strip()], tokens


@pytest.mark.parametrize("world_size, shards", [(1, [40]), (2, [40, 40, 40, 40]), (3, [40, 40, 40, 40])])
def test_every_text_comes_once_in_a_pass_whatever_the_processes(tmp_path, tokenizer, world_size, shards):
    """Four shards on three processes cannot be divided: each process takes every third text."""
    pattern = write_shards(tmp_path, shards)
    args = parse("--dataset", pattern, "--num-validation-texts", 5, "--shuffle-buffer", 16)
    args.micro_batch_size, args.seq_length = 1, 4  # so that little is cut off at the ends
    seen = []
    for rank in range(world_size):
        batches = []
        for batch in stream(args, tokenizer, rank, world_size):
            if batch["position"]["passes"] > 0:
                break
            batches.append(batch)
        numbers, _ = texts_in(tokenizer, batches)
        assert numbers != sorted(numbers)  # shuffled
        seen += numbers
    assert len(set(seen)) == len(seen)
    # The first five are held out; the first and last ones of a rank are not whole in its batches.
    assert set(seen) <= set(range(5, sum(shards))) and len(seen) >= sum(shards) - 5 - 4 * world_size


def test_sequences_have_no_gap_and_no_padding(tmp_path, tokenizer):
    """Read in a row, the inputs are the texts with </s> behind each; the targets are the same, one token later."""
    pattern = write_shards(tmp_path, [30])
    args = parse("--dataset", pattern, "--num-validation-texts", 1, "--shuffle-buffer", 8)
    batches = list(itertools.islice(stream(args, tokenizer), 20))
    inputs = np.concatenate([batch["input_ids"].ravel() for batch in batches])
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    assert batches[0]["input_ids"].shape == (2, 16) and (labels[:-1] == inputs[1:]).all()
    texts = itertools.islice(packed_texts(args, tokenizer).tokenized_texts(), 200)
    expected = np.concatenate([tokens for *_, tokens in texts])
    assert (inputs == expected[: len(inputs)]).all() and (expected == tokenizer.eos_token_id).sum() == 200


@pytest.mark.parametrize("shards", [[30, 30], [30, 30, 30]])
def test_a_stream_goes_on_exactly_from_any_position(tmp_path, tokenizer, shards):
    """Also through JSON, over the end of a pass, and where the shards cannot be divided."""
    args = parse("--dataset", write_shards(tmp_path, shards), "--num-validation-texts", 2, "--shuffle-buffer", 7)
    whole = list(itertools.islice(stream(args, tokenizer, 1, 2), 60))
    assert whole[-1]["position"]["passes"] > 0
    for place in range(0, 59, 3):
        position = json.loads(json.dumps(whole[place]["position"]))
        rest = list(itertools.islice(stream(args, tokenizer, 1, 2, position), 60 - place - 1))
        for batch, again in zip(whole[place + 1 :], rest, strict=True):
            assert (batch["input_ids"] == again["input_ids"]).all() and (batch["labels"] == again["labels"]).all()
            assert batch["position"] == again["position"]


def test_another_pass_and_another_seed_are_other_orders(tmp_path, tokenizer):
    args = parse("--dataset", write_shards(tmp_path, [60]), "--num-validation-texts", 1)
    batches = list(itertools.islice(stream(args, tokenizer), 60))
    passes = [texts_in(tokenizer, [b for b in batches if b["position"]["passes"] == n])[0] for n in (0, 1)]
    args.seed = 2
    other, _ = texts_in(tokenizer, list(itertools.islice(stream(args, tokenizer), 20)))
    assert passes[0][:10] != passes[1][:10] != other[:10] != passes[0][:10]


def test_broken_records_are_skipped_and_counted(tmp_path, tokenizer):
    pattern = write_shards(tmp_path, [40])
    [path] = tmp_path.glob("*.gz")
    lines = gzip.decompress(path.read_bytes()).splitlines()
    lines[10], lines[20], lines[30] = b'{"text": "cut', b'{"text": "\xff\xfe"}', b'{"url": "no text"}'
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    args = parse("--dataset", pattern, "--num-validation-texts", 5, "--shuffle-buffer", 15)
    batches = list(itertools.islice(stream(args, tokenizer), 80))
    one_pass = [batch for batch in batches if batch["position"]["passes"] == 0]
    assert one_pass[-1]["skipped"] == 3
    assert not {10, 20, 30} & set(texts_in(tokenizer, one_pass)[0])
    again = next(stream(args, tokenizer, position=batches[-2]["position"]))
    assert again["skipped"] == batches[-1]["skipped"] >= 6  # counted in each pass, and not twice after a resume


def test_faults_in_files_are_one_sentence(tmp_path, tokenizer):
    for name, content, message in (
        ("empty", b"", "none of its 0 records has a field 'text'"),
        ("fields", b'{"body": "a text"}\n' * 500, "none of its first records has a field 'text'"),
        ("cut", gzip.compress(b'{"text": "a text"}\n' * 5000)[:-20], "is broken after .* records"),
        ("not gzip", b'{"text": "a text"}\n' * 5, r"is broken after 0 records \(Not a gzipped file"),
        ("few", gzip.compress(b'{"text": "a text"}\n' * 5), "has only 5 records, and --num-validation-texts 9 holds"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c4.json.gz").write_bytes(gzip.compress(content) if name in ("empty", "fields") else content)
        args = parse("--dataset", tmp_path / name / "*.gz", "--num-validation-texts", 9, "--shuffle-buffer", 100_000)
        with pytest.raises(common.UserError, match=message):
            source, _ = lm_multinode.load_texts(args, world_of(0, 1))
            item = next(stream(args, tokenizer, source=source))
            raise common.UserError(item["error"])
    with pytest.raises(common.UserError, match="has 1 files for 2 processes, and each needs one of its own"):
        lm_multinode.load_texts(
            parse("--dataset", write_shards(tmp_path, [9]), "--num-validation-texts", 2), world_of(0, 2)
        )
    with pytest.raises(common.UserError, match="no such file; builtin and c4 need none"):
        lm_multinode.load_texts(parse("--dataset", tmp_path / "absent*.gz"), world_of(0, 1))
    with pytest.raises(common.UserError, match="c4 could not be read from the Hugging Face Hub"):
        lm_multinode.load_texts(parse("--dataset", "c4"), world_of(0, 1))


def test_c4_goes_through_the_library_and_resumes(tmp_path, tokenizer, monkeypatch):
    """The Hub's stream with local files in its place: everything but the network."""
    (tmp_path / "validation").mkdir()
    patterns = {"train": write_shards(tmp_path, [40, 40]), "validation": write_shards(tmp_path / "validation", [9])}
    load_dataset, asked = datasets.load_dataset, []

    def local(name, config, split, streaming):
        asked.append((name, config, split))
        return load_dataset("json", data_files=patterns[split], split="train", streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    args = parse("--dataset", "c4", "--num-validation-texts", 4, "--shuffle-buffer", 12)
    source, held_out = lm_multinode.load_texts(args, world_of(0, 2))
    assert asked == [("allenai/c4", "en", "train"), ("allenai/c4", "en", "validation")] and len(held_out) == 4
    whole = list(itertools.islice(stream(args, tokenizer, 1, 2, source=source), 30))
    rest = list(itertools.islice(stream(args, tokenizer, 1, 2, whole[9]["position"], source), 20))
    for batch, again in zip(whole[10:], rest, strict=True):
        assert (batch["input_ids"] == again["input_ids"]).all()
    numbers, _ = texts_in(tokenizer, [batch for batch in whole if batch["position"]["passes"] == 0])
    assert set(numbers) <= set(range(40, 80))  # rank 1 has the second file


def test_builtin_texts_hold_out_what_is_nowhere_else():
    train, held_out = lm_multinode.builtin_texts()
    paragraphs = [
        {paragraph.strip("\n") for paragraph in "".join(texts).split("\n\n")} - {""} for texts in (train, held_out)
    ]
    assert not paragraphs[0] & paragraphs[1]
    assert len(held_out) == 17 and sum(map(len, train)) > 300_000
