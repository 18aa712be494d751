"""WikiHow's two CSV files, other formats, the split by title, and the built-in articles."""

import json
import random
import re

import pytest
from conftest import reports, run_many, succeed, write_csv
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

import common
import t5_fsdp


def load(path, tmp_path, train=0, validation=0, text="text", summary="headline"):
    return common.load_summarization_data(str(path), text, summary, train, validation, tmp_path)


def all_rows_like_wikihow():
    """Rows with everything WikiHow's files hold: numbered titles, quotes, newlines, commas, gaps, odd lengths."""
    rows = []
    for index in range(60):
        article = common.builtin_article(index)
        headline = "\n" + article["headline"].replace(".\n", ".,\n") + ","
        text = '\nHe said "do it".\n\n, ' + article["text"] + "\n\n\n"
        for method in (1, 2):  # two methods of one article
            rows.append({"headline": headline, "title": f"{article['title']}{method}", "text": text + f" ({method})"})
    rows.append({"headline": "", "title": "How to Lack a Headline", "text": "There is text."})
    rows.append({"headline": "None", "title": "How to Say None", "text": "A headline that pandas takes for a gap."})
    rows.append({"headline": "Nothing here.", "title": "How to Lack a Text", "text": " \n"})
    rows.append({"headline": "Much longer than its text.", "title": "How to Ramble", "text": "Short text."})
    rows.append({"headline": "12345", "title": "", "text": "A row without a title, with a number as its headline."})
    return rows


def test_wikihow_all(tmp_path):
    data = load(write_csv(tmp_path / "wikihowAll.csv", all_rows_like_wikihow()), tmp_path)
    assert (data.rows, data.without_text_or_summary, data.with_long_summary) == (125, 2, 1)
    assert len(data.train) + len(data.validation) == 122
    summaries = data.train["summary"][:] + data.validation["summary"][:]
    texts = data.train["text"][:] + data.validation["text"][:]
    assert {"None", "12345"} <= set(summaries)
    assert not any(re.search(r",\s*(\n|$)", summary) for summary in summaries)
    assert not any(re.search(r"\n\s*,", text) for text in texts)
    assert any('"do it"' in text and "\n" in text for text in texts)


def test_sections_and_methods_of_an_article_never_straddle_the_split(tmp_path):
    rows = [
        {
            "overview": "About it.",
            "headline": common.builtin_article(10 * article + section)["headline"],
            "text": common.builtin_article(10 * article + section)["text"],
            "sectionLabel": f"Part {section}",
            "title": common.builtin_article(article)["title"] + str(section % 3 + 1),
        }
        for article in range(50)
        for section in range(5)
    ]
    data = load(write_csv(tmp_path / "wikihowSep.csv", rows), tmp_path)
    title_of = {row["text"]: row["title"].rstrip("123") for row in rows}
    train, validation = ({title_of[text] for text in split["text"]} for split in (data.train, data.validation))
    assert not train & validation
    assert len(validation) == round(common.VALIDATION_SHARE * 50)
    assert len(data.train) + len(data.validation) == 250


def test_split_and_selection_do_not_depend_on_the_order_of_the_rows(tmp_path):
    rows = [common.builtin_article(index) for index in range(300)]
    first = load(write_csv(tmp_path / "a.csv", rows), tmp_path, train=100, validation=10)
    random.Random(0).shuffle(rows)
    second = load(write_csv(tmp_path / "b.csv", rows), tmp_path, train=100, validation=10)
    assert len(first.train) == 100 and len(first.validation) == 10
    for split in ("train", "validation"):
        assert getattr(first, split)["text"][:] == getattr(second, split)["text"][:]


