"""How much perplexity the recipe lm-diloco loses for the same tokens, and how much time it gains on a slow network.

    python tests/benchmarks/lm_diloco.py [--steps 300] [--link 100mbit]

Two nodes of two processes, on one machine (see tests/two_nodes.py; needs root), are joined by a slow cable. A copy of
lm_multinode.py with the recipe trains its tiny Llama on the built-in texts, under NO_SHARD, _HYBRID_SHARD_ZERO2 and
DILOCO. All take the same steps with the same tokens. DILOCO runs with the paper's outer optimizer, and with one that
only averages. The table has the final validation perplexity, and how long the run took from its first step on.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from shared import MACHINE, limit_command, patched, print_table, read_metrics
from two_nodes import ip, two_nodes

AVERAGING = ("DILOCO", "--outer-lr", 1, "--outer-momentum", 0)  # all replicas continue from their mean weights
RUNS = {
    "NO_SHARD": ("NO_SHARD",),
    "_HYBRID_SHARD_ZERO2": ("_HYBRID_SHARD_ZERO2",),
    "DILOCO, 2 replicas, H = 50": ("DILOCO", "--local-steps", 50),
    "DILOCO, 4 replicas, H = 50": ("DILOCO", "--local-steps", 50, "--shards-per-replica", 1),
    "DILOCO, 2 replicas, averaging, H = 50": (*AVERAGING, "--local-steps", 50),
    "DILOCO, 2 replicas, averaging, H = 10": (*AVERAGING, "--local-steps", 10),
}


def rows(nodes, folder: Path, options):
    """Yield a row for each run."""
    flags = ["--max-steps", options.steps, "--validate-every", 50, "--log-every", 100, "--precision", "fp32"]
    flags += ["--device", "cpu", "--no-save-model", "--sharding-strategy"]
    script = patched(folder / "copy", "lm-diloco") / "lm_multinode.py"
    for index, (name, extra_flags) in enumerate(RUNS.items()):
        output = folder / str(index)
        finished = nodes.torchrun(script, *flags, *extra_flags, "--output-dir", output, timeout=3600)
        if any(node.returncode for node in finished):
            sys.exit("".join(node.stderr for node in finished))
        first, *_, last = [row for row in read_metrics(output) if "perplexity" in row]
        yield {"run": name, "perplexity": last["perplexity"], "seconds": last["seconds"] - first["seconds"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--link", default="100mbit", help="the limit in both directions, in tc's units")
    options = parser.parse_args()
    print(f"{MACHINE}, 2 nodes of 2 processes, {options.link} between them, {options.steps} steps of 2,048 tokens\n")
    with tempfile.TemporaryDirectory() as scratch, two_nodes() as nodes:
        for name in nodes.names:
            ip("netns", "exec", name, *limit_command(options.link))
        print_table(rows(nodes, Path(scratch), options))
