"""Line plots as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from spotrun.simulate.statistics import Estimate

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 420, 64, 48, 40, 220
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
)  # told apart by the colour-blind


@dataclass(frozen=True)
class Line:
    """A named series with confidence intervals."""

    name: str
    points: Sequence[tuple[float, Estimate]]


def plot(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """The plot as the text of an SVG file. The vertical axis begins at 0."""
    xs = [x for line in lines for x, _ in line.points]
    left, right, most = min(xs), max(xs), max(e.high for line in lines for _, e in line.points)
    step = _step(most)
    most = math.ceil(most / step) * step

    def place(x: float, y: float) -> tuple[float, float]:
        wide = WIDTH - LEFT - RIGHT
        return (
            LEFT + wide * (x - left) / ((right - left) or 1.0),
            HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / most,
        )

    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for index in range(round(most / step) + 1):
        x, y = place(left, index * step)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{index * step:g}</text>')
    for tick in sorted(set(xs)):
        x, y = place(tick, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>'
    )
    parts.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(up)}</text>')
    for line, colour, row in zip(lines, COLOURS, range(len(lines)), strict=False):
        dots = [(*place(x, e.value), place(x, e.low)[1], place(x, e.high)[1]) for x, e in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, low, high in dots:
            parts.append(f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        height = TOP + 10 + 18 * row
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{height - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 30}" y="{height}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _step(most: float) -> float:
    """A round distance of the grid's lines: about six of them."""
    rough = most / 6 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
