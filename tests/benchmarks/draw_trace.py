"""Draws a training step from a trace of PyTorch's profiler: what computes, and what communicates, over time.

    pip install matplotlib
    python tests/benchmarks/draw_trace.py output/lm_multinode/trace-0.json docs/trace.svg

The trace is that of the recipe in docs/your-model-and-data.md, from a run on CPUs: gloo's threads are the lanes of
communication.
"""

import argparse
import json
import re
from pathlib import Path

from shared import save_picture

# What the main thread does and what gloo does, with colours; of two that overlap the later one is seen.
KINDS = {
    "forward, clipping": (r"aten::", "#8fb8ee"),
    "backward": (r"autograd::engine::evaluate_function", "#e07b29"),
    "optimizer": (r"Optimizer\.step", "#656d76"),
    "FSDP waits or copies": (r"FSDP::", "#d1242f"),
    "all-gather": (r"gloo:all_?gather", "#1f5fbf"),
    "reduce-scatter, all-reduce": (r"gloo:(all_?reduce|reduce_?scatter)", "#9a4a0a"),
}


def read_step(trace: Path) -> tuple[list[dict], float, float]:
    """The events of the trace's last step, its beginning and its length in microseconds."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    step = [event for event in events if event["name"].startswith("ProfilerStep")][-1]
    start, length = step["ts"], step["dur"]
    inside = [event for event in events if start <= event["ts"] < start + length and event is not step]
    return inside, start, length


def spans(events: list[dict], start: float) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """For each thread and kind of KINDS: beginnings and lengths in milliseconds. What nearly touches is one."""
    found = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        kinds = [kind for kind, (pattern, _) in KINDS.items() if re.match(pattern, event["name"])]
        if not kinds:
            continue
        begin = (event["ts"] - start) / 1000
        end = begin + event["dur"] / 1000
        places = found.setdefault((event["tid"], kinds[0]), [])
        if places and begin - sum(places[-1]) < 0.1:
            begin = places[-1][0]
            end = max(end, sum(places.pop()))
        places.append((begin, end - begin))
    return found


def draw(trace: Path, picture: Path) -> None:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "trace", "font.size": 9}
    events, start, length = read_step(trace)
    found = spans(events, start)
    computing = {thread for thread, kind in found if kind == "backward"}
    threads = sorted({thread for thread, _ in found}, key=lambda thread: thread in computing)
    figure, panel = pyplot.subplots(figsize=(10, 0.9 + 0.5 * len(threads)), layout="constrained")
    for kind, (_, colour) in KINDS.items():
        label = kind
        for lane, thread in enumerate(threads):
            if (thread, kind) in found:
                panel.broken_barh(found[thread, kind], (lane - 0.35, 0.7), color=colour, linewidth=0, label=label)
                label = "_"  # once in the legend
    names = ["computes" if thread in computing else "communicates" for thread in threads]
    panel.set_yticks(range(len(threads)), names)
    panel.set(xlim=(0, length / 1000), xlabel="milliseconds of one training step")
    figure.legend(loc="outside upper center", ncols=len(KINDS), frameon=False)
    figure.patch.set_facecolor("white")  # readable on a dark page, too
    save_picture(figure, picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(options.trace, options.picture)
