"""A bar chart as SVG, without a library. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_FONT = 'font-family="sans-serif" font-size="12"'
_WIDTH, _LABEL, _BAR, _TOP, _RIGHT = 840, 330, 24, 40, 110  # pixels


def plot(title: str, values: Mapping[str, float]) -> str:
    """The text of an SVG file: a bar for each name, from the left at zero."""
    most, height = max(values.values(), default=0.0) or 1.0, _TOP + _BAR * len(values) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for index, (name, value) in enumerate(values.items()):
        y, width = _TOP + index * _BAR, (_WIDTH - _LABEL - _RIGHT) * value / most
        lines.append(f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="{_BAR - 8}" fill="#0072b2"/>')
        lines.append(f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{value:,.0f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
