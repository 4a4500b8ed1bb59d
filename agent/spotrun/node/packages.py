"""The packages of a job: installing its requirements, and finding the modules that its script imports."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from spotrun.errors import HungError, InstallError, RequirementsError, SetupError
from spotrun.machine.processes import descendants, kill
from spotrun.node.bundle import move

REAP = 10.0  # seconds for a killed pip to be gone
# pip takes the launcher's own versions of these: `pip install --target` would install other versions beside them.
PINNED = ("torch", "numpy", "safetensors")
# pip says one of these if no try can succeed. It says the first one too if the index does not answer, or answers with
# an error: then it knows no version at all. That is also so if there is no such package.
WRONG = ("No matching distribution found", "ResolutionImpossible", "Invalid requirement")
UNREACHABLE = ("Retrying (", "Could not fetch URL", "(from versions: none)")


async def install(requirements: tuple[str, ...], folder: Path, env: dict[str, str], limit: float) -> Path | None:
    """The folder with these packages, installed once; None: the agent's environment has them.

    limit: seconds after which a pip that has not ended is killed. Raises `SetupError`: `RequirementsError` if the
    requirements are wrong, `HungError` after the limit, `InstallError` for another error that is not the index's.
    """
    if not requirements:
        return None
    target = folder / hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    if await _are_installed(requirements, env, limit):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder) as scratch:
        pins = Path(scratch, "constraints.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in _installed_versions(PINNED)))
        content = Path(scratch, "content")
        args = ("install", "--target", str(content), "-c", str(pins))
        code, output = await _pip(*args, requirements=requirements, env=env, limit=limit)
        if code != 0:
            said = " ".join(output.strip().splitlines()[-5:])
            wrong = RequirementsError if any(each in output for each in WRONG) else InstallError
            kind = SetupError if any(each in output for each in UNREACHABLE) else wrong
            raise kind(f"requirements {', '.join(requirements)}: pip failed: {said}")
        move(content, target)
    return target


async def _are_installed(requirements: tuple[str, ...], env: dict[str, str], limit: float) -> bool:
    """Whether the environment has all of them. If an image has a job's packages, no node downloads them."""
    args = ("install", "--dry-run", "--no-index", "--report", "-")
    code, output = await _pip(*args, requirements=requirements, env=env, limit=limit)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return code == 0 and json.loads(output)["install"] == []
    return False


async def _pip(
    command: str, *args: str, requirements: tuple[str, ...], env: dict[str, str], limit: float
) -> tuple[int, str]:
    """Run pip; return its exit status and its output. Raises `HungError`."""
    # The kernel kills pip when the agent ends.
    wrapper = (
        f"from spotrun.machine.processes import die_with_parent; die_with_parent({os.getpid()});"
        "import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", wrapper, command, "--no-input", "--disable-pip-version-check", "--quiet", *args,
        *requirements, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, env=env, process_group=0,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit):
            output, _ = await process.communicate()
    except TimeoutError:
        raise HungError(
            f"requirements {', '.join(requirements)}: pip has not ended after {limit:g} s: killed. "
            "If it needs longer, set start_timeout in the job file"
        ) from None
    finally:
        if process.returncode is None:
            kill(descendants(process.pid))  # a package's build may have made process groups of its own
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)
            # A process of the build that cannot be found or killed may hold the pipe.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REAP):
                    await process.wait()
    return process.returncode or 0, output.decode(errors="replace")


def imported_modules(root: Path, script: str, further: Iterable[str] = ()) -> list[str]:
    """What the script imports at top level from outside the bundle, directly or through the bundle's modules.

    Returns names of modules, and `module:name` for `from module import name`: some packages load what has that name
    only when they are asked for it. further: more folders with modules. Those within the bundle have its modules.
    """
    places = [(root / script).parent, root, *(each for each in map(Path, further) if each.is_relative_to(root))]
    found: dict[str, None] = {}
    seen: set[Path] = set()
    todo = [root / script]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _top_level_imports(path):
            own = _own_module(name.partition(":")[0], places)
            if own is None:
                found.setdefault(name)
            else:
                todo += own + (_own_module(name.replace(":", "."), places) or [])
    return list(found)


def _installed_versions(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _top_level_imports(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the worker reports it, with a traceback
    # Imports inside try, if and with count; imports inside functions and classes do not.
    todo: list[ast.AST] = [*tree.body]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            yield from (node.module if each.name == "*" else f"{node.module}:{each.name}" for each in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]


def _own_module(name: str, places: list[Path]) -> list[Path] | None:
    """The module's files in the bundle; None if the module is not the bundle's."""
    first, *rest = name.split(".")
    for place in places:
        if (place / f"{first}.py").is_file():
            return [place / f"{first}.py"]
        if (place / first).is_dir():
            inner = place.joinpath(first, *rest)
            return [
                path
                for path in (place / first / "__init__.py", inner.with_suffix(".py"), inner / "__init__.py")
                if path.is_file()
            ]
    return None
