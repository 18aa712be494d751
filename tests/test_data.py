"""What is trained on: the texts of lm_multinode.py, the articles of t5_fsdp.py and the digits of mnist_fsdp.py."""

import collections
import gzip
import itertools
import json
import math
import random
import re
from pathlib import Path

import torch

import datasets
import numpy as np
import pytest
from conftest import CACHES, curve, losses, run_many, write_csv, write_shards

import inside


# ---- Texts of lm_multinode.py ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return inside.train_tokenizer(["0 1 2 3 4 5 6 7 8 9 lorem"] * 2, 300, append_eos=False)


def lm_args(*files, text_column="text", **flags):
    flags = {"micro_batch_size": 2, "seq_length": 16, "num_validation_texts": 1000} | flags
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return inside.parse("lm_multinode.py", *flags, "--text-column", text_column, "--dataset", *files)


def read_texts(folder):
    """Those of `write_shards`, in order."""
    lines = [line for path in sorted(folder.glob("*.gz")) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [json.loads(line)["text"] for line in lines]


def take(stream, count):
    """The inputs and labels of some batches, as one array, and the position after each, as a checkpoint has it."""
    some = list(itertools.islice(stream, count))
    tokens = np.array([[np.asarray(batch["input_ids"]), np.asarray(batch["labels"])] for batch, _ in some])
    return tokens, [json.loads(json.dumps(position)) for _, position in some]


def whole_texts(tokenizer, tokens, texts):
    """Those of `texts` that are whole in the inputs, in order."""
    pieces = [piece.strip() for piece in tokenizer.decode(tokens[:, 0].ravel()).split("</s>")]
    return [piece for piece in pieces[:-1] if piece in texts]


@pytest.mark.parametrize("processes, shards", [(2, [40] * 4), (2, [160]), (3, [40] * 4)])
def test_every_text_comes_once_in_a_pass_whatever_the_processes(tmp_path, tokenizer, processes, shards):
    """A process has files of its own, or every n-th text where they cannot be divided. It shuffles 500 texts at a time,
    here those of several passes."""
    files = write_shards(tmp_path, shards)
    texts = read_texts(tmp_path)
    args = lm_args(files, micro_batch_size=8, seq_length=8)  # little is cut off at the end of a block
    source, held_out = inside.lm_texts(args)
    seen = []
    for rank in range(processes):
        blocks = []
        for seed in (1, 2):
            args.seed = seed
            tokens, _ = take(inside.lm_stream(args, tokenizer, rank, processes, source=source), 150)
            blocks.append(whole_texts(tokenizer, tokens, texts)[:480])
        found, other = blocks
        counts = collections.Counter(found)
        passes = 500 / len(counts)
        assert math.floor(passes) - 4 <= min(counts.values()) and max(counts.values()) <= math.ceil(passes)
        for order in (texts, other):
            in_both = set(itertools.pairwise(found[: len(counts)])) & set(itertools.pairwise(order))
            assert len(in_both) < 0.5 * len(counts)
        seen += counts
    assert len(seen) == len(set(seen)) and set(seen) == set(texts) - set(held_out)


def test_each_pass_has_an_order_of_its_own(tmp_path, tokenizer):
    """Also where a pass is as many texts as are shuffled at a time."""
    count = 500
    args = lm_args(write_shards(tmp_path, [600]), seq_length=8)
    texts = read_texts(tmp_path)
    own = [row["text"] for row in inside.lm_texts(args)[0]][:count]
    write_shards(tmp_path, [texts.index(own[-1]) + 1])
    tokens, _ = take(inside.lm_stream(args, tokenizer), 1600)
    found = whole_texts(tokenizer, tokens, own)
    first, second = found[: count - 10], found[count : 2 * count - 10]  # at its end a pass is cut off
    in_both = set(itertools.pairwise(first)) & set(itertools.pairwise(second))
    assert len(in_both) < 0.1 * count


def test_held_out_texts_are_chosen_by_their_content(tmp_path):
    """A twentieth, whatever files they are in: every process takes the same, and a text that comes twice is on one
    side. None of them is trained on, also where fewer are validated on."""
    for name, shards in {"one": [1000], "two": [300, 700]}.items():
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, shards)
    one, *two = sorted(tmp_path.rglob("*.gz"))
    args = lm_args(one)
    source, held_out = inside.lm_texts(args)
    texts = [row["text"] for row in source]
    assert 20 < len(held_out) < 90
    assert sorted([*texts, *held_out]) == sorted(read_texts(tmp_path / "one"))
    again, few = inside.lm_texts(lm_args(*two[::-1], one, num_validation_texts=15))
    assert {row["text"] for row in again} == set(texts)
    assert len(few) == 15 and set(few) <= set(held_out)

    source, held_out = inside.lm_texts(lm_args("builtin"))
    texts = [row["text"] for row in source]
    assert len(texts) == len(set(texts)) > 500 and not set(held_out) & set(texts)


