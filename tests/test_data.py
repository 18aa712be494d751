"""The training data: lm_multinode.py's texts and t5_fsdp.py's articles."""

import collections
import copy
import datetime
import gzip
import itertools
import json
import random
import re
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import AFTER_ADAM, CACHES, SMALL, curve, losses, run_many, serve, write_csv
from test_errors import refuse
from tokenizers.processors import TemplateProcessing

import inside


# ---- Texts of lm_multinode.py ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return inside.train_tokenizer(["no\n 0 1 2 3 4 5 6 7 8 9 lorem"] * 2, 300, append_eos=False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Make `datasets` read 2 kB of a file at a time, not 10 MB. The first block decides the types of all rows."""
    load_dataset_builder = datasets.load_dataset_builder

    def load(*arguments, **options):
        builder = load_dataset_builder(*arguments, **options)
        builder.config.chunksize = 2000
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load)


def lm_args(dataset, **flags):
    flags = {"seq_length": 16, "global_batch_size": 8, "num_validation_texts": 1000, "dataset": dataset} | flags
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return inside.parse("lm_multinode.py", *flags)


def make_text(index):
    """A text of two lines. Lengths differ between texts."""
    return " ".join([f"no\n{index}", *["lorem"] * (index * 7 % 23)])


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_shards(folder, counts):
    """Write files in C4's format, each with as many texts as its count says."""
    indices = itertools.count()
    for shard, count in enumerate(counts):
        rows = [{"text": make_text(index), "url": "http://x"} for index in itertools.islice(indices, count)]
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder / "*.json.gz"


KINDS = {"one file": [600], "unequal files": [290, 7, 250, 53], "many files": [10] * 60}
KINDS |= dict.fromkeys(("builtin", "row groups", "paragraphs", "not alike"))


