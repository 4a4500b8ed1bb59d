"""Reading traces, and cutting windows out of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from spotrun.errors import SpecError
from spotrun.simulate.traces import Trace, Zone, load


def folder(path: Path, about: str = "polarity: available\n", **files: str) -> Path:
    """A folder with these files; `_` stands for the dot in their names."""
    if about:
        (path / "traces.yaml").write_text(about)
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (path / f"{stem}.{suffix}").write_text(text)
    return path


ONE = "date,availability\n2023-02-15 22:00:00,0\n2023-02-15 22:10:00,1\n2023-02-15 22:20:00,1\n2023-02-15 22:30:00,0\n"


def test_a_row_holds_until_the_next_one(tmp_path: Path) -> None:
    found = load(folder(tmp_path, zone_csv=ONE))
    assert found.zones == (Zone("zone", ((0, 0), (600, 1), (1800, 0))),)
    assert found.length == 2400  # the last row holds as long as the others


def test_preempted_traces_are_turned_round(tmp_path: Path) -> None:
    found = load(folder(tmp_path, "polarity: preempted\n", zone_csv=ONE))
    assert found.zones[0].counts == ((0, 1), (600, 0), (1800, 1))


def test_one_file_has_a_column_for_each_zone(tmp_path: Path) -> None:
    found = load(folder(tmp_path, counts_csv="seconds,a,b\n0,16,3\n600,16,\n1200,7,4\n"))
    assert found.zones == (Zone("a", ((0, 16), (1200, 7))), Zone("b", ((0, 3), (1200, 4))))
    assert found.length == 1800


def test_json_has_a_gap_and_its_own_prices(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 4, 4], "prices": [1.5, 1.5, 2.0]})
    found = load(folder(tmp_path, zone_json=text))
    assert found.zones == (Zone("zone", ((0, 0), (300, 4)), ((0, 1.5), (600, 2.0))),)


def test_prices_of_a_file_of_their_own_and_of_the_description(tmp_path: Path) -> None:
    about = "polarity: available\non_demand: 3.06\nprice: 1\nzone_prices: {b: 0.5}\n"
    found = load(folder(tmp_path, about, x_csv="t,a,b,c\n0,1,1,1\n60,1,1,1\n", prices_csv="t,a,z\n0,2,9\n60,3,9\n"))
    assert [zone.prices for zone in found.zones] == [((0, 2), (60, 3)), ((0, 0.5),), ()]
    assert (found.on_demand, found.price) == (3.06, 1)


def test_prices_of_each_row_of_a_zone(tmp_path: Path) -> None:
    found = load(folder(tmp_path, zone_csv=ONE, spot_json=json.dumps({"zone": [1, 1, 2, 2], "other": [7]})))
    assert found.zones[0].prices == ((0, 1), (1200, 2))


def test_files_may_be_gzipped(tmp_path: Path) -> None:
    with gzip.open(folder(tmp_path) / "zone.csv.gz", "wt") as file:
        file.write(ONE)
    assert load(tmp_path).zones[0].name == "zone"


def test_a_window_begins_at_zero() -> None:
    zone = Zone("a", ((0, 0), (600, 1), (1800, 0)), ((0, 1.0), (900, 2.0)))
    assert zone.window(700, 1000) == Zone("a", ((0, 1),), ((0, 1.0), (200, 2.0)))
    assert zone.window(500, 200) == Zone("a", ((0, 0), (100, 1)), ((0, 1.0),))
    assert Trace("t", 3000, (zone,)).window(600, 60).length == 60


@pytest.mark.parametrize(
    ("about", "files", "message"),
    [
        ("", {"a_csv": ONE}, r"polarity is missing; allowed: available .* no default"),
        ("polarity: up\n", {"a_csv": ONE}, r"traces.yaml: polarity: 'up'; allowed: available"),
        ("polarity: available\nprice: -1\n", {"a_csv": ONE}, r"price: -1: allowed: a number, 0 or more"),
        ("polarity: available\n", {}, r"no \*.csv or \*.json file"),
        ("polarity: available\n", {"a_csv": "date,availability\nyesterday,1\n"}, r"a.csv: line 2: 'yesterday,1'"),
        ("polarity: available\n", {"a_csv": "date,a,b\n0,1\n"}, r"a.csv: line 2: '0,1'"),
        ("polarity: available\n", {"a_json": '{"data": [1]}'}, r"a.json: needs metadata.gap_seconds"),
        ("polarity: [\n", {"a_csv": ONE}, r"traces.yaml: is not YAML"),
        (
            "polarity: available\nprcie: 1\n",
            {"a_csv": ONE},
            r"traces.yaml: 'prcie': there is no such key; allowed",
        ),
        ("- 1\n", {"a_csv": ONE}, r"traces.yaml: allowed: keys with values"),
        ("polarity: available\nzone_prices: {a: .nan}\n", {"a_csv": ONE}, r"zone_prices: a: nan: allowed: a number, 0"),
        ("polarity: available\n", {"a_csv": "date,a\n0,-5\n9,1\n"}, r"a.csv: line 2: '0,-5': '-5': allowed: a number"),
        ("polarity: available\n", {"a_csv": "date,a\n0,nan\n9,1\n"}, r"a.csv: line 2: '0,nan': 'nan': allowed"),
        (
            "polarity: available\n",
            {"a_csv": "date,a,b\n0,1,\n9,1,\n"},
            r"zone b: has no number of machines",
        ),
        ("polarity: available\n", {"a_json": '{"metadata": {"gap_seconds": 9}, "data": []}'}, r"zone a: has no number"),
        (
            "polarity: available\n",
            {"a_json": '{"metadata": {"gap_seconds": 9}, "data": [-1]}'},
            r"a.json: .* -1: all",
        ),
    ],
    ids=[
        "without a polarity",
        "with an unknown polarity",
        "with a negative price",
        "without a file",
        "a time that is none",
        "a row that is too short",
        "JSON without a gap",
        "a description that is not YAML",
        "a description with an unknown key",
        "a description without keys",
        "a price that is no number",
        "fewer machines than none",
        "a number of machines that is none",
        "a zone without numbers",
        "JSON without numbers",
        "JSON with fewer machines than none",
    ],
)
def test_a_bad_folder_is_refused(tmp_path: Path, about: str, files: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(folder(tmp_path, about, **files))


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.csv", b"\xd4\xff\x00"), ("a.csv.gz", b"time,a"), ("a.json", b"\xd4"), ("traces.yaml", b"\xff\xfe")],
    ids=["CSV that is not text", "a file that is not gzipped", "JSON that is not text", "YAML that is not text"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SpecError, match=name):
        load(tmp_path, "available")


def test_a_wrong_polarity_that_is_given_is_named() -> None:
    with pytest.raises(SpecError, match=r"POLARITY: 'up': allowed: available"):
        load(Path(__file__).parent, "up")


def test_the_polarity_can_be_given_instead(tmp_path: Path) -> None:
    assert load(folder(tmp_path, "", zone_csv=ONE), "preempted").zones[0].counts[0] == (0, 1)