def test_json_lines_and_parquet_with_other_columns(tmp_path):
    import datasets

    rows = [common.builtin_article(index) for index in range(50)]
    renamed = [{"article": row["text"], "highlights": row["headline"], "title": row["title"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in renamed))
    datasets.Dataset.from_list(renamed).to_parquet(tmp_path / "rows.parquet")
    write_csv(tmp_path / "rows.csv", renamed)
    loaded = [
        load(tmp_path / f"rows.{ending}", tmp_path, text="article", summary="highlights").train["text"][:]
        for ending in ("jsonl", "parquet", "csv")
    ]
    assert len(loaded[0]) == 48
    assert loaded[0] == loaded[1] == loaded[2]


def test_a_changed_file_is_read_again(tmp_path):
    rows = [common.builtin_article(index) for index in range(40)]
    path = write_csv(tmp_path / "rows.csv", rows)
    assert load(path, tmp_path).rows == 40
    write_csv(path, rows[:20])
    assert load(path, tmp_path).rows == 20


def test_batches_are_padded_to_their_longest_and_lengths_are_cut(tmp_path, tiny_model, articles_csv):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = common.tokenize(load(articles_csv, tmp_path).train, tokenizer, "summarize: ", 40, 9)
    assert max(len(ids) for ids in rows["input_ids"]) == 40 and max(len(ids) for ids in rows["labels"]) == 9
    shortest = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))[:4]
    batch = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)([rows[i] for i in shortest])
    assert batch["input_ids"].shape[1] % 8 == 0
    assert batch["input_ids"].shape[1] < 40 or len(rows[shortest[-1]]["input_ids"]) > 32
    assert batch["labels"].shape == (4, 16)
    assert (batch["labels"][:, 9:] == -100).all()


def test_a_used_tokenizer_finds_the_same_cache(tmp_path, tiny_model, articles_csv):
    data = load(articles_csv, tmp_path)
    used, fresh = (AutoTokenizer.from_pretrained(tiny_model) for _ in range(2))
    common.tokenize(data.train, used, "summarize: ", 32, 8)  # rank 0; the other ranks find this in the cache
    first, second = (common.tokenize(data.validation, each, "summarize: ", 32, 8) for each in (used, fresh))
    assert first._fingerprint == second._fingerprint
    assert first._fingerprint != common.tokenize(data.validation, fresh, "summarize: ", 33, 8)._fingerprint


@pytest.mark.parametrize("samples, batch_size, world_size", [(10, 2, 1), (10, 2, 3), (7, 2, 2), (9, 2, 4), (1, 4, 4)])
def test_every_sample_comes_once_on_any_number_of_ranks(samples, batch_size, world_size):
    import torch

    dataset = [{"labels": torch.full((1,), index)} for index in range(samples)]
    order = list(reversed(range(samples)))
    per_rank = []
    for rank in range(world_size):
        world = common.World(rank, rank, world_size, world_size, torch.device("cpu"), "gloo")
        collate = torch.utils.data.default_collate
        batches = t5_fsdp.load_batches(dataset, collate, order, batch_size, world)
        per_rank.append([batch["labels"].flatten().tolist() for batch in batches])
    assert len({len(batches) for batches in per_rank}) == 1  # or a rank would wait for the others for ever
    seen = [label for batches in per_rank for batch in batches for label in batch if label != -100]
    assert sorted(seen) == list(range(samples))
    first = sorted(label for batches in per_rank for label in batches[0] if label != -100)
    assert first == sorted(order[: batch_size * world_size])


