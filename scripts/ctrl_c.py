"""Lets Ctrl-C end a command without a traceback while the modules of the command load."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended, as in shells


def exit_quietly() -> None:
    """Until `raise_again`, Ctrl-C ends this process at once. No effect where SIGINT is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_again() -> None:
    """From now on, Ctrl-C raises `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    os._exit(INTERRUPTED)
