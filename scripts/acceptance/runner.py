"""Runs each step once, in order. The steps of stage `end` run after a failure and after Ctrl-C too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts import ctrl_c
from scripts.acceptance import plan, report
from scripts.acceptance.record import Facts, Failed, Keeper, NotRun, Record, Result
from scripts.acceptance.steps import Step
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.text import to_json

INTERRUPTED = "interrupted by the operator"
Check = Callable[[Step], Facts]


@dataclass
class Runner:
    """One run of an acceptance."""

    cluster: ClusterSpec
    steps: Sequence[Step]  # all steps, not only those to run
    checks: Mapping[str, Check]  # by step; raises `SpotrunError` if its step failed, `NotRun` if it cannot be tried
    keeper: Keeper  # where the record is kept
    say: Callable[[str], None]  # prints a line
    record: Record  # the results so far
    _interrupted: bool = field(default=False, init=False)

    def run(self, again: bool = False) -> int:
        """Run the steps. Returns the exit status: 0, 1 if a step failed, 130 after Ctrl-C.

        again: repeat the steps that have passed. The steps of the end are done after a failure and after Ctrl-C too,
        and when a CI job is cancelled or the terminal is gone.
        """
        chosen = plan.todo(self.steps, self.record.results, again, self.record.standing, self.cluster)
        names = {step.name for step in chosen}
        kept = {name: result for name, result in self.record.results.items() if name not in names}
        self.record = self.record.replace(results=kept)
        work = [step for step in chosen if step.stage != "end"]
        with ctrl_c.all_ends():
            try:
                for step in work:
                    self._put(step, self._attempt(step))
            except KeyboardInterrupt:
                ctrl_c.ignore_others()
                self._interrupted = True
                self._tell(f"\n{INTERRUPTED}; taking the cluster down")
                for step in work:
                    if step.name not in self.record.results:
                        # Not saved yet: the bucket may be slow, and another Ctrl-C must not leave this block.
                        self.record = self.record.with_result(step.name, Result(state="not run", reason=INTERRUPTED))
            self._end([step for step in chosen if step.stage == "end"])
        self._publish()
        return 130 if self._interrupted else 1 if self.record.failed else 0

    def _end(self, steps: Sequence[Step]) -> None:
        """Run the steps of the end. `down` is skipped if nothing has been brought up."""
        for step in steps:
            if not self.record.standing and step.name == "down":
                self._put(step, Result(state="not run", reason="nothing was brought up"), quiet=True)
                continue
            try:
                result = self._attempt(step)
            except KeyboardInterrupt:
                self._interrupted = True
                result = Result(state="failed", reason=INTERRUPTED, at=time.time())
            if step.name == "down" and result.state == "passed":
                self.record = self.record.with_standing(False)
            self._put(step, result)

    def _attempt(self, step: Step) -> Result:
        reason = plan.missing(step, self.cluster) or plan.blocked(step, self.steps, self.record.results)
        if reason:
            return Result(state="not run", reason=reason, at=time.time())
        self._tell(report.announce(step, self.cluster))
        if step.sets_up:
            self.record = self.record.with_standing(True)  # saved before the step begins, because it may be killed
            self.keeper.save(self.record)
        began = time.monotonic()
        state: dict[str, Any] = {"state": "passed"}
        facts: Facts = {}
        try:
            facts = self.checks[step.name](step)
        except NotRun as error:
            state = {"state": "not run", "reason": str(error)}
        except SpotrunError as error:
            state = {"state": "failed", "reason": str(error)}
            facts = error.facts if isinstance(error, Failed) else {}
        except Exception as error:  # a mistake of ours must not leave machines running
            state = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
        return Result(**state, facts=facts, seconds=time.monotonic() - began, at=time.time())

    def _put(self, step: Step, result: Result, quiet: bool = False) -> None:
        self.record = self.record.with_result(step.name, result)
        if not quiet and (result.seconds or result.state != "not run"):
            self._tell(report.outcome(step, result))
        self.keeper.save(self.record)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone, or `tee`; the cluster is taken down all the same
            self.say(text)

    def _publish(self) -> None:
        self.keeper.save(self.record)
        text = report.markdown(self.steps, self.record, self.cluster)
        data = to_json(report.document(self.steps, self.record, self.cluster)) + "\n"
        places = self.keeper.publish(md=text, json=data)
        for reason, names in report.not_run(self.steps, self.record).items():
            self._tell(f"not run: {reason}: {', '.join(names)}")
        self._tell(f"{report.verdict(self.steps, self.record)}; the report: {', '.join(places)}")
