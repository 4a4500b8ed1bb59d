"""A cluster of the local cloud, for the operator's commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from scripts import control, queue
from scripts.home import home
from scripts.make_command import make_command
from scripts.ssh import Access, Unreachable
from scripts.transports import Direct
from spotrun.cloud.local import cloud
from spotrun.cloud.local.layout import Layout
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.store import Store, cluster_key


@dataclass(frozen=True)
class LocalSite:
    """A `Site` whose machines are processes on this computer."""

    cluster: ClusterSpec
    file: str

    def access(self) -> Access:
        layout = self._layout()
        if not layout.key.exists() or not layout.record.exists():
            raise Unreachable(f"cluster {self.cluster.name} is not up; `{make_command(self.file, 'up')}` brings it up")
        return Access(self.cluster.name, self._store(), Direct("spotrun", layout.key), layout.state, self.file)

    def bucket(self) -> Store:
        self._layout().make()
        return self._store()

    def plan(self) -> bool:
        up = make_command(self.file, "up")
        raise SpotrunError(
            f"{self.file}: cloud local has no plan: Terraform does not make it. Run `{up}`, or name a cluster file of"
            " another cloud, such as CLUSTER=clusters/gcp-l4.yaml"
        )

    def up(self) -> control.Status:
        store = self.bucket()
        store.put(cluster_key(self.cluster.name), self.cluster.document().encode())
        # Only when the cluster starts: a second record would make the next head hold the jobs that run now.
        cloud.up(self.cluster, home(), starting=lambda: queue.hold(store, self.cluster.name))
        return control.await_head(self.access(), self.cluster.digest, look=self._look)

    ready = up  # which does nothing if nothing is missing

    def unfinished(self) -> list[control.Unfinished]:
        try:
            return control.unfinished(self.access())
        except Unreachable:  # the bucket knows the jobs too
            if not cloud.alive(self.cluster.name, home()):
                return []
            return queue.unfinished(self._store(), self.cluster.name, make_command(self.file, "down", "FORCE=1"))

    def down(self, everything: bool) -> str:
        layout = self._layout()
        if not layout.state.is_dir():
            return self._never_up()
        cloud.down(self.cluster.name, home())
        return f"cluster {self.cluster.name} is down; its bucket stays: {self.cluster.bucket or layout.bucket}"

    def _never_up(self) -> str:
        """The text for a `down` of a cluster that was never up. Raises `SpotrunError` if it is up with another home."""
        name = self.cluster.name
        for other in cloud.homes(name):
            again = f"SPOTRUN_HOME={shlex.quote(str(other))} {make_command(self.file, 'down')}"
            raise SpotrunError(
                f"cluster {name} was never up with its state in {home()}; a cluster of that name is up with its state"
                f" in {other}: `{again}` takes it down"
            )
        return f"cluster {name} was never up with its state in {home()} (another folder: set SPOTRUN_HOME)"

    def _look(self) -> None:
        """Raises `Unreachable` if another command has taken the cluster down since this one brought it up."""
        if not self._layout().record.exists():
            again = make_command(self.file, "up")
            raise Unreachable(
                f"another command has taken cluster {self.cluster.name} down meanwhile; `{again}` tries again"
            )

    def _layout(self) -> Layout:
        return Layout.of(home(), self.cluster.name)

    def _store(self) -> Store:
        return Store(self.cluster.bucket or str(self._layout().bucket))
