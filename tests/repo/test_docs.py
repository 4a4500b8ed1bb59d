"""The documentation names what is there: files, sections, targets, keys, permissions that are JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from scripts.acceptance.steps import STEPS
from spotrun.spec import ClusterSpec, JobSpec, load_cluster
from spotrun.spec.fields import parse_duration

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CLOUDS = {"gcp": ROOT / "docs/gcp.md", "aws": ROOT / "docs/aws.md"}
pages = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
clouds = pytest.mark.parametrize(("cloud", "page"), CLOUDS.items(), ids=list(CLOUDS))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """`name`, `head.machine`, `pools[].zone`: every key that has no keys of its own."""
    for name, field in model.model_fields.items():
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        many = "[]" if "tuple" in str(field.annotation) else ""
        yield from keys(inner, f"{prefix}{name}{many}.") if inner else (prefix + name,)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


@pages
def test_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    variables = set(re.findall(r"\b[A-Z]+\b", (ROOT / "Makefile").read_text()))
    for line in re.findall(r"(?:^|`)make ([a-z][^`\n#]*)", page.read_text(), re.MULTILINE):
        words = line.split()
        assert words[0] in targets, f"{page.name}: make {line}"
        assert set(re.findall(r"\b([A-Z]+)=", line)) <= variables, f"{page.name}: make {line}"


@pages
def test_cluster_files_exist(page: Path) -> None:
    for file in re.findall(r"\bclusters/[\w-]+\.yaml", page.read_text()):
        assert (ROOT / file).exists() or file == "clusters/mine.yaml", f"{page.name}: {file}"


def test_what_the_page_says_is_where_is_there() -> None:
    """Each row of the table names a file, and functions or classes in that file."""
    section = (ROOT / "docs/how-it-works.md").read_text().partition("## Where is what\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `([^|`]+)` \| ([^|]+) \|$", section, re.MULTILINE)
    assert len(rows) == section.count("\n| ") - 1  # all but the heading
    for file, names in rows:
        path = next((ROOT / top / file for top in ("agent/spotrun", ".") if (ROOT / top / file).is_file()), None)
        assert path is not None, file
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *(async )?(def|class) {name}\b", path.read_text(), re.MULTILINE), f"{file}: {name}"


@clouds
def test_every_key_of_a_cluster_file_is_explained(cloud: str, page: Path) -> None:
    """And none that is not: the table of keys has exactly those that this cloud takes."""
    elsewhere = {
        "gcp": {"network.efa", "permissions_boundary", "pools[].devices"},
        "aws": {"project", *(f"pools[].{key}" for key in ("accelerator", "devices", "max_run_duration", "notice"))},
    }[cloud]
    wanted = {key for key in keys(ClusterSpec) if not key.startswith(("local.", *elsewhere))}
    section = page.read_text().partition("## 6. The cluster file")[2].partition("\n## ")[0]
    found: set[str] = set()
    for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        found |= {first, *(first.rpartition(".")[0] + other if other[0] == "." else other for other in others)}
    assert found == wanted


@clouds
def test_what_a_page_says_is_the_default(cloud: str, page: Path) -> None:
    sample = load_cluster(ROOT / "clusters" / {"gcp": "gcp-t4.yaml", "aws": "aws-p4d.yaml"}[cloud])
    bare = ClusterSpec.model_validate(
        {"name": "x", "cloud": cloud, "region": sample.region, "project": sample.project}
        | {"pools": [{"name": "y", "zone": sample.pools[0].zone, "machine": sample.head.machine}]}
    )
    text = page.read_text()
    assert f"| the machine that is always on | `{bare.head.machine}`, the first pool's zone |" in text
    for key, value in (("nat", bare.network.nat), ("placement", bare.network.placement)):
        assert re.search(rf"^\| `network\.{key}` \|.*\| `{str(value).lower()}` \|$", text, re.MULTILINE), key
    assert f"| private range, /16 to /20 | `{bare.network.cidr}` |" in text


def test_every_key_of_a_job_file_is_explained() -> None:
    """In the tables of jobs.md, or among the keys that jobs.md leaves to capacity.md. The defaults are the code's."""
    section = (ROOT / "docs/jobs.md").read_text().partition("## Keys of a job file")[2].partition("\n## ")[0]
    elsewhere = re.search(r"The keys (.*) are in \[capacity\.md\]", section)
    assert elsewhere
    found = set(re.findall(r"`(\w+)`", elsewhere[1]))
    capacity = (ROOT / "docs/capacity.md").read_text()
    assert {key for key in found if f"`{key}" not in capacity} == set()
    for first, default in re.findall(r"^\| (`[^|]+) \|.*\| ([^|]+) \|$", section, re.MULTILINE):
        names = re.findall(r"`(\w+)`", first)
        found.update(names)
        value = JobSpec.model_fields[names[0]].default
        if re.fullmatch(r"\d+[smh]", default):
            assert parse_duration(default) == value, names
        elif default.isdecimal() and names != ["nodes"]:
            assert int(default) == value, names
    assert found == set(JobSpec.model_fields)


@pytest.mark.parametrize("policy", sorted((ROOT / "docs/aws-policies").glob("*.json")), ids=lambda path: path.stem)
def test_policies_name_actions_and_where(policy: Path) -> None:
    document = json.loads(policy.read_text())
    assert document["Version"] == "2012-10-17"
    for statement in document["Statement"]:
        assert statement["Effect"] == "Allow"
        actions, places = ([x] if isinstance(x, str) else x for x in (statement["Action"], statement["Resource"]))
        assert all(re.fullmatch(r"[a-z0-9-]+:[A-Za-z*]+", action) for action in actions)
        if places == ["*"] and "Condition" not in statement:
            # EC2 needs the last one for an endpoint with AWS's own names. The zone of these names belongs to AWS.
            allowed = r"[a-z0-9-]+:(Describe|Get|List)|route53:AssociateVPCWithHostedZone$"
            assert all(re.match(allowed, action) for action in actions), statement["Sid"]


def test_the_steps_of_the_acceptance_are_those_that_there_are() -> None:
    text = (ROOT / "docs/acceptance.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (local|account|gpu|two gpus)[^|]* \| ([^|]+) \|$", text, re.MULTILINE)
    assert rows == [(step.name, step.needs, step.proves) for step in STEPS]


@clouds
def test_a_page_begins_with_the_acceptance(cloud: str, page: Path) -> None:
    first = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)[0]
    assert first == "The first day: `make acceptance`"
    assert f"make acceptance CLUSTER=clusters/{cloud}-" in page.read_text()
