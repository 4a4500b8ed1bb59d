"""Makes EC2 interrupt a spot instance, through the Fault Injection Service, for `make preempt`.

https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html#send-spot-instance-interruptions
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from typing import Any

from spotrun.cloud.aws.api import Clients, ask
from spotrun.errors import CloudError
from spotrun.spec import names

_SHORTEST, _LONGEST = 2, 15  # minutes that the action accepts
_PATIENCE = 30  # looks at an experiment that has not begun, a second apart
log = logging.getLogger(__name__)


async def interrupt(clients: Clients, cluster: str, group_arn: str, instance: str, notice: float | None) -> None:
    """Have EC2 interrupt a spot instance. Returns when the interruption has begun. Raises `CloudError`.

    notice: seconds, rounded to whole minutes from 2 to 15. EC2's own notice always comes two minutes before the end. A
    longer `notice` delays both, and EC2 sends a rebalance recommendation at once.
    """
    made = await ask(lambda: clients.fis.create_experiment_template(**template(cluster, group_arn, instance, notice)))
    which = made["experimentTemplate"]["id"]
    try:
        started = await ask(
            lambda: clients.fis.start_experiment(
                clientToken=uuid.uuid4().hex, experimentTemplateId=which, tags={names.CLUSTER: cluster}
            )
        )
        await _begin(clients, started["experiment"]["id"], instance)
    finally:
        # A running experiment no longer needs its template, and an account may have only so many.
        try:
            await ask(lambda: clients.fis.delete_experiment_template(id=which))
        except CloudError as error:
            log.warning("experiment template %s stays: %s", which, error)


def template(cluster: str, group_arn: str, instance: str, notice: float | None) -> dict[str, Any]:
    """The experiment: this instance, this action, no stop condition. Pure.

    group_arn: the ARN of the instance's group. It has the partition, region and account.
    """
    _, partition, _, region, account, *_ = group_arn.split(":")
    return {
        "description": f"spotrun: interrupt {instance} of cluster {cluster}",
        "roleArn": f"arn:{partition}:iam::{account}:role/{names.group(cluster, names.FIS)}",
        "stopConditions": [{"source": "none"}],
        "targets": {
            "machine": {
                "resourceType": "aws:ec2:spot-instance",
                "resourceArns": [f"arn:{partition}:ec2:{region}:{account}:instance/{instance}"],
                "selectionMode": "ALL",
            }
        },
        "actions": {
            "interrupt": {
                "actionId": "aws:ec2:send-spot-instance-interruptions",
                "parameters": {"durationBeforeInterruption": f"PT{_minutes(notice)}M"},
                "targets": {"SpotInstances": "machine"},
            }
        },
        "tags": {names.CLUSTER: cluster},
    }


def _minutes(notice: float | None) -> int:
    return _SHORTEST if notice is None else max(_SHORTEST, min(_LONGEST, math.floor(notice / 60 + 0.5)))


async def _begin(clients: Clients, experiment: str, instance: str) -> None:
    """Poll until the experiment runs: FIS sends no events."""
    for _ in range(_PATIENCE):
        state = (await ask(lambda: clients.fis.get_experiment(id=experiment)))["experiment"]["state"]
        status = state.get("status")
        if status in ("failed", "cancelled", "stopped"):
            why = " ".join(state.get("reason", "no reason given").split())
            raise CloudError(f"AWS did not interrupt {instance}: experiment {experiment} {status}: {why}")
        if status not in ("pending", "initiating"):
            return
        await asyncio.sleep(1.0)
    log.warning("experiment %s has not begun to interrupt %s yet", experiment, instance)
