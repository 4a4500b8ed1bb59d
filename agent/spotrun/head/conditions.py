"""Problems of a job that has not ended, one line for each, for status documents and displays. Pure."""

from __future__ import annotations

from spotrun.head.planner import idle, silence
from spotrun.head.view import Node, View


def conditions(view: View) -> list[dict[str, object]]:
    """Each as {"since": epoch seconds, "text": one line}, the oldest first."""
    found = [_saving(node) for node in view.nodes if node.connected and node.report.job == view.job.id]
    found += [idle.condition(view), _silent(view)]
    return sorted((each for each in found if each), key=lambda each: float(str(each["since"])))


def _silent(view: View) -> dict[str, object] | None:
    """No node reports to the head."""
    since, news = silence.since(view), silence.news(view)
    return {"since": since, "text": news[1]} if since is not None and news else None


def _saving(node: Node) -> dict[str, object] | None:
    """A node that cannot upload its part of a checkpoint."""
    trouble = node.report.trouble
    if trouble is None:
        return None
    tries = "1 try" if trouble.tries == 1 else f"{trouble.tries} tries"
    text = f"{node.name} cannot save its part of the checkpoint of step {trouble.step} ({tries}): {trouble.message}"
    return {"since": trouble.since, "text": text}
