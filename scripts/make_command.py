"""The commands that messages name. They name the cluster file too, because some of them destroy. Pure."""

from __future__ import annotations

import re
import shlex

LOCAL = "clusters/local.yaml"  # the Makefile's own default


def make_command(file: str, target: str, *variables: str) -> str:
    """`make <target>`, as it is typed for the cluster of this cluster file."""
    cluster = [] if file == LOCAL else [f"CLUSTER={shlex.quote(file)}"]
    return " ".join(["make", target, *cluster, *variables])


def here(text: str, file: str) -> str:
    """A head's text for this cluster: the head does not know the cluster file, so its commands do not name one."""
    return re.sub(r"`make ([a-z-]+)(?! CLUSTER=)\b", lambda found: "`" + make_command(file, found[1]), text)