@pytest.mark.parametrize("samples, step_size", [(1000, 8), (1003, 8), (5, 8)])
def test_an_epoch_is_a_permutation_that_saves_padding(samples, step_size):
    import torch

    lengths = torch.randint(10, 500, (samples,), generator=torch.Generator().manual_seed(0))

    def padded(order):
        return sum(len(step) * lengths[step].max().item() for step in torch.tensor(order).split(step_size))

    grouped = t5_fsdp.epoch_order(lengths, step_size, seed=3, group_by_length=True)
    shuffled = t5_fsdp.epoch_order(lengths, step_size, seed=3, group_by_length=False)
    assert sorted(grouped) == sorted(shuffled) == list(range(samples))
    assert grouped == t5_fsdp.epoch_order(lengths, step_size, seed=3, group_by_length=True)
    if samples > 5:
        assert padded(grouped) < 1.1 * lengths.sum() < 1.5 * lengths.sum() < padded(shuffled)
        assert grouped != t5_fsdp.epoch_order(lengths, step_size, seed=4, group_by_length=True)
        # Steps of all lengths come in any order: no curriculum from short to long.
        firsts = lengths[grouped[: samples // step_size * step_size : step_size]].double()
        assert abs(torch.corrcoef(torch.stack([firsts, torch.arange(len(firsts)).double()]))[0, 1]) < 0.3


def test_builtin_articles_can_be_learned_but_not_copied():
    articles = [common.builtin_article(index) for index in range(2000)]
    assert articles[5] == common.builtin_article(5)
    assert len({article["title"] for article in articles}) == len(articles)
    actions = {action.lower() for action in common.PARAPHRASES}
    for article in articles:
        steps = article["headline"].split("\n")
        paragraphs = article["text"].split("\n")
        assert 2 <= len(steps) == len(paragraphs)
        for step, paragraph in zip(steps, paragraphs, strict=True):
            action, the_item = step.rstrip(".").split(" ", 1)
            assert the_item in paragraph  # named, and in this paragraph
            assert not actions & set(re.findall(r"\w+", paragraph.lower())), (action, paragraph)  # only implied


def test_the_command_line_selects_and_counts(tmp_path, tiny_model):
    path = write_csv(tmp_path / "wikihowAll.csv", all_rows_like_wikihow())
    arguments = ["--model", tiny_model, "--dataset", path, "--num-train-samples", 30, "--num-validation-samples", 3]
    arguments += ["--max-source-length", 16, "--max-target-length", 4, "--num-rouge-samples", 2, "--epochs", 1]
    finished = succeed("t5_fsdp.py", *arguments, "--output-dir", tmp_path / "out", processes=2, fork=True)
    assert "30 articles to train on, 3 to validate" in finished.stdout
    assert "of 125 rows, 2 without text or summary and 1 with a summary longer" in finished.stdout
    end = reports(tmp_path / "out", "epoch")[-1]
    assert end["step"] == 4  # 30 articles, the document's batch of 4 on two processes
    settings = reports(tmp_path / "out", "settings")[0]
    assert (settings["lr"], settings["gamma"], settings["batch_size"]) == (0.002, 0.7, 4)


def test_switches_switch_off(tmp_path, tiny_model, articles_csv):
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 8, "--epochs", 1]
    arguments += ["--max-target-length", 40]  # else the untrained model writes 150 tokens for each summary
    switches = ("run-validation", "track-memory", "save-model")
    settings = [[*arguments, f"--no-{switch}", "--output-dir", tmp_path / switch] for switch in switches]
    run_many("t5_fsdp", settings, processes=1)
    epochs = {switch: reports(tmp_path / switch, "epoch")[-1] for switch in switches}
    exported = {switch: len(list((tmp_path / switch).glob("t5-*"))) for switch in switches}
    assert exported == {"run-validation": 1, "track-memory": 1, "save-model": 0}
    assert "validation_loss" not in epochs["run-validation"] and "rougeL" not in epochs["run-validation"]
    assert not {"peak_memory_gb", "state_bytes", "parameter_bytes"} & set(epochs["track-memory"])
    assert {"validation_loss", "rougeL", "peak_memory_gb", "state_bytes", "parameter_bytes"} <= set(
        epochs["save-model"]
    )


def test_bf16_runs_where_it_is_emulated_and_auto_leaves_it(tmp_path, tiny_model, articles_csv):
    arguments = ["--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 8, "--epochs", 1]
    arguments += ["--max-target-length", 8, "--no-run-validation", "--no-save-model"]
    for precision, chosen in (("bf16", "bf16"), ("auto", "fp32")):
        options = (*arguments, "--precision", precision, "--output-dir", tmp_path / precision)
        finished = succeed("t5_fsdp.py", *options, ATEN_CPU_CAPABILITY="avx2")  # read by PyTorch when it is imported
        assert f"precision  {chosen}: " in finished.stdout
        assert finished.stderr.count("only emulates bf16, which is slow") == (precision == "bf16")