def write_kind(folder, kind):
    """Write 600 texts as a dataset of this kind."""
    if KINDS[kind]:
        return write_shards(folder, KINDS[kind])
    texts = [make_text(index) for index in range(600)]
    if kind == "row groups":
        columns = {"text": texts, "number": range(600)}
        datasets.Dataset.from_dict(columns).to_parquet(folder / "rows.parquet", batch_size=40)
        return folder / "rows.parquet"
    if kind == "paragraphs":
        (folder / "texts.txt").write_text("\n\n".join(texts))
        return folder / "texts.txt"
    # "not alike": a column changes its type, other columns appear, and texts are missing.
    rows = [{"text": text, "id": index if index < 300 else f"A{index}"} for index, text in enumerate(texts)]
    rows += [{"text": text, "url": "http://x"} for text in ("", " \n", None)]
    return write_rows(folder / "rows.jsonl", rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_resumes_reads_what_one_run_reads(kind, tmp_path, tokenizer, small_blocks):
    """A run stops and resumes 30 times, anywhere in a block of texts, over several passes."""
    dataset = kind if kind == "builtin" else write_kind(tmp_path, kind)
    args = lm_args(dataset, seq_length=256 if kind == "builtin" else 16)
    texts = inside.lm_all_texts(args)
    assert kind == "builtin" or texts == sorted(map(make_text, range(600)))

    make_stream = inside.lm_stream(args, tokenizer, index=5, num_streams=8)
    choose = random.Random(0)
    lengths = [choose.choice((1, 1, 2, 3, 7, 80)) for _ in range(30)]
    expected = [*itertools.islice(make_stream(), sum(lengths))]
    num_tokens = sum(len(tokens) + 1 for tokens in tokenizer(texts)["input_ids"])
    assert len(expected) * args.seq_length > 2 * num_tokens / 8  # more than two passes

    sequences = []
    position = None
    for length in lengths:
        stream = make_stream()
        if position:
            stream.load_state_dict(json.loads(position))
        sequences += itertools.islice(stream, length)
        position = json.dumps(stream.state_dict())
    np.testing.assert_equal(sequences, expected)


@pytest.mark.parametrize("texts, sizes", [(300, (1, 2, 4, 8)), (30, (1, 2))])
def test_a_step_is_the_same_on_any_number_of_processes(texts, sizes, tmp_path, tokenizer):
    """The micro-batch size does not matter either. 30 texts are enough for two streams."""
    dataset = write_rows(tmp_path / "rows.jsonl", [{"text": make_text(index)} for index in range(texts)])
    steps_of_sizes = []
    for size in sizes:
        args = lm_args(dataset, global_batch_size=16, micro_batch_size=size)
        steps = []
        for streams in itertools.islice(inside.lm_steps(args, tokenizer, size=size), 15):
            rows = [np.concatenate([batch[name] for batch in streams]) for name in ("input_ids", "labels")]
            steps.append(sorted(np.hstack(rows).tolist()))
        steps_of_sizes.append(steps)
    assert {len(step) for step in steps_of_sizes[0]} == {16}
    assert all(steps == steps_of_sizes[0] for steps in steps_of_sizes)


def test_stopped_runs_resume_with_the_same_losses(tiny_llama, tmp_path):
    """4, 1 and 2 processes continue one run over several passes, with other micro-batches. Other flags may give the
    same learning rate. The script refuses other texts."""
    dataset = write_rows(tmp_path / "rows.jsonl", [{"text": make_text(index)} for index in range(150)])
    flags = (*SMALL, "--model", tiny_llama, "--dataset", dataset, "--seq-length", 16, "--resume", "--no-save-model")
    flags = (*flags, "--max-steps", 12, "--validate-every", 0, "--lr", 1e-3, "--warmup-steps", 100)
    changed = ("--lr", 4e-3, "--warmup-steps", 400, "--micro-batch-size", 1, "--num-validation-texts", 5)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_many("lm_multinode.py", {whole: flags}, 1)
    for processes, step, extra in (4, 3, ()), (1, 6, ("--micro-batch-size", 5)), (2, 12, changed):
        settings = {stopped: (*flags, *extra)}
        run_many("lm_multinode.py", settings, processes, change=("signal_in_step", 0, step, "SIGTERM"))
    assert losses(stopped) == pytest.approx(losses(whole), **AFTER_ADAM)
    assert len(curve(stopped)) == 12

    dataset.write_text(dataset.read_text().replace("77 lorem", "78 lorem"))
    refuse("lm_multinode.py", *flags, "--output-dir", stopped, words=["--dataset", "has changed"])


def sequences_of(args, tokenizer, num_steps):
    """The sequences of the first steps, with the target of the last token: a list for each stream."""
    steps = itertools.islice(inside.lm_steps(args, tokenizer), num_steps)
    streams = zip(*steps, strict=True)
    return [[row for step in stream for row in add_target(step)] for stream in streams]


def add_target(step):
    return np.hstack([step["input_ids"], step["labels"][:, -1:]])


# Each pair of streams has its own files; all streams share four files; there is one file.
@pytest.mark.parametrize("shards", [[15] * 40, [150] * 4, [250, 250, 85, 15], [600]])
def test_every_text_comes_once_in_a_pass(shards, tmp_path, tokenizer):
    """Each text is in one stream, or held out because of its content. Passes and seeds have different orders."""
    args = lm_args(write_shards(tmp_path, shards), seq_length=32, global_batch_size=80)
    indices = [index for index in range(600) if not inside.lm_is_held_out(make_text(index))]
    assert 0.93 * 600 < len(indices) < 0.97 * 600
    assert all(map(inside.lm_is_held_out, inside.lm_first_texts(args)[1]))
    streams = sequences_of(args, tokenizer, 40)
    args.seed = 2
    assert [list(rows[0]) for rows in sequences_of(args, tokenizer, 1)] != [list(rows[0]) for rows in streams]

    seen = []
    for rows in streams:
        # Of a text that two sequences share, only the end or only the beginning is visible.
        begun = [re.findall(r"no\n(\d+)[ <]", tokenizer.decode(row)) for row in rows]
        counts = collections.Counter(itertools.chain(*begun))
        own = tokenizer([make_text(int(index)) for index in counts])["input_ids"]
        passes = args.seq_length * len(rows) / sum(len(tokens) + 1 for tokens in own)
        assert passes > 4 and max(counts.values()) < passes + 3  # a block has almost three passes
        half = len(begun) // 2
        assert begun[:half] != begun[half : 2 * half]
        assert len(counts) == pytest.approx(len(indices) / 8, rel=0.3)
        seen += map(int, counts)
    assert sorted(seen) == indices


@pytest.mark.parametrize("length", [64, 1024])
def test_long_and_short_texts_are_trained_alike(length, tmp_path, tokenizer):
    """Novels among notes, notes before novels, one very long text. In a pass of a stream, almost all words of each kind
    are trained; the rest of each block is not. All streams give sequences."""
    notes = [f"{index} ant" for index in range(4000)]
    novels = ["bee " * 4000 + str(index) for index in range(40)]
    mixed = random.Random(0).sample(notes + novels, len(notes + novels))
    for texts in mixed, notes + novels, [*notes, "bee " * 100_000]:
        path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
        args = lm_args(path, seq_length=length)
        to_train = [text for text in texts if not inside.lm_is_held_out(text)]
        num_tokens = sum(len(tokens) + 1 for tokens in tokenizer(to_train)["input_ids"])
        stream = inside.lm_stream(args, tokenizer, index=0, num_streams=1)()
        rows = [row["input_ids"] for row in itertools.islice(stream, num_tokens // length)]
        trained = tokenizer.decode(np.concatenate(rows))
        for word in ("ant", "bee"):
            share = trained.count(word) / "".join(to_train).count(word)
            assert 0.94 < share < 1.7, word  # the end of a pass may be the beginning of the next
        assert len(sequences_of(args, tokenizer, 3)) == 8


def test_the_first_texts_come_from_ten_files(tmp_path):
    """Each file has an equal share, because a tokenizer learns from some of these texts; others are for validation."""
    for file in range(12):
        write_rows(tmp_path / f"{file}.jsonl", [{"text": f"{file} {index}"} for index in range(500)])
    args = lm_args(tmp_path, num_validation_texts=100)
    to_train, held_out = inside.lm_first_texts(args)
    assert (len(to_train), len(held_out)) == (2000, 100)
    for texts in (to_train, held_out):
        shares = collections.Counter(text.split()[0] for text in texts)
        assert len(shares) == 10 and max(shares.values()) < 2.5 * min(shares.values())
    args.num_validation_texts = 5
    assert inside.lm_first_texts(args) == (to_train, held_out[:5])


def test_a_text_is_validated_once(tmp_path):
    """30% of the rows are one text that is held out."""
    texts = [make_text(index) for index in range(400)]
    often = next(filter(inside.lm_is_held_out, texts))
    rows = [{"text": text} for text in [*texts, *[often] * 170]]
    _, held_out = inside.lm_first_texts(lm_args(write_rows(tmp_path / "rows.jsonl", rows)))
    assert sorted(held_out) == sorted(filter(inside.lm_is_held_out, texts))


def test_the_home_folder_is_found_in_flags(monkeypatch, tmp_path):
    """A shell does not replace ~ in them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "rows.jsonl", [{"text": make_text(index)} for index in range(60)])
    args = lm_args("~/rows.jsonl", output_dir="~/run")
    assert inside.parse("lm_multinode.py", "--dataset", "~/*.jsonl").dataset == f"{tmp_path}/*.jsonl"
    assert args.output_dir == tmp_path / "run" and len(inside.lm_all_texts(args)) == 60


def test_the_first_texts_come_from_all_files_of_one_text(tmp_path, tokenizer):
    for index in range(150):
        (tmp_path / f"{index}.txt").write_text(make_text(index))
    sequences = sequences_of(lm_args(tmp_path, seq_length=64), tokenizer, 2)  # several files make one
    assert [len(stream) for stream in sequences] == [2] * 8
    to_train, held_out = inside.lm_first_texts(lm_args(tmp_path))
    assert sorted(to_train + held_out) == sorted(map(make_text, range(150)))


@pytest.mark.parametrize("dogs, dog_files", [(20, 1), (140, 70)])
def test_kinds_of_texts_mix(dogs, dog_files, tmp_path):
    """A file has one kind of texts, and in half a pass each kind has its share. A stream gets nine of 70 small files,
    but a large file is too large for one stream."""
    sizes = {"ant": 900, "bee": 700, "cat": 1100, "dog": dogs}
    total = sum(sizes.values())
    for kind, count in sizes.items():
        rows = [{"text": f"{kind} {index}"} for index in range(count)]
        files = dog_files if kind == "dog" else 1
        for file in range(files):
            write_rows(tmp_path / f"{kind}{file}.jsonl", rows[file::files])
    tokenizer = inside.train_tokenizer(["ant bee cat dog 0 1 2 3 4 5 6 7 8 9"] * 9, 300, append_eos=False)
    rows = itertools.chain(*sequences_of(lm_args(tmp_path), tokenizer, 60))
    texts = " ".join(map(tokenizer.decode, rows))
    counts = collections.Counter(re.findall("ant|bee|cat|dog", texts))
    assert 0.3 * total < counts.total() < 0.7 * total
    for kind, count in sizes.items():
        assert counts[kind] / counts.total() == pytest.approx(count / total, rel=0.5, abs=0.02)


def test_sequences_have_no_gap_and_no_padding(tmp_path, tokenizer):
    """A sequence holds the end of a text, whole texts, and the beginning of a text, each with the tokenizer's special
    tokens and one EOS. Targets are one token later. Special tokens inside a text are read as letters."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})  # as Llama's and Gemma's tokenizers do
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=special)
    texts = [f"{make_text(index)} </s> <pad><s> {index}" for index in range(300)]
    args = lm_args(write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts]), seq_length=100)
    for step in itertools.chain(*itertools.islice(inside.lm_steps(args, tokenizer), 30)):
        assert (step["labels"][:, :-1] == step["input_ids"][:, 1:]).all()

    ids = tokenizer(texts, split_special_tokens=True)["input_ids"]
    whole = {(*tokens, tokenizer.eos_token_id) for tokens in ids}
    beginnings = {tokens[:end] for tokens in whole for end in range(len(tokens))}
    ends = {tokens[start:] for tokens in whole for start in range(len(tokens))}
    num_whole = 0
    for row in itertools.chain(*sequences_of(args, tokenizer, 30)):
        first, *others, last = np.split(row, np.flatnonzero(row == tokenizer.eos_token_id) + 1)
        assert tuple(first) in ends and tuple(last) in beginnings
        assert {tuple(tokens) for tokens in others} <= whole
        assert tokenizer.pad_token_id not in row
        num_whole += len(others)
    assert num_whole > 100


