"""What all documents have in common: messages between head and agents, and records in the bucket."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

_set = object.__setattr__  # documents are frozen

FORMAT = 1  # of the documents in the bucket: see `Kept`


class Document(BaseModel):
    """A frozen message part. A logged number may be NaN, for which JSON has no number.

    Unknown keys are ignored: the other side may be of another version.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    def replace(self, **changes: object) -> Self:
        """A copy with these fields changed; their values are not validated. Raises `TypeError` for an unknown field."""
        # A head makes thousands of copies for one change. `model_fields` takes longer than this copy, and `model_copy`
        # four times as long: it looks at extra and private values, which documents do not have.
        kind = type(self)
        if unknown := changes.keys() - kind.__pydantic_fields__.keys():
            raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
        copied = kind.__new__(kind)
        _set(copied, "__dict__", {**self.__dict__, **changes})
        _set(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__ | changes.keys())
        _set(copied, "__pydantic_extra__", None)
        _set(copied, "__pydantic_private__", None)
        return copied


def _known(value: int) -> int:
    if value > FORMAT:
        raise ValueError(f"has format {value}; this version of spotrun reads format {FORMAT}: update it")
    return value


class Kept(Document):
    """A document in the bucket."""

    # It goes up only when readers of the older format would misread the document, not for each new key.
    format: Annotated[int, AfterValidator(_known)] = FORMAT  # a higher one cannot be read


def is_newer(error: ValueError) -> bool:
    """Whether a document cannot be read because a later version has written it. Then it must not be replaced."""
    return isinstance(error, ValidationError) and any(each["loc"] == ("format",) for each in error.errors())


def problem(error: ValueError) -> str:
    """One line about what is wrong with a document."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())[:300]
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
