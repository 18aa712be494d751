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
from conftest import AFTER_ADAM, CACHES, SMALL, curve, losses, run_many, write_csv
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


def whole_texts(tokenizer, tokens):
    """The texts in a row of tokens, in order. An EOS ends each text."""
    pieces = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_token_id) + 1)
    return [tokenizer.decode(piece[:-1]).strip() for piece in pieces[:-1]]


def stream_tokens(args, tokenizer, num_steps):
    """The inputs of the first steps: one row of tokens for each stream."""
    steps = itertools.islice(inside.lm_steps(args, tokenizer), num_steps)
    return [np.concatenate([batch["input_ids"].ravel() for batch in stream]) for stream in zip(*steps, strict=True)]


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


# Each pair of streams has its own files; all streams share four files; there is one file.
@pytest.mark.parametrize("shards", [[15] * 40, [150] * 4, [250, 250, 85, 15], [600]])
def test_every_text_comes_once_in_a_pass(shards, tmp_path, tokenizer):
    """Each text is in one stream, or held out because of its content. Passes and seeds have different orders."""
    args = lm_args(write_shards(tmp_path, shards), seq_length=8, global_batch_size=80)
    texts = sorted(text for text in map(make_text, range(600)) if not inside.lm_is_held_out(text))
    assert 0.93 * 600 < len(texts) < 0.97 * 600
    assert all(map(inside.lm_is_held_out, inside.lm_first_texts(args)[1]))
    orders = [whole_texts(tokenizer, tokens) for tokens in stream_tokens(args, tokenizer, 95)]
    args.seed = 2
    assert whole_texts(tokenizer, stream_tokens(args, tokenizer, 10)[0])[:5] != orders[0][:5]

    seen = []
    for order in orders:
        # Between two blocks, the beginning of a text can precede a whole one.
        order = [re.search(r"no\n\d+( lorem)*$", text)[0] for text in order]
        own = set(order)
        passes = len(order) / len(own)
        assert passes > 4 and max(collections.Counter(order).values()) < passes + 2
        one_pass, next_pass = (set(itertools.pairwise(order[first:][: len(own)])) for first in (0, len(own)))
        assert len(one_pass & next_pass) < 0.5 * len(own)
        assert len(own) == pytest.approx(len(texts) / 8, rel=0.3)
        seen += own
    assert sorted(seen) == texts


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


def test_the_first_texts_come_from_all_files_of_one_text(tmp_path):
    for index in range(150):
        (tmp_path / f"{index}.txt").write_text(make_text(index))
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
    texts = " ".join(map(tokenizer.decode, stream_tokens(lm_args(tmp_path), tokenizer, 60)))
    counts = collections.Counter(re.findall("ant|bee|cat|dog", texts))
    assert 0.3 * total < counts.total() < 0.7 * total
    for kind, count in sizes.items():
        assert counts[kind] / counts.total() == pytest.approx(count / total, rel=0.5, abs=0.02)


def test_sequences_have_no_gap_and_no_padding(tmp_path, tokenizer):
    """Consecutive inputs are texts, each with the tokenizer's special tokens and one EOS. Targets are one token later.
    Special tokens inside a text are read as letters."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})  # as Llama's and Gemma's tokenizers do
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=special)
    texts = [f"{make_text(index)} </s> <pad><s> {index}" for index in range(300)]
    args = lm_args(write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts]), global_batch_size=1)
    [steps] = zip(*itertools.islice(inside.lm_steps(args, tokenizer), 30), strict=True)  # fewer than a block
    inputs, labels = (np.concatenate([batch[name].ravel() for batch in steps]) for name in ("input_ids", "labels"))
    assert (labels[:-1] == inputs[1:]).all()
    pieces = [piece.removeprefix("<s>").strip() for piece in whole_texts(tokenizer, inputs)]
    assert len(pieces) > 10 and set(pieces) <= set(texts)
    ids = tokenizer(pieces, split_special_tokens=True)["input_ids"]
    expected = np.concatenate([[*tokens, tokenizer.eos_token_id] for tokens in ids])
    assert inputs[: len(expected)].tolist() == expected.tolist()
    assert (expected == tokenizer.bos_token_id).sum() == (expected == tokenizer.eos_token_id).sum() == len(pieces)
    assert tokenizer.pad_token_id not in inputs
    assert len(inputs) - len(expected) < 90  # a text that continues in the next sequence


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
        assert sorted(map(str.strip, inside.lm_all_texts(lm_args(name)))) == texts
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


def test_a_csv_from_a_spreadsheet_is_read(tmp_path):
    """Other delimiters, a byte-order mark, a delimiter after each row; compressed; by a pattern or an address."""
    expected = sorted((TEXT.format(index), f"s{index}") for index in range(30))
    for delimiter, encoding in itertools.product(",;\t", ("utf-8", "utf-8-sig")):
        for end, header_end in (("", ""), (delimiter, ""), (delimiter, delimiter)):
            (tmp_path / "rows.csv").write_bytes(spreadsheet(delimiter, end, header_end, encoding))
            assert pairs(tmp_path / "rows.csv") == expected
    (tmp_path / "rows.tsv").write_bytes(spreadsheet("\t"))
    (tmp_path / "ROWS.CSV.gz").write_bytes(gzip.compress(spreadsheet(";")))
    for name in (tmp_path / "rows.tsv", tmp_path / "ROWS.CSV.gz", tmp_path / "*.csv", f"file://{tmp_path}/rows.csv"):
        assert pairs(name) == expected


@pytest.mark.parametrize("row", [0, 1, 29])
def test_a_comma_without_quotes_is_refused_not_cut(row, tmp_path):
    """Except in the first row, where one empty field too many looks like a delimiter after the row."""
    path = tmp_path / "rows.csv"
    for end, header_end in (("", ""), (",", ""), (",", ",")):
        for section in ("Local", ""):
            lines = spreadsheet(end=end, header_end=header_end).decode().splitlines()
            lines[row + 1] = f"{TEXT.format(row)},Wash, peel,{section}{end}"
            path.write_text("\n".join(lines))
            if row == 0 and (header_end or not section + end):
                continue
            with pytest.raises(inside.UserError, match=f"in line {row + 2}, saw" if row else "index_col"):
                pairs(path)


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
        with pytest.raises(inside.UserError, match=f"no texts in column {column};"):
            pairs(path)
        with pytest.raises(inside.UserError, match=f"{column} holds {kind}"):
            inside.lm_all_texts(lm_args(path, text_column=column))


@pytest.mark.parametrize("row", [7, 299])
def test_a_number_among_texts_is_refused(row, tmp_path, small_blocks):
    """`datasets` would turn all texts of its block, and of later blocks, into JSON."""
    rows = [{"text": TEXT.format(index), "headline": "s"} for index in range(300)]
    rows[row]["text"] = 404
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(inside.UserError, match=r"no texts in column text.*Json"):
        pairs(path)
    with pytest.raises(Exception, match=r"extension<arrow\.json>"):
        inside.lm_all_texts(lm_args(path))
