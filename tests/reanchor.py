"""After a change of the scripts: gives the diffs of docs/your-model-and-data.md their new places in them.

    python tests/reanchor.py

A diff whose lines are still there is written anew; one that no longer applies is named, and stays as it is. Read what
changed on the page: a diff has one line of context, so it can also apply in a wrong place.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "your-model-and-data.md"


def recipes(changed=None):
    """The diffs of the page by the titles of their sections; writes those in `changed` into the page."""
    page = PAGE.read_text()
    diffs = {}
    for title, section in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", page, re.M | re.S):
        for diff in re.findall(r"^```diff\n(.+?)^```$", section, re.M | re.S):
            diffs[title] = diff
    if changed:
        for title, diff in changed.items():
            page = page.replace(diffs[title], diff)
        PAGE.write_text(page)
    return diffs


def reanchor(diff):
    """The same change of a script as it is now, or None."""
    [name] = re.findall(r"^\+\+\+ b/(.+)", diff, re.M)
    with tempfile.TemporaryDirectory() as folder:
        for side in ("a", "b"):
            path = Path(folder, side, name)
            path.parent.mkdir()
            path.write_text((ROOT / name).read_text())

        # Each part is looked for as far away as the one before was found.
        patch = ["patch", "--fuzz=0", "--no-backup-if-mismatch", f"b/{name}"]
        if subprocess.run(patch, input=diff, capture_output=True, text=True, cwd=folder).returncode:
            return None
        compare = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-prefix", "-U1", "a", "b"]
        fresh = subprocess.run(compare, capture_output=True, text=True, cwd=folder).stdout
        return fresh[fresh.index("--- ") :]


if __name__ == "__main__":
    fresh = {title: reanchor(diff) for title, diff in recipes().items()}
    recipes({title: diff for title, diff in fresh.items() if diff})
    failed = [title for title, diff in fresh.items() if not diff]
    sys.exit(f"no longer apply: {', '.join(failed)}" if failed else 0)
