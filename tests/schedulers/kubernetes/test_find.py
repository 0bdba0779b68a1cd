"""Jobs of others in a namespace: found by their label, whatever else is written on them, and one object each."""

from __future__ import annotations

import json

import pytest

from schedulers import JobSpec, SchedulerError
from schedulers.kubernetes import find, names
from schedulers.kubernetes.native_id import Native
from tests.schedulers.kubernetes.support import least

from .conftest import MakeApi
from .servers import reply, serving
from .shapes import Object, workload

_ID = "0aaaaaaaaaa"


def _job(spec: str, uid: str = "1") -> Object:
    made = workload("Job", namespace="team", uid=uid, creationTimestamp="2026-11-21T10:00:00Z")
    made["metadata"] |= {"labels": {names.JOB_ID: _ID}, "annotations": {names.SPEC: spec}}
    return made


def test_an_annotation_that_is_nested_too_deeply_hides_no_list(make: MakeApi) -> None:
    with serving(lambda handler: reply(handler, {"items": [_job("[" * 200_000)]})) as server:
        (job,) = find.jobs(make(server.url), least(workload="job"))
        with pytest.raises(SchedulerError, match="another version of accel submitted job"):
            find.find(make(server.url), least(workload="job"), _ID)
    assert (job.job_id, job.name, job.nodes) == (_ID, "run1", 2)


def test_the_native_id_tells_an_object_from_a_later_one_of_its_name(make: MakeApi) -> None:
    """As `helm install` makes it of the same values after `helm uninstall`."""
    spec = json.dumps(JobSpec(argv=("train.py",)).to_json())
    with serving(lambda handler: reply(handler, {"items": [_job(spec, "u-1")]})) as server:
        found = find.find(make(server.url), least(workload="job"), _ID)
    assert found is not None
    assert found.native_id == f"job/team/run1/{_ID}/u-1"
    native = Native.parse(found.native_id)
    assert (str(native), native.uid) == (found.native_id, "u-1")
    assert [native.owns(_job(spec, uid)) for uid in ("u-1", "u-2")] == [True, False]
    assert Native.parse(f"job/team/run1/{_ID}").owns(_job(spec, "u-2"))  # of a record from before
