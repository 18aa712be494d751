"""Every command on a page or in a script's header is accepted as printed. Links lead somewhere, tables render, and
every name that a document uses is found."""

import ast
import re
import shlex
from typing import NamedTuple

from torch.distributed.run import get_args_parser

import pytest
from conftest import ROOT, SCRIPTS, long, run_many
from packaging.requirements import Requirement

from inside import LM_MODELS, lm_mesh_shape, parse

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = (*SCRIPTS, *(str(path.relative_to(ROOT)) for path in DOCUMENTS))
NOT_HERE = {"T5_training.py"}  # the tutorial's

RECIPES = {"DILOCO", "fp16", "--context-parallel-size"}  # that recipes add
ARGUMENTS = r"[^`#;&|<>\n]*"
LAUNCHER = rf"python3?|torchrun(?: {ARGUMENTS}?)?"
COMMAND = re.compile(rf"\b({LAUNCHER}) ([\w/]+\.py)\b({ARGUMENTS})")
PER_NODE = 8  # the GPUs of a node


class Command(NamedTuple):
    page: str
    printed: str
    launcher: str  # with torchrun's options
    file: str
    flags: tuple[str, ...]


def text_of(page):
    """Return a page with each command on one line, and with values for the variables of shells."""
    text = (ROOT / page).read_text()
    if page in SCRIPTS:
        text = ast.get_docstring(ast.parse(text))
    text = re.sub(r"\\\n\s*", "", text)
    text = re.sub(r"(?<!`)`[^`]+`", lambda code: " ".join(code[0].split()), text)
    return text.replace("$SLURM_NNODES", "2").replace("$strategy", "FULL_SHARD")


def commands_of(page):
    """Return the commands of a page. `...` stands for the flags of the last command with the same launcher and file."""
    commands = []
    last_flags = {}
    for match in COMMAND.finditer(text_of(page)):
        launcher, file, flags = match.groups()
        flags = shlex.split(flags)
        key = (launcher.split()[0], file)
        if "..." in flags:
            flags = [*last_flags.get(key, []), *(flag for flag in flags if flag != "...")]
        last_flags[key] = flags
        commands.append(Command(page, match[0], launcher, file, tuple(flags)))
    return commands


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def processes_of(command):
    """Return the number of processes on all nodes, and on one node."""
    if not command.launcher.startswith("torchrun"):
        return 1, 1
    options = get_args_parser().parse_args([*shlex.split(command.launcher)[1:], command.file])
    nodes = int(options.nnodes.split(":")[-1])
    is_number = options.nproc_per_node.isdigit()  # or gpu, xpu
    per_node = int(options.nproc_per_node) if is_number else PER_NODE
    return nodes * per_node, per_node


def test_every_command_is_accepted_and_its_numbers_fit():
    """By torchrun and by the script."""
    for command in COMMANDS:
        size, per_node = processes_of(command)
        if not RECIPES.isdisjoint(command.flags):
            continue
        if command.file in SCRIPTS:
            args = parse(command.file, *command.flags)
            assert args.global_batch_size % size == 0, command.printed
        if command.file == "lm_multinode.py":
            assert "/" in args.model or args.model in LM_MODELS, command.printed
            replicas, shards = lm_mesh_shape(args, size, per_node)
            assert replicas * shards == size, command.printed


def test_no_command_is_overlooked():
    names = "|".join(map(re.escape, SCRIPTS))
    for page in PAGES:
        searched = re.findall(rf"\b(?:python|torchrun)[^`\n]*?\b(?:{names})", text_of(page))
        assert len(searched) <= len([command for command in COMMANDS if command.page == page]), page
    files = {command.file for command in COMMANDS}
    missing = {file for file in files if not (ROOT / file).is_file()}
    assert missing == NOT_HERE and files >= set(SCRIPTS)


