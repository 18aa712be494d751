"""The texts of lm_multinode.py: packed without a gap, read on from any position, and C4's files with their faults."""

import gzip
import itertools
import json
import random
import sys
import zlib
from pathlib import Path

import torch

import datasets
import numpy as np
import pytest
from conftest import check_bad_input

import common
import lm_multinode
from common import World


def write_shards(folder, counts, first=0):
    """Files in C4's format with `counts` records each; text i is "i lorem lorem ..." of a length of its own."""
    numbers = itertools.count(first)
    for shard, count in enumerate(counts):
        texts = [f"{i} " + " ".join(["lorem"] * (i * 7 % 23)) for i in itertools.islice(numbers, count)]
        records = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "http://x"} for text in texts]
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return str(folder / "*.json.gz")


def parse(pattern, *arguments):
    names = [pattern] if isinstance(pattern, str) else map(str, pattern)
    sys.argv = ["lm_multinode.py", "--dataset", *names, "--micro-batch-size", "2", "--seq-length", "16", *arguments]
    return lm_multinode.parse_args()


@pytest.fixture(scope="session")
def tokenizer():
    return common.train_tokenizer(["0 1 2 3 4 5 6 7 8 9 lorem"] * 2, 300, append_eos=False)


def stream(args, tokenizer, rank=0, size=1, position=None, source=None):
    """A rank's batches, each with the position after it."""
    world = World(rank, rank, size, size, torch.device("cpu"))
    source = source or lm_multinode.load_texts(args)[0]
    return iter(lm_multinode.Batches(args, world, source, tokenizer, [position or {}], 0))


def pass_of(number, batches):
    """The batches of one pass, of a stream from its start."""
    inside = itertools.takewhile(lambda item: item[1]["pass"] <= number, batches)
    return [batch for batch, position in inside if position["pass"] == number]


def numbers_in(tokenizer, batches):
    """The numbers of the texts that are whole in these batches, in order."""
    texts = tokenizer.decode(np.concatenate([batch["input_ids"].ravel() for batch in batches])).split("</s>")
    return [int(text.split()[0]) for text in texts[1:-1]]


@pytest.mark.parametrize("processes, shards", [(1, [160]), (2, [40] * 4), (2, [160]), (3, [40] * 4)])
def test_every_text_comes_once_in_a_pass_whatever_the_processes(tmp_path, tokenizer, processes, shards):
    """A process has files of its own, or every n-th text where they cannot be divided: one by two, four by three."""
    args = parse(write_shards(tmp_path, shards), "--num-validation-texts", "1000")
    args.micro_batch_size, args.seq_length = 1, 4  # so that little is cut off at the ends
    source, held_out = lm_multinode.load_texts(args)
    seen = []
    for rank in range(processes):
        numbers = numbers_in(tokenizer, pass_of(0, stream(args, tokenizer, rank, processes, source=source)))
        assert numbers != sorted(numbers)  # shuffled
        seen += numbers
    assert len(set(seen)) == len(seen)
    held_out = {int(text.split()[0]) for text in lm_multinode.texts_of(held_out, "text")}
    assert 0.01 < len(held_out) / 160 < 0.12
    # The first and the last text of each process are not whole in its batches.
    assert set(seen) <= set(range(160)) - held_out and len(seen) >= 160 - len(held_out) - 4 * processes


def test_held_out_texts_are_chosen_by_their_content(tmp_path):
    """5% by a checksum of the line, so that every process takes the same; a text that comes twice is on one side."""
    args = parse(write_shards(tmp_path, [1000]), "--num-validation-texts", "30")
    source, held_out = lm_multinode.load_texts(args)
    with gzip.open(next(tmp_path.iterdir()), "rt") as file:
        lines = file.read().splitlines()
    chosen = [line for line in lines if zlib.crc32(line.encode()) % 20 == 0]
    assert 30 < len(chosen) < 70 and held_out == chosen[:30]
    assert [row["text"] for row in source] == [line for line in lines if line not in chosen]  # more is not trained on
    source, held_out = lm_multinode.load_texts(parse("builtin"))
    texts = [row["text"] for row in source]
    assert len(set(texts)) == len(texts) > 500 and not set(texts) & set(held_out)
    assert 20 < len(held_out) < 0.1 * len(texts) and sum(map(len, texts)) > 200_000


