"""Repeat a run, add tags and notes to it, or remove it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

from scripts import control, provenance, run_show, runs
from scripts.make_command import make_command
from scripts.site import Site
from spotrun.errors import ConflictError, JobNotFound, SpotrunError, UnreadableError
from spotrun.head.job_state import JobState
from spotrun.history.provenance import MOST, Note, Remarks
from spotrun.store import Store, code_key, job_key, queue_key, remarks_key
from spotrun.wire import problem, read_queue

TRIES = 5  # to change a document that another person changes at the same time
LONGEST = 2000  # characters of a note
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,39}")


def rerun(site: Site, job: str) -> dict[str, Any]:
    """Submit a run's job again, with the same bundle. The answer has the new job and what differs."""
    access = site.access()
    state, origin = runs.state(access.store, site.cluster.name, job), runs.provenance(access.store, job)
    if not access.store.exists(code_key(state.code)):
        raise SpotrunError(f"ID: {job!r}: its bundle {state.code[:12]} is not in the bucket: use `make train JOB=`")
    known = provenance.again(origin, job, site.file, state.code)
    differs = differences(state, origin.version if origin else "", origin.cluster_file if origin else "", known)
    new = control.submit(access, {"job": state.spec.model_dump(mode="json"), "code": state.code})
    if warning := provenance.write(access.store, new, known):
        differs.append(warning)
    return {"job": new, "rerun_of": job, "differs": differs}


def differences(state: JobState, version: str, cluster_file: str, now: Any) -> list[str]:
    """What has changed since the run was submitted: one line for each change."""
    found = []
    if not version:
        found.append("the run has no provenance in the bucket, so its cluster file cannot be compared")
    elif version != now.version:
        found.append(f"spotrun: {version} then, {now.version} now")
    if cluster_file and cluster_file != now.cluster_file:
        found.append(f"the cluster file {now.cluster_path} has changed")
    loose = [each for each in state.spec.requirements if "==" not in each]
    if loose:
        found.append(f"requirements without an exact version: {', '.join(loose)}: pip may choose other versions")
    if state.spec.inputs:
        inputs = ", ".join(state.spec.inputs.values())
        found.append(f"inputs: the new job reads files of the same jobs, {inputs}; these files may have changed")
    return found


def tag(store: Store, cluster: str, job: str, text: str) -> Remarks:
    """Add tags; a tag with - in front is removed. Raises `SpotrunError`."""
    words = text.replace(",", " ").split()
    if not words:
        raise SpotrunError("TAG is missing: give a tag, such as TAG=best; TAG=-best removes it")
    for word in words:
        if not _TAG.fullmatch(word.removeprefix("-")):
            raise SpotrunError(
                f"TAG: {word!r}: allowed: 1 to 40 letters, digits and . _ : / - with a letter or digit first"
            )
    gone = {word[1:] for word in words if word.startswith("-")}
    new = [word for word in words if not word.startswith("-")]

    def change(said: Remarks) -> Remarks:
        return said.replace(tags=tuple(each for each in dict.fromkeys([*said.tags, *new]) if each not in gone))

    return _change(store, cluster, job, change)


def note(store: Store, cluster: str, job: str, text: str) -> Remarks:
    """Add a note. Raises `SpotrunError`."""
    if not text.strip() or len(text) > LONGEST:
        raise SpotrunError(f"TEXT: give 1 to {LONGEST} characters, such as TEXT='lr too high'")
    said = Note(at=time.time(), user=provenance.user(), text=text.strip())
    return _change(store, cluster, job, lambda old: old.replace(notes=(*old.notes, said)))


def remove(site: Site, job: str, force: bool, ask: Callable[[str], str] = input) -> dict[str, Any]:
    """Remove everything that the bucket has of a run that has ended. Asks first, unless `force`."""
    store, cluster = site.bucket(), site.cluster.name
    _refuse(store, site, runs.state(store, cluster, job))
    if not force:
        _ask(job, run_show.objects(job, store.sizes(f"jobs/{job}")), ask)
        _refuse(store, site, runs.state(store, cluster, job))  # another person may have relaunched it meanwhile
    sizes = store.sizes(f"jobs/{job}")
    what = run_show.objects(job, sizes)
    # The state goes last. If this removal fails before that, the next one still finds the run and removes the rest.
    last = job_key(job, "state.json")
    store.delete([key for key in sizes if key != last])
    store.delete([last])
    return {"job": job, "removed": what}


def removal(what: dict[str, Any]) -> list[str]:
    """One line for each folder that is removed."""
    return [f"  {name}: {each['objects']} objects, {run_show.size(each['bytes'])}" for name, each in what.items()]


def _ask(job: str, what: dict[str, Any], ask: Callable[[str], str]) -> None:
    if ask is input and not (sys.stdin and sys.stdin.isatty()):
        raise SpotrunError(f"{job} stays: there is no terminal to ask; FORCE=1 removes it without a question")
    lines = [f"this removes all that the bucket has of {job}:", *removal(what), f"type {job} to remove it: "]
    try:
        said = ask("\n".join(lines))
    except EOFError:
        said = ""
    if said.strip() != job:
        raise SpotrunError(f"{job} stays: its id was not typed; run the command again, or with FORCE=1")


def _refuse(store: Store, site: Site, state: JobState) -> None:
    """Raise `SpotrunError` if a run must stay."""
    key = queue_key(site.cluster.name)
    try:
        queue = read_queue(store.find(key))
    except ValueError as error:
        raise SpotrunError(f"{state.id} stays: {key} cannot be read: {problem(error)}") from None
    if not state.over or state.id in (*queue.jobs, *queue.held):
        held = state.id in queue.held and not state.over
        why = (
            "is held"
            if held
            else f"keeps a node, {state.kept_node.member.node}"
            if state.kept_node
            else "has not ended"
        )
        stop = make_command(site.file, "stop", f"ID={state.id}")
        raise SpotrunError(f"{state.id} stays: it {why}; run `{stop}` first")
    for other in (*queue.jobs, *queue.held):
        try:
            needs = runs.state(store, site.cluster.name, other)
        except JobNotFound:
            continue
        except UnreadableError as error:
            stop = make_command(site.file, "stop", f"ID={other}")
            raise SpotrunError(
                f"{state.id} stays: {other}, which has not ended, may need its files: {error}; `{stop}` takes it out of"
                " the queue"
            ) from None
        if state.id in (
            *needs.after,
            *(each.job for each in needs.inputs),
            *(j for j, _ in needs.spec.sources.values()),
        ):
            raise SpotrunError(
                f"{state.id} stays: {other}, which has not ended, needs its files; wait for {other}, or stop it"
            )


def _change(store: Store, cluster: str, job: str, change: Callable[[Remarks], Remarks]) -> Remarks:
    runs.state(store, cluster, job)
    key = remarks_key(job)
    for _ in range(TRIES):
        data, version = store.read(key)
        try:
            old = Remarks() if data is None else Remarks.model_validate_json(data)
        except ValueError:
            why = "cannot be read, so nothing is added; look at it, and remove it from the bucket if it is damaged"
            raise SpotrunError(f"{store.url}: {key} {why}") from None
        new = change(old)
        text = new.model_dump_json().encode()
        if len(text) > max(MOST, len(data or b"")):
            raise SpotrunError(f"{store.url}: {key} is full: tags and notes of a run have at most {MOST >> 20} MiB")
        try:
            store.replace(key, text, version)
            return new
        except ConflictError:
            continue
    raise SpotrunError(f"{store.url}: {key} is being changed by others; try again")
