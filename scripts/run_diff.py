"""What differs between two runs: code, job files, packages, machines, results."""

from __future__ import annotations

import difflib
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import zstandard

from scripts import run_show, runs
from scripts.columns import aligned, duration
from scripts.job_table import money
from spotrun.errors import NotFound, SpotrunError
from spotrun.head.job_state import JobState
from spotrun.history.provenance import NodeRecord, Remarks
from spotrun.spec import bundle as limits
from spotrun.store import Store, code_key

Found = dict[str, Any]
TEXT = 256 << 10  # bytes of a file whose lines are compared; of a longer file, only whether it differs
LINES = 400  # lines of a file's difference that are shown
# Names of variables whose values stay out. TOKENS and TOKENIZERS are about texts.
SECRET = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
SHORT = 6  # characters: a shorter value, such as 0 or no, stands for other things as well


def document(store: Store, cluster: str, a: str, b: str) -> Found:
    """What `make diff JSON=1` prints. Raises `SpotrunError` if one of the runs does not exist."""
    first, second = (runs.state(store, cluster, job) for job in (a, b))
    records = [run_show.nodes(store, job, store.list(f"jobs/{job}/system")) for job in (a, b)]
    one, two = (
        _spec(state) | (_seed(found) if all(records) else {})
        for state, found in zip((first, second), records, strict=True)
    )
    return {
        "a": a,
        "b": b,
        "code": _hidden(_code(store, first, second), {*_secrets(first), *_secrets(second)}),
        "unrecorded": [job for job, found in zip((a, b), records, strict=True) if not found],
        "job": changes(one, two),
        "packages": changes(*map(_packages, records)),
        "machines": changes(*map(_machines, records)),
        "results": changes(*(_results(state) for state in (first, second))),
    }


def _secrets(state: JobState) -> list[tuple[str, str]]:
    """The variables in the job file that look like secrets, with each line of their values."""
    found = [(name, line.strip()) for name, text in state.spec.env.items() for line in text.splitlines()]
    return [(name, line) for name, line in found if line and SECRET.search(name)]


def _hidden(found: list[Found] | str, secrets: Iterable[tuple[str, str]]) -> list[Found] | str:
    """The differences of files without these values: the job file is one of the files.

    A short value is hidden only in lines with the variable's name.
    """
    if isinstance(found, str):
        return found
    for name, value in sorted(secrets, key=lambda each: len(each[1]), reverse=True):
        for each in found:
            each["lines"] = [
                line.replace(value, "(hidden)")
                if not line.startswith("@@") and (len(value) >= SHORT or name in line)
                else line
                for line in each["lines"]
            ]
    return found


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Found:
    """Each key whose values differ, with both values; None: it is missing. NaN does not differ from NaN."""
    pairs = ((key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]))
    return {key: [one, two] for key, one, two in pairs if one != two and (one == one or two == two)}


def code(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> list[Found]:
    """The files that differ, with the difference of their lines if both are short texts."""
    found = []
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            how = "added" if name not in a else "removed" if name not in b else "changed"
            found.append({"file": name, "how": how, "lines": list(_lines(name, a.get(name), b.get(name)))})
    return found


def text(found: Found) -> str:
    """The document for a person."""
    lines = [f"a: {found['a']}", f"b: {found['b']}", ""]
    lines += _code_text(found["code"])
    for key, title in (("job", "job file"), ("packages", "packages"), ("machines", "machines"), ("results", "results")):
        lines.append("")
        unknown = found["unrecorded"] if key in ("packages", "machines") else []
        if unknown:
            of = " and ".join(dict.fromkeys(unknown))
            lines.append(f"{title}: not known: there is no record of the machines of {of}")
            continue
        if not found[key]:
            lines.append(f"{title}: equal")
            continue
        rows = [["", "a", "b"], *([name, _short(one), _short(two)] for name, (one, two) in found[key].items())]
        lines += [f"{title}:", *aligned(rows)]
    return "\n".join(lines)


def _code_text(found: Any) -> list[str]:
    if isinstance(found, str):
        return [f"code: {found}"]
    if not found:
        return ["code: equal"]
    lines = ["code:"]
    for each in found:
        lines.append(f"  {each['file']}: {each['how']}")
        lines += [f"    {line}" for line in each["lines"][:LINES]]
        if len(each["lines"]) > LINES:
            lines.append(f"    … {len(each['lines']) - LINES} more lines")
    return lines


def _code(store: Store, a: JobState, b: JobState) -> list[Found] | str:
    if a.code == b.code:
        return []
    try:
        return code(unpacked(store, a.code), unpacked(store, b.code))
    except NotFound as error:
        return f"differs, but a bundle is no longer in the bucket: {error}"
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        return f"differs, but a bundle cannot be read: {error}"


def unpacked(store: Store, sha256: str) -> dict[str, bytes]:
    """The files of a bundle by name; of links, where they lead to. Raises `NotFound`."""
    data = store.get(code_key(sha256), limits.PACKED)
    found: dict[str, bytes] = {}
    with (
        zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as plain,
        tarfile.open(fileobj=plain, mode="r|") as tar,
    ):
        total = 0
        for member in tar:
            total += member.size
            if total > limits.BYTES:
                raise SpotrunError(f"{code_key(sha256)}: over {limits.BYTES >> 20} MiB of files, too large to compare")
            file = tar.extractfile(member) if member.isfile() else None
            found[member.name] = file.read() if file else f"link to {member.linkname}".encode()
    return found


def _lines(name: str, a: bytes | None, b: bytes | None) -> Iterator[str]:
    if any(len(data) > TEXT or b"\0" in data[:8192] for data in (a or b"", b or b"")):
        return
    one, two = ((data or b"").decode(errors="replace").splitlines() for data in (a, b))
    yield from difflib.unified_diff(one, two, f"a/{name}", f"b/{name}", lineterm="", n=2)


def _spec(state: JobState) -> Found:
    """The job file's keys, flat. Values of variables that look like secrets stay out."""
    found: Found = {}
    for key, value in state.spec.model_dump(mode="json").items():
        if key == "env":
            for name, text in value.items():
                found[f"env.{name}"] = f"(hidden, {len(text)} characters)" if SECRET.search(name) else text
        elif key == "args":
            found["args"] = " ".join(value)
        elif isinstance(value, dict):
            found |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def _packages(records: list[NodeRecord]) -> Found:
    return dict(records[0].packages) if records else {}


def _seed(records: list[NodeRecord]) -> Found:
    """What the script gave to `spotrun.init`."""
    return {"seed": records[0].seed} if records and records[0].seed is not None else {}


def _machines(records: list[NodeRecord]) -> Found:
    if not records:
        return {}
    first = records[0]
    types = sorted({each.type for each in records})
    found = {"types": ", ".join(types), "gpus": ", ".join(sorted(set(first.gpus))), "driver": first.driver}
    image = str(first.image.get("commit", ""))
    return found | {"python": first.python, "kernel": first.kernel, "image": image, "devices": first.devices}


def _results(state: JobState) -> Found:
    row = runs.row(state, None, Remarks())
    found = {key: row[key] for key in ("phase", "step", "generations", "interruptions", "steps_lost")}
    found |= {"took": duration(row["seconds"]) if row["seconds"] is not None else None, "cost": money(row["cost"])}
    return found | {f"metric {name}": value for name, value in state.progress.metrics.items()}


def _short(value: Any) -> str:
    found = "none" if value in (None, "", []) else f"{value:.6g}" if isinstance(value, float) else str(value)
    return found if len(found) <= 60 else found[:59] + "…"
