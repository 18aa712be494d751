"""The training data: lm_multinode.py's texts and t5_fsdp.py's articles."""

import collections
import contextlib
import copy
import functools
import gzip
import io
import itertools
import json
import random
from unittest import mock

import datasets
import numpy as np
import pytest
from conftest import long, serve, write_csv
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import inside


# ---- Files of both scripts -------------------------------------------------------------------------------------------
def lm_args(dataset, **flags):
    flags = {"seq_length": 16, "global_batch_size": 8, "num_validation_texts": 1000, "dataset": dataset} | flags
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return inside.parse("lm_multinode.py", *flags)


def pairs(path, *columns):
    """The texts and summaries of a file, for training or for validation."""
    return sorted((row["text"], row["summary"]) for part in inside.t5_articles(path, *columns) for row in part)


def write_rows(path, rows):
    """Write dictionaries as the ending of the name says. Paragraphs (.txt) hold only the texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".csv"):
        return write_csv(path, rows)
    lines = [json.dumps(row) for row in rows]
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(path, batch_size=40)  # rows in a group
        return path
    if name.endswith(".txt"):
        content = "\n\n".join(row["text"] for row in rows if row["text"])
    elif name.endswith(".json"):
        content = f"[{', '.join(lines)}]"
    else:
        content = "\n".join(lines)
    content = content.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


TEXT = "Article {} is longer than what a summary of it may be."
SOME = [{"text": TEXT.format(index), "headline": f"s{index}"} for index in range(40)]
# A --dataset, and the files that hold its rows
NAMES = {
    "rows.jsonl": ["rows.jsonl"],
    "ROWS.JSONL.gz": ["ROWS.JSONL.gz"],
    "rows.json": ["rows.json"],
    "rows.parquet": ["rows.parquet"],
    "*.jsonl": ["a.jsonl", "b.jsonl"],
    "folder/**/*.jsonl": ["folder/a.jsonl", "folder/deeper/b.jsonl"],
    "*.csv": ["a.csv", "b.csv"],
    "texts.txt": ["texts.txt"],
    "texts.txt.gz": ["texts.txt.gz"],
    "texts/*.txt": ["texts/a.txt", "texts/b.txt"],
    "http://HERE/rows.jsonl?download=true": ["rows.jsonl"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_is_what_its_name_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, file in enumerate(NAMES[name]):
        write_rows(tmp_path / file, SOME[number :: len(NAMES[name])])
    with serve(tmp_path) as address:
        name = name.replace("http://HERE", address)
        assert inside.lm_all_texts(lm_args(name)) == sorted(row["text"] for row in SOME)
        if "texts" not in name and address not in name:  # paragraphs have no summaries; a CSV is read by http below
            assert pairs(name) == sorted((row["text"], row["headline"]) for row in SOME)


# The names that the Hub is asked for
HUB = {
    "c4": ("allenai/c4", "en"),
    "someone/texts": ("someone/texts",),
    "someone/texts.v2:english": ("someone/texts.v2", "english"),
}


@pytest.mark.parametrize("name", HUB)
def test_other_names_are_those_of_the_hub(name, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", SOME)
    asked = []
    load_dataset_builder = datasets.load_dataset_builder

    def load_from_here(*names):
        asked.append(names)
        return load_dataset_builder("json", data_files=str(path))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_from_here)
    assert len(inside.lm_all_texts(lm_args(name))) == 40
    assert asked == [HUB[name]]


# ---- Texts of lm_multinode.py ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return inside.train_tokenizer(["no\n 0 1 2 3 4 5 6 7 8 9 lorem"] * 2, 300, append_eos=False)


def make_text(index):
    """A text of two lines. Lengths differ between texts."""
    return " ".join([f"no\n{index}", *["lorem"] * (index * 7 % 23)])


ROWS = [{"text": make_text(index), "number": index} for index in range(600)]
OTHER_COLUMNS = [row if row["number"] < 300 else {"url": "http://x", "text": row["text"]} for row in ROWS]
NO_TEXTS = [{"text": ""}, {"text": " \n"}, {"text": None}]
LONG = [{"text": "lorem " * 5000 if index % 20 == 0 else str(index)} for index in range(600)]
# The ending of the files, their rows, and how many each file has
KINDS = {
    "one file": ("jsonl.gz", ROWS, [600]),
    "unequal files": ("jsonl", ROWS, [290, 7, 250, 53]),
    "many files": ("jsonl", ROWS, [1] * 520),
    "row groups": ("parquet", ROWS, [600]),
    "paragraphs": ("txt", ROWS, [600]),
    "tables": ("csv", ROWS, [290, 7, 250, 53]),
    "other columns": ("jsonl", OTHER_COLUMNS + NO_TEXTS, [300, 303]),
    "long beside short": ("jsonl", LONG, [600]),
}


def write_files(folder, ending, rows, counts):
    rows = iter(rows)
    for number, count in enumerate(counts):
        write_rows(folder / f"{number}.{ending}", [*itertools.islice(rows, count)])
    return folder / f"*.{ending}"


@pytest.fixture
def small_blocks(monkeypatch):
    """Streams tokenize about 5,000 characters at once, so a short stream has many blocks."""
    monkeypatch.setattr(*inside.LM_CHARACTERS_AT_ONCE, 5000)


@pytest.mark.parametrize("kind", ["builtin", *(long(kind) if kind == "many files" else kind for kind in KINDS)])
def test_a_chain_of_resumes_reads_what_one_run_reads(kind, tmp_path, tokenizer, small_blocks):
    """A stream stops and resumes 30 times, often twice within a block of texts. Positions go through JSON."""
    args = lm_args(kind if kind == "builtin" else write_files(tmp_path, *KINDS[kind]), seq_length=64)
    choose = random.Random(0)
    lengths = [choose.choice((1, 1, 2, 3, 7, 80)) for _ in range(30)]
    read = [*itertools.islice(inside.lm_stream(args, tokenizer, 7, 8), sum(lengths))]
    expected = [sequence for sequence, _ in read]
    assert len({json.dumps(position["rows"]) for _, position in read}) > 2  # of several blocks

    sequences = []
    position = None
    for length in lengths:
        stream = inside.lm_stream(args, tokenizer, 7, 8, position)
        part = list(itertools.islice(stream, length))
        sequences += [sequence for sequence, _ in part]
        position = json.loads(json.dumps(part[-1][1]))
    assert sequences == expected


# The number of texts, --global-batch-size, and numbers of processes
SIZES = [
    (300, 16, (1, 2, 4, 8, 16)),
    (300, 48, (1, 2, 4, 8, 16)),
    (8, 4, (1, 2, 4)),
    (300, 24, (3, 6, 12)),
    (300, 20, (5, 10)),
    (300, 21, (7,)),
    (300, 64, (32,)),
]


@pytest.mark.parametrize("num_texts, batch, sizes", SIZES)
def test_a_step_is_the_same_on_any_number_of_processes(num_texts, batch, sizes, tmp_path, tokenizer, small_blocks):
    args = lm_args(write_rows(tmp_path / "rows.jsonl", ROWS[:num_texts]), global_batch_size=batch)
    steps_of_sizes = []
    for size in sizes:
        steps = []
        for streams in itertools.islice(inside.lm_steps(args, tokenizer, size=size), 15):
            rows = np.concatenate([stream["input_ids"] for stream in streams])
            steps.append(sorted(rows.tolist()))
        assert {len(step) for step in steps} == {batch}
        steps_of_sizes.append(steps)
    assert all(steps == steps_of_sizes[0] for steps in steps_of_sizes)


def test_a_run_continues_on_other_numbers_of_processes(tmp_path, tokenizer, small_blocks):
    args = lm_args(write_rows(tmp_path / "rows.jsonl", ROWS), global_batch_size=16)

    def read(size, positions, count):
        """Steps as they are, and the positions of all streams after them, through JSON."""
        ranks = inside.lm_ranks(args, tokenizer, size, positions)
        steps = [list(zip(*parts, strict=True)) for parts in itertools.islice(ranks, count)]
        sequences = [np.concatenate(step[0]).tolist() for step in steps]
        return sequences, json.loads(json.dumps([*itertools.chain.from_iterable(steps[-1][1])]))

    expected, _ = read(1, None, 50)
    steps, positions = read(8, None, 15)
    for size, count in ((16, 20), (4, 15)):
        more, positions = read(size, positions, count)
        steps += more
    assert steps == expected


@pytest.mark.parametrize("counts", [[900], [290, 7, 250, 353], [1, 2] * 300])
def test_every_text_comes_once_in_a_pass(counts, tmp_path, small_blocks):
    """Text i is words of its own, each one token. Some texts are held out by their content, one of them is in many
    rows: they are validated once, and never trained on."""
    texts = [f"word{index} " * (1 + index % 23) for index in range(800)]
    held_out = [text for text in texts if inside.lm_is_held_out(text)]
    trained = [text for text in texts if text not in held_out][:640]  # eight streams can divide them
    rows = trained + held_out + held_out[:1] * (900 - 640 - len(held_out))
    random.Random(0).shuffle(rows)
    args = lm_args(write_files(tmp_path, "jsonl", [{"text": text} for text in rows], counts))
    assert sorted(inside.lm_sample_texts(args)[1]) == sorted(held_out)

    words = Tokenizer(WordLevel({"</s>": 0} | {text.split()[0]: index for index, text in enumerate(trained, 1)}))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    seen = []
    for index in range(8):
        tokens = collections.Counter()
        for sequence, position in inside.lm_stream(args, tokenizer, index, 8):
            if position["used"] == 1 and tokens.total() > 3000:  # a pass has about 1,000; earlier blocks are whole
                break
            tokens.update(sequence[:-1])  # the next sequence begins with the last token
            num_passes = inside.lm_count_passes(position)
        passes = {number: tokens[number] / len(trained[number - 1].split()) for number in set(tokens) - {0}}
        assert sum(share % 1 > 0 for share in passes.values()) <= 1  # the last text may be cut
        assert max(passes.values()) - min(passes.values()) <= 1
        assert num_passes <= min(passes.values())
        seen += passes
    assert sorted(seen) == [*range(1, 641)]


def test_sequences_hold_texts_with_one_eos_and_no_padding(tmp_path, tokenizer, small_blocks):
    """A sequence holds the end of a text, whole texts, and the beginning of a text, each with the tokenizer's special
    tokens. Special tokens inside a text are special tokens, too: a rendered chat template has them."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})  # as Llama's and Gemma's tokenizers do
    special = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=special)
    texts = [f"{make_text(index)} <pad><s> {index}" for index in range(300)]
    args = lm_args(write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts]), seq_length=100)

    ids = tokenizer(texts)["input_ids"]
    assert ids[0].count(tokenizer.bos_token_id) == 2 and tokenizer.pad_token_id in ids[0]
    whole = {(*tokens, tokenizer.eos_token_id) for tokens in ids}
    beginnings = {tokens[:end] for tokens in whole for end in range(len(tokens))}
    ends = {tokens[start:] for tokens in whole for start in range(len(tokens))}
    for sequence, _ in itertools.islice(inside.lm_stream(args, tokenizer, 0, 8), 300):
        row = np.array(sequence)
        first, *others, last = np.split(row, np.flatnonzero(row == tokenizer.eos_token_id) + 1)
        assert len(row) == 101 and others
        assert tuple(first) in ends and tuple(last) in beginnings
        assert {tuple(tokens) for tokens in others} <= whole


