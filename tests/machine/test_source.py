"""Which code of spotrun a process has."""

from __future__ import annotations

import os
from pathlib import Path

from spotrun.machine import source


def test_a_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "one.py").write_text("1")
        (folder / "two.py").write_text("2")
    expected = source.digest(first)
    os.utime(second / "two.py", (1, 1))
    (second / "two.pyc").write_text("not a source")
    assert source.digest(second) == expected, "neither times nor other files count"
    (second / "two.py").write_text("3")
    assert source.digest(second) != expected
    (second / "two.py").write_text("2")
    (second / "two.py").rename(second / "three.py")
    assert source.digest(second) != expected


def test_the_digest_of_this_process() -> None:
    assert source.digest() == source.DIGEST
    assert source.STAMP.startswith(source.DIGEST)
