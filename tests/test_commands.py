"""Every printed command starts as it is printed: those of the pages and of the scripts' headers.

Each comes to its first training step, with its own flags and its own number of processes, on the
CPU and with small models and files under the names of the large ones.
"""

import ast
import functools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from torch.distributed.run import get_args_parser

import pytest
from conftest import ROOT, SCRIPTS, make_llama, make_model, run, write_csv, write_mnist
from first_step import DONE
from test_lm_data import write_shards

import common

# How many commands a header or a page has at least, benchmarks included.
LEAST = {
    "mnist_fsdp.py": 5,
    "mnist_fsdp_xpu.py": 4,
    "t5_fsdp.py": 4,
    "lm_multinode.py": 3,
    "README.md": 11,
    "docs/from-the-documents.md": 3,
    "docs/multi-node.md": 4,
    "docs/results.md": 7,
    "docs/will-it-fit.md": 2,
    "docs/your-model-and-data.md": 8,
}
PLACEHOLDERS = ("SCRIPT.py",)  # any of the scripts
NOT_HERE = ("T5_training.py",)  # the tutorial's
# These need a diff that is printed above them. Other tests apply it and train them.
RECIPES = ("facebook/bart-base", "openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct")

ON_GPUS = 8  # processes that `python SCRIPT.py` starts on a node of 8 GPUs, and at most on a node
ON_A_CPU = 2
OTHER_COUNTS = (3, 7, 16)  # also tried where a command has no flags
SHELLS = "bash|sh|shell|console"  # languages of code blocks


class Command(NamedTuple):
    """A printed command that starts a Python file."""

    page: str
    printed: str
    launcher: str  # torchrun or python
    options: tuple[str, ...]  # torchrun's own
    file: str
    flags: tuple[str, ...]


class Start(NamedTuple):
    """What is tried: a script with flags, on so many processes, so many of them on a node."""

    script: str
    flags: tuple[str, ...]
    processes: int
    per_node: int


# ---- The commands --------------------------------------------------------------------------------
def header_of(page):
    return ast.get_docstring(ast.parse((ROOT / page).read_text()))


def code_of_header(page):
    """The indented lines, as one section with one piece of code."""
    lines = [line for line in header_of(page).splitlines() if line.startswith("    ")]
    return [["\n".join(lines)]]


def code_of_page(page):
    """For each section its blocks of shell code, and then what is `code` in its text."""
    sections = []
    for section in re.split(r"^## ", (ROOT / page).read_text(), flags=re.M):
        blocks = re.findall(rf"^```(?:{SHELLS})\n(.*?)^```$", section, re.M | re.S)
        text = re.sub(r"^```.*?^```$", "", section, flags=re.M | re.S)
        spans = re.findall(r"`([^`]+)`", text)
        sections.append([*blocks, *(" ".join(span.split()) for span in spans)])
    return sections


def lines_of(code):
    """Continued lines are joined. Slurm's variable is the number that its header asks for."""
    code = re.sub(r"\\\n\s*", " ", code)
    nodes = re.search(r"^#SBATCH --nodes=(\d+)", code, re.M)
    if nodes:
        code = code.replace("$SLURM_NNODES", nodes[1])
    return code.splitlines()


def calls_of(line):
    """The calls of a line of shell, each a list of words. Comments are left out, and what is set
    for one call, as in NAME=value python."""
    if not re.search(r"(^|[\s/!])(python3?|torchrun) ", line):
        return []
    words = shlex.shlex(line.strip().lstrip("!$ "), posix=True, punctuation_chars=True)
    words.whitespace_split = True
    calls = [[]]
    for word in words:
        if set(word) <= set("();<>|&"):
            calls.append([])
        elif calls[-1] or not re.fullmatch(r"\w+=.*|srun", word):
            calls[-1].append(word)
    return [call for call in calls if call]


def parse(page, line, call):
    """The command, or None for what starts no Python file, such as `python -m pytest`."""
    launcher = Path(call[0]).name
    files = [index for index, word in enumerate(call) if word.endswith(".py")]
    if launcher == "torchrun" and files:
        index = files[0]
    elif launcher in ("python", "python3") and 1 in files:
        index = 1
    else:
        return None
    options = tuple(word for word in call[1:index] if word != "...")
    return Command(page, line.strip(), launcher, options, call[index], tuple(call[index + 1 :]))


