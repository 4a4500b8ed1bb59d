"""`make image-trial`: try provisioning steps 10 to 42 in a container of plain Debian 12, before a paid build.

    python -m images.trial CLUSTER

It takes Docker or Podman, and the internet. It downloads what a build downloads (2 GB), compiles the GPU's and EFA's
modules, and keeps nothing. What a container cannot show: a boot of the pinned kernel, and anything of a device.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from images.lint import SOURCES
from scripts import ctrl_c, programs
from spotrun.errors import SpotrunError
from spotrun.spec import load_cluster

HERE = Path(__file__).parent
ENGINES = ("docker", "podman")
DEBIAN = "docker.io/library/debian:12"
FIRST, LAST = 10, 42
SEEN = "/srv/images"  # this folder in the container, read-only


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m images.trial CLUSTER", file=sys.stderr)
        return 2
    try:
        cluster = load_cluster(argv[0])
        if cluster.cloud not in SOURCES:
            raise SpotrunError(f"{argv[0]}: cloud {cluster.cloud} has no images; name a cluster file of gcp or aws")
        code, _ = programs.run(command(engine(), cluster.cloud), HERE, os.environ, "spotrun: interrupted")
        if code:
            raise SpotrunError(f"a build for {cluster.cloud} would fail: exit status {code}; see above")
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return ctrl_c.INTERRUPTED
    print(f"steps {FIRST} to {LAST} for {cluster.cloud} end well in plain Debian 12")
    return 0


def engine() -> str:
    """The program that runs containers. Raises `SpotrunError`."""
    found = next(filter(None, map(shutil.which, ENGINES)), None)
    if found is None:
        raise SpotrunError("there is no `docker` or `podman` on this machine: install one")
    return found


def command(program: str, cloud: str) -> list[str]:
    """The command that runs the steps in a container and then removes the container."""
    mount = f"type=bind,source={HERE},target={SEEN},readonly"
    proxies = [
        word for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ for word in ("--env", name)
    ]
    steps = ["bash", f"{SEEN}/trial.sh", SEEN, cloud, str(FIRST), str(LAST)]
    return [program, "run", "--rm", "--platform", "linux/amd64", "--mount", mount, *proxies, DEBIAN, *steps]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