def test_sequences_have_no_gap_and_no_padding(tmp_path, tokenizer):
    """Read in a row, the inputs are the texts with </s> behind each; the targets are the same, one token later. Broken
    records are left out."""
    args = lm_args(write_shards(tmp_path, [300]))
    known = read_texts(tmp_path)
    with gzip.open(tmp_path / "c4-train.00000.json.gz", "a") as file:
        faults = [b'{"text": "1 cut', b'{"url": "no text"}', b'{"text": null}', b'{"text": 5}', b"[]", b"", b"\n"]
        half_a_surrogate_pair = b'{"text": "1 \\ud83d"}'
        file.write(b"\n".join([*faults, half_a_surrogate_pair]))
    tokens, _ = take(inside.lm_stream(args, tokenizer), 100)  # not all of a pass
    assert tokens.shape == (100, 2, 2, 16)
    inputs, labels = tokens[:, 0].ravel(), tokens[:, 1].ravel()
    assert (labels[:-1] == inputs[1:]).all()
    texts = whole_texts(tokenizer, tokens, known)
    expected = np.concatenate(tokenizer([text + "</s>" for text in texts])["input_ids"])
    assert inputs[: len(expected)].tolist() == expected.tolist()
    assert len(inputs) - len(expected) < 40  # a text that goes on in the next batch


