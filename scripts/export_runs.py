"""Write a run's metrics for other programs. The libraries for that are optional, and imported only when used."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts import console, event_files, runs
from spotrun.errors import SpotrunError
from spotrun.head.job_state import JobState
from spotrun.history.curves import Curve
from spotrun.history.reader import Reader
from spotrun.store import Store

KINDS = ("csv", "parquet", "tensorboard", "mlflow")
FOLDER = "exports"
COLUMNS = ("name", "step", "epoch", "samples", "time", "value", "generation", "void")
BATCH = 1000  # points that MLflow takes at once
_MLFLOW_NAME = 240  # of the 250 characters of a name in MLflow: a number may follow


def export(store: Store, cluster: str, job: str, kind: str, out: str) -> dict[str, Any]:
    """Write the points of all names. Returns how many and where. Raises `SpotrunError`.

    out: a folder, or for MLflow a tracking URI; empty: the default. CSV and Parquet have void points too, and a column
    that says so. The others have only the points that count.
    """
    if kind not in KINDS:
        raise SpotrunError(f"TO: {kind!r}: allowed: {', '.join(KINDS)}")
    state = runs.state(store, cluster, job)
    reader = Reader(store, job)
    reader.update()
    for each in reader.problems:
        console.warn(f"spotrun: export: not complete: {each}")
    if not reader.names and reader.problems:
        raise SpotrunError(f"the bucket has no metrics of {job} that can be read: {reader.problems[0]}")
    if not reader.names:
        raise SpotrunError(f"the bucket has no metrics of {job}: call `run.log(loss=loss)` in the script")
    curves = (reader.curve(name) for name in reader.names)
    if kind == "mlflow":
        return _to_mlflow(state, _mlflow_names(reader.names), curves, out or os.environ.get("MLFLOW_TRACKING_URI", ""))
    folder = Path(out or f"{FOLDER}/{job}")
    folder.mkdir(parents=True, exist_ok=True)
    write = {"csv": _to_csv, "parquet": _to_parquet, "tensorboard": _to_tensorboard}[kind]
    return write(folder, curves)


def _points(curve: Curve) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    points = curve.points
    for row in range(len(points)):
        samples = points.samples[row]
        yield (
            curve.name,
            points.steps[row],
            points.epochs[row],
            None if math.isnan(samples) else samples,
            points.times[row],
            points.values[row],
            curve.generations[row],
            bool(curve.void[row]),
        )


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`. If writing fails, what was at `path` stays."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    except OSError as error:
        raise SpotrunError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        new.unlink(missing_ok=True)


def _to_csv(folder: Path, curves: Iterator[Curve]) -> dict[str, Any]:
    path, count = folder / "metrics.csv", 0
    with _whole(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for curve in curves:
            for each in _points(curve):
                writer.writerow([_plain(each[0]), *each[1:7], int(each[7])])
                count += 1
    return {"where": str(path), "points": count}


def _to_parquet(folder: Path, curves: Iterator[Curve]) -> dict[str, Any]:
    arrow, parquet = event_files.library("pyarrow", "parquet"), event_files.library("pyarrow.parquet", "parquet")
    kinds = ("string", "int64", "int64", "float64", "float64", "float64", "int64", "bool_")
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in zip(COLUMNS, kinds, strict=True)])
    path, count = folder / "metrics.parquet", 0
    with _whole(path) as new, parquet.ParquetWriter(str(new), schema) as writer:
        for curve in curves:
            points, length = curve.points, len(curve.points)
            samples = [None if math.isnan(each) else each for each in points.samples]
            void = [bool(each) for each in curve.void]
            columns = [[curve.name] * length, points.steps, points.epochs, samples]
            columns += [points.times, points.values, curve.generations, void]
            arrays = [arrow.array(each, kind) for each, kind in zip(columns, schema.types, strict=True)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            count += length
    return {"where": str(path), "points": count}


def _to_tensorboard(folder: Path, curves: Iterator[Curve]) -> dict[str, Any]:
    """Event files, which `tensorboard --logdir` reads. An earlier export is removed: TensorBoard would show both."""
    before = set(folder.glob(event_files.GLOB))
    try:
        file = event_files.EventFile(folder)
        count = sum(file.add(curve.name, curve.counting()) for curve in curves)
        file.close()
    except OSError as error:
        for new in set(folder.glob(event_files.GLOB)) - before:
            new.unlink(missing_ok=True)
        raise SpotrunError(f"{folder}: cannot be written: {error.strerror or error}") from None
    for old in before - {file.path}:
        old.unlink(missing_ok=True)
    return {"where": str(folder), "points": count}


def _to_mlflow(state: JobState, names: dict[str, str], curves: Iterator[Curve], uri: str) -> dict[str, Any]:
    """A run of the experiment that has the job's name, with the job's arguments as parameters. names: in MLflow."""
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for the answer
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # without the internet, this takes a minute
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # 2 min with all tries; its default takes 8 min
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 14 s; its default of 7 waits for over 4 minutes
    library = event_files.library("mlflow", "mlflow")
    if not uri:
        raise SpotrunError("OUT is missing: give MLflow's tracking URI, such as OUT=http://localhost:5000")
    try:
        urlsplit(uri)
    except ValueError as error:
        raise SpotrunError(f"OUT: {_public(uri)!r}: is not an address: {error}") from None
    run, done = None, False
    try:
        client = library.MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(state.name)
        experiment = found.experiment_id if found else client.create_experiment(state.name)
        tags = {"spotrun.job": state.id, "spotrun.code": state.code}
        run = client.create_run(experiment, start_time=int(state.submitted * 1000), tags=tags, run_name=state.id)
        client.log_param(run.info.run_id, "args", " ".join(state.spec.args)[:6000])
        client.log_param(run.info.run_id, "script", state.spec.script)
        sent = sum(_send(library, client, run.info.run_id, curve, names[curve.name]) for curve in curves)
        status = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}.get(state.phase, "RUNNING")
        client.set_terminated(run.info.run_id, status, int((state.ended or state.submitted) * 1000))
        done = True
    except library.exceptions.MlflowException as error:
        raise SpotrunError(f"MLflow at {_public(uri)}: {_public(' '.join(str(error).split()))[:500]}") from None
    finally:
        if run is not None and not done:  # a part of the numbers would look like all of them
            with contextlib.suppress(library.exceptions.MlflowException):
                client.delete_run(run.info.run_id)
    return {"where": f"run {run.info.run_id} of experiment {state.name} at {_public(uri)}", "points": sent}


def _public(text: str) -> str:
    """The text without the names and passwords of its addresses."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", text)


