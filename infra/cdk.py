"""The only module that knows CDKTF; all else says `from infra import cdk`.

CDKTF has been archived since December 2025, and https://github.com/open-constructs/cdk-terrain goes on with it, as
`cdktn`: to move there is to change this file.

A provider's package imports all of its 1,500 to 2,200 modules when it is imported itself: half a minute and a
gigabyte. So an empty package stands in for it in `sys.modules`, and a stack loads those of its modules that it needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import types
from typing import Any

from spotrun.errors import SpotrunError

# jsii fails with a traceback from its innards without either of them, so look first.
if not shutil.which(os.environ.get("JSII_NODE") or "node"):
    raise SpotrunError("the stacks need Node.js 20 or newer, and there is none: install it, see https://nodejs.org")
if importlib.util.find_spec("cdktf") is None:
    raise SpotrunError("the stacks need cdktf, which is not installed: pip install -e '.[infra]'")

# Before the import, whose Node.js process inherits it: no eight lines about Node.js 20 at every run. It works.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "20")

from cdktf import (
    App,
    Fn,
    GcsBackend,
    LocalBackend,
    S3Backend,
    TerraformOutput,
    TerraformResourceLifecycle,
    TerraformStack,
    Token,
)

__all__ = [
    "App",
    "Fn",
    "GcsBackend",
    "LocalBackend",
    "S3Backend",
    "TerraformOutput",
    "TerraformResourceLifecycle",
    "TerraformStack",
    "Token",
    "aws",
    "google",
    "new_app",
]


def new_app(outdir: str) -> App:
    """An app that writes into `outdir`, whose resources have in Terraform the very names they have in a stack."""
    return App(outdir=outdir, context={"excludeStackIdFromLogicalIds": "true", "allowSepCharsInLogicalIds": "true"})


def google(name: str) -> Any:
    """The class of a resource (`compute_firewall`), of a data source (`data_google_project`) or of the `provider`.

    Nested blocks are dictionaries. An argument that the provider lacks is a TypeError when the resource is made, in
    blocks too: these classes are generated from the provider's schema. ModuleNotFoundError: there is no such resource.
    """
    return _resource("cdktf_cdktf_provider_google", name)


def aws(name: str) -> Any:
    """As `google`, for AWS: `vpc`, `data_aws_caller_identity`, `provider`."""
    return _resource("cdktf_cdktf_provider_aws", name)


def _resource(package: str, name: str) -> Any:
    if package not in sys.modules:
        sys.modules[package] = _stand_in(package)
    module = importlib.import_module(f"{package}.{name}")
    return getattr(module, min(module.__all__, key=len))  # its blocks' names all begin with the resource's own


def _stand_in(package: str) -> types.ModuleType:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise SpotrunError(f"the stacks need {package}, which is not installed: pip install -e '.[infra]'")
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    return module