def test_benchmarks_know_their_flags():
    """They take too long to run here. will_it_fit.py also takes the flags of a script."""
    for command in COMMANDS:
        if command.file.startswith("tests/benchmarks/"):
            files = [command.file, *set(command.flags) & set(SCRIPTS), "common.py"]
            source = "".join((ROOT / file).read_text() for file in files)
            for flag in re.findall(r"--[\w-]+", command.printed):
                field = flag.removeprefix("--").replace("-", "_")  # of a script's Args
                assert f'"{flag}"' in source or f"\n    {field}: " in source, command.printed


@pytest.mark.long
def test_benchmarks_start():
    for path in (ROOT / "tests" / "benchmarks").rglob("*.py"):
        if "ArgumentParser" in path.read_text():
            assert "usage" in run_many(path, [["--help"]]).stdout, path


# ---- What pages hold -------------------------------------------------------------------------------------------------
SHARED = ("FSDP1 beside FSDP2", "Do not copy from them", "Which strategy: their rules and ours")


def sections_of(path):
    return dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", path.read_text(), re.MULTILINE | re.DOTALL))


def test_what_a_document_names_is_in_its_section():
    """A reader who searches for a name finds it, with this spelling. The first sections count for all documents."""
    sections = sections_of(ROOT / "docs" / "from-the-documents.md")
    shared = "".join(sections[name] for name in SHARED)
    for document, names in sections_of(ROOT / "tests" / "names.txt").items():
        for name in shlex.split(names):
            pattern = rf"(?<![\w-]){re.escape(name)}(?!\w)"
            assert re.search(pattern, sections[document] + shared), (document, name)


def prose(page):
    """The page without its blocks of code, whose `#` starts a comment."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return the anchors that GitHub makes of headings: lower case, no punctuation, hyphens for spaces."""
    names = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        names.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return names


def test_links_inside_the_repository_lead_somewhere():
    for page in DOCUMENTS:
        for file, anchor in re.findall(r"\]\((?!https?://)([^)\s#]*)#?([^)\s]*)\)", prose(page)):
            target = (page.parent / file).resolve() if file else page
            assert target.exists() and (not anchor or anchor in anchors(target)), (page.name, file, anchor)


def test_every_table_renders():
    """Every row has as many cells as the head. Otherwise GitHub drops or adds some. A bar after a backslash is text."""
    for page in [*DOCUMENTS, ROOT / "tests" / "README.md"]:
        for table in re.findall(r"^\|.+\|$(?:\n\|.*$)+", prose(page), re.MULTILINE):
            head, ruler, *rows = [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in table.splitlines()]
            assert all(re.fullmatch(r" *:?-+:? *", cell) for cell in ruler), (page.name, head)
            assert {len(row) for row in (ruler, *rows)} == {len(head)}, (page.name, head)


def test_each_requirement_has_a_tested_version_that_meets_it():
    tested = dict(line.split("==") for line in (ROOT / "docs/tested-versions.txt").read_text().splitlines())
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        requirement = Requirement(line.partition("#")[0])
        assert requirement.specifier.contains(tested.pop(requirement.name.replace("-", "_")))
    assert not tested


@pytest.mark.parametrize("size", [2, long(None), long(4)])
def test_the_program_on_the_front_page_prints_the_same_on_any_number_of_processes(size, tmp_path):
    """Also without its lines marked FSDP, as a plain loop in one process."""
    page = (ROOT / "README.md").read_text()
    program = (ROOT / "docs" / "minimal.py").read_text()
    assert f"```python\n{program}```" in page
    if size is None:
        lines = program.splitlines(keepends=True)
        unmarked = [line for line in lines if "# FSDP" not in line]
        assert len(lines) - len(unmarked) == 16
        program = "".join(unmarked)
        assert "dist" not in program
    path = tmp_path / "minimal.py"
    path.write_text(program)
    loss = r"^step \d+ \| loss (\S+)$"
    on_the_page = list(map(float, re.findall(loss, page, re.M)))
    assert len(on_the_page) == 2
    one_thread = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    printed = run_many(path, [[]], size, fork=size != 4, **one_thread).stdout  # torchrun itself starts four
    assert list(map(float, re.findall(loss, printed, re.M))) == pytest.approx(on_the_page, abs=3e-4)