def _send(library: Any, client: Any, run: str, curve: Curve, name: str) -> int:
    """Send the points of a curve. name: in MLflow."""
    points = curve.counting()
    for start in range(0, len(points), BATCH):
        part = range(start, min(start + BATCH, len(points)))
        metrics = [
            library.entities.Metric(name, points.values[row], int(points.times[row] * 1000), points.steps[row])
            for row in part
        ]
        client.log_batch(run, metrics=metrics)
    return len(points)


def _mlflow_names(names: Sequence[str]) -> dict[str, str]:
    """For each name, one that MLflow takes. A number follows if another curve has that name."""
    plain = {name: _mlflow_name(name) for name in names}
    found, taken = dict[str, str](), set[str]()
    for name in sorted(names, key=lambda name: plain[name] != name):  # names that stay as they are come first
        numbered = (f"{plain[name]}_{number}" for number in count(2))
        found[name] = next(each for each in chain([plain[name]], numbered) if each not in taken)
        taken.add(found[name])
    return found


def _mlflow_name(name: str) -> str:
    """MLflow's names have letters, digits, spaces and _ - . : /; the rest becomes _.

    They are also paths: no part may be empty, . or .., and the whole must not begin with two dots.
    """
    plain = "".join(each if each.isalnum() or each in "_-. :/" else "_" for each in name)
    return re.sub(r"(?<![^/])\.{0,2}(?![^/])|^\.\.", "_", plain[:_MLFLOW_NAME])


def _plain(name: str) -> str:
    """A name as text in UTF-8 without line breaks."""
    return json.dumps(name, ensure_ascii=False)[1:-1] if any(ord(each) < 32 for each in name) else name
