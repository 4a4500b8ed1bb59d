"""The only module that imports CDKTF. All others use `from infra import cdk`.

CDKTF has been archived since December 2025. Its successor is `cdktn`, https://github.com/open-constructs/cdk-terrain: a
move there changes only this file.

A provider's package imports all its 1,500 to 2,200 modules at once, which takes half a minute and a gigabyte. So an
empty package replaces it in `sys.modules`, and a stack loads only the modules that it needs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from spotrun.errors import SpotrunError

# If Node.js or cdktf is missing, jsii fails with an internal traceback. So check for both first.
if not shutil.which(os.environ.get("JSII_NODE") or "node"):
    raise SpotrunError("the stacks need Node.js 20 or newer, and there is none: install it, see https://nodejs.org")
if importlib.util.find_spec("cdktf") is None:
    raise SpotrunError("the stacks need cdktf, which is not installed: pip install -e '.[infra]'")

# The import starts a Node.js process, which inherits this variable. Without it, each run prints eight lines about
# Node.js 20.
os.environ.setdefault("JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION", "20")

from cdktf import App as App
from cdktf import GcsBackend as GcsBackend
from cdktf import LocalBackend as LocalBackend
from cdktf import S3Backend as S3Backend
from cdktf import TerraformStack as TerraformStack
from cdktf import Token as Token

Resource = Callable[..., Any]


def new_app(outdir: str) -> App:
    """An app that writes into `outdir`. In Terraform, a resource has the name that it has in its stack."""
    return App(outdir=outdir, context={"excludeStackIdFromLogicalIds": "true", "allowSepCharsInLogicalIds": "true"})


def google(name: str) -> Resource:
    """Makes a resource (`compute_firewall`), a data source (`data_google_project`) or the `provider`, in a stack.

    Call it with the stack, an id that is unique in the stack, and the arguments. Nested blocks are dictionaries. An
    argument that the provider does not know raises TypeError, also in blocks. ModuleNotFoundError: no such resource.
    """
    return functools.partial(_make, "cdktf_cdktf_provider_google", name)


def aws(name: str) -> Resource:
    """As `google`, for AWS: `vpc`, `data_aws_caller_identity`, `provider`."""
    return functools.partial(_make, "cdktf_cdktf_provider_aws", name)


def _make(package: str, name: str, stack: TerraformStack, id: str, /, **arguments: Any) -> Any:
    if package not in sys.modules:
        sys.modules[package] = _stand_in(package)
    module = importlib.import_module(f"{package}.{name}")
    resource = getattr(module, min(module.__all__, key=len))  # the names of its blocks begin with the resource's name
    if name != "provider":
        return resource(stack, id, **_typed(resource, arguments))
    # CDKTF turns every - in the keys of a provider's maps into _, also in default labels and tags.
    nested = {key: value for key, value in arguments.items() if isinstance(value, dict | list)}
    provider = resource(stack, id, **{key: value for key, value in arguments.items() if key not in nested})
    for key, value in nested.items():
        provider.add_override(key, value)
    return provider


def _typed(owner: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with each block as an object of the block's class.

    The generated classes do that themselves, but not inside lists, where they lose keys that are not in camelCase.
    """
    hints = typing.get_type_hints(owner.__init__)  # type: ignore[misc]  # a class, not an instance
    return {key: _block(value, hints.get(key)) for key, value in arguments.items()}


def _block(value: Any, hint: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_block(item, hint) for item in value]
    kind = _block_class(hint) if isinstance(value, dict) else None
    return value if kind is None else kind(**_typed(kind, value))


def _block_class(hint: Any) -> type | None:
    """The class among the alternatives of a type hint; None for plain dictionaries, such as labels."""
    if isinstance(hint, type) and hasattr(hint, "__jsii_type__") and not getattr(hint, "_is_protocol", False):
        return hint
    return next(filter(None, map(_block_class, typing.get_args(hint))), None)


def _stand_in(package: str) -> types.ModuleType:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise SpotrunError(f"the stacks need {package}, which is not installed: pip install -e '.[infra]'")
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    return module