# ---- Articles of t5_fsdp.py ------------------------------------------------------------------------------------------
def sheet(delimiter=",", encoding="utf-8"):
    """The rows of SOME as a spreadsheet writes them, as bytes, with a column that is often empty."""
    lines = [delimiter.join(["text", "headline", "section"])]
    for index, row in enumerate(SOME):
        lines.append(delimiter.join([*row.values(), ("Local", "")[index % 2]]))
    return "\r\n".join([*lines, ""]).encode(encoding)


SHEET = sorted((row["text"], row["headline"]) for row in SOME)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_spreadsheet_is_read(delimiter, tmp_path):
    """With a byte-order mark, compressed, from a server, beside one with another delimiter."""
    (tmp_path / "rows.csv").write_bytes(sheet(delimiter, "utf-8-sig"))
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(sheet(delimiter)))
    assert pairs(tmp_path / "rows.csv") == pairs(tmp_path / "rows.csv.gz") == SHEET
    with serve(tmp_path) as address:
        for name in ("rows.csv.gz", "rows.csv?download=true"):
            assert pairs(f"{address}/{name}") == SHEET
    for name, of_file in {"a": ",", "b": delimiter}.items():
        (tmp_path / f"sheet-{name}.csv").write_bytes(sheet(of_file))
    assert pairs(tmp_path / "sheet-*.csv") == sorted(SHEET * 2)
    (tmp_path / "rows.csv").write_bytes(sheet(delimiter).replace(b"Article 7", b"Article 99"))
    assert pairs(tmp_path / "rows.csv") != SHEET  # not the rows that `datasets` has kept


