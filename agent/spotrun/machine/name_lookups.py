"""Names of addresses, for which torch asks DNS (2.13): that of the other end of each connection to a TCPStore.

It asks at each connection, to write the name into a log that nobody reads. The server does so in its only thread, and
the client before it connects. If an answer is lost, all workers of a generation wait for 5 s. If DNS does not answer,
they wait for 10 s, and those of a large group one after the other.

Both functions do nothing with a C library that is not GNU's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_RETRANS, _RETRY = 0, 1  # of `struct __res_state` (resolv.h): seconds until DNS is asked again; how often it is asked
_libc = ctypes.CDLL(None)


def leave_out_dns() -> None:
    """From now on, this process finds names and addresses in /etc/hosts only."""
    with contextlib.suppress(AttributeError):
        _libc.__nss_configure_lookup(b"hosts", b"files")


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """In this context, this thread waits at most 1 s for the answer of a DNS server."""
    try:
        find = _libc.__res_state
        find.restype = ctypes.POINTER(ctypes.c_int)
        _libc.__res_init()
        state = find()
    except AttributeError:
        yield
        return
    before = state[_RETRANS], state[_RETRY]
    state[_RETRANS], state[_RETRY] = 1, 1
    try:
        yield
    finally:
        state[_RETRANS], state[_RETRY] = before