def test_sequences_have_no_gap_and_no_padding(tmp_path, tokenizer):
    """Read in a row, the inputs are the texts with </s> behind each; the targets are the same, one token later."""
    args = parse(write_shards(tmp_path, [300]))
    batches = pass_of(0, stream(args, tokenizer))
    assert batches[0]["input_ids"].shape == (2, 16)
    inputs, labels = (np.concatenate([batch[name].ravel() for batch in batches]) for name in ("input_ids", "labels"))
    assert (labels[:-1] == inputs[1:]).all()
    texts = [json.loads(row["text"])["text"] for row in lm_multinode.load_texts(args)[0]]
    order = numbers_in(tokenizer, [{"input_ids": np.append(tokenizer.eos_token_id, inputs)}])
    assert len(order) >= len(texts) - 4
    ordered = [next(text for text in texts if text.startswith(f"{number} ")) for number in order]
    expected = np.concatenate(tokenizer([text + "</s>" for text in ordered])["input_ids"])
    assert inputs[: len(expected)].tolist() == expected.tolist()


@pytest.mark.parametrize("shards", [[30, 30], [30, 30, 30], [1200]])
def test_a_stream_goes_on_exactly_from_any_place(tmp_path, tokenizer, shards):
    """Again and again, through JSON, over the end of a pass, inside a block of 500 texts and over its end."""
    args, choose = parse(write_shards(tmp_path, shards)), random.Random(0)
    source, _ = lm_multinode.load_texts(args)
    batches = stream(args, tokenizer, 1, 2, source=source)
    passed = itertools.takewhile(lambda item: item[1]["pass"] < 3, batches)
    whole, again, position = list(passed), [], {}
    while len(again) < len(whole):
        count = choose.randint(1, len(whole) // 10)
        again += itertools.islice(stream(args, tokenizer, 1, 2, position, source), count)
        position = json.loads(json.dumps(again[-1][1]))
    assert len(whole) > 30
    for (batch, _), (other, _) in zip(whole, again, strict=False):
        assert (batch["input_ids"] == other["input_ids"]).all() and (batch["labels"] == other["labels"]).all()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("shards", [[300], [50] * 6])
def test_several_workers_share_the_texts_and_go_on_exactly(tmp_path, tokenizer, shards):
    """Three of each of two ranks: each text is read once in a pass; resumed at any worker's turn."""
    args = parse(write_shards(tmp_path, shards), "--num-workers", "3")
    source, held_out = lm_multinode.load_texts(args)

    def load(rank, position):
        world = World(rank, rank, 2, 2, torch.device("cpu"))
        return lm_multinode.batches_on_device(args, world, source, tokenizer, position)

    numbers = []
    for rank in (0, 1):
        whole = list(itertools.islice(load(rank, {}), 100))
        for batch, position in whole:
            assert batch["input_ids"].shape == (2, 16) and len(position["workers"]) == 3
        for worker in range(3):
            batches = whole[worker::3]
            one_pass = [batch for batch, position in batches if position["workers"][worker]["pass"] == 0]
            assert len(one_pass) < len(batches)
            numbers += numbers_in(tokenizer, one_pass)
        for step in (4, 9, 50):
            rest = itertools.islice(load(rank, json.loads(json.dumps(whole[step - 1][1]))), 15)
            for (batch, position), (other, again) in zip(whole[step:], rest, strict=False):
                assert (batch["input_ids"] == other["input_ids"]).all() and position == again
    texts = {json.loads(row["text"])["text"].split()[0] for row in source}
    assert len(numbers) == len(set(numbers)) and set(map(str, numbers)) <= texts
    assert len(numbers) > 0.8 * len(texts) and len(texts) + len(held_out) == sum(shards)  # the ends of a pass are cut


def test_other_formats_hold_the_same_texts(tmp_path, tokenizer, monkeypatch):
    """Several files without quotes, JSON lines, parquet, and a dataset of the Hub, under any column; each resumes."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    write_shards(tmp_path, [40, 40])
    files = sorted(map(str, tmp_path.glob("*.gz")))
    rows = [json.loads(line) for path in files for line in gzip.decompress(Path(path).read_bytes()).splitlines()]
    renamed = datasets.Dataset.from_list([{"body": row["text"], "url": row["url"]} for row in rows])
    renamed.to_json(tmp_path / "rows.jsonl")
    renamed.to_parquet(tmp_path / "rows.parquet")
    load_dataset = datasets.load_dataset

    def hub(path, *names, **options):
        """The Hub's `someone/texts`, with the configuration `english`."""
        if path == "someone/texts":
            path, options = "parquet", options | {"data_files": str(tmp_path / "rows.parquet")}
            assert names == ("english",) and options["streaming"]
        return load_dataset(path, **options)

    monkeypatch.setattr(datasets, "load_dataset", hub)
    found = []
    for names in (files, [tmp_path / "rows.jsonl"], [tmp_path / "rows.parquet"], ["someone/texts:english"]):
        args = parse(names, "--text-column", "text" if names is files else "body")
        source, held_out = lm_multinode.load_texts(args)
        assert held_out
        lines = (row["text"] for row in source)
        found.append({*lm_multinode.texts_of([*held_out, *lines], args.text_column)})
        whole = list(itertools.islice(stream(args, tokenizer, source=source), 20))
        rest = itertools.islice(stream(args, tokenizer, 0, 1, json.loads(json.dumps(whole[6][1])), source), 13)
        for (batch, _), (again, _) in zip(whole[7:], rest, strict=True):
            assert (batch["input_ids"] == again["input_ids"]).all()
    assert found == [{row["text"] for row in rows}] * 4


def test_another_pass_and_another_seed_are_other_orders(tmp_path, tokenizer):
    pattern = write_shards(tmp_path, [60])
    args = parse(pattern)
    orders = [numbers_in(tokenizer, pass_of(number, stream(args, tokenizer))) for number in (0, 1)]
    orders.append(numbers_in(tokenizer, pass_of(0, stream(parse(pattern, "--seed", "2"), tokenizer))))
    assert all(len(set(order)) > 50 for order in orders)
    for order, other in itertools.combinations(orders, 2):
        assert sum(one == two for one, two in zip(order, other, strict=False)) < 15


def test_broken_records_are_left_out(tmp_path, tokenizer):
    pattern = write_shards(tmp_path, [100])
    [path] = tmp_path.iterdir()
    lines = gzip.decompress(path.read_bytes()).splitlines()
    faults = [b'{"text": "cut', b'{"url": "no text"}', b'{"text": null}', b'{"text": 5}', b"[]", b""]
    lines[10:70:10] = faults
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    args = parse(pattern)
    source, held_out = lm_multinode.load_texts(args)
    numbers = numbers_in(tokenizer, pass_of(0, stream(args, tokenizer, source=source)))
    assert not set(range(10, 70, 10)) & set(numbers)
    assert len(numbers) >= 100 - len(faults) - len(held_out) - 4


def test_faults_in_files_are_one_sentence(tmp_path):
    good = b"".join(b'{"text": "text %d"}\n' % number for number in range(3000))
    output = ("--num-validation-texts", 9, "--output-dir", tmp_path / "output")
    large = ("--seq-length", 16, "--micro-batch-size", 5000, "--global-batch-size", 5000)
    cases = [
        (("--dataset", tmp_path / "absent*.json.gz", *output), 1, r"--dataset .*absent\*.json.gz: no such file"),
        (("--dataset", tmp_path, *output), 1, "is a folder; name its files, as in --dataset '.*json.gz'"),
    ]
    for name, content, options, message in (
        ("empty", gzip.compress(b""), (), ""),
        ("fields", gzip.compress(good.replace(b'"text"', b'"body"')), (), "too few texts in --text-column text"),
        ("cut", gzip.compress(good)[:-20], (), "ended before the end-of-stream"),
        ("not gzip", good, (), "Not a gzipped file"),
        ("not text", gzip.compress(good + b"\xff"), (), "'utf-8' codec can't decode"),
        ("few", gzip.compress(good[:40]), (), ""),
        ("less than a batch", gzip.compress(good), large, "too few texts for a micro-batch in each worker"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c4.json.gz").write_bytes(content)
        cases.append(
            (("--dataset", tmp_path / name / "*.json.gz", *options, *output), 1, f"--dataset .*{name}.*{message}")
        )
    check_bad_input("lm_multinode.py", [], cases)


def test_c4_goes_through_the_library_and_resumes(tmp_path, tokenizer, monkeypatch):
    """The Hub's stream with local files in its position: everything but the network."""
    (tmp_path / "validation").mkdir()
    files = {"train": write_shards(tmp_path, [40, 40]), "validation": write_shards(tmp_path / "validation", [9])}
    load_dataset, asked = datasets.load_dataset, []

    def local(path, data_files, **options):
        asked.append(data_files)
        return load_dataset(path, data_files=files["train" if "train" in data_files else "validation"], **options)

    monkeypatch.setattr(datasets, "load_dataset", local)
    args = parse("c4", "--num-validation-texts", "4")
    source, held_out = lm_multinode.load_texts(args)
    assert asked == [f"hf://datasets/allenai/c4/en/c4-{split}.*.json.gz" for split in ("train", "validation")]
    texts = lm_multinode.texts_of(held_out, "text")
    assert [text.split()[0] for text in texts] == list("0123")  # of its own validation split
    whole = list(itertools.islice(stream(args, tokenizer, 1, 2, source=source), 30))
    rest = itertools.islice(stream(args, tokenizer, 1, 2, json.loads(json.dumps(whole[9][1])), source), 20)
    for (batch, _), (again, _) in zip(whole[10:], rest, strict=True):
        assert (batch["input_ids"] == again["input_ids"]).all()
    numbers = numbers_in(tokenizer, [batch for batch, position in whole if position["pass"] == 0])
    assert len(numbers) > 30 and set(numbers) <= set(range(40, 80))  # rank 1 has the second file
