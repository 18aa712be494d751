"""Bad input: one sentence on stderr that says what is wrong and what to do, exit code 2, no traceback."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import run, write_csv

import common

ARTICLES = [common.builtin_article(index) for index in range(20)]


def cases(folder):
    """{name: (arguments, what the sentence must say, environment)}"""
    write_csv(folder / "good.csv", ARTICLES)
    write_csv(folder / "columns.csv", [{"body": "a", "abstract": "b"}])
    write_csv(folder / "unusable.csv", [{"headline": "", "title": "t", "text": "a"}])
    write_csv(folder / "one_title.csv", [ARTICLES[0]])
    (folder / "latin1.csv").write_bytes("headline,title,text\nÉté,t,text of summer\n".encode("latin1"))
    (folder / "late_latin1.csv").write_bytes(b"headline,title,text\na,t,text\n" * 9000 + "\xe9".encode("latin1"))
    (folder / "broken.csv").write_text("headline,title,text\na,b,c\na,b,c,d,e\n")
    (folder / "broken.jsonl").write_text('{"text": "a", "headline"\n')
    (folder / "numbers.jsonl").write_text('{"text": 1, "headline": "a"}\n')
    (folder / "empty.csv").write_text("")
    (folder / "notes.txt").write_text("text")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "nothing").mkdir()
    (folder / "occupied").write_text("a file where the output folder should be")
    dataset, output = "--dataset", "--output-dir"
    none = {}
    return {
        "missing file": ((dataset, folder / "absent.csv"), "absent.csv: there is no such file", none),
        "folder": ((dataset, folder), "is a folder; name one file in it", none),
        "kind of file": ((dataset, folder / "notes.txt"), "unknown kind of file; .csv, .json", none),
        "columns": ((dataset, folder / "columns.csv"), "'text' or 'headline'; it has 'body', 'abstract'", none),
        "no usable row": ((dataset, folder / "unusable.csv"), "none of its 1 rows can be used", none),
        "one title": ((dataset, folder / "one_title.csv"), "two articles with different titles are needed", none),
        "not UTF-8": ((dataset, folder / "latin1.csv"), "latin1.csv is not UTF-8 text; convert it", none),
        "not UTF-8 later": ((dataset, folder / "late_latin1.csv"), "is not UTF-8 text; convert it", none),
        "broken csv": ((dataset, folder / "broken.csv"), "cannot read", none),
        "broken jsonl": ((dataset, folder / "broken.jsonl"), "cannot read", none),
        "numbers": ((dataset, folder / "numbers.jsonl"), "column 'text' holds", none),
        "empty file": ((dataset, folder / "empty.csv"), "it has none", none),
        "unreachable dataset": ((dataset, "someone/absent"), "neither a file here nor a dataset that could be", none),
        "not a T5": (("--model", folder / "bert"), "is a bert, not a T5", none),
        "empty model folder": (("--model", folder / "nothing"), "no model configuration could be read in that", none),
        "unreachable model": (("--model", "someone/absent"), "no model configuration could be read in a local", none),
        "zero": (("--batch-size", 0), "argument --batch-size: must be a whole number of at least 1", none),
        "negative": (("--num-train-samples", -1), "argument --num-train-samples: must be a whole number", none),
        "not a number": (("--lr", "nan"), "argument --lr: must be a number above 0", none),
        "abbreviation": (("--epoch", 1), "unrecognized arguments: --epoch 1", none),
        "strategy": (("--sharding-strategy", "HYBRID_SHARD"), "invalid choice: 'HYBRID_SHARD'", none),
        "prefetch": (("--backward-prefetch", "post"), "--backward-prefetch post needs --fsdp-version 1", none),
        "no such device": (("--device", "xpu"), "--device xpu: torch", none),
        "no collectives": (("--device", "mps"), "use --device cpu", none),
        "output is a file": ((output, folder / "occupied"), "cannot be written", none),
        "output below a file": ((output, folder / "occupied" / "deep"), "cannot be written", none),
    }


def assert_one_sentence(finished, sentence):
    lines = finished.stderr.strip().splitlines()
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("t5_fsdp.py: error: ")
    assert sentence in lines[0]


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    def try_case(case):
        (name, (arguments, _, environment)) = case
        if "--output-dir" not in arguments:
            arguments = (*arguments, "--output-dir", tmp_path / "output" / name)
        # Two cases start as a user's would: "zero", and the one whose environment PyTorch reads when it is imported.
        return run("t5_fsdp.py", *arguments, fork=not environment and name != "zero", **environment)

    expected = cases(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        finished = dict(zip(expected, pool.map(try_case, expected.items()), strict=True))
    problems = {}
    for name, (_, sentence, _) in expected.items():
        try:
            assert finished[name].returncode == 2
            assert_one_sentence(finished[name], sentence)
        except AssertionError as error:
            problems[name] = f"{finished[name].returncode}: {finished[name].stderr[-1500:]} {error}"
    assert not problems, "\n\n".join(f"{name}: {problem}" for name, problem in problems.items())


@pytest.mark.parametrize("arguments", [("--batch-size", 0), ("--device", "xpu")])
def test_among_several_ranks_rank_0_alone_speaks(arguments, tmp_path):
    finished = run("t5_fsdp.py", *arguments, "--output-dir", tmp_path, processes=2, fork=True)
    assert finished.returncode == 2
    assert_one_sentence(finished, "error: ")


def test_under_torchrun_rank_0_alone_speaks_and_every_rank_ends_with_2(tmp_path):
    finished = run("t5_fsdp.py", "--dataset", "absent.csv", "--output-dir", tmp_path, processes=2)
    assert finished.returncode != 0  # torchrun itself ends with 1, whatever its processes ended with
    ours = [line for line in finished.stderr.splitlines() if "error: " in line and line.startswith("t5_fsdp.py")]
    assert len(ours) == 1, finished.stderr
    assert "exitcode  : 2" in finished.stderr
    assert 't5_fsdp.py", line' not in finished.stderr  # no traceback of ours


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, tiny_model, articles_csv):
    """Two steps with absurd weights still have a loss; it is asked for only after ten."""
    arguments = ("--model", tiny_model, "--dataset", articles_csv, "--num-train-samples", 64, "--no-run-validation")
    options = ("--lr", 1e30, "--log-every", 10, "--checkpoint-every", 10, "--output-dir", tmp_path)
    finished = run("t5_fsdp.py", *arguments, *options, processes=2, fork=True)
    assert finished.returncode == 2
    assert_one_sentence(finished, "the loss is not finite at step 3 on rank 0; start again with a lower --lr")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    finished = run("t5_fsdp.py", "--output-dir", tmp_path / "output", fork=True)
    assert finished.returncode == 2
    assert_one_sentence(finished, "cannot be written")
