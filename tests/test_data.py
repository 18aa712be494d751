"""What is trained on: the texts of lm_multinode.py, the articles of t5_fsdp.py and the digits of mnist_fsdp.py."""

import collections
import copy
import gzip
import itertools
import json
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import AFTER_ADAM, CACHES, SMALL, curve, losses, run_many, write_csv
from test_errors import refuse
from tokenizers.processors import TemplateProcessing

import inside


# ---- Texts of lm_multinode.py ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return inside.train_tokenizer(["0 1 2 3 4 5 6 7 8 9 lorem"] * 2, 300, append_eos=False)


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lm_args(dataset, text_column="text", streams=1, **flags):
    """A step has a micro-batch of each stream."""
    flags = {"micro_batch_size": 2, "seq_length": 16, "num_validation_texts": 1000} | flags
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    args = inside.parse("lm_multinode.py", *flags, "--text-column", text_column, "--dataset", dataset)
    args.global_batch_size = streams * args.micro_batch_size
    return args


def numbered(number):
    """A text, of a length of its own."""
    return " ".join([str(number), *["lorem"] * (number * 7 % 23)])


def write_shards(folder, counts):
    """Files in C4's format, with so many of these texts each."""
    numbers = itertools.count()
    for shard, count in enumerate(counts):
        rows = [{"text": numbered(number), "url": "http://x"} for number in itertools.islice(numbers, count)]
        with gzip.open(folder / f"c4-train.{shard:05d}.json.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(folder / "*.json.gz")


def take(steps, count):
    """The inputs and labels of some steps, an array for each stream."""
    of_streams = zip(*itertools.islice(steps, count), strict=True)
    return [np.array([[batch["input_ids"], batch["labels"]] for batch in batches]) for batches in of_streams]


def whole_texts(tokenizer, tokens, texts):
    """Those of `texts` that are whole in the inputs, in order."""
    pieces = [piece.strip() for piece in tokenizer.decode(tokens[:, 0].ravel()).split("</s>")]
    return [piece for piece in pieces[:-1] if piece in texts]


def test_every_text_comes_once_in_a_pass(tmp_path, tokenizer):
    """Each pass in another order. Contents alone decide what is held out, also where fewer are validated on."""
    all_held_out = []
    # Files of their own for each of four streams; a few, and a single one, that they share; files of a text each.
    for number, shards in enumerate([[4] * 40, [40] * 4, [160], [1] * 70, [70, 70, 3, 15]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        args = lm_args(write_shards(folder, shards), streams=4, seq_length=8)  # little is cut off at a block's end
        _, held_out = inside.lm_texts(args)
        all_held_out.append(set(held_out))
        args.num_validation_texts = 1
        assert len(inside.lm_texts(args)[1]) == 1
        known = [*map(numbered, range(sum(shards)))]
        texts = sorted(set(known) - set(held_out))
        streams = take(inside.lm_steps(args, tokenizer), 150)
        orders = [whole_texts(tokenizer, tokens, known) for tokens in streams]
        args.seed = 2
        again = take(inside.lm_steps(args, tokenizer), 10)
        assert orders[0][:5] != whole_texts(tokenizer, again[0], known)[:5]

        seen = []
        for order in orders:
            own = set(order)
            first_pass = order[: len(own)]
            in_order = set(itertools.pairwise(first_pass)) & set(itertools.pairwise(order[len(own) : 2 * len(own)]))
            assert len(in_order) < 0.5 * len(own)
            assert len(own) == pytest.approx(len(texts) / 4, abs=6)
            seen += own
        assert sorted(seen) == texts
    first, second, third, *fewer = all_held_out
    assert first == second == third and 3 < len(first) < 20
    assert fewer[0] | fewer[1] <= first


@pytest.mark.parametrize("dogs, dog_files", [(20, 1), (140, 70)])
def test_kinds_of_texts_mix(dogs, dog_files, tmp_path):
    """Each file is of a kind: in half a pass each kind has its share. 70 small files are nine for each stream, but the
    large ones are too large for a stream of their own."""
    sizes = {"ant": 900, "bee": 700, "cat": 1100, "dog": dogs}
    total = sum(sizes.values())
    for kind, count in sizes.items():
        rows = [{"text": f"{kind} {number}"} for number in range(count)]
        files = dog_files if kind == "dog" else 1
        for file in range(files):
            write_rows(tmp_path / f"{kind}{file}.jsonl", rows[file::files])
    args = lm_args(tmp_path, streams=8, micro_batch_size=1)
    tokenizer = inside.train_tokenizer(["ant bee cat dog 0 1 2 3 4 5 6 7 8 9"] * 9, 300, append_eos=False)
    counts = collections.Counter()
    for micro_batches in itertools.islice(inside.lm_steps(args, tokenizer), 60):
        for batch in micro_batches:
            counts.update(re.findall("ant|bee|cat|dog", tokenizer.decode(batch["input_ids"].ravel())))
    assert 0.3 * total < counts.total() < 0.7 * total
    for kind, count in sizes.items():
        assert counts[kind] / counts.total() == pytest.approx(count / total, rel=0.5, abs=0.02)


def test_sequences_have_no_gap_and_no_padding(tmp_path, tokenizer):
    """Inputs in a row are texts with the tokenizer's special tokens and one </s>; targets are a token later."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})  # as Llama's and Gemma's do
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=special)
    args = lm_args(write_shards(tmp_path, [300]), seq_length=8)
    [tokens] = take(inside.lm_steps(args, tokenizer), 30)  # not all of a block
    inputs, labels = tokens[:, 0].ravel(), tokens[:, 1].ravel()
    assert (labels[:-1] == inputs[1:]).all()
    pieces = [piece.removeprefix("<s>").strip() for piece in tokenizer.decode(inputs).split("</s>")[:-1]]
    assert len(pieces) > 10 and set(pieces) <= {*map(numbered, range(300))}
    expected = np.concatenate([[*tokenizer(piece)["input_ids"], tokenizer.eos_token_id] for piece in pieces])
    assert (expected == tokenizer.bos_token_id).sum() == len(pieces)
    assert inputs[: len(expected)].tolist() == expected.tolist()
    assert len(inputs) - len(expected) < 40  # a text that goes on in the next batch


LONG = [pytest.param(shards, marks=pytest.mark.long) for shards in ([30] * 40, "row groups")]


@pytest.mark.parametrize("shards", [[1200], *LONG])
def test_texts_go_on_exactly_on_any_number_of_processes(shards, tiny_llama, tmp_path):
    """After two stops: over the ends of files and passes, inside a block of texts and over its end."""
    dataset = tmp_path / "rows.parquet"
    if shards == "row groups":
        rows = datasets.Dataset.from_dict({"text": [f"{number} lorem" for number in range(600)]})
        rows.to_parquet(dataset, batch_size=15)
    else:
        dataset = write_shards(tmp_path, shards)
    flags = (*SMALL, "--model", tiny_llama, "--dataset", dataset, "--seq-length", 16, "--micro-batch-size", 8)
    flags = (*flags, "--global-batch-size", 32, "--max-steps", 60, "--lr", 1e-4, "--validate-every", 0)
    flags = (*flags, "--no-save-model", "--resume")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_many("lm_multinode.py", {whole: flags}, 1)
    for processes, stop in (4, 7), (1, 19), (2, 60):
        run_many("lm_multinode.py", {parts: flags}, processes, change=("signal_in_step", 0, stop, "SIGTERM"))
    assert losses(parts) == pytest.approx(losses(whole), **AFTER_ADAM)
    assert len(curve(parts)) == 60


def test_all_formats_hold_the_same_texts(tmp_path, monkeypatch):
    """Files by a pattern, JSON lines or a list, Parquet, and datasets of the Hub, under any column."""
    write_shards(tmp_path, [40, 40])
    texts = [*map(numbered, range(80))]
    rows = datasets.Dataset.from_list([{"body": text, "url": "http://x"} for text in texts])
    rows.to_json(tmp_path / "rows.JSONL")
    rows.to_json(tmp_path / "rows.json", lines=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.rename_column("body", "text").to_parquet(tmp_path / "c4.parquet")
    # What the library finds on the Hub, by dataset and configuration.
    hub = {("someone/texts", "english"): "rows.parquet", ("allenai/c4", "en"): "c4.parquet"}
    load_dataset_builder = datasets.load_dataset_builder

    def load_from_here(path, name=None, data_files=None):
        if (path, name) in hub:
            path, name, data_files = "parquet", None, str(tmp_path / hub[path, name])
        return load_dataset_builder(path, name, data_files=data_files)

    monkeypatch.setattr(datasets, "load_dataset_builder", load_from_here)
    local = [tmp_path / name for name in ("rows.JSONL", "rows.json", "rows.parquet")]
    with_body = [lm_args(name, text_column="body") for name in (*local, "someone/texts:english")]
    for args in (lm_args(tmp_path / "*.json.gz"), lm_args("c4"), *with_body):
        assert inside.lm_all_texts(args) == sorted(texts)


def test_rows_need_not_be_alike(tmp_path):
    """The library reads 10 MB at a time, and guesses the types of all rows from the first."""
    texts = [f"{number} " + "lorem " * 30_000 for number in range(100)]
    rows = [{"text": text, "id": number, "note": None} for number, text in enumerate(texts)]
    for number in range(70, 100):
        rows[number] |= {"id": f"A{number}", "note": "late", "url": "http://x"}
    write_rows(tmp_path / "rows.jsonl", rows)
    assert inside.lm_all_texts(lm_args(tmp_path / "rows.jsonl")) == sorted(texts)


def test_a_folder_means_its_files(tmp_path):
    """But not those to test and validate on, nor rows without a text. A dataset card says which files are meant."""
    texts = [f"text {number} lorem" for number in range(200)]
    for number, name in enumerate(("train.jsonl", "more.JSONL", "deeper/unit-test-docs.jsonl", "latest.json")):
        rows = [{"text": text, f"column{number}": number} for text in texts[number * 40 :][:40]]
        write_rows(tmp_path / name, rows)
    rows = datasets.Dataset.from_dict({"x": [1] * 40, "text": texts[160:]})
    rows.to_parquet(tmp_path / "last.parquet")
    for name in ("test.jsonl", "validation-00000-of-00001.jsonl", "dev.json"):
        write_rows(tmp_path / name, [{"text": "held back"}])
    write_rows(tmp_path / "empty.jsonl", [{"text": text} for text in ("", " \n", None)])
    (tmp_path / "README.md").write_text("# Texts\n")
    args = lm_args(tmp_path)
    assert inside.lm_all_texts(args) == sorted(texts)

    card = "configs:\n- config_name: default\n  data_files: deeper/unit-test-docs.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    assert inside.lm_all_texts(args) == sorted(texts[80:120])


def test_short_texts_never_end_a_run(tmp_path):
    """A stream has a few hundred in a row, all of which do not fill a sequence."""
    rows = [{"text": "to be short"}, *[{"text": f"{number} lorem " * 50} for number in range(200)]]
    write_rows(tmp_path / "rows.jsonl", [rows[max(0, number - 400)] for number in range(600)])
    flags = ("--dataset", tmp_path / "rows.jsonl", "--seq-length", 512, "--max-steps", 8, "--no-save-model")
    run_many("lm_multinode.py", {tmp_path: (*flags, "--micro-batch-size", 1, "--log-every", 1)}, 1)
    assert len(curve(tmp_path)) == 8


def test_a_run_goes_on_with_its_tokenizer_and_its_files(tmp_path):
    """Also where the texts have changed."""
    folder = tmp_path / "texts"
    for number in range(20):  # of two streams each has its own
        write_rows(folder / f"{number}.jsonl", [{"text": f"{text} lorem " * 9} for text in range(number, 300, 20)])
    flags = ("--dataset", folder, "--max-steps", 4, "--micro-batch-size", 8, "--seq-length", 16, "--log-every", 1)
    run_many("lm_multinode.py", {tmp_path / "first": (*flags, "--checkpoint-every", 2)}, 1)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("lorem", "ipsum"))
    shutil.copytree(tmp_path / "first/checkpoints/step-0000002", tmp_path / "second/checkpoints/step-0000002")
    run_many("lm_multinode.py", {tmp_path / "second": (*flags, "--resume")}, 1)
    tokenizers = [(tmp_path / name / "model/tokenizer.json").read_bytes() for name in ("first", "second")]
    assert tokenizers[0] == tokenizers[1]

    resume = ("lm_multinode.py", *flags, "--resume", "--output-dir", tmp_path / "second")
    write_rows(folder / "0.jsonl", [{"text": f"{number} lorem"} for number in range(9000)])  # too large for one stream
    refuse(*resume, words=["1 streams", "2 streams"])
    (folder / "0.jsonl").unlink()
    refuse(*resume, words=["20 files", "19 files"])


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
    """The texts and summaries of a file, whichever side they are on."""
    return sorted((row["text"], row["summary"]) for part in inside.t5_articles(path, *columns) for row in part)


def test_other_files_hold_the_same_articles(tmp_path):
    """JSON lines and parquet, with other columns; a file that has changed is read again."""
    rows = [{"article": TEXT.format(number), "highlights": f"s{number}", "title": "t"} for number in range(50)]
    write_csv(tmp_path / "rows.csv", rows)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for kind in ("csv", "jsonl", "parquet"):
        found = pairs(tmp_path / f"rows.{kind}", "article", "highlights")
        assert found == sorted((row["article"], row["highlights"]) for row in rows)
    write_csv(tmp_path / "rows.csv", rows[:30])
    assert len(pairs(tmp_path / "rows.csv", "article", "highlights")) == 30


def test_a_csv_holds_texts_as_they_are_written(tmp_path):
    """Numbers, names of gaps, long articles. Of a column that is not used, only the last rows are words."""
    summaries = ["0", "007", "1.50", "None", "NA", "nan", "null", "False", "2020-01-01", "a,b;c", 'says "no"', "d\ne"]
    rows = [{"id": number, "text": TEXT.format(number), "headline": "a"} for number in range(10_050)]
    for number, summary in enumerate(summaries, start=10_010):
        rows[number] |= {"id": f"A{number}", "headline": summary}
    rows[0]["text"] *= 5000
    expected = sorted((row["text"], row["headline"]) for row in rows)
    assert pairs(write_csv(tmp_path / "rows.csv", rows)) == expected


def spreadsheet(delimiter=",", end="", header_end="", encoding="utf-8"):
    """A file as bytes. Of its three columns the last is empty in every second row."""
    lines = [f"text{delimiter}headline{delimiter}section{header_end}"]
    for number in range(30):
        section = ("Local", "")[number % 2]
        lines.append(delimiter.join([TEXT.format(number), f"s{number}", section]) + end)
    return "\r\n".join([*lines, ""]).encode(encoding)


def test_a_csv_as_spreadsheets_write_it(tmp_path):
    """Other delimiters, a byte-order mark, a delimiter at the end of each row; packed; by a pattern or an address."""
    expected = sorted((TEXT.format(number), f"s{number}") for number in range(30))
    for delimiter, encoding in itertools.product(",;\t", ("utf-8", "utf-8-sig")):
        for end, header_end in (("", ""), (delimiter, ""), (delimiter, delimiter)):
            (tmp_path / "rows.csv").write_bytes(spreadsheet(delimiter, end, header_end, encoding))
            assert pairs(tmp_path / "rows.csv") == expected
    (tmp_path / "rows.tsv").write_bytes(spreadsheet("\t"))
    (tmp_path / "ROWS.CSV.gz").write_bytes(gzip.compress(spreadsheet(";")))
    for name in (tmp_path / "rows.tsv", tmp_path / "ROWS.CSV.gz", tmp_path / "*.csv", f"file://{tmp_path}/rows.csv"):
        assert pairs(name) == expected


@pytest.mark.parametrize("place", [0, 1, 29])
def test_a_comma_without_quotes_is_never_cut(place, tmp_path):
    """Also where what stands behind it is empty. One that is alone in its file is met a row later."""
    path = tmp_path / "rows.csv"
    for end, header_end in (("", ""), (",", ""), (",", ",")):
        for section in ("Local", ""):
            lines = spreadsheet(end=end, header_end=header_end).decode().splitlines()
            lines[place + 1] = f"{TEXT.format(place)},Wash, peel,{section}{end}"
            path.write_text("\n".join(lines))
            with pytest.raises(inside.UserError, match=f"line {place + 2}|line {place + 3}"):
                pairs(path)


def test_a_list_of_sentences_is_joined(tmp_path):
    """As arXiv's and PubMed's; what is missing in it is skipped."""
    sentences = ["The first one.", None, "The second one."]
    rows = [{"text": [TEXT.format(number), *sentences], "headline": sentences} for number in range(30)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    joined = "The first one.\nThe second one."
    for name in ("rows.parquet", "rows.jsonl"):
        assert pairs(tmp_path / name) == sorted((f"{TEXT.format(number)}\n{joined}", joined) for number in range(30))


@pytest.mark.parametrize("title", ["Weekly report {}", "Untitled", ""])
def test_only_wikihow_is_repaired(title, tmp_path):
    """Other files have titles, too. Their commas stay, and each of their rows is an article of its own."""
    rows = []
    for number in range(300):
        code = f"f(\n    {TEXT.format(number)},\n    , 1,\n)"
        rows.append({"title": title.format(number), "text": code, "headline": "call,\nf,", "date": "today"})
    train, validation = inside.t5_articles(write_csv(tmp_path / "rows.csv", rows))
    assert 3 <= len(validation) <= 30 and len(train) + len(validation) == 300
    assert pairs(tmp_path / "rows.csv") == sorted((row["text"], row["headline"]) for row in rows)


def test_contents_alone_decide_what_is_held_out(tmp_path):
    """Of rows some have the same text. Where there are more, none that was trained on is held out."""
    rows = [{"text": TEXT.format(number // 3), "headline": f"s{number % 2}"} for number in range(600)]
    more = [{"text": TEXT.format(number), "headline": "s"} for number in range(200, 260)]
    train, validation = inside.t5_articles(write_csv(tmp_path / "rows.csv", rows))
    assert not set(train["text"]) & set(validation["text"])
    _, validation = inside.t5_articles(write_csv(tmp_path / "more.csv", more + rows))
    assert not set(train["text"]) & set(validation["text"])


def test_rouge_of_any_script():
    texts = (
        "Вымойте яблоки и груши.|洗苹果,然后切土豆。|اغسل التفاح ثم قشره.|हिन्दी की किताब।|りんごを洗う。|ကျွန်တော်စာဖတ်သည်"
    )
    for text in texts.split("|"):
        assert inside.rouge(text, text) == [1, 1, 1]
        assert 0 < inside.rouge(text, text[: len(text) // 2])[0] < 1
        assert inside.rouge(text, "apples") == [0, 0, 0]
    assert 0 < inside.rouge("Вымойте яблоки", "Вымойте груши")[0] < 1


@pytest.mark.long
def test_flags_count_articles_and_switch_off(tmp_path, tiny_model):
    """A run with another number of processes finds all articles in the cache."""
    path = write_csv(tmp_path / "new.csv", [inside.builtin_article(number) for number in range(300, 400)])
    flags = ("--model", tiny_model, "--dataset", path, "--num-train-samples", 40, "--num-validation-samples", 3)
    flags += ("--max-source-length", 16, "--max-target-length", 4, "--epochs", 2)
    switches = {"all": (), "max-steps": ("--no-run-validation", "--no-save-model", "--max-steps", 12)}
    run_many("t5_fsdp.py", {tmp_path / name: (*flags, *switches[name], "--batch-size", 4) for name in switches}, 2)
    for name, steps, validations in (("all", [5, 10], 3), ("max-steps", [5, 10, 12], 0)):
        assert list(losses(tmp_path / name)) == steps
        assert len(curve(tmp_path / name, "val_loss")) == validations
        assert (tmp_path / name / "best").exists() == (name == "all")

    cached = set(Path(CACHES.name).rglob("*.arrow"))
    run_many("t5_fsdp.py", [[*flags, "--batch-size", 8, "--output-dir", tmp_path / "one"]], 1)
    assert cached == set(Path(CACHES.name).rglob("*.arrow")) and list(losses(tmp_path / "one")) == [5, 10]