# Changes of a spreadsheet: the old text, the new one; then the summary of article 7, or words of the error.
CSV = {
    "a quoted line break": (",s7,", ',"s\n7",', "s\n7"),
    "a quoted delimiter": (",s7,", ',"s, 7",', "s, 7"),
    "a space before a quote": (",s7,", ', "s, 7",', "s, 7"),
    "a doubled quote": (",s7,", ',"say ""s""",', 'say "s"'),
    "a quote inside": (",s7,", ',s "7",', 's "7"'),
    "a word for nothing": (",s7,", ",null,", "null"),
    "numbers": (",s7,", ",007,", "007"),
    "empty lines": ("\r\n", "\r\n\r\n", "s7"),
    "Unix lines": ("\r\n", "\n", "s7"),
    "too many fields": (",s7,", ",s, 7,", "line 9:"),
    "too few fields": (",Local\r\n", "\r\n", "line 2:"),
    "a line break without quotes": (",s7,", ",s\r\n7,", "line 9:"),
    "a quote that is not closed": ("Article 7", '"Article 7', "unexpected end"),
    "a quote that the next text closes": ("Article 7 is", '"Article 7" is', "line 9:"),
    "backslashes before quotes": (",s7,", r',"say \"s\"",', "line 9:"),
    "two columns of one name": ("section", "text", "['text', 'headline', 'text']"),
    "another column": ("headline", "summary", "'headline'"),
    "another encoding": (",s7,", ",s\udce9,", "utf-8"),
}


