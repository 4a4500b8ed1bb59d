"""What a node writes down about itself for a job."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from spotrun.history.provenance import NodeRecord
from spotrun.machine.metadata import Identity
from spotrun.node import about, trackers
from spotrun.store import Store, about_key


def test_packages_are_those_that_python_finds_first(tmp_path: Path) -> None:
    (tmp_path / "numpy-9.9.9.dist-info").mkdir()
    (tmp_path / "My_Package-1.0rc1.dist-info").mkdir()
    (tmp_path / "junk.dist-info").mkdir()
    found = about.packages([str(tmp_path), "", "/nowhere", *sys.path])
    assert (found["numpy"], found["my-package"]) == ("9.9.9", "1.0rc1")
    assert found["torch"] == version("torch")


def test_an_image_and_a_driver(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_text(
        json.dumps({"commit": "abc", "packages": {"x": "1"}, "versions": {"torch": "2"}})
    )
    assert about.image(tmp_path / "image.json") == {"commit": "abc", "versions": {"torch": "2"}}
    assert about.image(tmp_path / "none.json") == {}
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    )
    assert about.driver(tmp_path / "version") == "580.95.05"
    for number in (0, 1):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text("Model: \t\t NVIDIA L4\nIRQ:   1\n")
    assert about.gpus(tmp_path / "gpus") == ("NVIDIA L4", "NVIDIA L4")
    assert (about.gpus(tmp_path / "none"), about.driver(tmp_path / "none")) == ((), "")


def test_the_record(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    about.write(store, "j", Identity("spot-0", "zone", "127.0.0.1", "vm", type="g2"), "boot", 2, "", 0)
    found = NodeRecord.model_validate_json(store.get(about_key("j", "spot-0", "boot")))
    assert (found.node, found.type, found.devices, found.packages["torch"]) == ("spot-0", "g2", 2, version("torch"))
    assert found.seed == 0


def test_a_job_is_one_run_in_other_programs() -> None:
    assert trackers.variables("j-1", {"A": "b"}) == {}
    assert trackers.variables("j-1", {"WANDB_API_KEY": "x"}) == {"WANDB_RUN_ID": "j-1", "WANDB_RESUME": "allow"}
    assert trackers.variables("j-1", {"MLFLOW_TRACKING_URI": "x"}) == {"MLFLOW_RUN_NAME": "j-1"}
