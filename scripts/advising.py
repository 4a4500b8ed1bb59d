"""`make advise`: gather what is known about machines and about the job, rank the machines, write a table and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts import advise as ranking
from scripts import bars, candidates
from scripts.jobs import check
from scripts.site import Site
from spotrun.errors import CloudError, StoreError

text = ranking.text


def advise(
    site: Site, path: str, measure: float | None, rate: float | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `make advise JSON=1` prints. Raises `SpotrunError`.

    measure: seconds. rate: samples per second of a machine of the first pool that suits the job.
    """
    job = check(site.cluster, path)
    if measure is not None:
        candidates.measure(site, path, measure, say)
    try:
        store = site.bucket()
        (speeds, work), seen = (
            candidates.recorded(store, site.cluster.name, job),
            candidates.history(store, site.cluster),
        )
    except (CloudError, StoreError) as error:
        say(f"the speeds of earlier runs are not known: {error}")
        speeds, work, seen = [], None, {}
    kinds = candidates.kinds(site.cluster, job, seen, say)
    counts = range(job.nodes.min, job.nodes.max + 1)
    if rate is not None and kinds:
        speeds = ranking.given(kinds[0], rate, speeds)
    options = ranking.rank(kinds, counts, speeds, work)
    return ranking.document(options, job.name, work, candidates.warnings(kinds))


def write(advice: Mapping[str, Any], folder: Path) -> None:
    """Write `machines.md`, a table, and `machines.svg`, a plot of samples for a dollar."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machines.md").write_text(ranking.markdown(advice))
    known = [each for each in advice["options"] if each["per_dollar"] is not None]
    best = sorted(known, key=lambda each: -each["per_dollar"])[: ranking.SHOWN]
    values = {ranking.name(each): each["per_dollar"] for each in best}
    (folder / "machines.svg").write_text(bars.plot(f"{advice['job']}: samples for a dollar", values))
