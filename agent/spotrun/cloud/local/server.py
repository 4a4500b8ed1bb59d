"""The daemon's HTTP interface: JSON in, JSON out, a bearer token, and an error that says why for whatever is wrong."""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from spotrun.cloud.local.layout import Config
from spotrun.cloud.local.machines import Group
from spotrun.errors import CloudError

_MAX_BODY = 1 << 20  # bytes
_MAX_NOTICE = 86400.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger("api")


def build(group: Group, unique: str, token: str) -> web.Application:
    """The interface to a group; `unique` tells a caller which cluster answers."""

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

    async def look(request: web.Request) -> web.Response:
        match request.match_info["what"]:
            case "ping":
                return web.json_response({"cluster": group.config.cluster, "unique": unique, "pid": os.getpid()})
            case "nodes":
                return web.json_response([asdict(instance) for instance in group.instances()])
            case "sizes":
                return web.json_response(group.sizes())
            case "prices":
                return web.json_response(group.prices())
            case "problems":
                return web.json_response([asdict(problem) for problem in group.problems()])
        return _error(404, f"{request.path} is not there")

    async def change(request: web.Request) -> web.Response:
        body = await _body(request)
        match request.match_info["what"]:
            case "resize":
                group.resize(_text(body, "pool"), _whole(body, "size"))
            case "remove":
                group.remove(_texts(body, "names"))
            case "recreate":
                group.recreate(_texts(body, "names"))
            case "preempt":
                await group.preempt(_text(body, "name"), _notice(body))
            case "kill":
                await group.kill(_text(body, "name"))
            case "freeze":
                await group.freeze(_text(body, "name"))
            case "thaw":
                await group.thaw(_text(body, "name"))
            case "cut":
                await group.cut(_text(body, "name"))
            case "join":
                await group.join(_text(body, "name"))
            case "stockout":
                group.stockout(_text(body, "zone"), _flag(body, "on"))
            case "configure":
                group.configure(_config(body))
            case _:
                return _error(404, f"{request.path} is not there")
        return web.json_response({})

    app = web.Application(client_max_size=_MAX_BODY, middlewares=[guard])
    app.router.add_get("/v1/{what}", look)
    app.router.add_post("/v1/{what}", change)
    return app


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


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise _refuse(f"{key}: {value!r} is not a text")
    return value


def _texts(body: dict[str, Any], key: str) -> list[str]:
    values = body.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _refuse(f"{key}: {values!r} is not a list of texts")
    return values


def _whole(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(f"{key}: {value!r} is not a whole number")
    return value


def _flag(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if not isinstance(value, bool):
        raise _refuse(f"{key}: {value!r} is neither true nor false")
    return value


def _notice(body: dict[str, Any]) -> float | None:
    value = body.get("notice")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refuse(f"notice: {value!r} is not a number of seconds")
    if not 0 <= value <= _MAX_NOTICE:
        raise _refuse(f"notice: {value!r} is not from 0 to {_MAX_NOTICE:g} seconds")
    return float(value)


def _config(body: dict[str, Any]) -> Config:
    try:
        return Config.from_json(body)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _refuse(f"not a configuration: {error}") from None
