"""Rows of text in columns, and durations in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Each row as a line. The first column is aligned to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return [(indent + "  ".join(_cells(row, widths))).rstrip() for row in rows]


def duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 2 h 10 min"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(widths[index]) if index else cell.ljust(widths[0]) for index, cell in enumerate(row)]
