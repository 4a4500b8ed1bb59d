"""The design's arrows: who may import whom. Read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = {
    "backoff",
    "document",
    "folders",
    "errors",
    "text",
    "wire",
    "changes",
    "spec",
    "store",
    "state",
    "machine",
    "readings",
}

# A part of the package, and the parts that it may import (besides itself).
ARROWS: dict[str, set[str]] = {
    "__init__": {"train"},
    "backoff": set(),
    "errors": set(),
    "locks": set(),
    "text": set(),
    "document": set(),
    "folders": {"document"},
    "readings": {"document"},
    "wire": {"document", "folders", "readings"},
    "changes": {"document", "errors", "wire"},
    "spec": {"errors"},
    "store": {"backoff", "errors", "locks"},
    "state": {"errors", "locks", "store", "wire"},
    "history": {"document", "errors", "state", "store", "wire"},
    "machine": {"backoff", "errors", "spec", "store", "wire"},
    "cloud": {"backoff", "errors", "locks", "spec", "machine"},
    "head": BASE | {"cloud", "history"},
    "node": BASE | {"history", "train"},
    "train": BASE - {"spec"},
    "dashboard": BASE | {"head", "history"},
    "simulate": BASE | {"head"},
    "cli": BASE | {"cloud", "head", "node"},
}
# A package, and the only places that may import it, wherever in the file the import is.
SDKS = {
    "torch": (
        "agent/spotrun/train/",
        "agent/spotrun/node/launch/server.py",
        "agent/spotrun/node/launch/worker.py",
        "agent/spotrun/node/health/gpu_check.py",
        "scripts/acceptance/probes/",
    ),
    "obstore": ("agent/spotrun/store/client.py",),
    "asyncssh": ("agent/spotrun/cloud/local/",),
    "google": ("agent/spotrun/cloud/gcp", "agent/spotrun/store/client.py"),
    "boto3": ("agent/spotrun/cloud/aws",),
    "botocore": ("agent/spotrun/cloud/aws",),
    "fabric": ("scripts/ssh.py", "scripts/fab.py"),
    "paramiko": ("scripts/ssh.py", "scripts/control.py"),
    "prometheus_client": ("agent/spotrun/head/exposition.py",),
    "psutil": ("agent/spotrun/node/telemetry/sensors.py",),
    "pynvml": ("agent/spotrun/node/telemetry/gpus.py",),
    "rich": ("scripts/display.py", "scripts/job_table.py"),
    "pathspec": ("scripts/bundle.py",),
    "cdktf": ("infra/cdk.py",),
    "constructs": ("infra/cdk.py",),
    "cdktf_cdktf_provider_aws": ("infra/cdk.py",),
    "cdktf_cdktf_provider_google": ("infra/cdk.py",),
}
SOURCES = sorted(
    [ROOT / "fabfile.py", *(path for top in ("agent", "infra", "scripts") for path in ROOT.glob(f"{top}/**/*.py"))]
)
SIZED = sorted([*SOURCES, *(path for top in ("bench", "images") for path in ROOT.glob(f"{top}/**/*.py"))])


def imports(path: Path) -> Iterator[str]:
    """The modules a file names, as `a.b` or, for `from a import b`, as `a.b` too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    return path.relative_to(ROOT / "agent/spotrun").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_arrows(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module in imports(path):
        words = module.split(".")
        places = SDKS.get(words[0])
        assert places is None or name.startswith(places), f"{name} imports {module}: only {places} may"
        if name.startswith("agent/"):
            assert words[0] not in ("scripts", "fabfile", "infra", "bench"), (
                f"{name} imports {module}: arrows point down"
            )
            target = words[1] if words[0] == "spotrun" and len(words) > 1 else None
            if target in ARROWS and target not in ("__init__", part(path)):
                assert target in ARROWS[part(path)], f"{name} imports {module}: {part(path)} may not"
        if name.startswith("infra/"):
            assert words[0] not in ("scripts", "fabfile", "bench"), f"{name} imports {module}: arrows point down"
            allowed = module.startswith(("spotrun.spec", "spotrun.errors", "spotrun.store.keys"))
            assert words[0] != "spotrun" or allowed, f"{name} imports {module}: only spec and the bucket's keys may be"


def test_no_test_module_is_imported() -> None:
    """Helpers that several test modules need are in modules of their own."""
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in ROOT.glob("tests/**/*.py")
        for module in imports(path)
        if module.startswith("tests.") and any(word.startswith("test_") for word in module.split(".")[1:3])
    ]
    assert found == []


def test_every_part_has_its_arrows() -> None:
    assert {part(path) for path in ROOT.glob("agent/spotrun/**/*.py")} <= set(ARROWS)


@pytest.mark.parametrize(
    "module", ["spotrun.head.server.serve", "spotrun.node.boot", "spotrun.cli", "spotrun.cloud.local.daemon"]
)
def test_the_small_processes_stay_free_of_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_stay_small() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SIZED}
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def test_functions_stay_small() -> None:
    sizes = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in [*SIZED, *ROOT.glob("tests/**/*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > 50} == {}