def fill_in(command, above):
    """`...` stands for the flags of the command above, or for none."""
    flags = []
    for word in command.flags:
        if word != "...":
            flags.append(word)
        elif above:
            flags += above.flags
    return command._replace(flags=tuple(flags))


def commands_of(page):
    """In order. The command above is the last of the same section, script and launcher."""
    found = []
    for section in code_of_header(page) if page in SCRIPTS else code_of_page(page):
        last = {}
        lines = [line for code in section for line in lines_of(code)]
        commands = [parse(page, line, call) for line in lines for call in calls_of(line)]
        for command in filter(None, commands):
            key = (command.launcher, command.file)
            last[key] = fill_in(command, last.get(key))
            found.append(last[key])
    return found


DOCS = tuple(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))
PAGES = (*SCRIPTS, "README.md", *DOCS)
COMMANDS = [command for page in PAGES for command in commands_of(page)]


# ---- What they start -----------------------------------------------------------------------------
def option(words, name):
    """The value of an option in any of its spellings, such as `--a_b 1` and `--a-b=1`, or None."""
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            return value if equals else words[index + 1]
    return None


def counts_of(command):
    """How many processes a command starts, and how many of them on a node."""
    if command.launcher == "torchrun":
        nodes = option(command.options, "--nnodes") or "1"
        nodes = int(nodes.split(":")[-1])  # the most of `1:4`
        per_node = option(command.options, "--nproc-per-node") or "1"
        per_node = int(per_node) if per_node.isdecimal() else ON_GPUS  # `gpu`
        return nodes * per_node, per_node
    usual = ON_A_CPU if option(command.flags, "--device") == "cpu" else ON_GPUS
    count = int(option(command.flags, "--num-processes") or usual)
    return count, count


def starts_of(command):
    """mnist_fsdp.py compares two modes, and a command without flags is for any machine."""
    script, flags = command.file.removesuffix(".py"), command.flags
    counts = [counts_of(command)]
    if command.launcher == "torchrun":
        return [Start(script, flags, *counts[0])]
    if not flags:
        counts += [(count, min(count, ON_GPUS)) for count in OTHER_COUNTS]
    starts = [Start(script, flags, *each) for each in counts]
    mode = option(flags, "--mode")
    if script == "mnist_fsdp" and mode in (None, "both"):
        starts.append(Start(script, (*flags, "--mode", "local"), 1, 1))
    return starts if mode != "local" else [Start(script, flags, 1, 1)]


def all_starts():
    """Each one, with the commands that lead to it."""
    found = {}
    for command in COMMANDS:
        if command.file in SCRIPTS and option(command.flags, "--model") not in RECIPES:
            for start in starts_of(command):
                found.setdefault(start, []).append(command)
    return found


STARTS = all_starts()


def name_of(start):
    """Nodes x processes of a node, and the command."""
    nodes = start.processes // start.per_node
    words = " ".join([f"{nodes}x{start.per_node}", f"{start.script}.py", *start.flags])
    return words if len(words) <= 120 else f"{words[:116]} etc"


