"""Types of values in both files, and the words for what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
)

PRIORITY = 1000  # the highest one of a job; the lowest is its negative
_LONGEST = 1e11  # seconds, 3,000 years
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: object) -> float:
    """Seconds from a number (seconds) or text such as 90s, 5m, 2h, 1d. Raises ValueError."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd])\s*", value)
        if match is None:
            raise ValueError("is not a duration")
        value = float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is not a duration")
    if value < 0:
        raise ValueError("is negative")
    if not value <= _LONGEST:  # also NaN, and whole numbers too large for a float
        raise ValueError("is not a duration")
    return float(value)


def positive(value: float) -> float:
    if value <= 0:
        raise ValueError("is not more than zero")
    return value


def label(limit: int) -> Callable[[str], str]:
    def check(value: str) -> str:
        if len(value) > limit or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", value):
            raise ValueError("is not a valid name")
        return value

    return check


def job_name(value: str) -> str:
    """A job's name or id. An id is the name with the time of its submission."""
    return label(80)(value)


def folder(value: str) -> str:
    """A folder's path within another folder, without the slash at its end."""
    parts = value.removesuffix("/").split("/")
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", part) for part in parts) or len(value) > 200:
        raise ValueError("is not the path of a folder within another one")
    return "/".join(parts)


class WrittenInt(int):
    """A whole number of a YAML file. source: as it is written there, such as 007 or 16:9, which YAML reads as 969."""

    source: str


class WrittenFloat(float):
    """A number of a YAML file that is not whole. source: as it is written there, such as 1.10."""

    source: str


def text(value: object) -> object:
    """Numbers become text, as they are written. Booleans are errors: YAML also reads yes, no, on and off as such."""
    if isinstance(value, bool):
        raise ValueError("YAML reads this as a boolean: put it in quotes")
    if isinstance(value, date):
        raise ValueError("YAML reads this as a date: put it in quotes")
    return getattr(value, "source", str(value)) if isinstance(value, int | float) else value


Duration = Annotated[float, BeforeValidator(parse_duration)]
Interval = Annotated[float, BeforeValidator(parse_duration), AfterValidator(positive)]
Int = Annotated[int, Strict()]
Bool = Annotated[bool, Strict()]
BOOL = "true or false, without quotes"
Str = Annotated[str, Strict(), Field(min_length=1)]
Text = Annotated[str, BeforeValidator(text)]
DURATION = "seconds, or a number with s, m, h or d, such as 90s or 5m"
INTERVAL = DURATION + ", more than zero"
FOLDER = "letters, digits, _, . and -, no . at the start, with / between folders, at most 200 characters"
LABEL = "lower-case letters, digits and single inner hyphens, a letter first, at most {} characters"


class Spec(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def kept(cls, values: object) -> Self:
        """Read what this version or another one wrote. Ignores unknown keys. Raises `ValueError`."""
        return cls.model_validate(values, extra="ignore")

    @model_serializer(mode="wrap")
    def _with_unknown_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        return values | (self.model_extra or {})