@pytest.mark.parametrize("shards", [[30, 30], [30, 30, 30], [1200]])
def test_a_stream_goes_on_exactly_from_any_place(tmp_path, tokenizer, shards):
    """Again and again, over the ends of passes, inside a block of texts and over its end."""
    count = 60
    args = lm_args(write_shards(tmp_path, shards), micro_batch_size=8)
    source, _ = inside.lm_texts(args)
    whole, _ = take(inside.lm_stream(args, tokenizer, 1, 2, source=source), count)
    choose = random.Random(0)
    done = 0
    position = None
    while done < count:
        some = min(choose.randint(1, count // 6), count - done)
        tokens, positions = take(inside.lm_stream(args, tokenizer, 1, 2, position, source), some)
        assert np.array_equal(tokens, whole[done : done + some])
        done += some
        position = positions[-1]


def test_other_formats_hold_the_same_texts(tmp_path, tokenizer, monkeypatch):
    """Several files, JSON lines, parquet and datasets of the Hub, under any column; each stream goes on exactly."""
    write_shards(tmp_path, [40, 40])
    texts = read_texts(tmp_path)
    rows = datasets.Dataset.from_list([{"body": text, "url": "http://x"} for text in texts])
    rows.to_json(tmp_path / "rows.jsonl")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.rename_column("body", "text").to_parquet(tmp_path / "c4.parquet")
    # What the library finds on the Hub, by dataset and configuration.
    hub = {("someone/texts", "english"): "rows.parquet", ("allenai/c4", "en"): "c4.parquet"}
    load_dataset = datasets.load_dataset

    def load_from_here(*names, **options):
        if names in hub:
            return load_dataset("parquet", data_files=str(tmp_path / hub[names]), **options)
        return load_dataset(*names, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_from_here)
    formats = [lm_args(*sorted(tmp_path.glob("*.gz"))), lm_args("c4")]
    for name in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet", "someone/texts:english"):
        formats.append(lm_args(name, text_column="body"))

    for args in formats:
        source, held_out = inside.lm_texts(args)
        assert held_out and sorted([*held_out, *(row["text"] for row in source)]) == sorted(texts)
        whole, positions = take(inside.lm_stream(args, tokenizer, source=source), 20)
        rest, _ = take(inside.lm_stream(args, tokenizer, position=positions[6], source=source), 13)
        assert np.array_equal(rest, whole[7:])


@pytest.mark.long
def test_workers_that_are_not_forked(tmp_path):
    """As on macOS: what a worker calls reaches it as a pickle. Of the texts, which processes divide, only every second
    line is a record."""
    with open(tmp_path / "c4.json", "w") as file:
        file.writelines(f'{{"text": "text {number} of some words"}}\n{{"te\n' for number in range(2000))
    flags = ("--seq-length", 32, "--micro-batch-size", 2, "--global-batch-size", 8, "--num-validation-texts", 50)
    flags += ("--max-steps", 1, "--no-save-model", "--dataset", tmp_path / "c4.json", "--output-dir", tmp_path)
    run_many("lm_multinode.py", [flags], 2, change=("spawn_workers",))
    assert len(curve(tmp_path)) == 1


# ---- Articles of t5_fsdp.py ------------------------------------------------------------------------------------------
def test_wikihow_all(tmp_path):
    """A file with everything WikiHow's hold: numbered titles, quotes, newlines, commas, gaps, odd lengths."""
    rows = []
    for number in range(60):
        article = inside.builtin_article(number)
        headline = "\n" + article["headline"].replace(".\n", ".,\n") + ","
        text = '\nHe said "do it".\n\n, ' + article["text"] + "\n\n\n"
        for method in (1, 2):  # two methods of one article, or the same row twice
            titled = {"headline": headline, "title": f"{article['title']}{method}", "text": f"{text} ({method})"}
            rows.append(titled if number < 40 else titled | {"title": "", "text": text})
    rows.append({"headline": "", "title": "How to Lack a Headline", "text": "There is text."})
    rows.append({"headline": "Nothing here.", "title": "How to Lack a Text", "text": " \n"})
    rows.append({"headline": "Much longer than its text.", "title": "How to Ramble", "text": "Short text."})
    rows.append({"headline": "12345", "title": "", "text": "A row without a title, with a number as its headline."})

    train, validation = inside.t5_articles(write_csv(tmp_path / "wikihowAll.csv", rows))
    assert len(train) + len(validation) == 121  # of 124 rows, two with a gap and one with a long summary
    assert 6 <= len(validation) <= 8  # 4 of 61 articles, of which one is a single row
    of_train, of_validation = (
        {re.sub(r"\s+\(\d\)$", "", text) for text in part["text"]} for part in (train, validation)
    )
    assert not of_train & of_validation
    texts = train["text"][:] + validation["text"][:]
    summaries = train["summary"][:] + validation["summary"][:]
    assert "12345" in summaries
    assert inside.builtin_article(0)["headline"] in summaries  # without the commas and line breaks
    assert not any(re.search(r"\n\s*,", text) for text in texts)
    assert any('"do it"' in text and "\n" in text for text in texts)


def test_other_files_hold_the_same_articles(tmp_path):
    """JSON lines and parquet, with other columns; a file that has changed is read again."""
    rows = [inside.builtin_article(number) for number in range(50)]
    renamed = [{"article": row["text"], "highlights": row["headline"], "title": row["title"]} for row in rows]
    write_csv(tmp_path / "rows.csv", renamed)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in renamed))
    datasets.Dataset.from_list(renamed).to_parquet(tmp_path / "rows.parquet")
    found = []
    for kind in ("csv", "jsonl", "parquet"):
        parts = inside.t5_articles(tmp_path / f"rows.{kind}", "article", "highlights")
        found.append([(row["text"], row["summary"]) for part in parts for row in part])
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == sorted((row["text"], row["headline"]) for row in rows)
    write_csv(tmp_path / "rows.csv", rows[:30])
    assert sum(len(part) for part in inside.t5_articles(tmp_path / "rows.csv")) == 30


