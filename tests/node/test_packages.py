"""The packages of a job: what is installed, and what a script imports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotrun.errors import SetupError
from spotrun.node.packages import imported_modules, install
from tests.fakes.node import wheel


async def test_packages_that_are_there_are_not_installed(tmp_path: Path) -> None:
    """pip could ask nobody here, so what it would have to install fails."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env = {**own, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    assert await install(("aiohttp>=3", "pydantic"), tmp_path / "packages", env, 60.0) is None
    assert not (tmp_path / "packages").exists()
    for missing in ("aiohttp>=999", "spotrun-no-such-package"):
        with pytest.raises(SetupError, match="pip failed"):
            await install(("pydantic", missing), tmp_path / "packages", env, 60.0)
    wanted = ("pydantic", f"tiny-package @ file://{wheel(tmp_path)}")
    with pytest.raises(SetupError, match="pip failed"):  # in part there: all of it goes into one folder
        await install(wanted, tmp_path / "packages", env, 60.0)
    assert await install(wanted[1:], tmp_path / "packages", env, 60.0) is not None


def test_imports_of_a_script(tmp_path: Path) -> None:
    files = {
        "src/train.py": "from __future__ import annotations\nimport os, a.b as c\nfrom d import e\nimport helper\n"
        "from tools.inner import x\ntry:\n    import f\nexcept ImportError:\n    import g\nif True:\n    import h\n"
        "def later():\n    import not_this\nclass C:\n    import nor_this\nfrom . import nothing\nimport helper\n",
        "src/helper.py": "import i, helper\n",
        "tools/__init__.py": "import j\n",
        "tools/inner.py": "import k\n",
        "tools/other.py": "import not_that\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(imported_modules(tmp_path, "src/train.py")) == ["a.b", "d:e", "f", "g", "h", "i", "j", "k", "os"]
    (tmp_path / "src/train.py").write_text("import inner, far\n")
    (tmp_path.parent / "far.py").write_text("")
    assert imported_modules(tmp_path, "src/train.py", [str(tmp_path / "tools"), str(tmp_path.parent)]) == ["far", "k"]
    (tmp_path / "src/train.py").write_text("not python at all")
    assert imported_modules(tmp_path, "src/train.py") == []
