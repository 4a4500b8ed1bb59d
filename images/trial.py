"""`make image-trial`: try provisioning steps 10 to 42 in a container of plain Debian 12, before a paid build.

    python -m images.trial CLUSTER

It takes Docker or Podman, and the internet. It downloads what a build downloads (2 GB), compiles the GPU's and EFA's
modules, and keeps nothing. What a container cannot show: a boot of the pinned kernel, and anything of a device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
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
        code = run(engine(), cluster.cloud)
        if code:
            raise SpotrunError(f"a build for {cluster.cloud} would fail: exit status {code}; see above")
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return ctrl_c.INTERRUPTED
    print(f"steps {FIRST} to {LAST} for {cluster.cloud} end well in plain Debian 12")
    return 0


def run(program: str, cloud: str) -> int:
    """Run the steps in a container. Returns their exit status. After Ctrl-C, no container is left."""
    name = f"spotrun-image-trial-{os.getpid()}"
    stopping = "spotrun: interrupted; the step that runs is being stopped; another Ctrl-C kills the container"
    try:
        return programs.run(command(program, cloud, name), HERE, os.environ, stopping)[0]
    except KeyboardInterrupt:  # a killed `docker run` leaves its container running
        subprocess.run([program, "rm", "--force", name], capture_output=True, check=False)
        raise


def engine() -> str:
    """The program that runs containers. Raises `SpotrunError`."""
    found = next(filter(None, map(shutil.which, ENGINES)), None)
    if found is None:
        raise SpotrunError("there is no `docker` or `podman` on this machine: install one")
    return found


def command(program: str, cloud: str, name: str) -> list[str]:
    """The command that runs the steps in a container of this name and then removes the container.

    The first process of a container gets the signals, and alone. Bash would ignore Ctrl-C there. `timeout`, here
    without a limit, sends it on to all processes of the steps.
    """
    mount = f"type=bind,source={HERE},target={SEEN},readonly"
    proxies = [
        word for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ for word in ("--env", name)
    ]
    steps = ["timeout", "0", "bash", f"{SEEN}/trial.sh", SEEN, cloud, str(FIRST), str(LAST)]
    options = ["--rm", "--name", name, "--platform", "linux/amd64", "--mount", mount, *proxies]
    return [program, "run", *options, DEBIAN, *steps]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
