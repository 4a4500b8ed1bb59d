"""Which requests does the dashboard answer? `refusal(asked, token)` is pure, and its tests are a table.

Other users of this computer and pages of other sites can reach the dashboard's port. Only a request with the secret
token of this dashboard is answered. A page of another site cannot read the token. But that page could make the browser
send the cookie with the token, or make its own host name lead to this computer (DNS rebinding). So `Host`, `Origin` and
`Sec-Fetch-Site` are checked too (https://developer.mozilla.org/docs/Web/HTTP/Reference/Headers/Sec-Fetch-Site).
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

# Only these host names: an attacker's host name could lead to this computer. Any port: an operator may forward a port.
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Asked:
    """A request, as far as the decision needs it. A header that is missing is empty."""

    method: str  # GET, POST …
    host: str = ""  # Host
    origin: str = ""  # Origin
    site: str = ""  # Sec-Fetch-Site
    mode: str = ""  # Sec-Fetch-Mode
    kind: str = ""  # Content-Type, without parameters
    token: str = ""  # from the URL, the cookie or `Authorization`


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered."""

    status: int  # of HTTP
    reason: str  # one line


_OTHER_SITE = "a page of another site has sent this request: open the address that `make dashboard` has printed"


def refusal(asked: Asked, token: str) -> Refusal | None:
    """None if the request is answered. token: the dashboard's own."""
    if not _HOST.fullmatch(asked.host):
        return Refusal(403, "this host name is not the dashboard's: use the address that `make dashboard` has printed")
    if asked.method not in ("GET", "HEAD", "POST"):
        return Refusal(405, f"{asked.method[:10]} is not allowed: use GET or POST")
    if asked.origin and asked.origin != f"http://{asked.host}":
        return Refusal(403, _OTHER_SITE)
    # A link on another site may lead here, but only with the token in it.
    if asked.site not in ("", "none", "same-origin") and not (asked.method == "GET" and asked.mode == "navigate"):
        return Refusal(403, _OTHER_SITE)
    if not hmac.compare_digest(asked.token.encode(errors="replace"), token.encode()):
        return Refusal(403, "the token is missing or old: open the address that `make dashboard` has printed")
    if asked.method == "POST" and asked.kind != "application/json":
        # A form of another site cannot send this type.
        return Refusal(415, "the body must be JSON, with the header `Content-Type: application/json`")
    return None
