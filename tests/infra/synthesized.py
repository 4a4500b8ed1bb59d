"""The stacks of a cluster file as tests read them. Synthesis is slow, so each is done once a run."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spotrun.spec import ClusterSpec, load_cluster
from tests.helpers import once

ROOT = Path(__file__).parents[2]
CLOUD_FILES = sorted(
    path for path in (ROOT / "clusters").glob("*.yaml") if yaml.safe_load(path.read_text())["cloud"] != "local"
)
Block = Mapping[str, Any]


@dataclass(frozen=True)
class Stack:
    """What Terraform reads of one stack, without CDKTF's own notes in it."""

    document: Block

    def all(self, type: str) -> dict[str, Any]:
        """The resources of a type, by name."""
        return dict(self.document.get("resource", {}).get(type, {}))

    def one(self, type: str) -> Any:
        (resource,) = self.all(type).values()
        return resource


@dataclass(frozen=True)
class Cluster:
    spec: ClusterSpec
    base: Stack
    pools: Stack


def synthesized(file: Path) -> Cluster:
    return _synthesized(load_cluster(file).model_dump_json())


def described(text: str, folder: Path) -> ClusterSpec:
    """The cluster that this text of a cluster file describes."""
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


@functools.cache
def _synthesized(spec: str) -> Cluster:
    base, pools = (Stack(document) for document in json.loads(once(spec, lambda: _synthesize(spec))))
    return Cluster(ClusterSpec.model_validate_json(spec), base, pools)


def _synthesize(spec: str) -> str:
    """Both stacks, as one JSON text."""
    from infra.app import synthesize

    cluster = ClusterSpec.model_validate_json(spec)
    with tempfile.TemporaryDirectory(prefix="spotrun-stacks-") as name:
        folder = Path(name)
        synthesize(cluster, folder, folder / "home")
        files = [folder / "stacks" / f"{cluster.name}-{stack}" / "cdk.tf.json" for stack in ("base", "pools")]
        return json.dumps([_plain(json.loads(file.read_text())) for file in files])


def of(spec: ClusterSpec) -> Cluster:
    return _synthesized(spec.model_dump_json())


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in a document and the keys that lead to it, indices left out."""
    yield path, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if key != "//"}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
