"""Write the stacks of the cluster file that CLUSTER names: `CLUSTER=clusters/gcp-l4.yaml python -m infra`.

`cdktf` runs this (see cdktf.json). The stacks go into CDKTF_OUTDIR, or ./cdktf.out. If the file is wrong, this writes
nothing, says why on stderr, and exits with 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spotrun.errors import SpotrunError
from spotrun.spec import load_cluster


def main() -> int:
    try:
        _write(os.environ.get("CLUSTER") or "", Path(os.environ.get("CDKTF_OUTDIR") or "cdktf.out"))
    except SpotrunError as error:
        print(f"spotrun: {error}", file=sys.stderr)
        return 2
    return 0


def _write(file: str, outdir: Path) -> None:
    if not file:
        raise SpotrunError("no cluster file: name one, such as CLUSTER=clusters/gcp-l4.yaml")
    cluster = load_cluster(file)
    if cluster.cloud == "local":
        raise SpotrunError(f"{file}: cloud local has no stacks; `make up` brings it up without Terraform")
    from infra.app import synthesize  # starts Node.js, so only after the checks

    home = Path(os.environ.get("SPOTRUN_HOME") or ".spotrun").absolute()  # as scripts.home
    try:
        synthesize(cluster, outdir.absolute(), home)
    except SpotrunError as error:
        raise SpotrunError(f"{file}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
