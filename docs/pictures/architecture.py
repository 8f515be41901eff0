"""Draws docs/architecture.svg: which processes and stores a node has, and which way a request and a deploy go.

python -m docs.pictures.architecture
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

FILE = Path(__file__).parents[1] / "architecture.svg"

WIDTH, HEIGHT = 1000, 560
LINE = 17
"""Pixels from one line of text to the next."""


class Box(NamedTuple):
    """A process, a part of one, or a store: its place in pixels, its kind, and its text, the first line in bold."""

    x: int
    y: int
    width: int
    height: int
    kind: str
    text: str


class Arrow(NamedTuple):
    """A way from the first point to the last, and what goes there; the text begins at `at`."""

    points: tuple[tuple[int, int], ...]
    text: str = ""
    at: tuple[int, int] = (0, 0)


COLOURS = {
    "outside": ("#f3f4f6", "#6b7280"),
    "frame": ("#ffffff", "#9ca3af"),
    "daemon": ("#eff6ff", "#2563eb"),
    "process": ("#f0fdf4", "#16a34a"),
    "store": ("#fff7ed", "#ea580c"),
}
"""The colours of each kind of box: its background, and its edge."""

BOXES = (
    Box(190, 16, 794, 528, "frame", "Node: one machine"),
    Box(210, 50, 380, 304, "frame", "Daemon, without PyTorch"),
    Box(16, 90, 150, 74, "outside", "Clients\nOpen Inference\nProtocol v2, HTTP"),
    Box(16, 412, 150, 96, "outside", "Deployer\nexports a model,\nsends the blocks\nnot sent before"),
    Box(230, 90, 140, 74, "daemon", "API\ntokens, limits,\nrequests, replies"),
    Box(430, 90, 140, 74, "daemon", "Scheduler\nevents in,\nactions out"),
    Box(270, 256, 120, 74, "daemon", "Journal\nevery event\nwith its actions"),
    Box(430, 256, 140, 74, "daemon", "Effects\ncarries out\neach action"),
    Box(650, 50, 314, 74, "process", "Base zygote\nPyTorch imported once;\nholds nothing of any tenant"),
    Box(650, 162, 314, 74, "process", "Zygote of each tenant\ncompiles its programs ahead;\nsandboxed like workers"),
    Box(650, 274, 150, 80, "process", "Worker, family A\none program,\nweights of A1, A2"),
    Box(814, 274, 150, 80, "process", "Worker, family B\none program,\nweights of B1"),
    Box(270, 400, 694, 56, "store", "Host store (tmpfs)\nblocks of loaded functions; workers map them read-only"),
    Box(210, 474, 754, 56, "store", "Repository (disk)\nblocks, programs, handlers and manifests of all functions"),
)

ARROWS = (
    Arrow(((166, 118), (230, 118)), "request", (176, 110)),
    Arrow(((230, 142), (166, 142)), "reply", (180, 158)),
    Arrow(((370, 118), (430, 118)), "event", (382, 110)),
    Arrow(((430, 300), (410, 300), (410, 184), (352, 184), (352, 164)), "reply", (362, 178)),
    Arrow(((444, 164), (444, 212), (330, 212), (330, 256)), "step", (370, 206)),
    Arrow(((476, 164), (476, 256)), "actions", (482, 238)),
    Arrow(((544, 256), (544, 164)), "events", (498, 188)),
    Arrow(((590, 87), (650, 87)), "start", (606, 79)),
    Arrow(((807, 124), (807, 162)), "fork", (815, 147)),
    Arrow(((725, 236), (725, 274)), "fork", (733, 259)),
    Arrow(((889, 236), (889, 274)), "fork", (897, 259)),
    Arrow(((570, 294), (650, 294)), "run, bind", (592, 286)),
    Arrow(((650, 318), (570, 318)), "results", (596, 334)),
    Arrow(((725, 400), (725, 354)), "map", (733, 381)),
    Arrow(((889, 400), (889, 354)), "map", (897, 381)),
    Arrow(((500, 330), (500, 400)), "load, evict", (508, 381)),
    Arrow(((330, 474), (330, 456))),
    Arrow(((91, 412), (91, 190), (240, 190), (240, 164)), "deploy", (99, 206)),
    Arrow(((254, 164), (254, 474))),
)

STYLE = """
text { font: 13px sans-serif; fill: #1f2937 }
.title { font-weight: bold }
.arrow { fill: #4b5563; font-size: 12px; stroke: #ffffff; stroke-width: 3; paint-order: stroke }
polyline { fill: none; stroke: #4b5563; stroke-width: 1.5; marker-end: url(#head) }
rect { stroke-width: 1.5 }
"""
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#4b5563"/></marker></defs>'
)


def draw() -> str:
    """The picture, as text."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
    lines.append("<title>The architecture of an Overwinter node</title>")
    lines.append(f"<style>{STYLE}</style>{HEAD}")
    lines.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>')
    for box in BOXES:
        lines.extend(_box(box))
    for arrow in ARROWS:
        lines.extend(_arrow(arrow))
    return "\n".join([*lines, "</svg>", ""])


def _box(box: Box) -> Iterator[str]:
    background, edge = COLOURS[box.kind]
    place = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"'
    yield f'<rect {place} fill="{background}" stroke="{edge}"/>'
    for number, line in enumerate(box.text.splitlines()):
        kind = "" if number else ' class="title"'
        yield f'<text x="{box.x + 12}" y="{box.y + 22 + number * LINE}"{kind}>{escape(line)}</text>'


def _arrow(arrow: Arrow) -> Iterator[str]:
    points = " ".join(f"{x},{y}" for x, y in arrow.points)
    yield f'<polyline points="{points}"/>'
    if arrow.text:
        x, y = arrow.at
        yield f'<text x="{x}" y="{y}" class="arrow">{escape(arrow.text)}</text>'


if __name__ == "__main__":
    FILE.write_text(draw())
