"""WikiHow's two CSV files, other formats, the split by title, the steps of an epoch, and the built-in articles."""

import json
import pickle
import random
import re
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch

import pytest
from conftest import CACHES, curve, losses, records, run_many, succeed, write_csv
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

import common
import t5_fsdp


def load(path, train=0, validation=0, text="text", summary="headline", longest=0.75):
    """What a single process would load."""
    with mock.patch("torch.distributed.get_rank", return_value=0):
        parts = common.load_articles(str(path), text, summary, longest)
    counts = (train, validation)  # 0 for all
    return [part.take(min(count, len(part))) if count else part for part, count in zip(parts, counts, strict=True)]


def rows_like_wikihow():
    """Rows with everything WikiHow's files hold: numbered titles, quotes, newlines, commas, gaps, odd lengths."""
    rows = []
    for number in range(60):
        article = common.builtin_article(number)
        headline = "\n" + article["headline"].replace(".\n", ".,\n") + ","
        text = '\nHe said "do it".\n\n, ' + article["text"] + "\n\n\n"
        for method in (1, 2):  # two methods of one article
            rows.append({"headline": headline, "title": f"{article['title']}{method}", "text": text + f" ({method})"})
    rows.append({"headline": "", "title": "How to Lack a Headline", "text": "There is text."})
    rows.append({"headline": "Nothing here.", "title": "How to Lack a Text", "text": " \n"})
    rows.append({"headline": "Much longer than its text.", "title": "How to Ramble", "text": "Short text."})
    rows.append({"headline": "12345", "title": "", "text": "A row without a title, with a number as its headline."})
    return rows


def test_wikihow_all(tmp_path):
    train, validation = load(write_csv(tmp_path / "wikihowAll.csv", rows_like_wikihow()))
    assert len(train) + len(validation) == 121  # of 124 rows, two with a gap and one with a long summary
    summaries, texts = (train[name][:] + validation[name][:] for name in ("summary", "text"))
    assert "12345" in summaries
    assert common.builtin_article(0)["headline"] in summaries  # without the commas and line breaks
    assert not any(re.search(r"\n\s*,", text) for text in texts)
    assert any('"do it"' in text and "\n" in text for text in texts)


def test_sections_and_methods_of_an_article_never_straddle_the_split(tmp_path):
    articles = [common.builtin_article(number) for number in range(1000)]
    rows = [
        {
            "overview": "About it.",
            "headline": articles[10 * number + section]["headline"],
            "text": articles[10 * number + section]["text"] + f" ({number}.{section})",
            "sectionLabel": f"Part {section}",
            "title": articles[number]["title"].replace("Home", "home" if section else "Home") + str(section % 3 + 1),
        }
        for number in range(100)
        for section in range(5)
    ]
    random.Random(0).shuffle(rows)
    train, validation = load(write_csv(tmp_path / "wikihowSep.csv", rows))
    assert len(train) + len(validation) == 500
    title_of = {row["text"]: row["title"].rstrip("123").lower() for row in rows}
    trained, held_out = ({title_of[text] for text in split["text"]} for split in (train, validation))
    assert not trained & held_out
    assert len(trained | held_out) == 100 and len(held_out) <= 15  # 5 expected


def test_rows_that_their_titles_number_are_apart_and_counted(tmp_path, capsys):
    rows = [common.builtin_article(number) | {"title": f"Report {number}"} for number in range(200)]
    rows[0]["headline"] = ""
    train, validation = load(write_csv(tmp_path / "reports.CSV", rows))
    assert len(train) + len(validation) == 199 and 3 <= len(validation) <= 25
    counts = "reports.CSV, 200 rows, of which 199 have a text and a summary within --max-summary-share"
    assert counts in capsys.readouterr().out


