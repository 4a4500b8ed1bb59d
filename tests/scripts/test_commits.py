"""`make lint` refuses long commit subjects on the branch's new commits, in real repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.commits import LONGEST, too_long

ROOT = Path(__file__).parents[2]
LONG, FITS = "x" * (LONGEST + 1), "y" * LONGEST
WHO = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *WHO, "-C", str(folder), *words], check=True, capture_output=True)


def commit(folder: Path, *subjects: str) -> None:
    for subject in subjects:
        git(folder, "commit", "--allow-empty", "-m", subject, "-m", "a body line " * 10)


def subjects(folder: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in too_long(folder)]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """On branch `work`, two commits before `main`'s head, of which main has a long one."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    commit(folder, "first", f"old {LONG}")
    git(folder, "checkout", "-b", "work")
    return folder


def test_new_commits_of_a_branch(repository: Path) -> None:
    assert subjects(repository) == [f"old {LONG}"], "without a new commit, the newest one"
    commit(repository, LONG, FITS)
    assert subjects(repository) == [LONG], "neither one that fits, nor one that main has"


def test_origin_main_goes_before_main(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(repository, "checkout", "main")
    git(tmp_path, "clone", str(repository), str(clone))
    assert subjects(clone) == []
    commit(clone, LONG)
    assert subjects(clone) == [LONG], "on main itself, what origin/main lacks"


def test_a_shallow_clone_has_only_its_newest_commit(repository: Path, tmp_path: Path) -> None:
    commit(repository, LONG, FITS)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--depth", "1", f"file://{repository}", str(clone))
    assert subjects(clone) == []
    commit(clone, LONG)
    assert subjects(clone) == [LONG]


def test_a_folder_that_is_no_repository_has_no_commits(tmp_path: Path) -> None:
    assert too_long(tmp_path) == []


def test_lint_asks() -> None:
    assert "-m scripts.commits" in (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
