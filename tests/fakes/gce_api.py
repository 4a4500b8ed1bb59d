"""What each method of Compute Engine's API does in `tests.fakes.gce`: state, and one function a method."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.cloud import compute_v1

from tests.fakes import gce_advice
from tests.fakes.gce_advice import Refused
from tests.fakes.mig import Event, Group, Times, Vm, stamp
from tests.fakes.mig_requests import Requests

_DONE, _RUNNING = compute_v1.Operation.Status.DONE, compute_v1.Operation.Status.RUNNING
_WAIT = 120.0  # seconds that zoneOperations.wait holds its answer at the most


class Methods:
    """The project's state, on the fake's event loop. quotas: by region, the project's under ''."""

    def __init__(self, project: str, times: Times, page: int) -> None:
        self.project, self.times, self.page = project, times, page
        self.tell: Callable[[Event], None] = lambda event: None
        self.groups: dict[tuple[str, str], Group] = {}
        self.requests: dict[str, Requests] = {}  # by group
        self.templates: dict[str, compute_v1.InstanceTemplate] = {}
        self.quotas: dict[str, list[compute_v1.Quota]] = {}
        self.images = [compute_v1.Image(name="spotrun-1", family="spotrun")]  # as `make image` leaves one
        self.disks: list[compute_v1.Disk] = []  # apart from the machines' own
        self.addresses: list[compute_v1.Address] = []
        self.markets: dict[str, gce_advice.Zone] = {}  # by zone
        self.offers: dict[str, set[str]] | None = None  # types by zone; None: all, everywhere
        self.failing: dict[str, tuple[str, str]] = {}
        self._operations: dict[str, compute_v1.Operation] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}

    async def call(self, service: str, method: str, request: Any) -> Any:
        """The answer to a request. Raises `Refused`."""
        play = getattr(self, f"_{service}_{method}", None)
        if play is None:
            raise Refused(501, "notImplemented", f"{service}.{method} is not played here", strange=True)
        if request.project != self.project:
            raise Refused(404, "notFound", f"The resource 'projects/{request.project}' was not found")
        identity = getattr(request, "request_id", "")
        if identity and identity in self._operations:
            return self._operations[identity]  # the same request, sent again
        found = play(request)
        if isinstance(found, compute_v1.Operation):
            if identity and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", identity):
                raise Refused(400, "invalid", f"requestId is not a UUID: {identity}", strange=True)
            return self._begin(found, f"{service}.{method}", identity or str(uuid.uuid4()))
        return await found if asyncio.iscoroutine(found) else found

    def add_group(self, zone: str, name: str, base: str, template: compute_v1.InstanceTemplate, size: int) -> None:
        link = f"projects/{self.project}/zones/{zone}/instanceGroupManagers/{name}"
        resource = compute_v1.InstanceGroupManager(
            name=name,
            zone=f"https://www.googleapis.com/compute/v1/projects/{self.project}/zones/{zone}",
            self_link=f"https://www.googleapis.com/compute/v1/{link}",
            base_instance_name=base,
            creation_timestamp=stamp(time.time()),
        )
        made = self.groups[zone, name] = Group(resource, template, self.times, self.tell, self.boot)
        made.resize(size)

    def boot(self, path: str) -> str:
        """The image at [projects/…/global/images/][family/]<name> now: of a family its newest."""
        kind, _, name = path.rpartition("/")
        family = kind.endswith("family")
        asked = path.rpartition("images/")[2]
        found = self._image(asked, lambda image: name == (image.family if family else image.name))
        return str(found.name)

    async def remove_all(self) -> None:
        groups = list(self.groups.values())
        lives = [member.life for each in groups for member in each.members.values() if member.life]
        for each in groups:
            each.resize(0)
        await asyncio.gather(*lives)
        self.groups.clear()

    def vms(self, zone: str = "") -> list[Vm]:
        found = [vm for each in self.groups.values() if zone in ("", each.zone) for vm in each.vms()]
        return sorted(found, key=lambda vm: str(vm.resource.name))

    # What Google says about the market.

    def _advice_capacity(self, request: Any) -> compute_v1.CapacityAdviceResponse:
        return gce_advice.capacity(self.markets, request)

    def _advice_capacity_history(self, request: Any) -> compute_v1.CapacityHistoryResponse:
        return gce_advice.history(self.markets, request)

    # Groups.

    def _instance_group_managers_insert(self, request: Any) -> compute_v1.Operation:
        wanted = request.instance_group_manager_resource
        link = wanted.instance_template or wanted.versions[0].instance_template
        template = self.templates.get(link.rpartition("/")[2])
        if template is None:
            raise Refused(400, "invalid", f"Invalid value for field 'resource.instanceTemplate': '{link}'")
        if (request.zone, wanted.name) in self.groups:
            raise Refused(409, "alreadyExists", f"The resource '{wanted.name}' already exists")
        self.add_group(request.zone, wanted.name, wanted.base_instance_name, template, wanted.target_size)
        return self._operation(request.zone)

    def _instance_group_managers_get(self, request: Any) -> compute_v1.InstanceGroupManager:
        return self._group(request).resource

    def _instance_group_managers_list(self, request: Any) -> compute_v1.InstanceGroupManagerList:
        if request.filter:
            raise Refused(501, "notImplemented", "a filter of groups", strange=True)
        found = [each.resource for (zone, _), each in sorted(self.groups.items()) if zone == request.zone]
        items, token = self._page(found, request)
        return compute_v1.InstanceGroupManagerList(items=items, next_page_token=token)

    def _instance_group_managers_delete(self, request: Any) -> compute_v1.Operation:
        self._group(request).resize(0)
        del self.groups[request.zone, request.instance_group_manager]
        return self._operation(request.zone)

    def _instance_group_managers_resize(self, request: Any) -> compute_v1.Operation:
        if request.size < 0:
            raise Refused(400, "invalid", f"Invalid value for field 'size': '{request.size}'")
        self._group(request).resize(request.size)
        return self._operation(request.zone)

    def _instance_group_manager_resize_requests_list(self, request: Any) -> Any:
        items, token = self._page([*self._requests(request).made.values()], request)
        return compute_v1.InstanceGroupManagerResizeRequestsListResponse(items=items, next_page_token=token)

    def _instance_group_manager_resize_requests_insert(self, request: Any) -> compute_v1.Operation:
        wanted = request.instance_group_manager_resize_request_resource
        self._requests(request).insert(wanted, lambda why: Refused(400, "invalid", why, strange=True))
        return self._operation(request.zone)

    def _instance_group_manager_resize_requests_cancel(self, request: Any) -> compute_v1.Operation:
        found = self._requests(request)
        if found.made[request.resize_request].state != "ACCEPTED":
            raise Refused(400, "invalid", f"Resize request '{request.resize_request}' is not in state ACCEPTED")
        found.cancel(request.resize_request)
        return self._operation(request.zone)

    def _instance_group_managers_delete_instances(self, request: Any) -> compute_v1.Operation:
        found, asked = self._group(request), request.instance_group_managers_delete_instances_request_resource
        names = _names(asked.instances, request.zone)
        if not asked.skip_instances_on_validation_error:
            _members(found, names)
        found.delete(names)
        return self._operation(request.zone)

    def _instance_group_managers_recreate_instances(self, request: Any) -> compute_v1.Operation:
        found, asked = self._group(request), request.instance_group_managers_recreate_instances_request_resource
        names = _names(asked.instances, request.zone)
        _members(found, names)
        found.recreate(names)
        return self._operation(request.zone)

    def _instance_group_managers_list_managed_instances(self, request: Any) -> Any:
        items, token = self._page(self._group(request).managed(), request)
        return compute_v1.InstanceGroupManagersListManagedInstancesResponse(
            managed_instances=items, next_page_token=token
        )

    def _instance_group_managers_list_errors(self, request: Any) -> Any:
        newest = self._group(request).errors[::-1]
        items, token = self._page(newest, request)
        return compute_v1.InstanceGroupManagersListErrorsResponse(items=items, next_page_token=token)

    # Machines.

    def _instances_get(self, request: Any) -> compute_v1.Instance:
        return self._vm(request).resource

    def _instances_list(self, request: Any) -> compute_v1.InstanceList:
        found = [vm.resource for vm in self.vms(request.zone) if _fits(vm.resource, request.filter)]
        items, token = self._page(found, request)
        return compute_v1.InstanceList(items=items, next_page_token=token)

    def _instances_aggregated_list(self, request: Any) -> compute_v1.InstanceAggregatedList:
        found = [vm.resource for vm in self.vms() if _fits(vm.resource, request.filter)]
        items, token = self._page(found, request)
        answer = compute_v1.InstanceAggregatedList(next_page_token=token)
        for item in items:
            zone = f"zones/{item.zone.rpartition('/')[2]}"
            scoped = answer.items.get(zone, compute_v1.InstancesScopedList())
            answer.items[zone] = compute_v1.InstancesScopedList(instances=[*scoped.instances, item])
        return answer

    def _disks_list(self, request: Any) -> compute_v1.DiskList:
        found = [each for each in self.disks if each.zone == request.zone and _fits(each, request.filter)]
        items, token = self._page(found, request)
        return compute_v1.DiskList(items=items, next_page_token=token)

    def _addresses_list(self, request: Any) -> compute_v1.AddressList:
        found = [each for each in self.addresses if each.region == request.region and _fits(each, request.filter)]
        items, token = self._page(found, request)
        return compute_v1.AddressList(items=items, next_page_token=token)

    def _instances_delete(self, request: Any) -> compute_v1.Operation:
        self._vm(request).take()
        return self._operation(request.zone)

    def _instances_simulate_maintenance_event(self, request: Any) -> compute_v1.Operation:
        vm = self._vm(request)
        if vm.resource.status != "RUNNING":
            raise Refused(400, "resourceNotReady", f"The resource '{request.instance}' is not ready")
        if vm.resource.scheduling.provisioning_model == "SPOT":  # all others move to another host, and run on
            vm.take(self.times.notice)
        return self._operation(request.zone)

    # Templates, operations, quotas, images.

    def _instance_templates_insert(self, request: Any) -> compute_v1.Operation:
        return self._template(request.instance_template_resource)

    def _region_instance_templates_insert(self, request: Any) -> compute_v1.Operation:
        return self._template(request.instance_template_resource)

    def _instance_templates_get(self, request: Any) -> compute_v1.InstanceTemplate:
        if request.instance_template not in self.templates:
            raise Refused(404, "notFound", f"The resource '{request.instance_template}' was not found")
        return self.templates[request.instance_template]

    _region_instance_templates_get = _instance_templates_get

    def _instance_templates_aggregated_list(self, request: Any) -> compute_v1.InstanceTemplateAggregatedList:
        items, token = self._page(sorted(self.templates.values(), key=lambda each: str(each.name)), request)
        scoped = compute_v1.InstanceTemplatesScopedList(instance_templates=items)
        return compute_v1.InstanceTemplateAggregatedList(items={"regions/us-central1": scoped}, next_page_token=token)

    def _zone_operations_get(self, request: Any) -> compute_v1.Operation:
        found = next((each for each in self._operations.values() if each.name == request.operation), None)
        if found is None:
            raise Refused(404, "notFound", f"The resource '{request.operation}' was not found")
        return found

    async def _global_operations_wait(self, request: Any) -> compute_v1.Operation:
        return await self._zone_operations_wait(request)

    async def _zone_operations_wait(self, request: Any) -> compute_v1.Operation:
        found = self._zone_operations_get(request)
        await asyncio.wait([self._ends[found.name]], timeout=_WAIT)
        return found

    def _regions_get(self, request: Any) -> compute_v1.Region:
        return compute_v1.Region(name=request.region, quotas=self.quotas.get(request.region, []))

    def _projects_get(self, request: Any) -> compute_v1.Project:
        return compute_v1.Project(name=self.project, quotas=self.quotas.get("", []))

    def _images_get(self, request: Any) -> compute_v1.Image:
        return self._image(request.image, lambda image: image.name == request.image)

    def _images_list(self, request: Any) -> compute_v1.ImageList:
        if request.filter:
            raise Refused(501, "notImplemented", "a filter of images", strange=True)
        items, token = self._page(self.images, request)
        return compute_v1.ImageList(items=items, next_page_token=token)

    def _images_delete(self, request: Any) -> compute_v1.Operation:
        self.images.remove(self._image(request.image, lambda image: image.name == request.image))
        return self._operation("")

    def _images_get_from_family(self, request: Any) -> compute_v1.Image:
        return self._image(f"family/{request.family}", lambda image: image.family == request.family)

    def _machine_types_get(self, request: Any) -> compute_v1.MachineType:
        self._offer(request.zone, request.machine_type)
        return compute_v1.MachineType(name=request.machine_type)

    def _machine_types_aggregated_list(self, request: Any) -> compute_v1.MachineTypeAggregatedList:
        def scoped(name: str) -> compute_v1.MachineTypesScopedList:
            return compute_v1.MachineTypesScopedList(machine_types=[{"name": name}])

        return compute_v1.MachineTypeAggregatedList(items=self._offering(request, scoped))

    def _accelerator_types_get(self, request: Any) -> compute_v1.AcceleratorType:
        self._offer(request.zone, request.accelerator_type)
        return compute_v1.AcceleratorType(name=request.accelerator_type)

    def _accelerator_types_aggregated_list(self, request: Any) -> compute_v1.AcceleratorTypeAggregatedList:
        def scoped(name: str) -> compute_v1.AcceleratorTypesScopedList:
            return compute_v1.AcceleratorTypesScopedList(accelerator_types=[{"name": name}])

        return compute_v1.AcceleratorTypeAggregatedList(items=self._offering(request, scoped))

    # What they share.

    def _offer(self, zone: str, name: str) -> None:
        if self.offers is not None and name not in self.offers.get(zone, ()):
            path = f"projects/{self.project}/zones/{zone}/machineTypes/{name}"
            raise Refused(404, "notFound", f"The resource '{path}' was not found")

    def _offering(self, request: Any, scoped: Callable[[str], Any]) -> dict[str, Any]:
        """As Google answers: all zones, with what is left of each by the filter."""
        wanted = re.fullmatch(r"name = ([a-z0-9-]+)", request.filter)
        if wanted is None:
            raise Refused(501, "notImplemented", f"the filter {request.filter!r}", strange=True)
        found = (self.offers or {}).items()
        return {
            f"zones/{zone}": scoped(wanted[1]) if wanted[1] in types else type(scoped(""))() for zone, types in found
        }

    def _image(self, name: str, fits: Callable[[compute_v1.Image], bool]) -> compute_v1.Image:
        found = next(filter(fits, reversed(self.images)), None)
        if found is None:
            path = f"projects/{self.project}/global/images/{name}"
            raise Refused(404, "notFound", f"The resource '{path}' was not found")
        return found

    def _template(self, wanted: compute_v1.InstanceTemplate) -> compute_v1.Operation:
        self.templates[wanted.name] = wanted
        return self._operation("")

    def _requests(self, request: Any) -> Requests:
        group = self._group(request)
        return self.requests.setdefault(str(group.resource.name), Requests(group))

    def _group(self, request: Any) -> Group:
        found = self.groups.get((request.zone, request.instance_group_manager))
        if found is None:
            path = (
                f"projects/{self.project}/zones/{request.zone}/instanceGroupManagers/{request.instance_group_manager}"
            )
            raise Refused(404, "notFound", f"The resource '{path}' was not found")
        return found

    def _vm(self, request: Any) -> Vm:
        found = next((vm for vm in self.vms(request.zone) if vm.resource.name == request.instance), None)
        if found is None:
            path = f"projects/{self.project}/zones/{request.zone}/instances/{request.instance}"
            raise Refused(404, "notFound", f"The resource '{path}' was not found")
        return found

    def _page(self, items: Sequence[Any], request: Any) -> tuple[Sequence[Any], str]:
        """The entries of one answer, and the token by which the next ones are asked for."""
        start = int(request.page_token.removeprefix("from-") or 0) if request.page_token else 0
        end = start + min(request.max_results or self.page, self.page)
        return items[start:end], f"from-{end}" if end < len(items) else ""

    def _operation(self, zone: str) -> compute_v1.Operation:
        return compute_v1.Operation(name=f"operation-{uuid.uuid4()}", zone=zone, status=_RUNNING)

    def _begin(self, made: compute_v1.Operation, call: str, identity: str) -> compute_v1.Operation:
        self._operations[identity] = made
        self._ends[made.name] = asyncio.create_task(self._finish(made, self.failing.pop(call, None)))
        return made

    async def _finish(self, made: compute_v1.Operation, error: tuple[str, str] | None) -> None:
        await asyncio.sleep(self.times.operation)
        if error is not None:
            made.error = compute_v1.Error(errors=[{"code": error[0], "message": error[1]}])
        made.status = _DONE  # type: ignore[assignment]


def _names(urls: Iterable[str], zone: str) -> list[str]:
    """From zones/<zone>/instances/<name>, or a whole URL."""
    found = [re.fullmatch(rf"(?:.*/)?zones/{re.escape(zone)}/instances/([^/]+)", url) for url in urls]
    if not found or not all(found):
        raise Refused(400, "invalid", f"Invalid value for field 'instances': '{list(urls)}'", strange=True)
    return [match[1] for match in found if match]


def _members(found: Group, names: Iterable[str]) -> None:
    for name in names:
        member = found.members.get(name)
        if member is None or member.leaving or member.vm is None:
            raise Refused(400, "invalid", f"Instance '{name}' is not a member of {found.resource.name}, or is leaving")


def _fits(resource: Any, text: str) -> bool:
    """A filter on labels, which is all that is asked here."""
    if not text:
        return True
    match = re.fullmatch(r"labels\.([\w-]+) = ([\w-]+)", text)
    if match is None:
        raise Refused(501, "notImplemented", f"the filter {text}", strange=True)
    return resource.labels.get(match[1]) == match[2]
