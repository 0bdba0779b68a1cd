"""Both charts, with both versions of Helm: linted, rendered, and what their schemas refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from . import charts, checking, helms

FILES = [(chart, file) for chart in charts.CHARTS for file in charts.values_files(chart)]
each_file = pytest.mark.parametrize(("chart", "file"), FILES, ids=[f"{c.name}-{f.stem}" for c, f in FILES])
each_chart = pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)


@each_file
def test_a_strict_lint_finds_nothing(helm: helms.Helm, chart: Path, file: Path) -> None:
    assert helm.lint(chart, charts.load(file)) == []


@each_file
def test_what_is_rendered_is_valid(helm: helms.Helm, chart: Path, file: Path) -> None:
    made = helms.objects(helm.render(chart, charts.load(file)))
    assert made
    assert checking.complaints(made) == []
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in made]
    assert len(set(names)) == len(names)


@each_file
def test_what_is_installed_is_valid(helm3: helms.Helm3, chart: Path, file: Path) -> None:
    made = helms.objects(helm3.render_for_cluster(chart, charts.load(file)))
    assert checking.complaints(made) == []
    rendered = {(o["kind"], o["metadata"]["name"]) for o in helms.objects(helm3.render(chart, charts.load(file)))}
    assert {(o["kind"], o["metadata"]["name"]) for o in made} >= rendered
    # A test is one Job, which carries its scripts: of one that failed the cluster leaves nothing.
    assert helms.hooked(made, "pre-delete") == []
    for test in helms.hooked(made, "test"):
        assert (test["kind"], test["spec"]["ttlSecondsAfterFinished"]) == ("Job", 600)
        pod = test["spec"]["template"]
        (files,) = [each["downwardAPI"]["items"] for each in pod["spec"]["volumes"] if "downwardAPI" in each]
        for item in files:
            (key,) = re.findall(r"^metadata\.annotations\['(.+)'\]$", item["fieldRef"]["fieldPath"])
            assert pod["metadata"]["annotations"][key] == (chart / "files" / item["path"]).read_text()


@each_file
def test_both_versions_of_helm_agree(helm3: helms.Helm3, chart: Path, file: Path) -> None:
    helms.check_helm4()
    values = charts.load(file)

    def by_name(text: str) -> dict[tuple[str, str], helms.Manifest]:
        return {(o["kind"], o["metadata"]["name"]): o for o in helms.objects(text)}

    assert by_name(helm3.render(chart, values)) == by_name(helms.Helm4().render(chart, values))


@each_file
def test_the_notes_can_be_read(chart: Path, file: Path) -> None:
    helms.check_helm4()
    notes = helms.Helm4().notes(chart, charts.load(file))
    assert helms.NAMESPACE in notes
    assert "<no value>" not in notes
    assert "\n\n\n" not in notes


@each_chart
def test_a_package_renders_what_the_directory_renders(
    helm: helms.Helm, helm3: helms.Helm3, chart: Path, tmp_path: Path
) -> None:
    values = charts.load(charts.VALUES / chart.name / "everything.yaml")
    package = helm3.package(chart, tmp_path)
    assert helms.objects(helm.render(package, values)) == helms.objects(helm.render(chart, values))


@each_chart
def test_the_values_files_use_every_option(chart: Path) -> None:
    defaults = charts.load(chart / "values.yaml")
    files = [charts.load(file) for file in charts.values_files(chart)]

    def differs(values: Mapping[str, Any], key: str) -> bool:
        try:
            return bool(charts.at(values, key) != charts.at(defaults, key))
        except KeyError:
            return False

    assert [key for key, _ in charts.leaves(chart) if not any(differs(values, key) for values in files)] == []


# What Helm makes a string of when it stands in `--set`.
FRACTIONS = [("accel", "cleanup.afterHours"), ("accel-job", "resources.memoryGb"), ("accel-job", "resources.shmGb")]


@pytest.mark.parametrize(("name", "key"), FRACTIONS, ids=[key for _, key in FRACTIONS])
def test_a_fraction_may_be_set_on_the_command_line(helm: helms.Helm, name: str, key: str) -> None:
    chart = charts.ROOT / "helm" / name
    whole = charts.load(charts.VALUES / name / "everything.yaml")

    def rendered(value: object) -> list[helms.Manifest]:
        top, _, last = key.partition(".")
        return helms.objects(helm.render(chart, {**whole, top: {**whole[top], last: value}}))

    assert rendered("0.5") == rendered(0.5)
    for wrong in ("0", "0.0", "-1", "half", ".", "", 0, -1):
        with pytest.raises(helms.Refused, match=key.rpartition(".")[2]):
            rendered(wrong)


def wrong_values(chart: Path) -> Iterator[tuple[str, object]]:
    """A value of the wrong type for every key, and an unknown key beside every one."""
    wrong: dict[str, object] = {
        "string": {"a": 1},
        "boolean": "yes",
        "integer": "1",
        "number": "1",
        "array": "a",
        "object": "a",
    }
    for key, part in charts.leaves(chart):
        types = part.get("type", "string")
        kind = next(name for name in ([types] if isinstance(types, str) else types) if name != "null")
        yield key, wrong[kind]
    for prefix in sorted({key.rpartition(".")[0] for key, _ in charts.leaves(chart)}):
        yield f"{prefix}.typo".lstrip("."), 1


@each_chart
def test_the_schema_refuses_what_cannot_be_meant(helm: helms.Helm, chart: Path) -> None:
    values: dict[str, Any] = {}
    expected = list(wrong_values(chart))
    for key, value in expected:
        *parents, last = key.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    with pytest.raises(helms.Refused) as refused:
        helm.render(chart, values)
    said = [line.replace("/", ".") for line in str(refused.value).splitlines()]
    silent = [key for key, _ in expected if not any(names(key, line) for line in said)]
    assert silent == [], "\n".join(said)


def names(key: str, line: str) -> bool:
    """Whether a line of Helm's complains of a key; of an unknown one it names the place and the key apart."""
    place, _, last = key.rpartition(".")
    return key in line or (place in line and f"'{last}'" in line) or (place in line and f" {last} " in line)


@each_chart
def test_every_object_of_the_schema_is_closed(chart: Path) -> None:
    def open_objects(part: Any, place: str) -> Iterator[str]:
        if isinstance(part, dict):
            if (
                "properties" in part
                and isinstance(part["properties"], dict)
                and part.get("additionalProperties") is not False
            ):
                yield place
            for name, inner in part.items():
                yield from open_objects(inner, f"{place}/{name}")
        elif isinstance(part, list):
            for number, inner in enumerate(part):
                yield from open_objects(inner, f"{place}/{number}")

    assert list(open_objects(charts.schema(chart), "")) == []
