"""`make image-versions`: what is pinned, and what registries that are played here say of it."""

from __future__ import annotations

import contextlib
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from images import debian, versions
from tests.fakes.answering import answering

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"


def test_versions_are_pinned_once() -> None:
    pinned = versions.read(IMAGES / "versions.env")
    for name, value in pinned.items():
        assert value, name
        if name.endswith("SHA256"):
            assert re.fullmatch("[0-9a-f]{64}", value), name
    constraints = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned["TORCH"] == constraints["torch"]
    others = [
        path
        for path in IMAGES.rglob("*")
        if path.is_file() and path.name != "versions.env" and "__pycache__" not in str(path)
    ]
    for name in ("KERNEL", "NVIDIA_DRIVER", "EFA_INSTALLER", "EFA_INSTALLER_SHA256", "SSM_AGENT"):
        assert [path for path in others if pinned[name] in path.read_text()] == [], name


def test_no_node_has_a_newer_python_than_its_operator() -> None:
    """`make train` compiles the script before it asks for machines (scripts/jobs.py)."""
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest
    assert versions.read(IMAGES / "versions.env")["PYTHON"] == f"3.{oldest[1]}"


APT = """\
linux-image-6.1.0-60-cloud-amd64 |  6.1.200-1 | http://mirror bookworm-security/main amd64 Packages
linux-image-6.1.0-56-cloud-amd64 |  6.1.192-2 | http://mirror bookworm-security/main amd64 Packages
python3.11 | 3.11.2-6+deb12u6 | http://mirror bookworm/main amd64 Packages
    chrony | 4.3-2+deb12u9 | http://mirror bookworm/main amd64 Packages
    chrony | 4.3-2+deb12u3 | http://mirror bookworm/main amd64 Packages
    chrony |     9.9 | http://mirror sid/main amd64 Packages
"""
PINNED = {
    "KERNEL_ABI": "6.1.0-56-cloud-amd64",
    "KERNEL": "6.1.192-2",
    "PYTHON": "3.11",
    "CHRONY": "4.3-2+deb12u3",
    "NODE_EXPORTER": "1.5.0-1+b6",
    "TORCH": "2.13.0",
    "NVIDIA_DRIVER": "580.1",
    "DCGM": "1:4.6.0-1",
    "DCGM_EXPORTER": "4.8.3-1",
    "EFA_INSTALLER": "1.50.0",
    "AWS_OFI_NCCL": "1.21.1",
    "EC2_INSTANCE_CONNECT": "0" * 40,
    "SSM_AGENT": "3.3.1.0",
}


SOURCES = versions.read(IMAGES / "sources.env")
INDEX = """\
Package: nvidia-driver-cuda
Architecture: amd64
Version: 580.1-1

Package: nvidia-driver-cuda
Version: 590.2-1

Package: nvidia-driver-pinning-580.1
Version: 580.1-3

Package: libnvidia-nscq
Version: 590.2-1
"""


def _lists() -> contextlib.AbstractContextManager[list[str]]:
    return contextlib.nullcontext([])


def _ask(command: list[str]) -> str:
    if command[:2] == ["apt-cache", "madison"]:
        return "".join(line for line in APT.splitlines(True) if line.split()[0] in command)
    if command[:2] == ["apt-cache", "depends"]:
        return "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-60-cloud-amd64\n"
    return "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.9.1\n"


def _get(url: str) -> bytes:
    if "efa-changelog" in url:
        return (
            b"| Version | Changes |\n| 1.51.0 | [Amazon OFI NCCL Plugin 1.22.0] |\n| 1.50.0 | OFI NCCL Plugin 1.21.1 |"
        )
    raise OSError("no way there")


def _there(url: str) -> bool:
    if "aws-efa-installer-1.50.0.tar.gz" in url:
        return True
    if "SSMAgent/3.3.1.0/" in url:
        return False
    raise OSError("no way there")


def test_every_package_that_a_script_installs_at_a_pin_is_asked_for() -> None:
    asked: list[str] = []

    def get(url: str) -> bytes:
        asked.append(url)
        return gzip.compress(INDEX.encode())

    rows = {row.name: row for row in versions._nvidia(PINNED, "https://example.com/Packages.gz", _registries(get))}
    assert asked == ["https://example.com/Packages.gz"]
    assert (rows["NVIDIA_DRIVER"].there, rows["NVIDIA_DRIVER"].newest) == (True, "590.2")
    assert (rows["driver pinning"].there, rows["driver pinning"].newest) == (True, "580.1-3")
    assert (rows["libnvidia-nscq"].there, rows["libnvidia-nscq"].note) == (False, "")
    assert (rows["firmware"].there, rows["firmware"].note) == (False, "no firmware-nvidia-gsp")
    assert "not in its registry any more; no firmware-nvidia-gsp" in versions.table(list(rows.values()))
    assert "write libnvidia" not in versions.table(list(rows.values()))
    scripts = "\n".join(path.read_text() for path in sorted((IMAGES / "provision").glob("3[0-2]-*.sh")))
    names = {
        word.partition("=")[0].strip('"')
        for line in re.findall(r"(?:packages\+?=\(|install_packages )(.*)", scripts)
        for word in re.findall(r"[\w\".$-]+", line.partition("#")[0].replace("$NVIDIA_DRIVER", "580.1"))
        if re.match(r'"?(nvidia|libnvidia|firmware|datacenter)-', word)
    }
    assert len(names) == 13
    known = Path(versions.__file__).read_text().replace("{pinned['NVIDIA_DRIVER']}", "580.1")
    assert [name for name in sorted(names) if f'"{name}"' not in known] == []


