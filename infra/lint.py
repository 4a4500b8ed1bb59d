"""Write the stacks of several cluster files at once, for Checkov to read: python -m infra.lint <folder> <file>...

One Node.js serves all files; `python -m infra` starts one for each. Files of cloud local are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

from infra.app import synthesize
from spotrun.errors import SpotrunError
from spotrun.spec import load_cluster


def main(folder: Path, files: list[str]) -> int:
    for file in files:
        try:
            cluster = load_cluster(file)
            if cluster.cloud != "local":
                synthesize(cluster, folder / Path(file).stem, folder)
        except SpotrunError as error:
            print(f"spotrun: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
