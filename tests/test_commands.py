"""Every command that a page or a script's header prints is accepted as it is printed, and trains.

The last value of a flag counts: after the printed flags come those of a small model, little data and one step.
"""

import ast
import json
import re
import shlex
from typing import NamedTuple

from torch.distributed.run import get_args_parser

import pytest
from conftest import ROOT, SCRIPTS, curve, make_llama, make_model, run_many, write_csv

from inside import LM_MODELS, builtin_article, lm_mesh_shape, parse

PAGES = (*SCRIPTS, "README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
PLACEHOLDER = "SCRIPT.py"  # any of the scripts
NOT_HERE = {"T5_training.py", "first_chat.py"}  # the tutorial's; one that a page has its reader save
# These need a diff that is printed above them: test_recipes.py trains with it.
RECIPES = {"facebook/bart-base", "openai-community/gpt2", "chats.jsonl"}

REST = r"[^`#;&|<>\n]*"  # of a command
COMMAND = re.compile(rf"\b(python3?|torchrun(?: {REST}?)?) ([\w/]+\.py)\b({REST})")
PER_NODE = 8  # GPUs, on which `python SCRIPT.py` starts as many processes


class Command(NamedTuple):
    page: str
    printed: str
    launcher: str  # with torchrun's options
    file: str
    flags: tuple[str, ...]


def text_of(page):
    """With each command on one line. Slurm's variable is the number of nodes that its script asks for."""
    text = (ROOT / page).read_text()
    if page in SCRIPTS:
        text = ast.get_docstring(ast.parse(text))
    text = re.sub(r"\\\n\s*", "", text)
    text = re.sub(r"(?<!`)`[^`]+`", lambda code: " ".join(code[0].split()), text)
    nodes = re.search(r"^#SBATCH --nodes=(\d+)", text, re.M)
    return text.replace("$SLURM_NNODES", nodes[1]) if nodes else text


def commands_of(page):
    """`...` stands for the flags of the command above with the same launcher; where both name one, its own counts."""
    found = []
    above = {}
    for match in COMMAND.finditer(text_of(page)):
        launcher, file, flags = match.groups()
        flags = shlex.split(flags)
        key = (launcher.split()[0], file)
        if "..." in flags:
            flags = [*above.get(key, []), *(flag for flag in flags if flag != "...")]
        above[key] = flags
        found.append(Command(page, match[0], launcher, file, tuple(flags)))
    return found


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def commands_for(script):
    """Each list of flags once, without those of the recipes."""
    commands = [command for command in COMMANDS if command.file == script and not RECIPES & set(command.flags)]
    return list({command.flags: command for command in commands}.values())


def processes_of(command):
    """Of all nodes, and of one."""
    values = dict(zip(command.flags, command.flags[1:], strict=False))
    count = int(values.get("--num-processes", PER_NODE))
    if not command.launcher.startswith("torchrun"):
        return count, count
    parsed = get_args_parser().parse_args([*shlex.split(command.launcher)[1:], command.file])
    per_node = int(parsed.nproc_per_node)
    return int(parsed.nnodes.split(":")[-1]) * per_node, per_node


@pytest.fixture(scope="module")
def small(small_mnist, tmp_path_factory):
    """A function: a script's flags for small models and little data."""
    root = tmp_path_factory.mktemp("small")
    articles = [builtin_article(number) for number in range(600)]
    rows = [article | {"body": article["text"], "abstract": article["headline"]} for article in articles]
    write_csv(root / "articles.csv", rows[:200])
    with open(root / "texts.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

    t5 = ("--model", make_model(root / "t5", num_layers=1), "--dataset", root / "articles.csv", "--no-run-validation")
    llama = make_llama(root / "llama", num_hidden_layers=1)
    lm = ("--model", llama, "--tokenizer", llama, "--dataset", root / "texts.jsonl", "--seq-length", 32)
    lm = (*lm, "--num-validation-texts", 3)
    one_step = ("--max-steps", 1, "--no-save-model")

    def flags_for(script, processes):
        digits = ("--dataset", "mnist", "--data-dir", small_mnist, "--num-train-samples", 8 * processes)
        digits = (*digits, "--batch-size", 8, "--epochs", 1)
        flags = {
            "mnist_fsdp.py": ("--model", "shallow", *digits),
            "mnist_fsdp_xpu.py": digits,
            "t5_fsdp.py": (*t5, *one_step),
            "lm_multinode.py": (*lm, *one_step),
        }
        return flags[script]

    return flags_for


def check_that_all_train(script, commands, small, root, processes, per_node):
    """In one launch. The first command that does not is named."""
    folders = [root / f"{processes}-{per_node}-{number}" for number in range(len(commands))]
    settings = [
        (*command.flags, "--device", "cpu", *small(script, processes), "--output-dir", folder)
        for command, folder in zip(commands, folders, strict=True)
    ]
    change = ("skip_compiling",)  # which takes a minute: test_fsdp.py does it once
    finished = run_many(script, settings, processes, per_node=per_node, change=change, check=False)
    errors = f"\non {processes} processes ends with\n{finished.stderr[-5000:]}"
    for command, folder in zip(commands, folders, strict=True):
        trains = (folder / "metrics.jsonl").exists() and (curve(folder) or curve(folder, "step_seconds"))
        assert trains, f"{command.page}: {command.printed}{errors}"
    assert finished.returncode == 0, errors


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_trains_on_two_processes(script, small, tmp_path):
    """But those that compare strategies, which takes longer."""
    commands = [command for command in commands_for(script) if "--compare-strategies" not in command.flags]
    check_that_all_train(script, commands, small, tmp_path, 2, 2)


def test_the_printed_numbers_fit_the_printed_processes():
    """On nodes of 8 GPUs where no number is printed. Only the LM's depend on them."""
    for command in commands_for("lm_multinode.py"):
        size, per_node = processes_of(command)
        args = parse(command.file, *command.flags)
        replicas, shards = lm_mesh_shape(args, size, per_node)
        assert replicas * shards == size, command.printed
        assert args.global_batch_size % (args.micro_batch_size * size) == 0, command.printed


@pytest.mark.long
def test_eight_processes_on_two_nodes(small, tmp_path):
    flags = ("--sharding-strategy", "HYBRID_SHARD", "--micro-batch-size", 1)
    command = Command("this test", "", "", "lm_multinode.py", flags)
    check_that_all_train("lm_multinode.py", [command], small, tmp_path, 8, 4)


def test_no_command_is_overlooked():
    names = "|".join(map(re.escape, SCRIPTS))
    for page in PAGES:
        searched = re.findall(rf"\b(?:python|torchrun)[^`\n]*?\b(?:{names})", text_of(page))
        assert len(searched) <= len([command for command in COMMANDS if command.page == page]), page
    files = {command.file for command in COMMANDS}
    missing = {file for file in files if not (ROOT / file).is_file()}
    assert missing == {PLACEHOLDER, *NOT_HERE} and files >= set(SCRIPTS)
    assert {flag for command in COMMANDS for flag in command.flags} >= RECIPES


def test_torchrun_and_the_scripts_take_what_is_printed():
    """Also the names of the LM script's own models, in whose place the tests above take another."""
    for command in COMMANDS:
        assert processes_of(command)[0] > 1, command.printed
        if command.file in SCRIPTS:
            args = parse(command.file, *command.flags)
            model = getattr(args, "model", "")
            assert command.file != "lm_multinode.py" or "/" in model or model in LM_MODELS, command.printed


def test_benchmarks_know_their_flags():
    """They take too long to run here. One takes the flags of a script, too."""
    for command in COMMANDS:
        if command.file.startswith("tests/benchmarks/"):
            files = [command.file, *set(command.flags) & set(SCRIPTS), "common.py"]
            source = "".join((ROOT / file).read_text() for file in files)
            for flag in re.findall(r"--[\w-]+", command.printed):
                assert f'"{flag}"' in source, command.printed


@pytest.mark.long
def test_benchmarks_start():
    for path in (ROOT / "tests" / "benchmarks").rglob("*.py"):
        if "ArgumentParser" in path.read_text():
            assert "usage" in run_many(path, [["--help"]]).stdout, path
