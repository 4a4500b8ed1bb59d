"""Which requests the dashboard answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotrun.dashboard.guard import Asked, refusal

GOOD = Asked(method="GET", host="127.0.0.1:8000", token="secret")
POST = replace(GOOD, method="POST", kind="application/json", origin="http://127.0.0.1:8000", site="same-origin")

ANSWERED: dict[str, Asked] = {
    "a page that the operator opens": replace(GOOD, site="none", mode="navigate"),
    "what the page loads": replace(GOOD, site="same-origin", mode="cors"),
    "a browser of this computer that says localhost": replace(GOOD, host="localhost:8000"),
    "a port that the operator forwards": replace(GOOD, host="localhost:9"),
    "a program with the token": GOOD,
    "a link with the token on another page, such as a terminal in a browser": replace(
        GOOD, site="cross-site", mode="navigate"
    ),
    "a change that the page asks for": POST,
}
REFUSED: dict[str, tuple[Asked, int]] = {
    "no token": (replace(GOOD, token=""), 403),
    "another token": (replace(GOOD, token="secreT"), 403),
    "a token that is not ASCII": (replace(GOOD, token="sécret"), 403),
    "a token that is not even text": (replace(GOOD, token="\udcff"), 403),  # as aiohttp gives a header's byte 255
    "a name of another domain that leads here": (replace(GOOD, host="evil.example:8000"), 403),
    "a name that begins like ours": (replace(GOOD, host="127.0.0.1.evil.example"), 403),
    "no host name": (replace(GOOD, host=""), 403),
    "a fetch of another site's page": (replace(GOOD, origin="http://evil.example", site="cross-site"), 403),
    "an image on another site's page": (replace(GOOD, site="cross-site", mode="no-cors"), 403),
    "a page on another port of this computer": (replace(GOOD, origin="http://127.0.0.1:1", site="same-site"), 403),
    "another port in an old browser, which says only the origin": (replace(GOOD, origin="http://127.0.0.1:1"), 403),
    "a page in a frame without an origin": (replace(GOOD, origin="null"), 403),
    "a form of another site": (replace(POST, origin="http://evil.example", site="cross-site"), 403),
    "a form that the browser opens as a page": (replace(POST, site="cross-site", mode="navigate"), 403),
    "a form of this site": (replace(POST, kind="text/plain"), 415),
    "another method": (replace(GOOD, method="PUT"), 405),
}


@pytest.mark.parametrize("asked", ANSWERED.values(), ids=ANSWERED)
def test_is_answered(asked: Asked) -> None:
    assert refusal(asked, "secret") is None


@pytest.mark.parametrize(("asked", "status"), REFUSED.values(), ids=REFUSED)
def test_is_refused(asked: Asked, status: int) -> None:
    found: Any = refusal(asked, "secret")
    assert found.status == status
    assert "secret" not in found.reason
