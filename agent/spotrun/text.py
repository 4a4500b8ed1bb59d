"""Make text from outside safe for a terminal, values valid for JSON, and words agree with numbers. Pure.

Names, events, logs and messages come from machines that run a job's code. An escape sequence in them could overwrite
earlier lines on an operator's terminal, set the window's title, or on some terminals type input.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# ECMA-48: control sequences; strings that end with BEL or ST; other sequences of two or more characters.
_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[\\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\\\|\x9c)"
    "|\x1b[ -/]*[0-~]"
)
# C0 except line break and tab, DEL, C1; other line separators; characters that reverse the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ANY = re.compile(_CONTROL.pattern[:-2] + "\ud800-\udfff]")  # one class is five times as fast as two


def clean(text: str) -> str:
    """The text without escape sequences and control characters; line breaks and tabs stay.

    A carriage return becomes a line break: progress bars draw over their own line with it.
    """
    if not _ANY.search(text):
        return text
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def line(text: str) -> str:
    """The clean text on one line, so that no part of it can look like a line of the output."""
    return re.sub("[\n\t]+", " ", clean(text))


def tidy(value: Any, long: tuple[str, ...] = ("traceback",)) -> Any:
    """The JSON value with every text clean and on one line. long: keys whose text keeps its line breaks."""
    if isinstance(value, str):
        return line(value)
    if isinstance(value, list | tuple):
        return [tidy(each, long) for each in value]
    if isinstance(value, dict):
        return {
            line(str(key)): clean(each) if key in long and isinstance(each, str) else tidy(each, long)
            for key, each in value.items()
        }
    return value


def to_json(value: Any) -> str:
    """The value as JSON on one line. NaN and infinities become null: JSON has no such numbers."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return value


def count(number: int, noun: str, nouns: str = "") -> str:
    """`1 node`, `2 nodes`. nouns: the plural, unless it is the noun with an `s`."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"
