"""The four scripts have one shape: who has read one knows where to look in the others."""

import argparse
import ast
import importlib
import inspect
import re
import sys

import torch

import pytest
from conftest import ROOT

import common

SCRIPTS = ("mnist_fsdp", "mnist_fsdp_xpu", "t5_fsdp", "lm_multinode")
SECTIONS = ("FSDP", "Model and data", "Main")
# In each section, from top to bottom.
FUNCTIONS = {
    "FSDP": ("shard_with_fsdp2", "shard_with_fsdp1", "train_step|train_one_epoch"),
    "Model and data": ("validate|evaluate",),
    "Main": ("parse_args", "main"),
}
IN_ALL = ("num-processes", "device", "seed", "output-dir", "save-model", "fsdp-version", "dataset", "lr")
SAME_TEXT = (
    *("num-processes", "seed", "fsdp-version", "output-dir", "save-model", "log-every", "checkpoint-every", "resume"),
    *("precision", "data-dir", "min-num-params"),
)
OWN_CHOICES = ("dataset", "model", "sharding-strategy", "precision")  # of the built-in ones
TEXTS = ("-1", "0", "0.5", "1", "7", "nan", "inf", "word")


def tree_of(name):
    return ast.parse((ROOT / f"{name}.py").read_text())


def flags(script, monkeypatch):
    """The script's flags by name, as argparse knows them."""
    parsers = []
    parse = common.Parser.parse_args
    monkeypatch.setattr(common.Parser, "parse_args", lambda self: parsers.append(self) or parse(self))
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    importlib.import_module(script).parse_args()
    return {action.option_strings[0][2:]: action for action in parsers[0]._actions if action.dest != "help"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_and_functions_come_in_one_order(script):
    """Docstring, imports, FSDP in one piece, model and data, main; the guard is the end."""
    source, body = (ROOT / f"{script}.py").read_text(), tree_of(script).body
    sections = [
        (match[1], match.start()) for match in re.finditer(r"^# ---- ([\w ]+?)(:.*)? -+$", source, re.MULTILINE)
    ]
    assert tuple(name for name, _ in sections) == SECTIONS
    lines = {name: source[:place].count("\n") + 1 for name, place in sections}
    imports = [node.lineno for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert ast.get_docstring(tree_of(script)) and max(imports) < lines["FSDP"]
    functions = {node.name: node.lineno for node in body if isinstance(node, ast.FunctionDef)}
    ends = [*list(lines.values())[1:], len(source.splitlines()) + 1]
    for (section, wanted), end in zip(FUNCTIONS.items(), ends, strict=True):
        places = [next(line for name, line in functions.items() if re.fullmatch(one, name)) for one in wanted]
        assert lines[section] < places[0] and places == sorted(places) and places[-1] < end, (section, places)
    assert ast.unparse(body[-1]).startswith("if __name__ == '__main__':")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_header_says_how_to_start_it_and_what_it_follows(script):
    header = ast.get_docstring(tree_of(script))
    question, text = header.split("\n", 1)
    assert question.endswith("?")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for start in (f"python {script}.py", "torchrun --nproc_per_node|python .*--num-processes", "torchrun --nnodes 2"):
        assert any(re.match(start, command) for command in commands), start
    assert "Follows " in text and "Where it departs: " in text


def test_flags_of_the_same_name_mean_the_same(monkeypatch):
    def accepted(action):
        """What the flag makes of each text."""
        found = []
        for text in TEXTS:
            try:
                found.append(action.type(text) if action.type else text)
            except (ValueError, argparse.ArgumentTypeError):
                found.append(None)
        return found

    by_name = {}
    for script in SCRIPTS:
        found = flags(script, monkeypatch)
        assert set(IN_ALL) <= set(found), script
        for name, action in found.items():
            by_name.setdefault(name, []).append(action)
    assert set(SAME_TEXT) <= {name for name, actions in by_name.items() if len(actions) > 1}
    for name, actions in by_name.items():
        first = actions[0]
        for action in actions[1:]:
            assert type(action) is type(first), name
            # 0 is all epochs, where there are epochs.
            assert name == "max-steps" or str(accepted(action)) == str(accepted(first)), name
            assert name in OWN_CHOICES or action.choices == first.choices, name
            assert name not in SAME_TEXT or action.help == first.help, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read(script, monkeypatch):
    """In the script, or in common.py; a flag that nobody reads would do nothing."""
    names = set()
    for node in [*ast.walk(tree_of(script)), *ast.walk(tree_of("common"))]:
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in ("args", "self.args")
            and isinstance(node.ctx, ast.Load)
        ):
            names.add(node.attr)
    unread = {name.replace("-", "_") for name in flags(script, monkeypatch)} - names
    assert not unread


class TableSeen(Exception):
    pass


@pytest.mark.parametrize("terminal, room", [(120, 100), (80, 80)])
@pytest.mark.parametrize("place", [*(f"{script}.main" for script in SCRIPTS), "lm_multinode.compare_strategies"])
def test_tables_do_not_wrap(place, terminal, room, monkeypatch, tmp_path, capsys):
    """Each function makes its table before it trains; here it ends there. A narrow terminal drops columns."""
    make, widths = common.Log, []

    def see(*arguments, **columns):
        log = make(*arguments, **columns)
        log.row(write=False)
        log.row(write=False, **dict.fromkeys(log.columns.keys() - {"strategy", "network", "mode", "note"}, 1))
        widths.extend(len(line) for line in capsys.readouterr().out.splitlines() if line)
        raise TableSeen

    monkeypatch.setenv("COLUMNS", str(terminal))
    script, function = place.split(".")
    module, world = importlib.import_module(script), common.World(0, 0, 1, 1, torch.device("cpu"))
    monkeypatch.setattr(common, "Log", see)
    monkeypatch.setattr(common, "StopRequest", lambda: None)  # it would take pytest's Ctrl-C
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--output-dir", str(tmp_path)])
    run = getattr(module, function)
    with pytest.raises(TableSeen):
        run(module.parse_args(), world, *[None] * (run.__code__.co_argcount - 2))
    assert len(widths) == 3 and len(set(widths)) == 1 and widths[0] <= room


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_a_page(script, monkeypatch, capsys):
    """What it does, the flags in groups, the commands at the end; at 80 columns only these are longer."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(script).parse_args()
    page = capsys.readouterr().out
    titles = ("data and model:", "training:", "FSDP:", "processes and output:", "examples:", "Follows ")
    places = [page.index(f"\n{title}") for title in titles]
    assert page.startswith(f"usage: {script}.py [flags]\n\n") and places == sorted(places)
    long = [line for line in page.splitlines() if len(line) > 80]
    assert all(line.startswith("    ") and places[4] < page.index(line) < places[5] for line in long), long
    assert page.count("\n  --") == len(flags(script, monkeypatch))


def test_benchmarks_call_what_the_scripts_have():
    """Names and arguments; most benchmarks take too long to run here."""
    for path in (ROOT / "tests" / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            used = node.func if isinstance(node, ast.Call) else node
            if not isinstance(used, ast.Attribute) or ast.unparse(used.value) not in (*SCRIPTS, "common"):
                continue
            thing = getattr(importlib.import_module(used.value.id), used.attr)
            if used is not node and None not in (names := [keyword.arg for keyword in node.keywords]):
                inspect.signature(thing).bind(*node.args, **dict.fromkeys(names))
