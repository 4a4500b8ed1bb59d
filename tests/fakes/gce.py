"""A Compute Engine for tests: managed instance groups and their machines behind the API's own REST paths.

What may be asked, and in which form, is taken from google-cloud-compute itself: paths from its transports, requests
from its types. A request that does not fit one of these exactly is refused, and noted; one that fits but is not played
here gets 501, and is noted too. Leaving `running` raises if there is any such.

    with fakegce.running() as fake:
        fake.add_cluster(cluster, bucket="gs://b")       # or add_stack(json of the pools stack)
        fake.watch(on_event)                             # machines come and go
        subprocess.run([...], env=os.environ | fake.environment)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import re
import secrets
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.cloud import compute_v1
from google.protobuf.json_format import ParseError

from spotrun.spec import ClusterSpec, PoolSpec
from spotrun.spec.names import BUCKET, CLUSTER, HEAD, POOL, ROLE, group
from tests.fakes.gce_advice import Refused, Zone
from tests.fakes.gce_api import Methods
from tests.fakes.mig import STOCKOUT, Event, Group, Limit, Machine, Times, Vm, stamp
from tests.fakes.serving import DIRECT, Loop, serve

__all__ = ["STOCKOUT", "Event", "FakeGce", "Machine", "Times", "running"]

_SERVICES = (
    "instances",
    "instance_group_managers",
    "instance_templates",
    "region_instance_templates",
    "zone_operations",
    "global_operations",
    "regions",
    "projects",
    "images",
    "disks",
    "addresses",
    "machine_types",
    "accelerator_types",
    "advice",
    "instance_group_manager_resize_requests",
)
_SYSTEM = {"$alt", "alt", "prettyPrint"}  # https://cloud.google.com/apis/docs/system-parameters
_STOCKOUT_TEXT = (
    "The zone 'projects/{}/zones/{}' does not have enough resources available to fulfill the request."
    "  '(resource type:compute)'."
)


@dataclass(frozen=True)
class Route:
    """One method of the library. body: the request's field that is the HTTP body, if any."""

    service: str
    method: str
    verb: str
    path: re.Pattern[str]
    request: Any
    body: str


@dataclass(frozen=True)
class _Failure:
    status: int
    reason: str
    message: str
    only: str
    done: bool


