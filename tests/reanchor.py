"""After a change of the scripts: `python tests/reanchor.py` gives the diffs in docs/recipes/ their new places in them.

One that no longer applies is named, and stays as it is. Read what changed: a diff has one line of context, so it can
also apply in a wrong place.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def reanchor(path):
    """Whether the diff still applies."""
    diff = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for side in ("a", "b"):
            Path(folder, side).mkdir()
            for name in re.findall(r"^\+\+\+ b/(.+)", diff, re.M):
                shutil.copy(ROOT / name, Path(folder, side))
        patch = ["patch", "--silent", "--fuzz=0", "--no-backup-if-mismatch", "-p1", "-d", "b"]
        if subprocess.run(patch, input=diff, text=True, cwd=folder).returncode != 0:
            return False
        compare = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-prefix", "-U1", "a", "b"]
        fresh = subprocess.run(compare, capture_output=True, text=True, cwd=folder).stdout
    fresh = re.sub(r"^(diff|index) .*\n", "", fresh, flags=re.M)
    path.write_text(fresh)
    return True


if __name__ == "__main__":
    failed = [path.stem for path in sorted(ROOT.glob("docs/recipes/*.diff")) if not reanchor(path)]
    sys.exit(f"no longer apply: {', '.join(failed)}" if failed else 0)
