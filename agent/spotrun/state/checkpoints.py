"""Checkpoints in the bucket: which are complete, and removing old ones. No torch: the head imports this.

A checkpoint is complete when it has a manifest, which lists every file with size and checksum. The head writes the
manifest last, once all parts are in the bucket (`head/orders.py`).
"""

from __future__ import annotations

import logging
import re

from pydantic import ValidationError

from spotrun.errors import NotFound, UnreadableError
from spotrun.store import Store, checkpoint_key, checkpoints_key
from spotrun.wire import Manifest, StateRef, problem

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"/(\d{10,})/(.+)$")


class _Newer(ValueError):
    """A manifest has a format that this version does not read."""


_GENERATION = re.compile(r"g(\d+)-")


def list_complete(store: Store, job: str, strict: bool = False) -> list[StateRef]:
    """Complete checkpoints of the job, newest first. A broken manifest is skipped with a warning.

    strict: raise `UnreadableError` if a manifest has a newer format: its checkpoint may be the newest state.
    """
    found, newer = _manifests(store, job, _folders(store, job))
    if newer and strict:
        raise UnreadableError(next(iter(newer.values())))
    refs = [StateRef(generation=manifest.generation, step=manifest.step) for manifest in found.values()]
    return sorted(refs, key=lambda ref: (ref.generation, ref.step), reverse=True)


def publish(store: Store, manifest: Manifest) -> None:
    """Write a manifest. It takes the place of an older generation's manifest for the same step.

    If a generation ends after the last step but before the end of the script, the next one makes no further step. But
    its state is the finished one. Raises `ConflictError` if another head writes the manifest at the same time.
    """
    key, data = checkpoint_key(manifest.job, manifest.step), manifest.model_dump_json().encode()
    if store.create(key, data):
        return
    found, version = store.read(key)
    if found is None or _is_older(found, manifest):
        store.replace(key, data, version)


def prune(store: Store, job: str, keep: int) -> None:
    """Remove complete checkpoints except the newest `keep`, and the files of older incomplete ones.

    Call it while no checkpoint is being uploaded. The manifest is removed first, so an interrupted removal leaves an
    incomplete checkpoint.
    """
    folders = _folders(store, job)
    manifests, newer = _manifests(store, job, folders)
    kept = sorted(manifests, key=lambda step: (manifests[step].generation, step), reverse=True)[:keep]
    if not kept:
        return
    newest = (manifests[kept[0]].generation, kept[0])
    for step, names in folders.items():
        if step in newer:
            continue
        if step in kept:
            listed = {"manifest.json", *(file.name for file in manifests[step].files)}
            doomed = sorted(name for name in names - listed if _newest_file(step, {name}) <= newest)
        elif step in manifests or _newest_file(step, names) < newest:
            doomed = sorted(names, key=lambda name: name != "manifest.json")
        else:
            continue
        store.delete([checkpoint_key(job, step, name) for name in doomed])


def read_manifest(store: Store, job: str, step: int) -> Manifest:
    """The manifest of a checkpoint. Raises `NotFound`, or `ValueError`, naming the key, if it is invalid."""
    key = checkpoint_key(job, step)
    text = store.get(key)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        kind = _Newer if _has_newer_format(error) else ValueError
        raise kind(f"{key} is not a manifest: {problem(error)}") from None
    if (manifest.job, manifest.step) != (job, step):
        raise ValueError(f"{key} is of job {manifest.job}, step {manifest.step}")
    if any(not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", file.name) for file in manifest.files):
        raise ValueError(f"{key} lists a file outside its folder")
    return manifest


def _is_older(text: bytes, manifest: Manifest) -> bool:
    """Whether this manifest is of an older generation, or is no manifest."""
    try:
        return Manifest.model_validate_json(text).generation < manifest.generation
    except ValidationError as error:
        return not _has_newer_format(error)


def _has_newer_format(error: ValidationError) -> bool:
    return any(each["loc"] == ("format",) for each in error.errors())


def _newest_file(step: int, names: set[str]) -> tuple[int, int]:
    generations = [int(match[1]) for name in names if (match := _GENERATION.match(name))]
    return (max(generations, default=0), step)


def _folders(store: Store, job: str) -> dict[int, set[str]]:
    """Names of the files in each step's folder."""
    folders: dict[int, set[str]] = {}
    for key in store.list(checkpoints_key(job)):
        if match := _FOLDER.match(key.removeprefix(checkpoints_key(job))):
            folders.setdefault(int(match[1]), set()).add(match[2])
    return folders


def _manifests(store: Store, job: str, folders: dict[int, set[str]]) -> tuple[dict[int, Manifest], dict[int, str]]:
    """By step: manifests of complete checkpoints, and error messages of manifests of a newer format."""
    found: dict[int, Manifest] = {}
    newer: dict[int, str] = {}
    for step, names in folders.items():
        if "manifest.json" not in names:
            continue
        try:
            manifest = read_manifest(store, job, step)
        except NotFound:
            continue  # removed since it was listed
        except ValueError as error:
            log.warning("checkpoint skipped: %s", error)
            if isinstance(error, _Newer):
                newer[step] = str(error)
            continue
        missing = {file.name for file in manifest.files} - names
        if missing:
            log.warning("checkpoint skipped: %s is missing", checkpoint_key(job, step, min(missing)))
            continue
        found[step] = manifest
    return found, newer
