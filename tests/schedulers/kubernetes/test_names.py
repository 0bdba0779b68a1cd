"""What a job's objects are called: names that every part of a cluster takes, and no two jobs share."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import object_names
from schedulers.kubernetes import names

_IDS = st.from_regex(r"\A[0-9a-z][0-9a-z_-]{0,62}\Z")
_MADE = st.text("0123456789abcdefghjkmnpqrstvwxyz", min_size=11, max_size=11)


@settings(deadline=None)
@given(st.text(min_size=1, max_size=80), _IDS)
def test_a_name_is_good_for_services_and_pods(name: str, job_id: str) -> None:
    made = object_names.object_name(name, job_id)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made)
    assert len(made) <= object_names.MAX_LENGTH
    assert len(f"{made}-worker-9999") <= 63 >= len(f"{made}-node-0-9999-abcde")
    for value in names.labels(name, job_id).values():
        assert value != ""
        assert names.is_label_value(value)


@settings(deadline=None)
@given(st.text(min_size=1), st.text(min_size=1), _MADE, _MADE)
def test_two_jobs_have_two_names(one: str, other: str, first: str, second: str) -> None:
    assert (object_names.object_name(one, first) == object_names.object_name(other, second)) <= (first == second)


def test_ids_of_other_shapes_do_not_collide() -> None:
    assert object_names.object_name("a", "b-c") != object_names.object_name("a-b", "c")
    assert object_names.object_name("a", "b_c") != object_names.object_name("a", "b-c")
    assert names.label_value("a-") != names.label_value("a")


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("train", "train-2mxaaaaaaaa"),
        ("Résumé 2", "resume-2-2mxaaaaaaaa"),
        ("123", "job-2mxaaaaaaaa"),
        ("x" * 80, f"{'x' * 28}-2mxaaaaaaaa"),
    ],
)
def test_names_can_be_read(name: str, made: str) -> None:
    assert object_names.object_name(name, "2mxaaaaaaaa") == made


def test_the_node_of_a_pod() -> None:
    operator = "training.kubeflow.org/replica-"
    assert names.node_of({"metadata": {"labels": {f"{operator}type": "master", f"{operator}index": "0"}}}) == 0
    worker = {f"{operator}type": "worker", f"{operator}index": "2"}
    assert names.node_of({"metadata": {"labels": worker}}) == 3
    assert names.node_of({"metadata": {"labels": {**worker, "accel.dev/elastic": "true"}}}) == 2
    index = {"batch.kubernetes.io/job-completion-index": "5"}
    assert names.node_of({"metadata": {"annotations": index}}) == 5
    assert names.node_of({"metadata": {"labels": index}}) == 5
    assert names.node_of({"metadata": {}}) is None
