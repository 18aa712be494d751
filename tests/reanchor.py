"""Run `python tests/reanchor.py` after changing the scripts: it updates the lines that docs/recipes/*.diff name.

The diffs keep three lines of context, so `patch` also finds its target in an edited copy. A diff that no longer applies
stays as it is, and its name is printed. Review the changes with `git diff`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
from shared import patched


def reanchor(path):
    """Whether the diff still applies."""
    with tempfile.TemporaryDirectory() as folder:
        patched(Path(folder, "a"))
        try:
            patched(Path(folder, "b"), path.stem)
        except AssertionError:
            return False
        compare = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--no-prefix", "-U3", "a", "b"]
        fresh = subprocess.run(compare, capture_output=True, text=True, cwd=folder).stdout
    path.write_text(re.sub(r"^(diff|index) .*\n", "", fresh, flags=re.M))
    return True


if __name__ == "__main__":
    failed = [path.stem for path in sorted(ROOT.glob("docs/recipes/*.diff")) if not reanchor(path)]
    sys.exit(f"no longer apply: {', '.join(failed)}" if failed else 0)