@pytest.mark.parametrize("case", CSV)
def test_a_csv_is_read_as_it_was_written_or_refused(case, tmp_path):
    path = tmp_path / "rows.csv"
    old, new, expected = CSV[case]
    content = sheet().decode()
    assert old in content
    path.write_bytes(content.replace(old, new).encode(errors="surrogateescape"))
    articles = sorted((text, expected if summary == "s7" else summary) for text, summary in SHEET)
    read_by_lm = functools.partial(inside.lm_all_texts, lm_args(path))
    for read, rows in ((functools.partial(pairs, path), articles), (read_by_lm, [text for text, _ in articles])):
        try:
            assert read() == rows
        except inside.UserError as error:
            assert expected in str(error) and str(path) in str(error)


def test_commas_do_not_separate_in_a_tsv(tmp_path):
    texts = [row["text"].replace(" ", ", ") for row in SOME]
    (tmp_path / "rows.TSV").write_text("\n".join(["text", *texts, ""]))
    assert inside.lm_all_texts(lm_args(tmp_path / "rows.TSV")) == sorted(texts)


def test_tabs_in_a_text_are_refused_where_tabs_separate(tmp_path):
    """Without quotes, a text that begins with one and a later one that ends with one would swallow what is between."""
    path = tmp_path / "rows.tsv"
    content = sheet("\t").decode().replace(TEXT.format(7), f'"{TEXT.format(7)}')
    path.write_text(content.replace(TEXT.format(9), f'{TEXT.format(9)}"'))
    for read in (functools.partial(pairs, path), functools.partial(inside.lm_all_texts, lm_args(path))):
        with pytest.raises(inside.UserError, match=r"rows.tsv, line 11: .*tab"):
            read()


def test_no_two_builtin_articles_have_one_text_or_one_summary():
    train, validation = inside.t5_articles("builtin")
    for column in ("text", "summary"):
        values = [*train[column], *validation[column]]
        assert len(set(values)) == len(values) > 8000


