"""Reads a YAML file into a pydantic model, with messages that a user can act on.

One line for each problem: `file:line: key: value: what is wrong; allowed: what is; did you mean key?`. "Allowed" is the
description of the model's field. What the files are about is in the other modules of `spec`.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from spotrun.errors import SpecError
from spotrun.spec.fields import WrittenFloat, WrittenInt

Place = tuple[str | int, ...]  # where a key is: ("pools", 0, "zone")
Conflict = tuple[Place, str]  # and what is wrong with it
M = TypeVar("M", bound=BaseModel)
LIMIT = 256 << 10  # the most bytes of a file, and the most values in it


class _Loader(yaml.SafeLoader):
    """Reads the keys on, off, yes, no, true and false as text. YAML 1.1 reads them as booleans.

    Numbers know how they are written: arguments of a script must not change.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _written_int(loader: _Loader, node: yaml.ScalarNode) -> WrittenInt:
    number = WrittenInt(loader.construct_yaml_int(node))
    number.source = node.value
    return number


def _written_float(loader: _Loader, node: yaml.ScalarNode) -> WrittenFloat:
    number = WrittenFloat(loader.construct_yaml_float(node))
    number.source = node.value
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _written_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _written_float)


class File:
    """A YAML mapping with the line of each key, to tell a user where something is wrong."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                content = file.read(LIMIT + 1)
            text = content.decode()
        except FileNotFoundError:
            raise SpecError(f"{path}: there is no such {kind}{_meant(path)}") from None
        except IsADirectoryError:
            raise SpecError(f"{path}: this is a folder, not a {kind}{_meant(path)}") from None
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
            reason = error.strerror if isinstance(error, OSError) else error
            raise SpecError(f"{path}: cannot read this {kind}: {reason}") from None
        if path.suffix == ".py":
            raise SpecError(f"{path}: this is a Python file, not a {kind}")
        if len(content) > LIMIT:
            raise SpecError(f"{path}: this is not a {kind}: it has more than {LIMIT >> 10} kB")
        try:
            loader = _Loader(text)
            self.root = loader.get_single_node()
            if _weight(self.root, {}) > LIMIT:
                raise SpecError(f"{path}: this is not a {kind}: its aliases stand for more than {LIMIT} values")
            self._refuse_duplicates(self.root, ())
            data = loader.construct_document(self.root) if self.root is not None else None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f":{mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            if "'\\t'" in problem:
                problem = "a tab; YAML takes only spaces here"
            raise SpecError(f"{path}{where}: this is not YAML: {problem}") from None
        except (ValueError, RecursionError) as error:  # an impossible date, lists that are too deep
            raise SpecError(f"{path}: this is not YAML that can be read: {error}") from None
        if data is None:
            raise SpecError(f"{path}: this {kind} is empty")
        if not isinstance(data, dict):
            number = isinstance(data, WrittenInt | WrittenFloat)
            what = "text" if isinstance(data, str) else "a number" if number else f"a {type(data).__name__}"
            raise SpecError(f"{path}: a {kind} is a mapping (key: value), this is {what}")
        for key, other in (("script", "job file"), ("pools", "cluster file")):
            if key in data and other != kind and not data.keys() & {"script", "pools"} - {key}:
                raise SpecError(f"{path}: this looks like a {other}, not a {kind}")
        self.data: dict[str, Any] = data

    def parse(self, model: type[M]) -> M:
        """The file as a `model`. Raises `SpecError` with a line for each problem."""
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            lines: list[str] = []
            for detail in sorted(error.errors(include_url=False), key=lambda detail: self._line(detail["loc"])):
                lines += self._explain(model, detail)
            raise SpecError("\n".join(dict.fromkeys(lines))) from None

    def say(self, place: Place, message: str) -> str:
        """One line about the key at `place`."""
        found, value = self._value(place)
        line = self._line(place)
        where = f"{self.path}:{line}" if line else f"{self.path}"
        shown = f" {_shown(value)}:" if found else ""
        return f"{where}: {dotted(place)}:{shown} {message}"

    def _explain(self, model: type[BaseModel], detail: Any) -> list[str]:
        place = tuple(part for part in detail["loc"] if part != "[key]")
        kind, context = detail["type"], detail.get("ctx", {})
        if kind == "conflicts":
            return [self.say(at, message) for at, message in context["conflicts"]]
        if kind == "invalid_key":
            return [self.say(place[:-1] or ("top level",), f"the key {place[-1]} is not text; put it in quotes")]
        if kind == "too_short" and self._value(place)[1]:
            return []  # each wrong item of the list has its own message
        parent, field = _field(model, place)
        allowed = _allowed(field)
        if kind == "extra_forbidden":
            keys = list(parent.model_fields) if parent else []
            meant = getattr(parent, "MEANT", {}).get(place[-1])
            hint = f"; did you mean {meant}?" if meant else nearest(str(place[-1]), keys)
            return [self.say(place, f"unknown key; allowed: {', '.join(keys)}{hint}")]
        if kind == "missing":
            return [self.say(place, f"is missing; give {allowed}")]
        reason = str(context["error"]) if kind == "value_error" and str(context.get("error", "")) else "is not allowed"
        found, value = self._value(place)
        options = list(get_args(field.annotation)) if field is not None and kind == "literal_error" else []
        hint = nearest(str(value), [str(option) for option in options]) if found else ""
        hint = hint or _as_number(value, allowed)
        return [self.say(place, f"{reason}; allowed: {allowed}{hint}")]

    def _value(self, place: Place) -> tuple[bool, object]:
        value: Any = self.data
        for part in place:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return False, None
        return True, value

    def _line(self, place: Place) -> int:
        """The line of the deepest part of `place` that the file has; 0 if it has none."""
        node, line = self.root, 0
        for part in place:
            if isinstance(node, yaml.MappingNode):
                pair = next((pair for pair in node.value if pair[0].value == str(part)), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line + 1, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
            else:
                break
        return line

    def _refuse_duplicates(self, node: Any, place: Place) -> None:
        """YAML parsers silently take the last of two equal keys."""
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                self._refuse_duplicates(child, (*place, index))
        if not isinstance(node, yaml.MappingNode):
            return
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            here = (*place, str(key.value))
            if str(key.value) in lines:
                first = lines[str(key.value)]
                raise SpecError(f"{self.path}:{line}: {dotted(here)}: this key is already on line {first}; keep one")
            lines[str(key.value)] = line
            self._refuse_duplicates(value, here)


def _meant(path: Path) -> str:
    """A hint for a path at which there is no file: the file that was probably meant."""
    if str(path).startswith("~"):
        return "; ~ is not expanded here: write the whole path"
    tried = (f"{path}/job.yaml", f"{path}.yaml", f"clusters/{path}.yaml")
    # Not Path.is_file, which raises an error for a name that is too long.
    return next((f"; did you mean {each}?" for each in tried if os.path.isfile(each)), "")


def _weight(node: Any, known: dict[int, int]) -> int:
    """The number of values in a node, counting each use of an alias."""
    if id(node) not in known:
        known[id(node)] = LIMIT + 1  # a node may contain itself
        inner: Iterable[Any] = ()
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = (each for pair in node.value for each in pair)
        known[id(node)] = 1 + sum(_weight(each, known) for each in inner)
    return known[id(node)]


def refuse(conflicts: Iterable[Conflict]) -> None:
    """For a model's validator: raise an error with all conflicts, if there are any."""
    found = list(conflicts)
    if found:
        text = "; ".join(f"{dotted(place)}: {message}" for place, message in found)
        raise PydanticCustomError("conflicts", "{text}", {"text": text, "conflicts": found})


