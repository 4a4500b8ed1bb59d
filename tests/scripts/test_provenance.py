"""Where a job comes from, as git and the operator's machine tell it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import bundle, provenance


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    return subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job in a repository, committed."""
    found = tmp_path / "repo" / "job"
    found.mkdir(parents=True)
    git(tmp_path / "repo", "init", "-q", "-b", "main")
    (found / "train.py").write_text("lr = 0.1\n")
    (found / "old name.py").write_text("x = 1\n")
    (found / ".gitignore").write_text("ignored.py\n")
    (found / ".spotrunignore").write_text("private.txt\n")
    (found / "private.txt").write_text("stays here\n")
    (tmp_path / "repo" / "other.txt").write_text("not the job's\n")
    git(tmp_path / "repo", "add", "-A")
    git(tmp_path / "repo", "commit", "-qm", "First")
    return found


def test_a_clean_repository(folder: Path) -> None:
    found = provenance.repository(folder, bundle.files(folder))
    assert found is not None
    assert found.commit == git(folder, "rev-parse", "HEAD").strip()
    assert (found.branch, found.diff, found.untracked, found.cut) == ("main", "", (), False)


def test_only_changes_of_the_bundle_count(folder: Path) -> None:
    """What is not sent to the nodes is not sent to the bucket either."""
    (folder / "train.py").write_text("lr = 0.2\n")
    (folder / "old name.py").unlink()
    (folder / "private.txt").write_text("a secret\n")
    (folder.parent / "other.txt").write_text("another secret\n")
    (folder / "new.py").write_text("y = 1\n")
    (folder / "ignored.py").write_text("z = 1\n")
    found = provenance.repository(folder, bundle.files(folder))
    assert found is not None
    assert "-lr = 0.1" in found.diff
    assert "+lr = 0.2" in found.diff
    assert "-x = 1" in found.diff
    assert "secret" not in found.diff
    assert found.untracked == ("new.py",)


def test_a_long_difference_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "LONGEST", 50)
    (folder / "train.py").write_text("lr = 0.2\n" * 50)
    found = provenance.repository(folder, bundle.files(folder))
    assert found is not None
    assert (len(found.diff), found.cut) == (50, True)


def test_no_repository_and_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").touch()
    assert provenance.repository(tmp_path / "job", [Path("train.py")]) is None
    git(tmp_path / "job", "init", "-q", "-b", "trunk")
    found = provenance.repository(tmp_path / "job", [Path("train.py")])
    assert found is not None
    assert (found.commit, found.branch, found.untracked) == ("", "trunk", ("train.py",))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.repository(tmp_path / "job", [Path("train.py")]) is None, "there is no git"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ann:token@example.com/a/b.git", "https://example.com/a/b.git"),
        ("https://example.com/a?private_token=x", "https://example.com/a"),
        ("git@example.com:a/b.git", "git@example.com:a/b.git"),
    ],
)
def test_a_remote_has_no_secrets(url: str, shown: str) -> None:
    assert provenance.without_secrets(url) == shown


def test_all_of_it(folder: Path) -> None:
    (folder / "job.yaml").write_text("script: train.py\n")
    found = provenance.gather(str(folder / "job.yaml"), "clusters/local.yaml", "ab" * 32, bundle.files(folder))
    assert found.job_file == "script: train.py\n"
    assert "cloud: local" in found.cluster_file
    assert found.user
    assert found.host
    assert found.git is not None