def _registries(get: Callable[[str], bytes]) -> versions.Registries:
    return versions.Registries(_ask, get, _there, _lists)


def test_what_is_at_a_url_is_asked_without_a_download() -> None:
    with answering({"HEAD /there": (None, 200, ""), "HEAD /broken": (None, 503, "")}) as host:
        assert versions.exists(f"http://{host}/there")
        assert not versions.exists(f"http://{host}/gone")
        with pytest.raises(OSError, match="503"):
            versions.exists(f"http://{host}/broken")


def test_what_is_newest() -> None:
    rows = versions.compare(PINNED, SOURCES, versions.Registries(_ask, _get, _there, _lists))
    found = {row.name: (row.newest, row.there) for row in rows}
    assert found["KERNEL"] == ("6.1.192-2", True)
    assert found["KERNEL_ABI"] == ("6.1.0-60-cloud-amd64", True)
    assert found["CHRONY"] == ("4.3-2+deb12u9", True)
    assert found["NODE_EXPORTER"] == ("", False)  # gone
    assert found["TORCH"] == ("2.15.0", True)
    assert found["NVIDIA_DRIVER"] == ("", None)
    assert found["EFA_INSTALLER"] == ("1.51.0", True)
    assert found["SSM_AGENT"] == ("", False)
    assert found["AWS_OFI_NCCL"] == ("1.22.0", None)
    assert {row.name for row in rows} >= set(PINNED)
    shown = versions.table(rows)
    assert "NVIDIA's registry was not reached: no way there" in shown
    assert re.search(r"NODE_EXPORTER .* not in its registry any more$", shown, re.MULTILINE)


def test_a_replaced_kernel_is_told_with_the_lines_to_write() -> None:
    pinned = PINNED | {"KERNEL_ABI": "6.1.0-50-cloud-amd64", "KERNEL": "6.1.180-1", "CHRONY": "4.3-2"}
    rows = versions.debian(pinned, versions.Registries(_ask, _get, _there, _lists))
    assert versions.replaced(rows) == {
        "KERNEL_ABI": "6.1.0-60-cloud-amd64",
        "KERNEL": "6.1.200-1",
        "CHRONY": "4.3-2+deb12u9",
    }
    assert "in images/versions.env write KERNEL=6.1.200-1" in versions.table(rows)


def test_a_kernel_whose_version_alone_was_replaced_keeps_its_abi() -> None:
    rows = versions.debian(PINNED | {"KERNEL": "6.1.192-1"}, versions.Registries(_ask, _get, _there, _lists))
    assert versions.replaced(rows) == {"KERNEL": "6.1.192-2"}


def test_lists_that_cannot_be_fetched_are_told() -> None:
    def lists() -> contextlib.AbstractContextManager[list[str]]:
        raise OSError("`apt-get update` failed: E: bookworm-security")

    rows = versions.debian(PINNED, versions.Registries(_ask, _get, _there, lists))
    assert {row.there for row in rows} == {None}
    assert {row.note for row in rows} == {"apt was not asked: `apt-get update` failed: E: bookworm-security"}


def _apt(folder: Path, updates: str) -> dict[str, str]:
    """An environment in which `apt-get` is a program that names two archives and answers an update with `updates`."""
    program = folder / "apt-get"
    uris = "\n".join(f"'{url}/dists/{suite}/InRelease' name 0" for url, suite in ARCHIVES)
    program.write_text(f"""#!/bin/sh\ncase "$*" in *--print-uris*) cat <<'E'\n{uris}\nE\n;; *) {updates} ;; esac\n""")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


ARCHIVES = [("http://mirror/debian", "bookworm"), ("http://mirror/security", "bookworm-security")]


def test_archives_are_found_whatever_lists_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `apt-get indextargets` it is not so: an archive whose list had not been fetched was missing there."""
    monkeypatch.setenv("PATH", _apt(tmp_path, "true")["PATH"])
    assert debian.archives() == ARCHIVES
    with debian.fresh_lists() as options:
        (sources,) = [word.partition("=")[2] for word in options if word.startswith("Dir::Etc::sourcelist=")]
        lines = Path(sources).read_text().splitlines()
        assert [tuple(line.split()[-3:-1]) for line in lines] == ARCHIVES
    assert not Path(sources).exists()


def test_an_archive_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", _apt(tmp_path, "echo 'E: bookworm-security: no answer' >&2; exit 100")["PATH"])
    with pytest.raises(OSError, match="bookworm-security: no answer"), debian.fresh_lists():
        pass


def test_a_machine_without_debian_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.images.test_versions.ARCHIVES", [("http://mirror/ubuntu", "noble")])
    monkeypatch.setenv("PATH", _apt(tmp_path, "true")["PATH"])
    with pytest.raises(OSError, match="no Debian bookworm"), debian.fresh_lists():
        pass


@pytest.mark.parametrize(
    "garbage",
    [gzip.compress(b"a")[:10] + b"\xff" * 40, gzip.compress(b"a")[:-9], b"<html>"],
    ids=["broken", "cut off", "a page"],
)
def test_a_registry_that_answers_nonsense_is_said_to_be_out_of_reach(garbage: bytes) -> None:
    ask = versions.Registries(_ask, lambda _: garbage, _there, _lists)
    rows = versions.compare(PINNED, SOURCES, ask)
    (row,) = [row for row in rows if row.name == "NVIDIA_DRIVER"]
    assert row.note.startswith("NVIDIA's registry was not reached")


def test_an_answer_that_ends_early_is_no_answer() -> None:
    with (
        answering({"GET /": (None, 200, "half", ("Content-Length", "1000"))}) as host,
        pytest.raises(OSError, match="Incomplete"),
    ):
        versions.fetch(f"http://{host}/")
