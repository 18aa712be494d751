"""The four scripts have one shape: who has read one knows where to look in the others."""

import ast
import importlib
import re
import sys

import pytest
from conftest import ROOT

import common

SCRIPTS = ("mnist_fsdp", "mnist_fsdp_xpu", "t5_fsdp", "lm_multinode")
SECTIONS = ["Model", "Data", "FSDP", "Training", "Main"]
IN_ALL = ("lr", "seed", "fsdp-version", "print-model", "device", "save-model", "output-dir", "dataset")
SAME_TEXT = ("seed", "fsdp-version", "print-model", "max-grad-norm", "checkpoint-every", "keep-checkpoints", "resume")
OWN_CHOICES = ("dataset", "model", "device", "sharding-strategy", "precision")


def flags(script, monkeypatch):
    """The script's flags by name, as argparse knows them."""
    parsers = []
    parse = common.ArgumentParser.parse_args
    monkeypatch.setattr(common.ArgumentParser, "parse_args", lambda self: parsers.append(self) or parse(self))
    device = ["--device", "cpu"] if script == "mnist_fsdp_xpu" else []
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *device])
    importlib.import_module(script).parse_args()
    return {action.option_strings[0][2:]: action for action in parsers[0]._actions if action.option_strings}


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_and_functions_come_in_one_order(script):
    source = (ROOT / f"{script}.py").read_text()
    sections = re.findall(r"^# ---- (\w+) -+$", source, re.MULTILINE)
    assert [section for section in sections if section in SECTIONS] == SECTIONS
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    wanted = ("parse_args", "shard_with_fsdp2", "shard_with_fsdp1", "train_", "evaluate", "main")
    places = [next(place for place, name in enumerate(names) if name.startswith(start)) for start in wanted]
    assert places == sorted(places)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_header_says_how_to_start_it_and_what_it_follows(script):
    header = ast.get_docstring(ast.parse((ROOT / f"{script}.py").read_text()))
    question, text = header.split("\n", 1)
    assert question.endswith("?")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for start in (f"python {script}.py", "torchrun --nproc_per_node", "torchrun --nnodes 2"):
        assert any(command.startswith(start) for command in commands), start
    assert "Follows " in text and "Where it departs: " in text


def test_flags_of_the_same_name_mean_the_same(monkeypatch):
    by_name = {}
    for script in SCRIPTS:
        found = flags(script, monkeypatch)
        assert set(IN_ALL) <= set(found)
        for name, action in found.items():
            by_name.setdefault(name, []).append(action)
    for name, actions in by_name.items():
        first = actions[0]
        for action in actions[1:]:
            assert name == "max-steps" or action.type is first.type, name  # 0 is all epochs, where there are epochs
            assert name in OWN_CHOICES or action.choices == first.choices, name
            assert name not in SAME_TEXT or action.help == first.help, name


def test_every_flag_is_used(monkeypatch):
    """A flag that its script never reads would do nothing."""
    for script in SCRIPTS:
        source = (ROOT / f"{script}.py").read_text() + (ROOT / "common.py").read_text()
        names = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        names |= {
            text for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) for text in [node.value]
        }
        unused = [name for name in flags(script, monkeypatch) if name.replace("-", "_") not in names | {"help"}]
        assert not unused, (script, unused)
