"""Whatever a server leaves out of its answers, a state comes of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import Status
from schedulers.kubernetes.status.job_states import status_of
from tests.schedulers.kubernetes.shapes import condition, ended, event, pod, running, terminated, waiting, workload

_OBJECTS = st.builds(
    workload,
    st.sampled_from(["PyTorchJob", "Job", "JobSet", "TrainJob"]),
    st.builds(condition, st.sampled_from(["Failed", "Running", "Suspended", "Complete", "New"]), st.text(max_size=5)),
    status=st.just({"restarts": 1}),
)
_CONTAINERS = st.sampled_from(
    [
        running(1, ended(7, message="x")),
        waiting("ErrImagePull", "gone"),
        waiting("CrashLoopBackOff", lastState={"terminated": ended(1)}),
        terminated(137, "OOMKilled"),
        terminated(0, "Completed"),
    ]
)
_PODS = st.builds(
    pod,
    st.integers(0, 3),
    _CONTAINERS,
    phase=st.sampled_from(["Pending", "Running", "Failed", "Succeeded", "Unknown"]),
    conditions=st.tuples(
        st.builds(condition, st.sampled_from(["PodScheduled", "DisruptionTarget"]), status=st.just("True"))
    ),
    operator=st.booleans(),
    deleted=st.booleans(),
    reason=st.sampled_from(["", "Evicted", "New"]),
)
_EVENTS = st.builds(event, st.sampled_from(["FailedCreate", "FailedMount", "New"]), st.text(max_size=9))


def thinned(value: Any, draw: Any) -> Any:
    """The same with some of its parts null or not there, as servers leave out what is empty."""
    if isinstance(value, dict):
        kept = {}
        for key, inside in value.items():
            fate = draw(st.sampled_from(["stays"] * 8 + ["null", "gone"]))
            if fate != "gone":
                kept[key] = thinned(inside, draw) if fate == "stays" else None
        return kept
    return [thinned(inside, draw) for inside in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(st.data(), _OBJECTS, st.lists(_PODS, max_size=3), st.lists(_EVENTS, max_size=3))
def test_a_state_always_comes_of_it(data: st.DataObject, made: Any, pods: list[Any], events: list[Any]) -> None:
    found = status_of(thinned(made, data.draw), thinned(pods, data.draw), thinned(events, data.draw))
    assert isinstance(found, Status)
    assert "\n" not in found.message
    assert found.attempt >= 0
