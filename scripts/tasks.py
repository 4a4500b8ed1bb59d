"""What all of the operator's tasks have in common: errors are one message and an exit status."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from invoke.exceptions import Exit
from invoke.tasks import task

from scripts import console, ctrl_c, inputs
from scripts import ssh as remote
from spotrun.errors import CloudError, SpotrunError, StoreError


def command(function: Callable[..., int | None]) -> Any:
    """A task whose errors are one message on stderr and an exit status, never a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> None:
        ctrl_c.raise_again()
        complain = functools.partial(_complain, bool(options.get("json")))
        try:
            if function.__name__ in os.environ.get("SPOTRUN_TARGETS", "").split():
                inputs.variables(os.environ)
            code = function(*args, **inputs.typed(options)) or 0
        except (remote.Unreachable, CloudError, StoreError) as error:
            code = complain(str(error), 3)
        except SpotrunError as error:
            code = complain(str(error), 2)
        except BrokenPipeError:  # `make logs | head`
            sys.stderr.close()
            code = 0
        except OSError as error:  # an error of this machine: a folder without the right to write, a full disk
            where = f"{error.filename}: " if error.filename else ""
            code = complain(f"{where}{error.strerror or error}", 2)
        except KeyboardInterrupt:
            code = 130
        if code:
            raise Exit(code=code)

    return task(wrapped, auto_shortflags=False)


def _complain(json: bool, error: str, code: int) -> int:
    """Print an error on stderr, and for programs on stdout too. Returns the exit status."""
    console.warn(f"spotrun: {error}")
    if json:
        console.answer({"error": error})
    return code
