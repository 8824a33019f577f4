"""The explanatory pictures of the documentation, drawn as SVG, each in a light and a dark form.

    python docs/site/pictures.py        writes docs/figures/NAME_light.svg and NAME_dark.svg

The ladder's sizes are those of models/sizes.py, the scores those of a record. The text stays text, and the same code
always writes the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
RESIZED = ROOT / "records" / "2026-11-22_minilm_resized" / "resize.json"
sys.path.insert(0, str(ROOT))

from models.sizes import STARBUCKS_LADDER  # noqa: E402

FONT = "'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# Roles of colours: the page, text, lines, the fills of what is data, model, loss, and left out; the lines of a chart.
LIGHT = {
    "page": "#ffffff",
    "text": "#1f2328",
    "quiet": "#59636e",
    "line": "#59636e",
    "plain": "#f6f8fa",
    "data": "#ddf4ff",
    "model": "#fff1e5",
    "loss": "#ffebe9",
    "used": "#fb8f44",
    "unused": "#eaeef2",
    "first": "#bc4c00",
    "second": "#0969da",
    "third": "#6e7781",
}
DARK = {
    "page": "#0d1117",
    "text": "#f0f6fc",
    "quiet": "#9198a1",
    "line": "#9198a1",
    "plain": "#151b23",
    "data": "#0c2d4a",
    "model": "#4a2a0c",
    "loss": "#4e1c1f",
    "used": "#bd561d",
    "unused": "#262c36",
    "first": "#f0883e",
    "second": "#58a6ff",
    "third": "#9198a1",
}
THEMES: Mapping[str, Mapping[str, str]] = {"light": LIGHT, "dark": DARK}


@dataclass
class Canvas:
    """An SVG under construction. Places are pixels from the top left; colours are roles of the theme."""

    width: int
    height: int
    title: str
    theme: Mapping[str, str]
    parts: list[str] = field(default_factory=list)

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "line", radius: float = 5
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{self.theme[fill]}" stroke="{self.theme[line]}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        colour: str = "text",
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{self.theme[colour]}"{weight}>{escape(text)}</text>'
        )

    def notes(self, y: float, *lines: str) -> None:
        """Lines below the drawing, from the left."""
        for number, line in enumerate(lines):
            self.text(20, y + 20 * number, line, size=12, colour="quiet", anchor="start")

    def box(self, x: float, y: float, width: float, height: float, fill: str, lines: Sequence[str]) -> None:
        """A rectangle with centred lines; the first one is bold, and the others are small."""
        self.rectangle(x, y, width, height, fill)
        top = y + height / 2 - 8 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            first = number == 0
            self.text(
                x + width / 2,
                top + 16 * number,
                line,
                size=13 if first else 11,
                bold=first,
                colour="text" if first or fill == "used" else "quiet",
            )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.theme["line"]}" stroke-width="1.4" '
            f'marker-end="url(#head)"{dashes}/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.theme[colour]}" stroke-width="{width:g}"/>'
        )

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A line through the points, with a dot at each."""
        self.line(points, colour, width=2.2)
        for x, y in points:
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{self.theme[colour]}"/>')

    def svg(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{self.theme["line"]}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" fill="{self.theme["page"]}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def ladder(theme: Mapping[str, str]) -> Canvas:
    """Each size as the part of the encoder that it uses: its layers from the bottom, its dimensions from the left."""
    full, names = STARBUCKS_LADDER.full, STARBUCKS_LADDER.names
    column, row = 142, 15
    canvas = Canvas(40 + column * len(STARBUCKS_LADDER), 376, "The sizes of a ladder", theme)
    canvas.text(20, 28, "One encoder, six sizes", size=16, bold=True, anchor="start")
    for number, size in enumerate(STARBUCKS_LADDER):
        x, width = 24 + column * number, 110
        used = max(6, width * size.dim / full.dim)
        canvas.text(x + width / 2, 62, names[size], bold=True)
        canvas.text(x + width / 2, 79, f"{size.layers} layers × {size.dim}", size=12, colour="quiet")
        for layer in range(1, full.layers + 1):
            y = 90 + row * (full.layers - layer)
            runs = layer <= size.layers
            canvas.rectangle(x, y, width, row - 3, "model" if runs else "unused", radius=2)
            if layer == size.layers:
                canvas.rectangle(x, y, used, row - 3, "used", radius=2)
        y = 90 + row * full.layers
        canvas.rectangle(x, y, width, row - 3, "data", radius=2)
    for number, (fill, line) in enumerate(
        [
            ("data", "token embeddings, which every size reads"),
            ("model", "layers that the size runs, at their full width"),
            ("used", "the embedding: the first dimensions of the state after the size's last layer"),
            ("unused", "layers that the size does not need: an export leaves them out"),
        ]
    ):
        y = 302 + 18 * number
        canvas.rectangle(24, y - 11, 22, 12, fill, radius=2)
        canvas.text(56, y, line, size=12, anchor="start")
    return canvas


def training_loop(theme: Mapping[str, str]) -> Canvas:
    """A step from the stream to the checkpoint, with the module of each part."""
    canvas = Canvas(900, 320, "The training loop", theme)
    canvas.text(20, 28, "One step of training", size=16, bold=True, anchor="start")
    top, bottom, height = 56, 196, 66
    canvas.box(20, top, 150, height, "data", ["shards", "tokenized texts on disk", "data/shards/"])
    canvas.box(210, top, 150, height, "data", ["stream", "a rank's share of a batch", "data/stream.py"])
    canvas.box(400, top, 190, height, "plain", ["objective", "cuts it into micro-batches", "trainer/objectives/"])
    canvas.box(690, top, 190, height, "model", ["engine", "forward pass, all sizes", "trainer/engine.py, models/"])
    canvas.box(690, bottom, 190, height, "loss", ["losses of all sizes", "over the global batch", "trainer/losses/"])
    canvas.box(400, bottom, 190, height, "model", ["engine", "backward pass", "trainer/engine.py"])
    canvas.box(210, bottom, 150, height, "model", ["step", "AdamW, clipping, ZeRO", "trainer/engine.py"])
    canvas.box(20, bottom, 150, height, "plain", ["checkpoint", "by all ranks; metrics", "trainer/loop.py"])
    middle = top + height / 2
    canvas.arrow((170, middle), (208, middle))
    canvas.arrow((360, middle), (398, middle))
    canvas.arrow((590, middle), (688, middle))
    canvas.text(640, middle - 22, "for each", size=11, colour="quiet")
    canvas.text(640, middle - 8, "micro-batch", size=11, colour="quiet")
    canvas.arrow((785, top + height), (785, bottom - 2))
    canvas.text(795, (top + height + bottom) / 2 + 4, "vectors, tokens", size=11, colour="quiet", anchor="start")
    middle = bottom + height / 2
    canvas.arrow((690, middle), (592, middle))
    canvas.text(640, middle - 8, "gradients", size=11, colour="quiet")
    canvas.arrow((495, bottom), (495, top + height + 2), dashed=True)
    canvas.text(505, (top + height + bottom) / 2 + 4, "the next micro-batch", size=11, colour="quiet", anchor="start")
    canvas.arrow((400, middle), (362, middle))
    canvas.arrow((210, middle), (172, middle))
    canvas.arrow((285, bottom), (285, top + height + 2), dashed=True)
    canvas.text(275, (top + height + bottom) / 2 + 4, "the next step", size=11, colour="quiet", anchor="end")
    canvas.notes(
        302,
        "The loop knows no loss, model or data. Which samples a step has follows from the seed and the step alone.",
    )
    return canvas


def smae(theme: Mapping[str, str]) -> Canvas:
    """Masked pre-training: two masks, one encoder, the states of each size, one decoder, and one MLM head."""
    canvas = Canvas(900, 400, "SMAE: masked pre-training at every size", theme)
    canvas.text(20, 28, "SMAE: masked pre-training at every size", size=16, bold=True, anchor="start")
    canvas.box(20, 150, 120, 60, "data", ["a text", "of the stream"])
    canvas.box(185, 60, 150, 60, "data", ["lightly masked", "20 % of the tokens"])
    canvas.box(185, 250, 150, 60, "data", ["heavily masked", "40 % of the tokens"])
    canvas.arrow((140, 172), (162, 172), (162, 90), (183, 90))
    canvas.arrow((140, 188), (162, 188), (162, 280), (183, 280))
    canvas.box(380, 60, 130, 60, "model", ["encoder", "one pass"])
    canvas.arrow((335, 90), (378, 90))
    sizes = [str(size).replace("x", " × ") for size in STARBUCKS_LADDER]
    shown = [sizes[0], "…", sizes[-1]]
    for number, name in enumerate(shown):
        y = 60 + 44 * number
        canvas.box(560, y, 110, 32, "used" if number != 1 else "plain", [name])
    for y in (76, 120, 164):
        canvas.arrow((510, 90), (535, 90), (535, y), (558, y))
    canvas.text(615, 48, "states of each size", size=12, colour="quiet")
    canvas.box(
        720,
        60,
        160,
        120,
        "loss",
        [
            "fused MLM head",
            "one for all sizes: size d",
            "takes its first d columns;",
            "masked tokens of the",
            "encoder",
        ],
    )
    for y in (76, 120, 164):
        canvas.arrow((670, y), (718, y))
    canvas.box(380, 250, 290, 60, "model", ["decoder, one layer", "one pass for all sizes together"])
    canvas.arrow((335, 280), (378, 280))
    canvas.arrow((615, 180), (615, 248))
    canvas.text(607, 214, "head(CLS) of each size", size=11, colour="quiet", anchor="end")
    canvas.text(607, 229, "stands at position 0", size=11, colour="quiet", anchor="end")
    canvas.box(720, 250, 160, 60, "loss", ["MLM head", "the same; masked", "tokens of the decoder"])
    canvas.arrow((670, 280), (718, 280))
    canvas.notes(
        352,
        "The decoder sees too little of the text to restore it alone, so each size's one vector must carry it.",
        "The loss is the mean over sizes of both losses. The logits of all tokens are never in memory together.",
    )
    return canvas


def srl(theme: Mapping[str, str]) -> Canvas:
    """Contrastive fine-tuning: texts, vectors of every size, scores, InfoNCE and KL, and gradient caching."""
    canvas = Canvas(900, 430, "SRL: contrastive fine-tuning of every size", theme)
    canvas.text(20, 28, "SRL: contrastive fine-tuning of every size", size=16, bold=True, anchor="start")
    canvas.box(20, 70, 130, 56, "data", ["queries", "of all ranks"])
    canvas.box(20, 170, 130, 56, "data", ["passages", "positives, negatives"])
    canvas.box(195, 110, 130, 76, "model", ["encoder", "one pass gives", "all sizes"])
    canvas.arrow((150, 98), (172, 98), (172, 132), (193, 132))
    canvas.arrow((150, 198), (172, 198), (172, 164), (193, 164))
    rows = [(70, "the full size"), (140, "a smaller size"), (210, "the smallest size")]
    for number, (y, name) in enumerate(rows):
        canvas.box(375, y, 160, 44, "used" if number == 0 else "model", ["scores", f"of {name}"])
        canvas.arrow((325, 148), (350, 148), (350, y + 22), (373, y + 22))
        canvas.box(690, y, 190, 44, "loss", ["InfoNCE" if number == 0 else "InfoNCE + KL"])
        canvas.arrow((535, y + 22), (688, y + 22))
    canvas.arrow((615, 92), (615, 160), dashed=True)
    canvas.arrow((615, 92), (615, 230), dashed=True)
    canvas.text(607, 122, "the full size's", size=11, colour="quiet", anchor="end")
    canvas.text(607, 136, "distribution", size=11, colour="quiet", anchor="end")
    canvas.rectangle(20, 285, 860, 118, "plain")
    canvas.text(36, 308, "Gradient caching: large batches in little memory, exactly", bold=True, anchor="start")
    steps = [
        ("1  embed", "all micro-batches,", "without a graph"),
        ("2  loss", "over the global batch,", "gradient of each vector"),
        ("3  embed again", "each micro-batch,", "with its graph"),
        ("4  backward", "from the cached", "gradients of its vectors"),
    ]
    for number, step in enumerate(steps):
        x = 36 + 212 * number
        canvas.box(x, 322, 180, 68, "loss" if number == 1 else "model", list(step))
        if number:
            canvas.arrow((x - 32, 356), (x - 2, 356))
    return canvas


@dataclass(frozen=True)
class Chart:
    """A chart's frame on a canvas, 370 × 220 pixels from (left, top). Its scores go from 0 up to `highest`."""

    canvas: Canvas
    left: float
    top: float
    highest: float

    def place(self, share: float, score: float) -> tuple[float, float]:
        """The pixel of a score. share: 0 at the left end, 1 at the right one."""
        return self.left + 370 * share, self.top + 220 * (1 - score / self.highest)

    def frame(self, title: str, below: str) -> None:
        self.canvas.text(self.left, self.top - 18, title, bold=True, anchor="start")
        for tenths in range(0, round(self.highest * 10), 2):
            x, y = self.place(0, tenths / 10)
            self.canvas.line([(x, y), (x + 370, y)], "unused")
            self.canvas.text(x - 8, y + 4, f"{tenths / 10:.1f}", size=11, colour="quiet", anchor="end")
        self.canvas.text(self.left + 185, self.top + 262, below, size=12, colour="quiet")

    def ticks(self, labels: Mapping[float, str]) -> None:
        """Labels below the frame, by their share of its width."""
        for share, label in labels.items():
            self.canvas.text(self.place(share, 0)[0], self.top + 238, label, size=11, colour="quiet")


def resized(theme: Mapping[str, str]) -> Canvas:
    """A trained model at every size: truncated, with fitted linear maps, and after `trainer.resize`."""
    rows = json.loads(RESIZED.read_text(encoding="utf-8"))["records"]
    methods = {
        "resized by one run": ("resized", "first"),
        "linear maps, no training": ("closed_form", "second"),
        "truncated": ("as_it_is", "third"),
    }
    canvas = Canvas(900, 372, "all-MiniLM-L6-v2 at six sizes: truncated, with linear maps, and resized", theme)
    for number, (name, (_, colour)) in enumerate(methods.items()):
        canvas.curve([(60 + 210 * number, 26), (88 + 210 * number, 26)], colour)
        canvas.text(98 + 210 * number, 30, name, size=12, anchor="start")

    def curves(chart: Chart, found: Sequence[Mapping[str, float]], places: Sequence[float]) -> None:
        for column, colour in reversed(methods.values()):
            canvas.curve([chart.place(x, row[column]) for x, row in zip(places, found)], colour)

    of_sts, of_scifact = ([row for row in rows if row["task"] == task] for task in ("stsb_test", "scifact"))
    by_size = Chart(canvas, 50, 84, 0.88)
    by_size.frame("STS-B, Spearman", "layers × dimensions")
    places = [0.05 + 0.9 * number / (len(of_sts) - 1) for number in range(len(of_sts))]
    by_size.ticks(dict(zip(places, (f"{row['layers']} × {row['dim']}" for row in of_sts))))
    curves(by_size, of_sts, places)

    by_cost = Chart(canvas, 500, 84, 0.7)
    by_cost.frame("SciFact, nDCG@10", "milliseconds a query")
    longest = 12.5
    by_cost.ticks({each / longest: str(each) for each in (0, 4, 8, 12)})
    places = [row["milliseconds"] / longest for row in of_scifact]
    curves(by_cost, of_scifact, places)
    for x, row in zip(places, of_scifact):
        left, top = by_cost.place(x, row["resized"])
        canvas.text(left - 2, top - 10, f"{row['layers']} × {row['dim']}", size=10, colour="quiet")
    return canvas


PICTURES: Mapping[str, Callable[[Mapping[str, str]], Canvas]] = {
    "ladder": ladder,
    "training_loop": training_loop,
    "smae": smae,
    "srl": srl,
    "resized": resized,
}


def files() -> Iterator[tuple[Path, str]]:
    """Each picture's files, and what belongs in them."""
    for name, draw in PICTURES.items():
        for theme, colours in THEMES.items():
            yield FIGURES / f"{name}_{theme}.svg", draw(colours).svg()


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text, encoding="utf-8")