def epoch_on(size, lengths):
    """The steps of 8 samples that `size` ranks make together."""
    ranks = [inside.t5_steps(lengths, 8 // size, rank, size) for rank in range(size)]
    return [[sample for part in step for sample in part] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("samples", [1003, 16])
def test_an_epoch_is_a_permutation_that_saves_padding(samples):
    """The same on any number of processes."""
    lengths = torch.randint(10, 500, (samples,), generator=torch.Generator().manual_seed(0))
    steps = epoch_on(1, lengths)
    numbers = {sample for step in steps for sample in step}
    assert len(steps) == samples // 8 and {len(step) for step in steps} == {8}
    assert len(numbers) == samples // 8 * 8 and numbers <= set(range(samples))
    for size in (2, 4):
        assert [sorted(step) for step in epoch_on(size, lengths)] == [sorted(step) for step in steps]
    if samples > 16:
        padded = sum(8 * lengths[step].max().item() for step in steps)
        assert padded < 1.1 * lengths.sum()  # 1.75 times as much in random order
        # Steps of all lengths come in any order: no curriculum from short to long.
        longest = torch.stack([lengths[step].max() for step in steps]).double()
        assert torch.corrcoef(torch.stack([longest, torch.arange(len(steps)).double()]))[0, 1].abs() < 0.3


@pytest.mark.parametrize("samples, batch_size", [(1500, 32), (20, 8)])
def test_no_step_comes_twice_and_every_article_is_met(samples, batch_size):
    """In three epochs: the longest articles, too."""
    lengths = torch.randint(10, 500, (samples,), generator=torch.Generator().manual_seed(0))
    steps = []
    for epoch in (1, 2, 3):
        steps += inside.t5_steps(lengths, batch_size, epoch=epoch)
    assert len(steps) == 3 * (samples // batch_size)
    assert len({frozenset(step) for step in steps}) == len(steps)
    assert {number for step in steps for number in step} == set(range(samples))


@pytest.mark.long
def test_flags_count_articles_and_switch_off(tmp_path, tiny_model):
    """A run with another number of processes finds all articles in the cache."""
    path = write_csv(tmp_path / "new.csv", [inside.builtin_article(number) for number in range(300, 400)])
    flags = ("--model", tiny_model, "--dataset", path, "--num-train-samples", 40, "--num-validation-samples", 3)
    flags += ("--max-source-length", 16, "--max-target-length", 4, "--epochs", 2)
    switches = {
        "all": (),
        "no-validation": ("--no-run-validation",),
        "no-model": ("--no-save-model",),
        "few-steps": ("--no-run-validation", "--no-save-model", "--max-steps", 7),
    }
    settings = {tmp_path / name: (*flags, *more, "--batch-size", 4) for name, more in switches.items()}
    run_many("t5_fsdp.py", settings, 2)
    for name, more in switches.items():
        assert list(losses(tmp_path / name)) == ([5, 7] if name == "few-steps" else [5, 10])
        assert len(curve(tmp_path / name, "val_loss")) == (0 if "--no-run-validation" in more else 3)
        assert (tmp_path / name / "best").exists() == ("--no-save-model" not in more)

    cached = set(Path(CACHES.name).rglob("*.arrow"))
    run_many("t5_fsdp.py", [[*flags, "--batch-size", 8, "--output-dir", tmp_path / "one"]], 1)
    assert cached == set(Path(CACHES.name).rglob("*.arrow")) and list(losses(tmp_path / "one")) == [5, 10]