def nearest(word: str, known: list[str]) -> str:
    """A hint for the end of a message: the known word closest to `word`, if any is close."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def dotted(place: Place) -> str:
    """pools[0].zone"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _field(model: type[BaseModel], place: Place) -> tuple[type[BaseModel] | None, Any]:
    """The model with the key at `place`, and the field of that key; None where there is none."""
    parent: type[BaseModel] | None = model
    field: Any = None
    for index, part in enumerate(place):
        if isinstance(part, int) or parent is None:
            continue
        field = parent.model_fields.get(part)
        inner = _model_in(field.annotation) if field is not None else None
        if index < len(place) - 1 and field is not None:
            parent = inner
    return parent, field


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each))), None)


def _allowed(field: Any) -> str:
    if field is None:
        return "a value that fits"
    if field.description:
        return str(field.description)
    return ", ".join(str(option) for option in get_args(field.annotation))


def _as_number(value: object, allowed: str) -> str:
    """A hint for a number that YAML reads as text, because it has quotes, or is written like 1e3."""
    if not isinstance(value, str) or "number" not in allowed:
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    return f"; YAML reads this as text: write {number:.15g}, without quotes" if math.isfinite(number) else ""


def _shown(value: object) -> str:
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else repr(value)
    return text if text and len(text) <= 80 else f"{text}"[:77] + "..."
