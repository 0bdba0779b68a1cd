"""A sweep: one job for each point of a table of arguments, submitted together."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .config.named_targets import ResolvedTarget
from .errors import SchedulerError, SpecError
from .hints import check_program
from .job import JobSpec
from .jobs.handle import Job, submit_spec
from .jobs.submit import admit, create_records, prepare, send_new
from .store.store import Store
from .target import Plan, SupportsSubmitMany

Point = Mapping[str, str]

_MAX_JOBS = 10_000
_NAME_LENGTH = 80


def grid(axes: Mapping[str, Sequence[str]]) -> list[Point]:
    """Return every combination of the values, the last axis varying fastest. Raises SpecError."""
    for name, values in axes.items():
        if not values:
            raise SpecError(f"sweep: {name} has no values")
    count = 1
    for values in axes.values():
        count *= len(values)
    _check_count(count)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def read(path: str | os.PathLike[str]) -> list[Point]:
    """Read the points of a file: CSV with a header, or YAML or JSON.

    YAML and JSON hold a list of mappings (the points) or a mapping of lists (a grid). Raises SpecError, naming
    the file and the place.
    """
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"sweep {name}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    points = _from_csv(text, name) if name.endswith((".csv", ".tsv")) else _from_yaml(text, name)
    if not points:
        raise SpecError(f"sweep {name}: it has no points")
    _check_count(len(points))
    return points


def specs(base: JobSpec, points: Sequence[Point]) -> list[JobSpec]:
    """Return one job per point, named after it. Raises SpecError.

    `{name}` in an argument is replaced by the point's value; a name that no argument holds is appended as
    `--name value`.
    """
    job_specs = []
    for point in points:
        for key in point:
            if not key or not key.isprintable() or key.startswith("-"):
                raise SpecError(f"sweep: {key!r} is not the name of an argument; write it without dashes")
        label = ", ".join(f"{key}={value}" for key, value in point.items())
        name = f"{base.name} [{label}]"
        short = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 2]}…]"
        printable = "".join(char if char.isprintable() else "_" for char in short)
        job_specs.append(dataclasses.replace(base, argv=_arguments(base.argv, point), name=printable))
    return job_specs


def submit_sweep(
    jobs: Sequence[JobSpec],
    target_name: str,
    store: Store | None = None,
    *,
    start: str | Path | None = None,
    ids: Sequence[str] | None = None,
) -> list[Job]:
    """Submit the jobs, in one request if the target supports that. `ids`: new ids of the store for them, in order.

    A job that is rejected alone is then returned as failed or submitting, with the reason in `record.warning`.
    Other targets get the jobs one by one: those before a rejected one stay submitted, and the message counts them.
    Raises what `submit` raises.
    """
    store = store or Store.default()
    resolved, job_specs = _prepare(jobs, target_name, store, start)
    ids = ids or [store.new_id() for _ in job_specs]
    if not isinstance(resolved.target, SupportsSubmitMany):
        done: list[Job] = []
        for spec, job_id in zip(jobs, ids, strict=True):
            try:
                done.append(submit_spec(spec, target_name, store, start=start, job_id=job_id))
            except SchedulerError as error:
                raise type(error)(f"{error} ({len(done)} of {len(jobs)} jobs were submitted before)") from None
        return done
    plans = resolved.plan_many(job_specs, ids)
    admit(resolved.target, job_specs)

    records = create_records(store, resolved, list(zip(ids, job_specs, plans, strict=True)))
    with records[0].submission():  # one lock for all: a thousand jobs would need a thousand open files
        send_new(store, records, resolved.target, functools.partial(resolved.target.submit_many, plans))
    return [Job(record, target=resolved.target) for record in records]


def plans(
    jobs: Sequence[JobSpec],
    target_name: str,
    ids: Sequence[str],
    store: Store | None = None,
    *,
    start: str | Path | None = None,
) -> list[Plan]:
    """Return the plans that `submit_sweep` would carry out; write and query nothing.

    Raises SpecError, ConfigError.
    """
    resolved, job_specs = _prepare(jobs, target_name, store or Store.default(), start)
    return resolved.plan_many(job_specs, ids)


def _prepare(
    jobs: Sequence[JobSpec], target_name: str, store: Store, start: str | Path | None
) -> tuple[ResolvedTarget, list[JobSpec]]:
    resolved, first = prepare(jobs[0], target_name, store, start)
    for word in {job.argv[0] for job in jobs}:
        check_program(first.entry, word, os.path.join(first.code, first.workdir))
    return resolved, [dataclasses.replace(job, code=first.code, after=first.after, nodes=first.nodes) for job in jobs]


def _arguments(argv: Sequence[str], point: Point) -> tuple[str, ...]:
    # All names at once: a value that looks like a name is not replaced again.
    names = re.compile("|".join(re.escape(f"{{{key}}}") for key in point))
    used = {placeholder[1:-1] for argument in argv for placeholder in names.findall(argument)}
    arguments = [names.sub(lambda placeholder: point[placeholder[0][1:-1]], argument) for argument in argv]
    for key, value in point.items():
        if key not in used:
            arguments += [f"--{key}", value]
    return tuple(arguments)


def _check_count(count: int) -> None:
    if count > _MAX_JOBS:
        raise SpecError(f"sweep: {count:,} jobs, but at most {_MAX_JOBS:,} are allowed")


def _from_csv(text: str, name: str) -> list[Point]:
    rows = csv.reader(text.splitlines(), delimiter="\t" if name.endswith(".tsv") else ",", strict=True)
    try:
        header = next(rows, [])
        if len(set(header)) != len(header):
            raise SpecError(f"sweep {name}:1: two columns have the same name")
        points: list[Point] = []
        for row in rows:
            if row and len(row) != len(header):
                raise SpecError(f"sweep {name}:{rows.line_num}: {len(row)} values for {len(header)} columns")
            if row:
                points.append(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise SpecError(f"sweep {name}:{rows.line_num}: {error}") from None
    return points


def _from_yaml(text: str, name: str) -> list[Point]:
    try:
        # Every scalar as it is written: 1e-3 stays 1e-3, and no is a word.
        value = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{name}:{mark.line + 1}" if mark is not None else name
        raise SpecError(f"sweep {location}: {getattr(error, 'problem', None) or 'it is not YAML'}") from None
    if isinstance(value, dict):
        for key, values in value.items():
            if not isinstance(values, list):
                raise SpecError(f"sweep {name}: {key}: expects a list of values")
        return grid({key: [_scalar(item, name, key) for item in values] for key, values in value.items()})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise SpecError(f"sweep {name}: expects a list of mappings (the points) or a mapping of lists (a grid)")
    return [{key: _scalar(item, name, key) for key, item in point.items()} for point in value]


def _scalar(value: Any, name: str, key: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"sweep {name}: {key}: expects a plain value, not {value!r}")
    return value
