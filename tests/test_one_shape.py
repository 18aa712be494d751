"""Flags of one name mean the same in all scripts, each is read, and the benchmarks call what the scripts have."""

import argparse
import ast
import importlib
import inspect
import sys

import pytest
from conftest import ROOT

import common

SCRIPTS = ("mnist_fsdp", "mnist_fsdp_xpu", "t5_fsdp", "lm_multinode")
IN_ALL = ("num-processes", "device", "seed", "output-dir", "save-model", "fsdp-version", "dataset", "lr")
SAME_TEXT = (
    *("num-processes", "seed", "fsdp-version", "output-dir", "save-model", "log-every", "checkpoint-every", "resume"),
    *("data-dir", "min-num-params"),
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_the_header_and_every_flag(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(script).parse_args()
    page = capsys.readouterr().out
    assert importlib.import_module(script).__doc__.strip() in page
    assert all(f"--{name}" in page for name in flags(script, monkeypatch))


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