class FakeGce:
    """The project. endpoint, environment: for clients, in this process or in others. All methods may be called from
    any thread but the fake's own, on which watchers are called.

    calls: `service.method` of each request that came in. page: entries in one answer to a list, at the most. out: zones
    that answer nothing but 503.
    """

    def __init__(self, project: str, times: Times, page: int) -> None:
        self.project, self.times = project, times
        self.endpoint = ""
        self.calls: list[str] = []
        self.refused: list[str] = []
        self.out: set[str] = set()  # zones whose endpoints do not answer
        self._failures: list[_Failure] = []
        self._watchers: list[Callable[[Event], None]] = []
        self._methods = Methods(project, times, page)
        self._routes = _routes()
        self._loop: Loop | None = None

    @property
    def environment(self) -> dict[str, str]:
        """With these variables set, Compute Engine is here."""
        return {"GOOGLE_COMPUTE_CUSTOM_ENDPOINT": f"{self.endpoint}/compute/v1/", **DIRECT}

    # What stands in the project.

    def add_cluster(self, cluster: ClusterSpec, bucket: str = "") -> None:
        """The groups that a cluster's stack would make: the head's of size 1, the pools' of size 0."""
        head = PoolSpec(name=HEAD, zone=cluster.head.zone, machine=cluster.head.machine, market="on-demand")
        for pool in (head, *cluster.pools):
            about = {CLUSTER: cluster.name, POOL: pool.name, ROLE: HEAD if pool is head else "node"}
            template = compute_v1.InstanceProperties(
                machine_type=pool.machine,
                labels=about,
                metadata=_items({**about, BUCKET: bucket}),
                scheduling=_scheduling(pool),
            )
            self._add(group(cluster.name, pool.name), pool.zone, template, 1 if pool is head else 0)

    def add_stack(self, stack: Mapping[str, Any]) -> None:
        """The groups of a synthesized `pools` stack (its cdk.tf.json, parsed); those that are there already stay.

        Images that it looks up are looked up now, as Terraform does.
        """
        resources = stack["resource"]
        images = self._look_up(stack.get("data", {}).get("google_compute_image", {}))
        templates = resources["google_compute_region_instance_template"]
        for found in resources["google_compute_instance_group_manager"].values():
            reference = found["version"][0]["instance_template"]  # ${google_compute_….spot-template.self_link}
            wanted = templates[reference.removeprefix("${").split(".")[1]]
            schedule = dict(wanted["scheduling"])
            if isinstance(schedule.get("max_run_duration"), list):  # Terraform's way to write a block
                schedule["max_run_duration"] = schedule["max_run_duration"][0]
            image = wanted["disk"][0]["source_image"]
            image = images.get(image, image)
            template = compute_v1.InstanceProperties(
                machine_type=wanted["machine_type"],
                labels=wanted["labels"],
                metadata=_items(wanted["metadata"]),
                scheduling=schedule,
                disks=[{"boot": True, "initialize_params": {"source_image": image}}],
            )
            self._add(found["name"], found["zone"], template, found["target_size"])

    def set_images(self, **families: str) -> None:
        """The project's images and their families, the newest last, a day apart. At first there is one, of family
        `spotrun`."""
        first = time.time() - 86400 * len(families)
        found = [
            compute_v1.Image(
                name=name,
                family=family,
                creation_timestamp=stamp(first + 86400 * index),
                archive_size_bytes=6 << 30,
            )
            for index, (name, family) in enumerate(families.items())
        ]
        self._the_loop.do(lambda: setattr(self._methods, "images", found))

    def set_market(
        self, zone: str, obtainability: float, uptime: str, rates: Mapping[float, float], prices: Mapping[float, float]
    ) -> None:
        """What Google says of a zone's spot machines. rates, prices: since when, epoch seconds, and how much."""
        found = Zone(obtainability, uptime, dict(rates), dict(prices))
        self._the_loop.do(lambda: self._methods.markets.update({zone: found}))

    def set_offers(self, **zones: set[str]) -> None:
        """The machine and accelerator types of each zone (`us_central1_a`). At first every zone has all there are."""
        found = {zone.replace("_", "-"): types for zone, types in zones.items()}
        self._the_loop.do(lambda: setattr(self._methods, "offers", found))

    def remove_all(self) -> None:
        """What `terraform destroy` does: groups and machines go, without notice."""

        async def remove() -> None:
            await self._methods.remove_all()

        self._the_loop.run(remove())

    def assign_address(self, name: str, address: str) -> None:
        """The internal address of a machine, for one that is really somewhere."""

        def assign() -> None:
            self._vm(name).resource.network_interfaces[0].network_i_p = address

        self._the_loop.do(assign)

    def machines(self) -> list[Machine]:
        return self._the_loop.do(lambda: [vm.seen() for vm in self._methods.vms()])

    def size(self, name: str) -> int:
        """The target size of a group."""
        return self._the_loop.do(lambda: int(self._group(name).resource.target_size))

    # What happens there.

    def watch(self, tell: Callable[[Event], None]) -> None:
        """Have each event told, in order, on the fake's thread: hand it over, as with `queue.Queue.put`. What is there
        already is told first."""

        def begin() -> None:
            for vm in self._methods.vms():
                tell(Event("created", vm.seen()))
                if vm.resource.status == "RUNNING":
                    tell(Event("running", vm.seen()))
            self._watchers.append(tell)

        self._the_loop.do(begin)

    def preempt(self, name: str, notice: float | None = None) -> None:
        """What Google does to a spot machine. notice: seconds; None: as long as `Times` says."""
        self._the_loop.do(lambda: self._vm(name).take(self.times.notice if notice is None else notice))

    def vanish(self, name: str) -> None:
        """The machine is lost, without notice."""
        self._the_loop.do(lambda: self._vm(name).take())

    def limit(self, name: str, most: int | None, code: str = STOCKOUT, message: str = "") -> None:
        """Let a group have no more than `most` machines, or any number again (None); those that are there stay."""

        def change() -> None:
            found = self._group(name)
            text = message or _STOCKOUT_TEXT.format(self.project, found.zone)
            found.limit = None if most is None else Limit(most, code, text)
            found.nudge()
            if name in self._methods.requests:
                self._methods.requests[name].grant()

        self._the_loop.do(change)

    def fail_requests(self, name: str, code: str, message: str) -> None:
        """Let the resize requests of a group that wait fail."""
        self._the_loop.do(lambda: self._methods.requests[name].fail(code, message))

    def stop(self, name: str) -> None:
        """A machine stops for ever, and its group does nothing about it."""

        def stop() -> None:
            vm = self._vm(name)
            vm.resource.status = "TERMINATED"

        self._the_loop.do(stop)

    def set_quotas(self, quotas: Mapping[str, tuple[float, float]], region: str = "") -> None:
        """Limit and usage by metric, of a region or of the project."""
        found = [compute_v1.Quota(metric=k, limit=limit, usage=usage) for k, (limit, usage) in quotas.items()]
        self._the_loop.do(lambda: self._methods.quotas.update({region: found}))

    def fail(
        self,
        *statuses: int,
        reason: str = "backendError",
        message: str = "asked to fail",
        only: str = "",
        done: bool = False,
    ) -> None:
        """Answer the next requests with these errors. only: `service.method`. done: do what is asked all the same, as
        when an answer is lost on its way."""
        self._failures += [_Failure(status, reason, message, only, done) for status in statuses]

    def fail_operation(self, method: str, code: str, message: str) -> None:
        """Let the operation that the next request of `service.method` starts end with an error."""
        self._methods.failing[method] = (code, message)

    # Inside.

    async def build(self) -> web.Application:
        self._methods.tell = self._tell
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    @property
    def _the_loop(self) -> Loop:
        assert self._loop is not None, "only while `running`"
        return self._loop

    def _tell(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher(event)

    def _add(self, name: str, zone: str, properties: compute_v1.InstanceProperties, size: int) -> None:
        template = compute_v1.InstanceTemplate(name=f"{name}-{secrets.token_hex(4)}", properties=properties)

        def add() -> None:
            if (zone, name) not in self._methods.groups:
                self._methods.templates[template.name] = template
                self._methods.add_group(zone, name, name, template, size)

        self._the_loop.do(add)

    def _look_up(self, data: Mapping[str, Any]) -> dict[str, str]:
        """The images that a stack looks up, by what stands for them in it."""
        found = {}
        for key, wanted in data.items():
            path = f"family/{wanted['family']}" if "family" in wanted else wanted["name"]
            name = self._the_loop.do(functools.partial(self._methods.boot, path))
            found[f"${{data.google_compute_image.{key}.self_link}}"] = f"projects/{self.project}/global/images/{name}"
        return found

    def _group(self, name: str) -> Group:
        return next(each for (_, key), each in self._methods.groups.items() if key == name)

    def _vm(self, name: str) -> Vm:
        found = next((vm for vm in self._methods.vms() if vm.resource.name == name), None)
        if found is None:
            raise LookupError(name)
        return found

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            route, parsed = self._parse(request, await request.text())
            self.calls.append(f"{route.service}.{route.method}")
            if getattr(parsed, "zone", "") in self.out:
                raise Refused(503, "backendError", f"zone {parsed.zone} is out")
            failure = self._failure(self.calls[-1])
            if failure is None or failure.done:
                found = await self._methods.call(route.service, route.method, parsed)
            if failure is not None:
                raise Refused(failure.status, failure.reason, failure.message)
            return web.Response(text=type(found).to_json(found), content_type="application/json")
        except Refused as error:
            if error.strange:
                self.refused.append(f"{request.method} {request.raw_path}: {error.message}")
            detail = {"message": error.message, "domain": "global", "reason": error.reason}
            body = {"error": {"code": error.status, "message": error.message, "errors": [detail]}}
            return web.json_response(body, status=error.status)

    def _failure(self, call: str) -> _Failure | None:
        found = next((each for each in self._failures if each.only in ("", call)), None)
        if found is not None:
            self._failures.remove(found)
        return found

    def _parse(self, request: web.Request, body: str) -> tuple[Route, Any]:
        """The request as the library's own type, or `Refused`."""
        path, verb = request.path, request.method.lower()
        fits = ((route, route.path.fullmatch(path)) for route in self._routes if route.verb == verb)
        route, match = next(((route, match) for route, match in fits if match), (None, None))
        if route is None or match is None:
            raise Refused(404, "notFound", f"the library has no such path: {path}", strange=True)
        kinds = {f.json_name: f for f in route.request.pb(route.request()).DESCRIPTOR.fields}
        values: dict[str, Any] = dict(match.groupdict())
        for key in request.query.keys() - _SYSTEM:
            values[key] = _value(kinds.get(key), request.query[key])
            if key not in kinds or kinds[key].name in (*match.groupdict(), route.body):
                raise Refused(400, "invalidParameter", f"{route.method} has no parameter {key}", strange=True)
        try:
            if route.body:
                values[route.body] = json.loads(body)
            elif body:
                raise Refused(400, "badRequest", f"{route.method} takes no body", strange=True)
            return route, route.request.from_json(json.dumps(values), ignore_unknown_fields=False)
        except (ValueError, ParseError) as error:
            raise Refused(400, "badRequest", f"{route.method}: {error}", strange=True) from None


@contextlib.contextmanager
def running(project: str = "my-project", times: Times | None = None, page: int = 500) -> Iterator[FakeGce]:
    """Serve. Raises at the end if something was asked that is not of the library's form."""
    fake = FakeGce(project, times or Times(), page)
    with serve(fake.build) as (fake._loop, fake.endpoint):
        yield fake
    assert not fake.refused, fake.refused


def _routes() -> list[Route]:
    """What the library can ask of these services."""
    found = []
    for service in _SERVICES:
        module = importlib.import_module(f"google.cloud.compute_v1.services.{service}.transports.rest_base")
        transport = next(getattr(module, n) for n in dir(module) if n.endswith("RestTransport") and n[:5] == "_Base")
        client = getattr(compute_v1, transport.__name__.removeprefix("_Base").replace("RestTransport", "Client"))
        for name, base in vars(transport).items():
            if not hasattr(base, "_get_http_options"):
                continue
            method = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("_Base")).lower()
            annotation = inspect.signature(getattr(client, method)).parameters["request"].annotation
            for option in base._get_http_options():
                path = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", option["uri"])
                request = typing.get_args(annotation)[0]
                found.append(
                    Route(service, method, option["method"], re.compile(path), request, option.get("body", ""))
                )
    return found


def _value(kind: Any, text: str) -> Any:
    """A query parameter as JSON has it."""
    return text == "true" if kind is not None and kind.type == kind.TYPE_BOOL else text


def _scheduling(pool: PoolSpec) -> dict[str, Any]:
    model = {"spot": "SPOT", "flex": "FLEX_START", "on-demand": "STANDARD"}[pool.market]
    if not pool.max_run_duration:
        return {"provisioning_model": model}
    end = {"instance_termination_action": "DELETE", "max_run_duration": {"seconds": round(pool.max_run_duration)}}
    return {"provisioning_model": model, **end}


def _items(values: Mapping[str, str]) -> compute_v1.Metadata:
    return compute_v1.Metadata(items=[{"key": key, "value": value} for key, value in values.items()])
