"""A dashboard on a bucket, with a real head behind it: what `make dashboard` runs, without SSH."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, CookieJar

from spotrun.dashboard.live import Live
from spotrun.dashboard.records import Records
from spotrun.dashboard.server import Dashboard, serving
from spotrun.store import Store
from tests.head.world import World, asked
from tests.helpers import await_for

TOKEN = "the-token-of-this-dashboard"


class WorldHead:
    """The head of a `World`, asked as `spotrun ctl` asks it. Its turns are made meanwhile."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[str] = []

    async def change(self, verb: str, job: str, to: int | None) -> dict[str, Any]:
        self.asked.append(verb)
        more = {} if to is None else {"to": to}
        asking = asyncio.create_task(asked(self.world, self.world.head, verb, job, **more))

        async def answered() -> bool:
            await self.world.turn()
            return asking.done()

        await await_for(answered, what="the head's answer")
        return await asking

    async def metrics(self) -> str:
        return ""


class Page:
    """What a browser has: the address, and a session that keeps cookies."""

    def __init__(self, port: int, session: ClientSession, live: Live, head: WorldHead) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port, self.session, self.live, self.head = port, session, live, head

    async def enter(self) -> None:
        """Open the address with the token."""
        async with self.session.get(f"{self.url}/?token={TOKEN}") as response:
            assert response.status == 200
            self.url = str(response.url).rstrip("/")

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            kind = response.content_type
            return response.status, await (response.json() if kind == "application/json" else response.text())

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            kind = response.content_type
            return response.status, await (response.json() if kind == "application/json" else response.text())


@asynccontextmanager
async def opened(world: World, store: Store | None = None) -> AsyncIterator[Page]:
    """A dashboard of the world's cluster. The page has not been opened yet. store: another client of its bucket."""
    live, head = Live(), WorldHead(world)
    dashboard = Dashboard(Records(store or world.store, world.cluster.name), live, head, TOKEN)
    async with serving(dashboard) as port, ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        yield Page(port, session, live, head)
