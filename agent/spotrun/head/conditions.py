"""What is wrong with a job while it goes on, a line each: for status documents and displays. Pure."""

from __future__ import annotations

from spotrun.head.health import Node, View


def conditions(view: View) -> list[dict[str, object]]:
    """Each as {"since": epoch seconds, "text": one line}, the oldest first."""
    found = [_saving(node) for node in view.nodes if node.linked and node.report.job == view.job.id]
    return sorted((each for each in found if each), key=lambda each: float(str(each["since"])))


def _saving(node: Node) -> dict[str, object] | None:
    """A node that cannot put its part of a checkpoint into the bucket."""
    trouble = node.report.trouble
    if trouble is None:
        return None
    tries = "1 try" if trouble.tries == 1 else f"{trouble.tries} tries"
    text = f"{node.name} cannot save its part of the checkpoint of step {trouble.step} ({tries}): {trouble.message}"
    return {"since": trouble.since, "text": text}