def test_wikihows_quirks_are_repaired(tmp_path):
    """Stray commas and line breaks. Methods of one article are on one side. Rows without a text or a summary, or with
    too long a summary, are left out. Other columns make another dataset, whose commas stay."""
    rows = []
    for index in range(60):
        article = inside.builtin_article(index)
        for method in (1, 2):
            rows.append(
                {
                    "headline": "\n" + article["headline"].replace(".\n", ".,\n") + ",",
                    "title": f"{article['title']}{method}",
                    "text": f'\nHe said "do it".\n\n, {article["text"]} ({method})\n',
                }
            )
    unusable = [("", "There is text."), ("Nothing here.", " \n"), ("Much longer than its text.", "Short text.")]
    rows += [{"headline": headline, "title": "How to", "text": text} for headline, text in unusable]

    parts = inside.t5_articles(write_csv(tmp_path / "wikihowAll.csv", rows))
    assert sum(map(len, parts)) == 120
    train, validation = ({text[:-4] for text in part["text"]} for part in parts)  # without the method
    assert validation and not train & validation
    read = pairs(tmp_path / "wikihowAll.csv")
    article = inside.builtin_article(0)
    assert (f'He said "do it".\n {article["text"]} (1)', article["headline"]) in read

    others = [row | {"date": "today"} for row in rows]
    assert (rows[0]["text"].strip(), rows[0]["headline"].strip()) in pairs(write_csv(tmp_path / "others.csv", others))


def test_contents_alone_decide_which_articles_are_held_out(tmp_path):
    """Some rows have the same text. Their order does not matter, and with more rows, no article moves from training to
    validation. At least one article is held out."""
    rows = [{"text": TEXT.format(index // 3), "headline": f"s{index % 2}"} for index in range(600)]
    train, validation = inside.t5_articles(write_csv(tmp_path / "rows.csv", rows))
    assert not set(train["text"]) & set(validation["text"])
    again = inside.t5_articles(write_rows(tmp_path / "reversed.jsonl", rows[::-1]))
    for one, other in zip((train, validation), again, strict=True):
        assert one["text"][:] == other["text"][:] and one["summary"][:] == other["summary"][:]

    more = [{"text": TEXT.format(index), "headline": "s"} for index in range(200, 260)]
    _, validation = inside.t5_articles(write_csv(tmp_path / "more.csv", more + rows))
    assert not set(train["text"]) & set(validation["text"])
    for count in (2, 3, 5, 9):
        train, validation = inside.t5_articles(write_csv(tmp_path / f"{count}.csv", SOME[:count]))
        assert len(train) and len(validation)


def test_each_target_ends_with_one_eos():
    """Even if a summary is cut."""
    tokenizer = inside.train_tokenizer(["a b c"] * 3, 300, append_eos=True)
    rows = {"text": ["a b"] * 3, "summary": ["a b", "a", "a b c " * 20]}
    columns = inside.t5_tokenize(rows, tokenizer, 30, 20)
    assert columns["length"] == [len(ids) for ids in columns["input_ids"]]
    targets = columns["labels"]
    assert [target.index(tokenizer.eos_token_id) + 1 for target in targets] == [len(target) for target in targets]
    assert len(targets[2]) == 20


# ---- Tokenizers of both scripts --------------------------------------------------------------------------------------
def lost_text(tokenizer, texts):
    """What print_lost_text prints."""
    printed = io.StringIO()
    with mock.patch("torch.distributed.get_rank", return_value=0), contextlib.redirect_stdout(printed):
        inside.print_lost_text(tokenizer, texts)
    return printed.getvalue()


def test_lost_text_is_counted_and_unknown_text_is_refused(tokenizer):
    """Spaces do not count. Each text has a brace, an emoji or a tilde, which many vocabularies lack."""
    known = WordLevel({"</s>": 0, "<unk>": 1, "the": 2, "of": 3, "and": 4}, unk_token="<unk>")
    words = Tokenizer(known)
    words.pre_tokenizer = WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    texts = ["the of {", "the  of\nand ~", "the of \N{GRINNING FACE}", "the of and the", "the"]
    assert " 3 of 5 texts" in lost_text(words, texts)
    assert " 0 of 5 texts" in lost_text(tokenizer, texts)  # of bytes
    with pytest.raises(inside.UserError, match="unknown"):
        lost_text(words, ["the weather is the news"])
