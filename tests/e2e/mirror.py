"""Machines for a cloud that only pretends to have some: for each that it lists, processes of the local cloud.

A machine of the mirror has the cloud's own name for it, and what the cloud gives it to read about itself, at an address
of this computer. It is what a machine of the local cloud is, but for its coming and going, which the cloud decides.
With another program than this module's, machines are something else: tests.image.containers starts them of an image.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spotrun.cloud.base import Market
from spotrun.cloud.local import metadata, pools, procs
from spotrun.cloud.local.daemon import claim_subnet
from spotrun.cloud.local.layout import Config, Layout, Pool, base_environment, remove_tree, write_json
from spotrun.cloud.local.machine import Machine
from spotrun.machine.processes import adopt_orphans
from spotrun.spec.names import HEAD
from tests.fakes.moto_server import ACCOUNT

LOOK = 0.1  # seconds between two looks at the cloud's list
PROCESSES = ("tests.e2e.mirror",)
_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Listed:
    """A machine that the cloud says it has. end: epoch seconds, once the cloud has given notice."""

    name: str
    id: str
    pool: str
    zone: str
    machine: str
    market: Market
    attributes: Mapping[str, str]
    end: float | None = None


class Mirror:
    """Follows the cloud's list from now to `close`; the machines are children of a process of its own.

    folder: for what the machines write. flavour: of their metadata, gce or ec2. key: the operator's, which they
    accept. environment: for them, besides what every machine of the local cloud has. program: a module that follows
    the list, with words of its own. assign: tells the cloud the address of a machine, which it should list.
    """

    def __init__(
        self,
        folder: Path,
        flavour: str,
        region: str,
        key: Path,
        environment: Mapping[str, str],
        listing: Callable[[], list[Listed]],
        assign: Callable[[str, str], None],
        program: Sequence[str] = PROCESSES,
    ) -> None:
        self._layout = Layout(folder.resolve())
        self.table = self._layout.state / "machines.json"  # name: address, for the program that plays the way in
        self._layout.state.mkdir(parents=True)
        shutil.copy(f"{key}.pub", f"{self._layout.key}.pub")
        self._listing, self._assign = listing, assign
        self._assigned: dict[str, str] = {}
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        with (folder / "mirror.log").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, str(folder), flavour, region, json.dumps(dict(environment))],
                cwd=_ROOT,
                env=base_environment(self._layout.mark("@mirror")),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
            )
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every machine; nothing of them is left when this returns. Raises what telling has met."""
        self._ended.set()
        self._thread.join(30)
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        procs.kill(lambda: procs.of_cluster(self._layout.unique))
        remove_tree(self._layout.tmpfs)
        if self._failure is not None:
            raise self._failure
        assert code == 0, (self._layout.state / "mirror.log").read_text()

    def _tell(self) -> None:
        assert self._process.stdin is not None
        try:
            while not self._ended.wait(LOOK):
                listed = [asdict(each) for each in self._listing()]
                self._process.stdin.write(json.dumps(listed) + "\n")
                self._process.stdin.flush()
                self._tell_addresses({each["name"]: each["id"] for each in listed})
        except BaseException as error:
            self._failure = error

    def _tell_addresses(self, ids: Mapping[str, str]) -> None:
        """Have the cloud list the addresses that its machines really have here."""
        path = self._layout.state / "addresses.json"
        for name, address in json.loads(path.read_text()).items() if path.exists() else ():
            if name in ids and self._assigned.get(ids[name]) != address:
                with contextlib.suppress(LookupError):  # it has gone meanwhile
                    self._assign(name, address)
                    self._assigned[ids[name]] = address


class Group(pools.LocalPools):
    """The local cloud's machines, as another cloud lists them."""

    def __init__(self, config: Config, layout: Layout, subnet: str, environment: Mapping[str, str]) -> None:
        super().__init__(config, layout, subnet, token="")
        self._extra = dict(environment)

    async def open(self) -> None:
        await self._metadata.setup()

    def show(self, listed: list[Listed]) -> None:
        """Begin what is new, end what is not listed any more, pass a notice on."""
        ids = {each.id for each in listed}
        for node in list(self.machines.values()):
            if node.id not in ids:
                self._end(node)
            if node.gone.is_set():
                del self.machines[node.name]
        for each in listed:
            known = self.machines.get(each.name)
            if known is None:
                self._create(each)
            elif each.end is not None and known.id == each.id and known.due == float("inf"):
                known.due, known.state = each.end, "stopping"
                self._give_notice(known)

    def door(self, node: Machine) -> str:
        """The address of this computer at which a machine's SSH server answers."""
        return node.address

    def _give_notice(self, node: Machine) -> None:
        node.subject.change(terminate_at=node.due, rebalance_at=time.time())

    def _create(self, each: Listed) -> None:
        address = self._address(each.name)
        account = "my-project" if self.config.metadata == "gce" else ACCOUNT
        facts = metadata.Facts(
            each.name, each.id, each.zone, self.config.region, each.machine, address, each.market, each.attributes
        )
        facts = replace(facts, account=account)
        pool = Pool(each.pool, each.zone, each.machine, each.market, 1)
        self._start(Machine(each.name, 0, pool, address, each.id, time.time(), metadata.Subject(facts)))

    def _env(self, machine: Machine, values: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in values.items() if name != "SPOTRUN_NODE"} | self._extra


Make = Callable[[Config, Layout, str, Mapping[str, str]], Group]


async def follow(make: Make, folder: Path, flavour: str, region: str, environment: dict[str, str]) -> None:
    """Be the mirror: lists come in on standard input, one a line, until it ends."""
    layout = Layout(folder)
    subnet, claim = claim_subnet(layout.unique)
    layout.tmpfs.mkdir(mode=0o700, exist_ok=True)
    head = Pool(HEAD, "", "", "on-demand", 1)
    config = Config("mirror", region, "", head, (), metadata="gce" if flavour == "gce" else "ec2")
    group = make(config, layout, subnet, environment)
    await group.open()
    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        group.show([Listed(**each) for each in json.loads(line)])
        nodes = group.machines.values()
        write_json(layout.state / "machines.json", {node.name: group.door(node) for node in nodes})
        write_json(layout.state / "addresses.json", {node.name: node.address for node in nodes})
    await group.close()
    claim.close()


def main(argv: list[str], make: Make = Group) -> None:
    adopt_orphans()
    asyncio.run(follow(make, Path(argv[0]), argv[1], argv[2], json.loads(argv[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
