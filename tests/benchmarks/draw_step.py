"""Draws docs/step.svg: one training step of one FSDP unit on two processes, and how the other strategies differ.

    python tests/benchmarks/draw_step.py

Time goes right. What a process holds of the unit is as high as it is large: whole, or half of it, its shard. The table
below has the other strategies of lm_multinode.py. Nothing is measured, and the file has the same bytes in every run.
"""

import itertools
from pathlib import Path

TITLE = "One training step of one FSDP unit (a layer) on two processes, FULL_SHARD"
ABOUT = """Each process keeps a shard, half of parameters and optimizer state. An all-gather makes the parameters whole
for forward. They are freed, then gathered again for backward, which makes a whole gradient. A reduce-scatter leaves
each process its shard of the averaged gradient, with which the optimizer updates its shard of the parameters."""
WIDTHS = (58, 84, 94, 90, 84, 104, 112, 118)  # of the columns, and what happens in each
EVENTS = "start,all-gather,forward,other units,all-gather,backward,reduce-scatter,optimizer step".split(",")
NOTES = "shards,parameters,on its batch,compute,again,on its batch,gradients,on its shard".split(",")
TABLE = (  # strategy, the columns through which gathered parameters are held, what is different
    ("NO_SHARD (DDP)", (), "Every process holds everything; one all-reduce averages the gradients."),
    ("SHARD_GRAD_OP", ((2, 6),), "Keeps the gathered parameters from forward to backward: one all-gather."),
    ("HYBRID_SHARD", ((2, 3), (5, 6)), "FULL_SHARD in each replica (a node); replicas all-reduce gradient shards."),
    ("_HYBRID_SHARD_ZERO2", ((2, 6),), "SHARD_GRAD_OP in each replica; replicas all-reduce gradient shards."),
    ("DILOCO", ((2, 3), (5, 6)), "Replicas train apart; every H steps all-reduce what the weights moved by."),
)
COLOURS = {  # in light mode, in dark mode
    "card": ("#ffffff", "#0d1117"),
    "track": ("#f0f2f5", "#1a2029"),
    "rule": ("#c4cbd3", "#3d444d"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9da7b3"),
    "parameters": ("#1f5fbf", "#1f6feb"),
    "parameters-rest": ("#c3daf8", "#23497f"),
    "gradients": ("#b8500a", "#c25e12"),
    "gradients-rest": ("#fbd7b0", "#6b3d14"),
    "optimizer": ("#656d76", "#6b747e"),
    "on": ("#ffffff", "#ffffff"),
}
WIDTH, LEFT, RIGHT, BOTTOM, WHOLE, HALF = 880, 120, 864, 492, 48, 24
EDGE = list(itertools.accumulate(WIDTHS, initial=LEFT))  # of the columns
# The y of both processes' rows. Gradients are nearest to the other process, so that arrows cross no block.
ROWS = {"optimizer": (128, 444), "parameters": (184, 388), "gradients": (240, 332)}
BOLD = ' font-weight="600"'


def box(kind: str, x: float, y: float, width: float, height: float, radius: int = 3) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"/>'


def text(words: str, x: float, y: float, room: float, kind="ink", anchor="middle", size=13, more="") -> str:
    """Words on a baseline; an error if they may be wider than their room."""
    assert 0.6 * size * len(words) <= room, f"{words!r} needs {0.6 * size * len(words):.0f}, has {room:g}"
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{more}>{words}</text>'


def arrow(kind: str, path: str, x: float, y: float, way: int = 0) -> str:
    """A path and the head at its end: to the right, or down (1), or up (-1)."""
    head = f"m-5 {-5 * way}l5 {5 * way}l5 {-5 * way}" if way else "m-5 -5l5 5l-5 5"
    return f'<path class="to-{kind}" d="{path} {x:g} {y:g}{head}"/>'


def draw_blocks(process: int):
    """What one process holds."""
    row = {name: ys[process] for name, ys in ROWS.items()}
    own, rest = process * HALF, HALF - process * HALF  # process 0 has the upper half, process 1 the lower one
    turn = f' transform="translate(30 {min(row.values()) + 80})rotate(-90)"'
    yield text(f"process {process}", 0, 0, 160, more=BOLD + turn)
    for name, y in row.items():
        yield box("track", LEFT, y, RIGHT - LEFT, WHOLE)
        for line, word in enumerate(lines := {"optimizer": ("optimizer", "state")}.get(name, (name,))):
            yield text(word, LEFT - 10, y + 36 - 8 * len(lines) + 16 * line, 76, anchor="end", size=12)
        yield from (box("card", x - 0.5, y, 1, WHOLE, 0) for x in EDGE[1:-1])
    yield box("optimizer", LEFT, row["optimizer"] + own, RIGHT - LEFT, HALF)
    yield box("parameters", LEFT, row["parameters"] + own, RIGHT - LEFT, HALF)
    yield from (box("parameters-rest", EDGE[i], row["parameters"] + rest, WIDTHS[i], HALF) for i in (2, 5))
    yield box("gradients-rest", EDGE[5], row["gradients"], WIDTHS[5], WHOLE)
    yield box("gradients", EDGE[7], row["gradients"] + own, WIDTHS[7], HALF)
    for words, name, y, kind, columns in (
        (f"shard {process}", "optimizer", own, "on", (0,)),
        (f"shard {process}", "parameters", own, "on", (0, 2, 5)),
        (f"shard {1 - process}", "parameters", rest, "ink", (2, 5)),
        ("freed", "parameters", rest, "muted", (3, 6)),
        ("updated", "parameters", own, "on", (7,)),
        ("none yet", "gradients", HALF / 2, "muted", (2,)),
        ("whole,", "gradients", 4, "ink", (5,)),
        ("of its batch", "gradients", 20, "ink", (5,)),
        ("averaged shard", "gradients", own, "on", (7,)),
    ):
        for i in columns:
            yield text(words, (EDGE[i] + EDGE[i + 1]) / 2, row[name] + y + 17, WIDTHS[i], kind)


def draw_arrows(process: int):
    """What one process sends, and its update."""
    row, own = {name: ys[process] for name, ys in ROWS.items()}, process * HALF
    for i in (1, 4):  # from its shard into the empty half of the other process
        start, y = EDGE[i] + 16, row["parameters"] + HALF
        x, end = EDGE[i + 1] - 3, ROWS["parameters"][1 - process] + own + 12
        yield arrow("parameters", f"M{start} {y}C{start} {(y + end) / 2:g} {x - 34} {end}", x, end)
    for to in (0, 1):  # from its whole gradient to both shards
        start, x = EDGE[6] + 3, EDGE[7] - 3
        y, end = (ROWS["gradients"][lane] + to * HALF + 12 for lane in (process, to))
        yield arrow("gradients", f"M{start} {y}C{start + 54} {y} {x - 54} {end}", x, end)
    for name in ("gradients", "optimizer"):  # both make the update
        x, way = (EDGE[7] + RIGHT) / 2, 1 if row[name] < row["parameters"] else -1
        y, end = (row[to] + own + 12 + side * way * 14 for to, side in ((name, 1), ("parameters", -1)))
        yield arrow(name, f"M{x:g} {y}L", x, end, way)


def draw_table():
    """The other strategies, each with the height of its parameters over the step."""
    y, left, wide, right = BOTTOM + 46, 194, 112, 326  # its baseline and columns
    yield text("Other strategies", 18, y, 170, anchor="start", size=15, more=BOLD)
    yield text("parameters held", left, y, wide, "muted", "start", 12)
    yield text("what differs", right, y, 200, "muted", "start", 12)
    for name, gathered, words in TABLE:
        y += 28
        yield box("rule", 18, y - 18, RIGHT - 18, 1, 0)
        yield text(name, 18, y, left - 18, anchor="start", size=12, more=BOLD)
        yield box("track", left, y - 13, wide, 18, 0)
        yield box("parameters", left, y - 13, wide, 9 if gathered else 18, 0)
        for begin, end in gathered:
            x, x2 = (round(left + (EDGE[i] - LEFT) * wide / (RIGHT - LEFT)) for i in (begin, end))
            yield box("parameters-rest", x, y - 4, x2 - x, 9, 0)
        yield text(words, right, y, RIGHT - right, anchor="start", size=12)


def draw():
    """The lines of the file."""
    height = BOTTOM + 46 + 28 * len(TABLE) + 18
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    yield """role="img" aria-labelledby="title desc" font-family="system-ui,'Segoe UI',Arial,sans-serif">"""
    yield f'<title id="title">{TITLE}</title>\n<desc id="desc">{ABOUT}</desc>\n<style>'
    yield from (f".{kind}{{fill:{light}}}.to-{kind}{{stroke:{light}}}" for kind, (light, _) in COLOURS.items())
    yield "@media (prefers-color-scheme:dark){"
    yield from (f".{kind}{{fill:{dark}}}.to-{kind}{{stroke:{dark}}}" for kind, (_, dark) in COLOURS.items())
    yield "}\n</style>"
    yield box("rule", 0, 0, WIDTH, height, 10) + box("card", 1, 1, WIDTH - 2, height - 2, 9)
    yield text(TITLE, 18, 32, RIGHT, anchor="start", size=16, more=BOLD)
    yield text("Full height: the whole unit. Half height: a shard.", 18, 58, 400, "muted", "start")
    for x, kind, words in ((440, "", "a process's own shard"), (660, "-rest", "held only for a while")):
        yield box("parameters" + kind, x, 47, 14, 14) + box("gradients" + kind, x + 17, 47, 14, 14)
        yield text(words, x + 38, 58, 170, "muted", "start")
    yield text("time \u2192", LEFT - 10, 98, 90, "muted", "end", 12)
    for x, width, name, more in zip(EDGE, WIDTHS, EVENTS, NOTES, strict=False):
        yield text(name, x + width / 2, 98, width, more=BOLD) + text(more, x + width / 2, 115, width, "muted", size=12)
    yield from itertools.chain(draw_blocks(0), draw_blocks(1))
    yield '<g fill="none" stroke-width="2" stroke-linecap="round" stroke-linejoin="round">'
    yield from itertools.chain(draw_arrows(0), draw_arrows(1))
    yield "</g>"
    yield from draw_table()
    yield "</svg>"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "step.svg"
    path.write_text("\n".join(draw()) + "\n", encoding="utf-8")
    print(path)
