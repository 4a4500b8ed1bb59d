"""An order as the difference to an earlier one. The generation of a job takes 100 bytes for each of its members.

The head numbers the orders of a connection, and a report says which one its agent has taken last (`Report.order`). The
head sends differences only to that order. So whole orders go to an agent that has taken none: it is new, has connected
again, could not read the last one, or is of a version that does not know differences. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic_core import to_json

from spotrun.document import Document
from spotrun.errors import LinkError
from spotrun.wire import Bundle, Generation, JobOrder, Order

SHARED = 128  # parts of orders whose JSON is kept


class JobChange(JobOrder):
    """What is new in the order about one job: the fields that are set. The others are as before."""

    id: str  # of the job
    bundle: Bundle | None = None  # type: ignore[assignment]  # of a job that the agent does not know, it is set


class OrderChange(Document):
    """Head to agent: the newest order, without what the agent knows."""

    kind: Literal["change"]
    base: int  # number of the order that the agent has taken
    number: int  # of this order
    version: int  # this and the others are as in `Order`
    epoch: int
    parked: tuple[str, ...] = ()
    jobs: tuple[JobChange, ...]  # all jobs of the order

    def applied(self, base: Order) -> Order:
        """The order. base: the one that it is the difference to. Raises `ValueError` if something is missing."""
        jobs = []
        for each in self.jobs:
            known, new = base.job(each.id), {name: getattr(each, name) for name in each.model_fields_set - {"id"}}
            jobs.append(JobOrder.model_validate({**(dict(known) if known else {}), **new}))
        same = {name: getattr(self, name) for name in Order.model_fields if name not in ("kind", "jobs")}
        return Order.model_validate({**same, "jobs": jobs})


class Kind(Document):
    """The key that tells messages apart."""

    kind: str = "order"


class Inbox:
    """The orders that have come over one connection."""

    def __init__(self) -> None:
        self.newest = 0  # number of the newest one; 0: none came, or the head does not number them
        self._known: dict[int, Order] = {}  # by number: those from which the head may send a difference

    def read(self, text: str) -> Order:
        """The order in a message. Raises `ValueError`, and `LinkError` if it is the difference to an unknown one."""
        order = self._parse(text)
        if isinstance(order, OrderChange):
            base = order.base
            if base not in self._known:
                raise LinkError(f"the head sent the difference to order {base}, which is not here")
            order = order.applied(self._known[base])
            # The head has read a report that names this base, so it uses no older one any more.
            self._known = {number: known for number, known in self._known.items() if number >= base}
        if order.number > self.newest:
            self.newest = order.number
            self._known[order.number] = order
        return order

    def _parse(self, text: str) -> Order | OrderChange:
        if Kind.model_validate_json(text).kind != "change":
            return Order.model_validate_json(text)
        return OrderChange.model_validate_json(text)


class Texts:
    """The JSON of orders. The JSON of a part that is in many orders is made once."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[Document, str]] = {}  # by `id`, with the part, so that the id stays its own

    def whole(self, order: Order) -> str:
        """An order for agents of version 2 or later."""
        return self._message(order, (self._job(each, None) for each in order.jobs))

    def change(self, order: Order, base: Order) -> str:
        """An order as the difference to `base`."""
        jobs = (self._job(each, base.job(each.bundle.id), id=each.bundle.id) for each in order.jobs)
        return self._message(order, jobs, kind="change", base=base.number)

    def _message(self, order: Order, jobs: Iterable[str], **more: object) -> str:
        values: dict[str, object] = {**dict(order), **more}
        del values["jobs"]
        return _object({**{key: _json(value) for key, value in values.items()}, "jobs": f"[{','.join(jobs)}]"})

    def _job(self, order: JobOrder, known: JobOrder | None, **more: object) -> str:
        before = dict(known) if known else {}
        new = {key: value for key, value in order if key not in before or before[key] != value}
        return _object({**{k: _json(v) for k, v in more.items()}, **{k: self._of(v) for k, v in new.items()}})

    def _of(self, value: object) -> str:
        if not isinstance(value, Bundle | Generation):
            return _json(value)
        if id(value) not in self._shared:
            if len(self._shared) >= SHARED:
                del self._shared[next(iter(self._shared))]
            self._shared[id(value)] = value, value.model_dump_json()
        return self._shared[id(value)][1]


def _json(value: object) -> str:
    return to_json(value, inf_nan_mode="strings").decode()


def _object(fields: Mapping[str, str]) -> str:
    return f"{{{','.join(f'{_json(key)}:{value}' for key, value in fields.items())}}}"