def test_all_formats_hold_the_same_texts(tmp_path, monkeypatch):
    """A pattern of files, JSON lines, a JSON list, Parquet, paragraphs, and datasets of the Hub, in any column."""
    pattern = write_shards(tmp_path, [40, 40])
    texts = sorted(make_text(index) for index in range(80))
    rows = datasets.Dataset.from_list([{"body": text, "url": "http://x"} for text in texts])
    rows.to_json(tmp_path / "rows.JSONL")
    rows.to_json(tmp_path / "rows.json", lines=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.rename_column("body", "text").to_parquet(tmp_path / "c4.parquet")
    (tmp_path / "rows.txt").write_bytes("\r\n\r\n".join(texts).encode())
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress("\n\n\n".join(texts).encode()))
    # The datasets on this test's Hub, by name and configuration.
    hub = {("someone/texts", "english"): "rows.parquet", ("allenai/c4", "en"): "c4.parquet"}
    load_dataset_builder = datasets.load_dataset_builder

    def load_from_here(path, name=None, data_files=None):
        if (path, name) in hub:
            path, name, data_files = "parquet", None, str(tmp_path / hub[path, name])
        return load_dataset_builder(path, name, data_files=data_files)

    monkeypatch.setattr(datasets, "load_dataset_builder", load_from_here)
    for name in (pattern, "c4", tmp_path / "rows.txt", tmp_path / "rows.txt.gz"):
        assert inside.lm_all_texts(lm_args(name)) == texts
    for name in (*(tmp_path / name for name in ("rows.JSONL", "rows.json", "rows.parquet")), "someone/texts:english"):
        assert inside.lm_all_texts(lm_args(name, text_column="body")) == texts