def test_the_split_depends_on_titles_and_not_on_the_order_of_the_rows(tmp_path):
    rows = [common.builtin_article(number) for number in range(300)]
    whole = load(write_csv(tmp_path / "a.csv", rows))
    random.Random(0).shuffle(rows)
    shuffled = load(write_csv(tmp_path / "b.csv", rows))
    for first, second in zip(whole, shuffled, strict=True):
        assert sorted(first["text"]) == sorted(second["text"])
    few = load(tmp_path / "a.csv", train=100, validation=3)
    for some, side, count in zip(few, whole, (100, 3), strict=True):
        assert some["text"][:] == side["text"][:count]


def test_json_lines_and_parquet_with_other_columns(tmp_path):
    import datasets

    rows = [common.builtin_article(number) for number in range(50)]
    renamed = [{"article": row["text"], "highlights": row["headline"], "title": row["title"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in renamed))
    datasets.Dataset.from_list(renamed).to_parquet(tmp_path / "rows.parquet")
    write_csv(tmp_path / "rows.csv", renamed)
    csv, jsonl, parquet = (
        [part[name][:] for part in load(tmp_path / f"rows.{kind}", 0, 0, "article", "highlights") for name in part[0]]
        for kind in ("csv", "jsonl", "parquet")
    )
    assert csv == jsonl == parquet
    assert sorted(csv[0] + csv[3]) == sorted(row["article"] for row in renamed)
    write_csv(tmp_path / "rows.csv", rows[:30])  # a changed file is read again
    assert sum(map(len, load(tmp_path / "rows.csv"))) == 30


def steps_on(size, samples, lengths, epoch=1):
    """The steps of an epoch, put together from what each of `size` ranks trains on, 8 samples a step."""
    args = Namespace(batch_size=8 // size, accumulation_steps=1, seed=1)
    worlds = [common.World(rank, rank, size, size, torch.device("cpu")) for rank in range(size)]
    parts = [t5_fsdp.split_epoch(args, world, lengths[:samples], epoch) for world in worlds]
    return [[sample for part in step for sample in part] for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("samples", [1000, 1003, 16])
def test_an_epoch_is_a_permutation_that_saves_padding(samples):
    lengths = torch.randint(10, 500, (1003,), generator=torch.Generator().manual_seed(0))
    steps = steps_on(1, samples, lengths)
    assert len(steps) == samples // 8 and {len(step) for step in steps} == {8}
    assert len({sample for step in steps for sample in step} & set(range(samples))) == samples // 8 * 8
    for size in (2, 4):
        assert [sorted(step) for step in steps_on(size, samples, lengths)] == [sorted(step) for step in steps]
    if samples > 16:
        assert steps_on(1, samples, lengths, epoch=2) != steps
        padded = sum(8 * lengths[step].max().item() for step in steps)
        assert padded < 1.1 * lengths[:samples].sum()  # 1.75 times as much in random order
        # Steps of all lengths come in any order: no curriculum from short to long.
        longest = torch.stack([lengths[step].max() for step in steps]).double()
        assert abs(torch.corrcoef(torch.stack([longest, torch.arange(len(steps)).double()]))[0, 1]) < 0.3


def test_workers_that_are_not_forked_can_make_batches(monkeypatch):
    """On a GPU two workers do; where they are not forked, all that they need reaches them as a pickle."""
    asked = {}

    def see(dataset, **options):
        asked.update(options, dataset=dataset)
        return []

    monkeypatch.setattr(t5_fsdp, "DataLoader", see)
    rows = Dataset.from_dict({"input_ids": [[5, 6], [7]], "labels": [[8], [9, 9]]})
    tokenizer = common.train_tokenizer(["any text"], 300, append_eos=True)
    world = common.World(0, 0, 1, 1, torch.device("cuda"))
    assert list(t5_fsdp.batches_on_device(rows, [[0, 1]], DataCollatorForSeq2Seq(tokenizer), world)) == []
    assert asked["num_workers"] == 2 and asked["pin_memory"]
    dataset, collate, init = pickle.loads(
        pickle.dumps((asked["dataset"], asked["collate_fn"], asked["worker_init_fn"]))
    )
    assert init is common.ignore_sigterm
    assert collate([dataset[0], dataset[1]])["labels"].tolist() == [[8, -100], [9, 9]]


def test_builtin_articles_can_be_learned_but_not_copied():
    articles = [common.builtin_article(number) for number in range(2000)]
    assert articles[5] == common.builtin_article(5)
    assert len({article["title"] for article in articles}) == len(articles)
    actions = {action.lower() for action in common.ACTIONS}
    for article in articles:
        steps, text = article["headline"].split("\n"), article["text"]
        assert 2 <= len(steps) <= 3
        for step in steps:
            action, thing = step.rstrip(".").split(" the ")
            assert any(way.format(thing) in text for way in common.ACTIONS[action])  # implied
        assert not actions & set(re.findall(r"\w+", text.lower())), text  # and not named


def test_flags_count_articles_and_switch_off(tmp_path, tiny_model):
    path = write_csv(tmp_path / "wikihowAll.csv", rows_like_wikihow())
    shared = ["--model", tiny_model, "--dataset", path, "--num-train-samples", 40, "--num-validation-samples", 3]
    shared += ["--batch-size", 4, "--max-source-length", 16, "--max-target-length", 4, "--epochs", 2]
    switches = {"all": (), "no-validation": ("--no-run-validation",), "no-model": ("--no-save-model",)}
    switches["few-steps"] = ("--no-run-validation", "--no-save-model", "--max-steps", 7)
    runs = [[*shared, *flags, "--output-dir", tmp_path / name] for name, flags in switches.items()]
    finished = run_many("t5_fsdp.py", runs, processes=2)
    assert finished.stdout.count("40 articles to train on, 3 to validate") == len(runs)
    steps = {name: [*losses(tmp_path / name)] for name in switches}
    assert steps == {name: [5, 7] if name == "few-steps" else [5, 10] for name in switches}
    scores = ("val_loss", "rouge1", "rouge2", "rougeL")
    validated = {name: [row["step"] for row in records(tmp_path / name, *scores)] for name in switches}
    assert validated == {"all": [0, 5, 10], "no-validation": [], "no-model": [0, 5, 10], "few-steps": []}
    assert [name for name in switches if (tmp_path / name / "best").exists()] == ["all", "no-validation"]
    assert len(re.findall("^summary", finished.stdout, re.M)) == 2 * 3  # of the first article, where it validates


def test_bf16_runs_where_it_is_emulated_and_auto_is_fp32_there(tmp_path, tiny_model, articles_csv):
    """As on a CPU that has no bf16. PyTorch reads the variable when it is imported."""
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 64, "--epochs", 1]
    arguments += ["--no-run-validation", "--no-save-model", "--log-every", 1]
    runs = [[*arguments, "--precision", name, "--output-dir", tmp_path / name] for name in ("auto", "bf16")]
    finished = run_many("t5_fsdp.py", runs, 2, fork=False, ATEN_CPU_CAPABILITY="avx2")
    assert re.findall(r"^fsdp .*, (\w+)$", finished.stdout, re.M) == ["fp32", "bf16"]
    assert len(re.findall("^--precision bf16: .* only emulates bf16, which is slow$", finished.stderr, re.M)) == 1
    fp32, bf16 = (curve(tmp_path / name) for name in ("auto", "bf16"))
    assert bf16 == pytest.approx(fp32, rel=0.02) and bf16 != fp32


def test_other_processes_find_the_articles_in_the_cache(tmp_path, tiny_model):
    path = write_csv(tmp_path / "new.csv", [common.builtin_article(number) for number in range(300, 400)])
    arguments = ("--model", tiny_model, "--dataset", path, "--num-train-samples", 16, "--no-run-validation")
    arguments += ("--no-save-model", "--epochs", 1, "--batch-size", 8)
    caches = []
    for processes in (2, 1):
        succeed("t5_fsdp.py", *arguments, "--output-dir", tmp_path / str(processes), processes=processes, fork=True)
        caches.append(set(Path(CACHES.name).glob("datasets/**/*.arrow")))
    assert caches[0] == caches[1] and len(list(Path(CACHES.name).glob("datasets/csv/**/cache-*.arrow"))) > 3
