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
from scripts.make_command import LOCAL, here
from spotrun.errors import CloudError, SpotrunError, StoreError


def command(function: Callable[..., int | None]) -> Any:
    """A task whose errors are one message on stderr and an exit status, never a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> None:
        ctrl_c.raise_again()
        json, file = bool(options.get("json")), str(options.get("cluster", LOCAL)).removeprefix(" ")
        complain = functools.partial(_complain, json, LOCAL)
        try:
            if function.__name__ in os.environ.get("SPOTRUN_TARGETS", "").split():
                inputs.variables(os.environ)  # its errors name the command as it was typed
            complain = functools.partial(_complain, json, file)
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


def _complain(json: bool, file: str, error: str, code: int) -> int:
    """Print an error on stderr, and for programs on stdout too. Returns the exit status.

    file: the cluster file, for the commands that the error names.
    """
    error = here(error, file)
    console.warn(f"spotrun: {error}")
    if json:
        console.answer({"error": error})
    return code
