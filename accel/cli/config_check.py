"""Checks of the answers of `accel config`, as `accel launch` or a target would check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import config_target

if TYPE_CHECKING:
    from accel.settings.wizard import Machine, Question

# What is taken for granted of questions that are still to be asked, so that their answers are not missed.
_ASKED_LATER = {"rdzv_backend": "c10d", "offload_optimizer_nvme_path": ".", "offload_param_nvme_path": "."}
_MACHINE = {"machine_rank": 0, "main_process_ip": ""}


def check(question: Question, answer: Any, before: Mapping[str, Any], machine: Machine) -> None:
    """Raise BadValue for an answer that contradicts the earlier ones or is invalid."""
    from accel.settings.values import BadValue
    from accel.settings.wizard import values_of

    config_target.check(question, answer, before)
    said = {**before, question.name: answer}
    values = values_of(said, machine)
    if "num_processes" not in said:
        values.pop("num_processes", None)
    wrong = refused({**_ASKED_LATER, **(_MACHINE if "num_machines" in said else {}), **values})
    if wrong:
        raise BadValue(wrong.removeprefix(f"{_shown(question)} "))


def refused(values: Mapping[str, Any]) -> str | None:
    """Return why `accel launch` would reject a file with `values` on any machine, or None."""
    from accel.launch.errors import Refused
    from accel.launch.external import started_once
    from accel.launch.machines import check_spread, place
    from accel.settings.config_file import Entry
    from accel.settings.contradictions import contradictions
    from accel.settings.precedence import resolve

    entries = {name: Entry(value, (name,)) for name, value in values.items()}
    options = {name: found.value for name, found in resolve({}, {}, entries, lambda keys: keys[0]).items()}
    wrong = contradictions(options)
    if wrong:
        return wrong
    if options["compute_environment"] == "AMAZON_SAGEMAKER" and options["num_machines"] is not None:
        options |= _MACHINE  # which SageMaker says
    try:
        check_spread(options["num_processes"], 1)
        place(started_once(options), {})
    except Refused as error:
        return str(error)
    return None


def _shown(question: Question) -> str:
    from accel.settings import BY_NAME

    return BY_NAME[question.name].shown if question.name in BY_NAME else ""
