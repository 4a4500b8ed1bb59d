"""The daemon's HTTP interface: JSON in, JSON out, a bearer token, and errors that say what is wrong."""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import web

from spotrun.cloud.local.layout import Change, Config
from spotrun.cloud.local.pools import LocalPools
from spotrun.errors import CloudError

_MAX_BODY = 1 << 20  # bytes
_MAX_NOTICE = 86400.0
_NUMBERS = ("price", "obtainability", "uptime", "preemptions")
T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("api")


def build(pools: LocalPools, unique: str, token: str) -> web.Application:
    """The HTTP interface to `pools`. `unique` tells a caller which cluster answers."""

    async def look(request: web.Request) -> web.Response:
        return web.json_response(_look(pools, unique, request))

    async def change(request: web.Request) -> web.Response:
        await _change(pools, request.match_info["what"], await _body(request), request.path)
        return web.json_response({})

    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_guard(token)])
    app.router.add_get("/v1/{what}", look)
    app.router.add_post("/v1/{what}", change)
    return app


def _guard(token: str) -> Any:
    """A middleware that refuses callers without the token, and answers every error in JSON."""

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return _error(401, "wrong or missing token")
        try:
            return await handler(request)
        except CloudError as error:
            return _error(409, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except Exception:
            log.exception("%s %s", request.method, request.path)
            return _error(500, "the local cloud failed; see its daemon.log")

    return guard


def _look(pools: LocalPools, unique: str, request: web.Request) -> object:
    match request.match_info["what"]:
        case "ping":
            return {"cluster": pools.config.cluster, "unique": unique, "pid": os.getpid()}
        case "nodes":
            return [asdict(instance) for instance in pools.instances()]
        case "ended":
            return [asdict(each) for each in pools.ledger.ended()]
        case "sizes":
            return pools.sizes()
        case "prices":
            return pools.prices()
        case "advice":
            return {pool: asdict(advice) for pool, advice in pools.advice().items()}
        case "problems":
            return [asdict(problem) for problem in pools.problems()]
    raise _unknown(request.path)


async def _change(pools: LocalPools, what: str, body: dict[str, Any], path: str) -> None:
    match what:
        case "resize":
            pools.resize(_text(body, "pool"), _value(body, "size", int, "is not a whole number"))
        case "remove":
            pools.remove(_texts(body, "names"))
        case "recreate":
            pools.recreate(_texts(body, "names"))
        case "preempt":
            await pools.preempt(_text(body, "name"), _notice(body))
        case "kill" | "freeze" | "thaw" | "cut" | "join":
            await getattr(pools, what)(_text(body, "name"))
        case "market":
            pools.change(_market_change(body))
        case "configure":
            pools.configure(_config(body))
        case _:
            raise _unknown(path)


def _unknown(path: str) -> web.HTTPException:
    return web.HTTPNotFound(reason=f"{path} does not exist")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _refuse(message: str) -> web.HTTPException:
    return web.HTTPBadRequest(reason=message.replace("\n", " ").replace("\r", " ")[:500])


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise _refuse("the body is not JSON") from None
    if not isinstance(body, dict):
        raise _refuse("the body is not a JSON object")
    return body


def _value(body: dict[str, Any], key: str, kind: type[T], problem: str) -> T:
    value = body.get(key)
    if type(value) is not kind:  # a bool is an int, too
        raise _refuse(f"{key}: {value!r} {problem}")
    return value


def _text(body: dict[str, Any], key: str) -> str:
    return _value(body, key, str, "is not a text")


def _texts(body: dict[str, Any], key: str) -> list[str]:
    values: list[Any] = _value(body, key, list, "is not a list of texts")
    if not all(isinstance(value, str) for value in values):
        raise _refuse(f"{key}: {values!r} is not a list of texts")
    return values


def _number(body: dict[str, Any], key: str, kind: str) -> float:
    """kind: what the number is, for the message."""
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _refuse(f"{key}: {value!r} is not {kind}")
    return float(value)


def _notice(body: dict[str, Any]) -> float | None:
    if body.get("notice") is None:
        return None
    value = _number(body, "notice", "a number of seconds")
    if value > _MAX_NOTICE:
        raise _refuse(f"notice: {value!r} is more than {_MAX_NOTICE:g} seconds")
    return value


def _market_change(body: dict[str, Any]) -> Change:
    """A change of the market, from its keys that are not null."""
    found: dict[str, Any] = {"where": _text(body, "where"), "notice": _notice(body)}
    for key in (name for name, value in body.items() if value is not None and name not in found):
        if key == "capacity":
            found[key] = _value(body, key, int, "is not a whole number")
        elif key == "dry":
            found[key] = _value(body, key, bool, "is neither true nor false")
        elif key in _NUMBERS:
            found[key] = _number(body, key, "a number")
        else:
            raise _refuse(f"{key}: unknown; allowed: where, notice, capacity, dry, {', '.join(_NUMBERS)}")
    return Change(**found)


def _config(body: dict[str, Any]) -> Config:
    try:
        return Config.from_json(body)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _refuse(f"not a configuration: {error}") from None