# ---- Starting them -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are called: it has all that they name, names of the Hub as folders.

    There is less of everything than there really is: a command that finds enough here finds enough,
    and for one that does not, more may be needed here.
    """
    root = tmp_path_factory.mktemp("commands")
    articles = [common.builtin_article(number) for number in range(320)]
    own = [{"body": article["text"], "abstract": article["headline"]} for article in articles]
    (root / "data").mkdir()
    write_csv(root / "builtin.csv", articles)  # the script makes 10,000
    write_csv(root / "data" / "wikihowAll.csv", articles)  # 215,000
    write_csv(root / "my.csv", own)
    write_mnist(root / "data", num_train=4096, num_test=200)  # 60,000 and 10,000
    # C4 has 1,024 files to train on and 8 to validate on, and more in each.
    for part, counts in {"validation": [100], "train": [250] * 32}.items():
        (root / "c4" / part).mkdir(parents=True)
        write_shards(root / "c4" / part, counts)
        for path in (root / "c4" / part).iterdir():
            path.rename(root / "c4" / path.name.replace("train", part))
    for name in ("google-t5/t5-base", "google/flan-t5-base"):
        make_model(root / name, num_layers=1)
    for name in ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B"):
        make_llama(root / name, max_position_embeddings=1024)
    texts = [article["text"] for article in articles]
    tokenizer = common.train_tokenizer(texts, 300, append_eos=False)
    tokenizer.save_pretrained(root / "mistralai" / "Mistral-7B-v0.1")  # its model is not used
    return root


def launch(folder, starts, timeout):
    """Run those with the same number of processes, one after another in the same processes."""
    commands = json.dumps([[start.script, *start.flags] for start in starts])
    counts = {"processes": starts[0].processes, "per_node": starts[0].per_node}
    arguments = (folder, commands)
    return run("tests/first_step.py", *arguments, **counts, fork=True, timeout=timeout)


@functools.cache
def all_start(folder, processes, per_node):
    """Whether all commands on so many processes come to their first step, in one launch."""
    starts = [start for start in STARTS if start[2:] == (processes, per_node)]
    try:
        finished = launch(folder, starts, timeout=300)
    except subprocess.TimeoutExpired:
        return False
    print("\n".join(line for line in finished.stdout.splitlines() if DONE in line))
    return finished.returncode == 0 and finished.stdout.count(DONE) == len(starts)


@pytest.mark.parametrize("start", STARTS, ids=name_of)
def test_it_comes_to_its_first_step(start, folder):
    """No error comes before: of a flag, of numbers that do not fit together, of too few data."""
    if all_start(folder, start.processes, start.per_node):
        return
    finished = launch(folder, [start], timeout=100)  # by itself: which one is it?
    printed = "\n".join(f"{command.page}: {command.printed}" for command in STARTS[start])
    output = f"{finished.stdout[-1500:]}\n{finished.stderr[-3000:]}"
    reached = finished.returncode == 0 and DONE in finished.stdout
    assert reached, f"{printed}\non {start.processes} processes ends with\n{output}"


# ---- What does not run here ----------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES)
def test_commands_are_found(page):
    """At least so many, as many as a search for their names finds, and all of files that exist."""
    commands = [command for command in COMMANDS if command.page == page]
    printed = "\n".join(command.printed for command in commands)
    assert len(commands) >= LEAST.get(page, 0), printed
    for command in commands:
        known = command.file in (*PLACEHOLDERS, *NOT_HERE)
        assert known or (ROOT / command.file).is_file(), command.printed
    text = header_of(page) if page in SCRIPTS else (ROOT / page).read_text()
    text = re.sub(r"\\\n\s*", " ", text)
    names = "|".join(map(re.escape, SCRIPTS))
    searched = re.findall(rf"\b(?:python3?|torchrun) (?!tests/benchmarks)(?:[^`\n]* )?(?:{names})\b", text)
    assert len(searched) <= len([1 for command in commands if command.file in SCRIPTS]), printed


def test_what_is_left_out_is_printed():
    files = {command.file for command in COMMANDS}
    models = {option(command.flags, "--model") for command in COMMANDS}
    assert {*PLACEHOLDERS, *NOT_HERE} <= files and set(RECIPES) <= models


def test_torchrun_knows_its_options():
    """In test_it_comes_to_its_first_step no torchrun reads them."""
    commands = [command for command in COMMANDS if command.launcher == "torchrun"]
    assert len(commands) >= 10
    for command in commands:
        words = [*command.options, command.file, *command.flags]
        assert get_args_parser().parse_args(words).training_script == command.file, command.printed


def test_benchmarks_know_their_flags():
    """They take too long to run here."""
    commands = [command for command in COMMANDS if command.file.startswith("tests/benchmarks/")]
    assert len(commands) >= 8
    for command in commands:
        source = (ROOT / command.file).read_text()
        scripts = [word for word in command.flags if word in SCRIPTS]
        if scripts:  # will_it_fit.py: its own flags, and those of a run
            source += (ROOT / scripts[0]).read_text() + (ROOT / "common.py").read_text()
        flags = [word.partition("=")[0] for word in command.flags if word.startswith("--")]
        for flag in flags:
            assert f'"{flag}"' in source, command.printed