def test_a_folder_is_read_as_the_datasets_library_reads_it(tmp_path):
    """All files, even if other columns differ; or the training files, by folder, by name or by dataset card."""
    texts = sorted(f"text {index} lorem" for index in range(120))
    for index, name in enumerate(("a.jsonl", "b.jsonl", "deeper/c.jsonl")):
        rows = [{"text": text, f"column{index}": index} for text in texts[index::3]]
        for folder in ("all", "folders/train", "card/some"):
            write_rows(tmp_path / folder / name, rows)
    write_rows(tmp_path / "names/train.jsonl", [{"text": text} for text in texts])
    for name in ("folders/test/a", "folders/validation/a", "names/test", "names/dev", "card/other/a"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": "held back"}])
    (tmp_path / "all/README.md").write_text("# Texts\n")
    card = "configs:\n- config_name: default\n  data_files: some/**\n"
    (tmp_path / "card/README.md").write_text(f"---\n{card}---\n")
    for folder in ("all", "folders", "names", "card"):
        assert inside.lm_all_texts(lm_args(tmp_path / folder)) == texts


def test_only_the_text_column_of_parquet_is_read(tmp_path):
    """The other column is damaged at its end. Its first rows tell `datasets` the columns, and pyarrow reads ahead."""
    path = tmp_path / "rows.parquet"
    texts = sorted(make_text(index) for index in range(200))
    datasets.Dataset.from_dict({"text": texts, "other": texts}).to_parquet(path, batch_size=5)
    damaged = pq.ParquetFile(path).metadata.row_group(39).column(1)
    with path.open("r+b") as file:
        file.seek(damaged.data_page_offset)
        file.write(bytes(damaged.total_compressed_size))
    assert inside.lm_all_texts(lm_args(path)) == texts
    with pytest.raises(OSError, match="thrift"):
        pq.read_table(path)


@pytest.mark.parametrize("processes", [1, 2])
def test_few_texts_are_enough_to_train(processes, tmp_path):
    """One of them is held out."""
    texts = [f"{index} lorem " * 50 for index in range(99)]
    texts.sort(key=inside.lm_is_held_out)
    settings = {}
    for count in (8, 20):
        (tmp_path / f"{count}.txt").write_text("\n\n".join(texts[-1:] + texts[: count - 1]))
        flags = ("--dataset", tmp_path / f"{count}.txt", "--seq-length", 8 * count, "--max-steps", 2)
        settings[tmp_path / str(count)] = (*flags, "--log-every", 1, "--no-save-model", "--validate-every", 0)
    run_many("lm_multinode.py", settings, processes)
    assert [len(curve(folder)) for folder in settings] == [2, 2]


# ---- Articles of t5_fsdp.py ------------------------------------------------------------------------------------------
def test_wikihows_quirks_are_repaired(tmp_path):
    """Numbered titles, quotes, newlines, commas, missing texts and odd lengths, all in one file."""
    rows = []
    for index in range(60):
        article = inside.builtin_article(index)
        headline = "\n" + article["headline"].replace(".\n", ".,\n") + ","
        text = '\nHe said "do it".\n\n, ' + article["text"] + "\n\n\n"
        for method in (1, 2):  # two methods of one article, or the same row twice
            titled = {"headline": headline, "title": f"{article['title']}{method}", "text": f"{text} ({method})"}
            rows.append(titled if index < 40 else titled | {"title": "", "text": text})
    rows.append({"headline": "", "title": "How to Lack a Headline", "text": "There is text."})
    rows.append({"headline": "Nothing here.", "title": "How to Lack a Text", "text": " \n"})
    rows.append({"headline": "Much longer than its text.", "title": "How to Ramble", "text": "Short text."})
    rows.append({"headline": "12345", "title": "", "text": "A row without a title, with a number as its headline."})

    train, validation = inside.t5_articles(write_csv(tmp_path / "wikihowAll.csv", rows))
    assert len(train) + len(validation) == 121  # of 124 rows; two lack a text, and one has too long a summary
    assert 6 <= len(validation) <= 8  # 4 of 61 articles; one article is a single row
    articles = [{re.sub(r"\s+\(\d\)$", "", text) for text in part["text"]} for part in (train, validation)]
    assert not articles[0] & articles[1]
    texts = train["text"][:] + validation["text"][:]
    summaries = train["summary"][:] + validation["summary"][:]
    assert "12345" in summaries
    assert inside.builtin_article(0)["headline"] in summaries  # without the commas and line breaks
    assert not any(re.search(r"\n\s*,", text) for text in texts)
    assert any('"do it"' in text and "\n" in text for text in texts)


TEXT = "Article {} is longer than what a summary of it may be."


def pairs(path, *columns):
    """The texts and summaries of a file, for training or for validation."""
    return sorted((row["text"], row["summary"]) for part in inside.t5_articles(path, *columns) for row in part)


def test_other_formats_hold_the_same_articles(tmp_path):
    """JSON lines and Parquet, with other columns and lists of sentences. A changed file is read again."""
    sentences = ["The first one.", None, "The second one."]
    rows = [{"article": [TEXT.format(index), *sentences], "highlights": sentences, "id": 1} for index in range(50)]
    write_rows(tmp_path / "rows.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    joined = "The first one.\nThe second one."
    expected = sorted((f"{TEXT.format(index)}\n{joined}", joined) for index in range(50))
    rows = [{"article": text, "highlights": summary} for text, summary in expected]
    write_csv(tmp_path / "rows.csv", rows)
    for kind in ("csv", "jsonl", "parquet"):
        assert pairs(tmp_path / f"rows.{kind}", "article", "highlights") == expected
    write_csv(tmp_path / "rows.csv", rows[:30])
    assert len(pairs(tmp_path / "rows.csv", "article", "highlights")) == 30


def test_a_csv_keeps_texts_as_they_are_written(tmp_path):
    """Summaries like "007" or "null" stay texts, and articles may be long. An unused column turns from numbers to words
    in the last rows. A folder with this file gives the same."""
    summaries = ["0", "007", "1.50", "None", "NA", "nan", "null", "False", "2020-01-01", "a,b;c", 'says "no"', "d\ne"]
    rows = [{"id": index, "text": TEXT.format(index), "headline": "a"} for index in range(10_050)]
    for index, summary in enumerate(summaries, start=10_010):
        rows[index] |= {"id": f"A{index}", "headline": summary}
    rows[0]["text"] *= 5000
    expected = sorted((row["text"], row["headline"]) for row in rows)
    assert pairs(write_csv(tmp_path / "rows.csv", rows)) == pairs(tmp_path) == expected


def spreadsheet(delimiter=",", end="", header_end="", encoding="utf-8"):
    """A file of three columns, as bytes. The last column is empty in every second row."""
    lines = [f"text{delimiter}headline{delimiter}section{header_end}"]
    for index in range(30):
        section = ("Local", "")[index % 2]
        lines.append(delimiter.join([TEXT.format(index), f"s{index}", section]) + end)
    return "\r\n".join([*lines, ""]).encode(encoding)


SHEET = sorted((TEXT.format(index), f"s{index}") for index in range(30))


def test_a_csv_from_a_spreadsheet_is_read(tmp_path):
    """Other delimiters, a byte-order mark, a delimiter after each row."""
    for delimiter, encoding in itertools.product(",;\t|", ("utf-8", "utf-8-sig")):
        for end, header_end in (("", ""), (delimiter, ""), (delimiter, delimiter)):
            (tmp_path / "rows.csv").write_bytes(spreadsheet(delimiter, end, header_end, encoding))
            assert pairs(tmp_path / "rows.csv") == SHEET


# Changes of a spreadsheet with commas: the old text, the new one; then the summary of article 7, or words of the error.
CSV = {
    "a quoted line break": (",s7,", ',"s\n7",', "s\n7"),
    "a quoted delimiter": (",s7,", ',"s, 7",', "s, 7"),
    "a space before a quote": (",s7,", ', "s, 7",', "s, 7"),
    "a doubled quote": (",s7,", ',"say ""s""",', 'say "s"'),
    "a quote inside": (",s7,", ',s "7",', 's "7"'),
    "missing last cells": (",\r\n", "\r\n", "s7"),
    "no last cell": (",Local\r\n", "\r\n", "s7"),
    "line breaks in all summaries": (".,s", ".,s\r\nx", "line 3:"),
    "empty lines": ("\r\n", "\r\r\n", "s7"),
    "old line ends": ("\r\n", "\r", "s7"),
    "other names": ("text,headline,section", "text, headline,section", "s7"),
    "a line break in a summary": (",s7,", ",Cat 1\r\nin house,", "line 10:"),
    "two line breaks in a summary": (",s7,", ",Cat 1\r\nin\r\nhouse,", "line 10:"),
    "a line break in a text": ("7 is", "7\r\nis", "line 9:"),
    "a delimiter in a text": ("7 is", "7, is", "line 9:"),
    "a delimiter in a summary": (",s7,", ",s, 7,", "line 9:"),
    "a quote that is not closed": ("Article 7", '"Article 7', "unexpected end"),
    "a quote that another text closes": ("Article 7 is", '"Article 7" is', "line 9:"),
    "backslashes before quotes": (",s7,", r',"say \"s\"",', "line 9:"),
    "sep=": ("text,", "sep=,\r\ntext,", r"'sep=,\r\n'"),
    "a comment": ("text,", "# my data\r\ntext,", "# my data"),
    "an empty first line": ("text,", "\r\ntext,", r"'\r\n'"),
    "two columns of one name": ("section", "text", "'text,headline,text"),
    "another column": ("headline", "summary", "'text,summary,section"),
    "another encoding": (",s7,", ",s\udce9,", "utf-8"),
}


@pytest.mark.parametrize("case", CSV)
def test_a_csv_is_read_as_it_was_written_or_refused(case, tmp_path):
    path = tmp_path / "rows.csv"
    old, new, expected = CSV[case]
    content = spreadsheet().decode()
    assert old in content
    path.write_bytes(content.replace(old, new).encode(errors="surrogateescape"))
    try:
        assert pairs(path) == sorted((text, expected if text == TEXT.format(7) else s) for text, s in SHEET)
    except inside.UserError as error:
        assert expected in str(error) and str(path if "utf" not in expected else "") in str(error)


@pytest.mark.parametrize("row", [0, 1, 29])
def test_a_comma_without_quotes_is_refused_not_cut(row, tmp_path):
    """Except in the first row, where one empty field too many looks like a delimiter after the row."""
    path = tmp_path / "rows.csv"
    for end, header_end in (("", ""), (",", ""), (",", ",")):
        for section in ("Local", ""):
            lines = spreadsheet(end=end, header_end=header_end).decode().splitlines()
            lines[row + 1] = f"{TEXT.format(row)},Wash, peel,{section}{end}"
            path.write_text("\n".join(lines))
            with pytest.raises(inside.UserError, match=r"line \d+: \d fields under a header"):
                pairs(path)


def test_an_edited_reader_reads_again(tmp_path):
    """The rows of the old one are in the cache."""
    (tmp_path / "rows.csv").write_bytes(spreadsheet())
    (tmp_path / "common.py").touch()
    assert pairs(tmp_path / "rows.csv") == SHEET
    with inside.edited_reader(tmp_path / "common.py"):
        assert pairs(tmp_path / "rows.csv") == sorted(
            (f"{text} edited", f"{summary} edited") for text, summary in SHEET
        )
    assert pairs(tmp_path / "rows.csv") == SHEET


def test_each_csv_file_has_its_own_dialect(tmp_path):
    """Several files with other delimiters and columns; compressed ones, written again; a card that says how to read."""
    (tmp_path / "rows.csv").write_bytes(spreadsheet())
    rows = [{"headline": "h", "text": TEXT.format(index), "id": index} for index in range(30, 60)]
    write_csv(tmp_path / "more.csv", rows)
    (tmp_path / "more.tsv").write_text((tmp_path / "more.csv").read_text().replace(",", "\t"))
    (tmp_path / "more.csv").unlink()
    expected = sorted(SHEET + [(row["text"], "h") for row in rows])
    for name in (tmp_path, f"{tmp_path}/*.?sv", f"{tmp_path}/*"):
        assert pairs(name) == expected

    for delimiter in ",;":
        (tmp_path / "ROWS.CSV.gz").write_bytes(gzip.compress(spreadsheet(delimiter)))
        assert pairs(tmp_path / "ROWS.CSV.gz") == SHEET

    card = "configs:\n- config_name: default\n  data_files: '*.csv'\n  sep: '#'\n  names: [headline, text]\n"
    write_rows(tmp_path / "card/README.md", []).write_text(f"---\n{card}  encoding: utf-16\n---\n")
    lines = [f"{summary}#{text}, and a comma" for text, summary in SHEET]
    (tmp_path / "card/rows.csv").write_text("\n".join(lines), encoding="utf-16")
    assert pairs(tmp_path / "card") == sorted((f"{text}, and a comma", summary) for text, summary in SHEET)


@pytest.mark.parametrize("title", ["Weekly report {}", "Untitled", ""])
def test_only_wikihow_is_repaired(title, tmp_path):
    """Other files have titles too. Their commas stay, and each row is its own article."""
    rows = []
    for index in range(300):
        code = f"f(\n    {TEXT.format(index)},\n    , 1,\n)"
        rows.append({"title": title.format(index), "text": code, "headline": "call,\nf,", "date": "today"})
    train, validation = inside.t5_articles(write_csv(tmp_path / "rows.csv", rows))
    assert 3 <= len(validation) <= 30 and len(train) + len(validation) == 300
    assert pairs(tmp_path / "rows.csv") == sorted((row["text"], row["headline"]) for row in rows)


def test_contents_alone_decide_which_articles_are_held_out(tmp_path):
    """Some rows have the same text. With more rows in the file, no article moves from training to validation."""
    rows = [{"text": TEXT.format(index // 3), "headline": f"s{index % 2}"} for index in range(600)]
    new_rows = [{"text": TEXT.format(index), "headline": "s"} for index in range(200, 260)]
    train, validation = inside.t5_articles(write_csv(tmp_path / "rows.csv", rows))
    assert not set(train["text"]) & set(validation["text"])
    _, validation = inside.t5_articles(write_csv(tmp_path / "more.csv", new_rows + rows))
    assert not set(train["text"]) & set(validation["text"])


def test_rouge_scores_texts_in_any_script():
    texts = (
        "Вымойте яблоки и груши.|洗苹果,然后切土豆。|اغسل التفاح ثم قشره.|हिन्दी की किताब।|りんごを洗う。|ကျွန်တော်စာဖတ်သည်"
    )
    for text in texts.split("|"):
        assert inside.rouge(text, text) == [1, 1, 1]
        assert 0 < inside.rouge(text, text[: len(text) // 2])[0] < 1
        assert inside.rouge(text, "apples") == [0, 0, 0]
    assert 0 < inside.rouge("Вымойте яблоки", "Вымойте груши")[0] < 1


@pytest.mark.parametrize("append_eos", [True, False])
def test_each_target_ends_with_one_eos(append_eos):
    """Even if the tokenizer adds none, if a summary is cut, or if it contains "</s>"."""
    tokenizer = inside.train_tokenizer(["a b </s> c"] * 3, 300, append_eos)
    rows = {"text": ["a </s> b"] * 3, "summary": ["a </s> b", "a</s>", "a b c " * 20]}
    targets = inside.t5_tokenize(rows, tokenizer, 30, 20)["labels"]
    assert [target.count(tokenizer.eos_token_id) for target in targets] == [1, 1, 1]
    assert {target[-1] for target in targets} == {tokenizer.eos_token_id}
    assert tokenizer.decode(targets[0][:-1]).strip() == "a </s> b"


@pytest.mark.long
def test_flags_limit_articles_and_steps_and_switch_off_validation_and_saving(tmp_path, tiny_model):
    """A run with another number of processes finds all articles in the cache."""
    path = write_csv(tmp_path / "new.csv", [inside.builtin_article(index) for index in range(300, 400)])
    flags = ("--model", tiny_model, "--dataset", path, "--num-train-samples", 40, "--num-validation-samples", 3)
    flags = (*flags, "--max-source-length", 16, "--max-target-length", 4, "--epochs", 2, "--global-batch-size", 8)
    switches = {"all": (), "max-steps": ("--no-run-validation", "--no-save-model", "--max-steps", 12)}
    run_many("t5_fsdp.py", {tmp_path / name: (*flags, *switches[name]) for name in switches}, 2)
    for name, steps, validations in (("all", [5, 10], 3), ("max-steps", [5, 10, 12], 0)):
        assert list(losses(tmp_path / name)) == steps
        assert len(curve(tmp_path / name, "val_loss")) == validations
        assert (tmp_path / name / "best").exists() == (name == "all")

    cached = set(Path(CACHES.name).rglob("*.arrow"))
    run_many("t5_fsdp.py", {tmp_path / "one": flags}, 1)
    assert cached == set(Path(CACHES.name).rglob("*.arrow")) and list(losses(tmp_path / "one")) == [5, 10]


# ---- Texts and articles ----------------------------------------------------------------------------------------------
NOT_TEXTS = {
    "struct<": {"a": "b"},
    "list<element: struct": [{"a": "b"}],
    "list<element: list": [["a"]],
    "int64": 404,
    "timestamp": datetime.datetime(2020, 1, 1),
    "binary": b"a",
}


@pytest.mark.parametrize("kind", NOT_TEXTS)
def test_a_column_without_texts_is_refused(kind, tmp_path):
    """The scripts do not turn its values into texts."""
    path = tmp_path / "rows.parquet"
    for column in ("text", "headline"):
        rows = {"text": [TEXT.format(index) for index in range(30)], "headline": ["s"] * 30}
        datasets.Dataset.from_dict(rows | {column: [NOT_TEXTS[kind]] * 30}).to_parquet(path)
        for read in (lambda: pairs(path), lambda c=column: inside.lm_all_texts(lm_args(path, text_column=c))):
            with pytest.raises(inside.UserError, match=f"rows.parquet: column {column} holds {kind}"):
                read()


@pytest.mark.parametrize("number", [404, float("nan")])
@pytest.mark.parametrize("row", [7, 299])
def test_a_number_among_texts_is_refused(row, number, tmp_path, small_blocks):
    """`datasets` would turn all texts of its block, and of later blocks, into JSON."""
    rows = [{"text": TEXT.format(index), "headline": "s"} for index in range(300)]
    rows[row]["text"] = number
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for read in (lambda: pairs(path), lambda: inside.lm_all_texts(lm_args(path))):
        with pytest.raises(inside.UserError, match=r"(?s)rows.jsonl.*extension<arrow\.json>"):
            read()


SOME = [{"text": TEXT.format(index), "headline": "s"} for index in range(40)]
PARAGRAPHS = "\n\n".join(row["text"] for row in SOME)
# A --dataset, the files that it finds (rows, or bytes), and what each script reads: the number of texts, or the error.
NAMES = {
    "file[1].jsonl": ({"file[1].jsonl": SOME, "file1.jsonl": SOME[:9]}, 40, 40),
    "set [v1]": ({"set [v1]/a.jsonl": SOME}, 40, 40),
    "a:b.jsonl": ({"a:b.jsonl": SOME}, 40, 40),
    "a:b": ({"a:b/c.jsonl": SOME}, 40, 40),
    "what?.jsonl": ({"what?.jsonl": SOME, "what1.jsonl": SOME[:9]}, 40, 40),
    "a.xml.txt": ({"a.xml.txt": PARAGRAPHS}, "found no files", 40),
    "texts": ({"texts/a.xml.txt": PARAGRAPHS}, "found no files", 40),
    ".": ({"a.jsonl": SOME, "output/lm_multinode/metrics.jsonl": SOME, "output/lm_multinode/b.json": SOME}, 40, 40),
    "x.parquet": ({"x.parquet/part-0.parquet": SOME, "x.parquet/_SUCCESS": "", "x.parquet/.part.crc": "a"}, 40, 40),
    "*.jsonl": ({"a.jsonl": SOME[:20], "b.jsonl": SOME[20:], "c.txt": "a"}, 40, 40),
    "*": ({"a.jsonl": SOME, "b.parquet": SOME}, "json and parquet files", "json and parquet files"),
    "both": ({"both/a.jsonl": SOME, "both/b.txt": PARAGRAPHS}, 40, "json and text files"),
    "some": ({"some/a.parquet": SOME, "some/b.parquet": ""}, 40, 40),
    "empty.parquet": ({"empty.parquet": ""}, "found no files", "found no files"),
    "tests": ({"tests/test.jsonl": SOME}, "found no files", "found no files"),
    "a.zip": ({"a.zip": "PK"}, "choose files of one kind", "choose files of one kind"),
    "absent/*.jsonl": ({}, "found no files", "found no files"),
    "absent.jsonl": ({}, "absent.jsonl'", "absent.jsonl'"),
    "columns": ({"columns/a.jsonl": SOME, "columns/b.jsonl": [{"body": "a"}] * 9}, *["b.jsonl: it has no text"] * 2),
    "numbers": ({"numbers/a.jsonl": SOME, "numbers/b.jsonl": [{"text": 1, "headline": "s"}]}, *["b.jsonl: column"] * 2),
    "cut": ({"cut/a.parquet": SOME, "cut/b.parquet": "PAR1" * 9}, *["b.parquet: "] * 2),
    "pandas.json": ({"pandas.json": '{"text": ' + json.dumps(dict(enumerate("a" * 999))) + "}"}, "no text", "struct<"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_is_what_its_name_says(name, tmp_path, monkeypatch):
    """What exists is read, whatever its name. All else is one short sentence."""
    monkeypatch.chdir(tmp_path)
    files, *results = NAMES[name]
    for file, content in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        elif path.suffix == ".parquet":
            datasets.Dataset.from_list(content).to_parquet(path)
        else:
            write_rows(path, content)
    for expected, read in zip(results, (pairs, lambda name: inside.lm_all_texts(lm_args(name))), strict=True):
        if isinstance(expected, int):
            assert len(read(name)) == expected
        else:
            with pytest.raises(inside.UserError) as caught:
                read(name)
            assert expected in str(caught.value) and len(str(caught.value)) < 700


def test_files_on_a_server_are_read(tmp_path):
    """By http, and with what follows the name in some addresses."""
    write_rows(tmp_path / "rows.jsonl", SOME)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(spreadsheet(";")))
    with serve(tmp_path) as address:
        for end in ("", "?download=true"):
            assert pairs(f"{address}/rows.csv.gz{end}") == SHEET
            name = f"{address}/rows.jsonl{end}"
            assert len(pairs(name)) == len(inside.lm_all_texts(lm_args(name))) == 40
        (tmp_path / "texts.txt").write_text(PARAGRAPHS)
        assert len(inside.lm_all_texts(lm_args(f"{address}/texts.txt"))) == 40
        with pytest.raises(inside.UserError, match=r"absent\.jsonl"):
            pairs(f"{address}/absent.jsonl")


def test_texts_that_fill_no_sequence_are_refused(tmp_path, tokenizer):
    """Not repeated without end."""
    rows = [{"text": str(index)} for index in range(24)]
    args = lm_args(write_rows(tmp_path / "rows.jsonl", rows), seq_length=16_384)
    rows.append(
        {"text": next(filter(inside.lm_is_held_out, (f"{index}" + " lorem" * 20_000 for index in itertools.count())))}
    )
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(inside.UserError, match="too few texts"):
        next(inside.lm_steps(args, tokenizer))


def test_links_are_followed(tmp_path):
    """The Hub's cache keeps files under other names."""
    write_rows(tmp_path / "blobs/0", SOME)
    (tmp_path / "link.jsonl").symlink_to("blobs/0")
    assert len(pairs(tmp_path / "link.jsonl")) == len(inside.lm_all_texts(lm_args(tmp_path / "link.jsonl"))) == 40
