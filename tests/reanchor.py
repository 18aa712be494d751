"""After a change of the scripts: gives the diffs in docs/recipes/ their new places in them.

    python tests/reanchor.py

A diff whose lines are still there is written anew; one that no longer applies is named, and stays as it is. Read what
changed: a diff has one line of context, so it can also apply in a wrong place.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPES = {path.stem: path for path in sorted((ROOT / "docs" / "recipes").glob("*.diff"))}


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
    failed = []
    for name, path in RECIPES.items():
        fresh = reanchor(path.read_text())
        if fresh:
            path.write_text(fresh)
        else:
            failed.append(name)
    sys.exit(f"no longer apply: {', '.join(failed)}" if failed else 0)
