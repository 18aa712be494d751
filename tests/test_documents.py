"""What each of the four documents names is in its section; links inside the documentation lead somewhere; tables
render."""

import re
import shlex

from conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHARED = "FSDP1 beside FSDP2"


def sections_of(path):
    return dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", path.read_text(), re.MULTILINE | re.DOTALL))


def test_what_a_document_names_is_in_its_section():
    """Who searches the section for a name must find it, spelled like this. The table of features counts for all."""
    sections = sections_of(ROOT / "docs" / "from-the-documents.md")
    for document, names in sections_of(ROOT / "tests" / "names.txt").items():
        for name in shlex.split(names):
            pattern = rf"(?<![\w-]){re.escape(name)}(?!\w)"
            assert re.search(pattern, sections[document] + sections[SHARED]), (document, name)


def prose(page):
    """The page without its blocks of code, whose `#` starts a comment."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """As GitHub makes them: the heading in lower case, without punctuation, with hyphens for spaces."""
    found = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


def test_links_inside_the_repository_lead_somewhere():
    for page in PAGES:
        for file, anchor in re.findall(r"\]\((?!https?://)([^)\s#]*)#?([^)\s]*)\)", prose(page)):
            target = (page.parent / file).resolve() if file else page
            assert target.exists() and (not anchor or anchor in anchors(target)), (page.name, file, anchor)


def test_every_table_renders():
    """GitHub cuts off or fills up rows with other numbers of cells than the head. A bar behind a backslash is text."""
    for page in [*PAGES, ROOT / "tests" / "README.md"]:
        for table in re.findall(r"^\|.+\|$(?:\n\|.*$)+", prose(page), re.MULTILINE):
            head, ruler, *rows = [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in table.splitlines()]
            assert all(re.fullmatch(r" *:?-+:? *", cell) for cell in ruler), (page.name, head)
            assert {len(row) for row in (ruler, *rows)} == {len(head)}, (page.name, head)


def test_the_lines_of_fsdp_are_those_of_the_script():
    [lines] = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.S)
    assert lines in (ROOT / "lm_multinode.py").read_text()
