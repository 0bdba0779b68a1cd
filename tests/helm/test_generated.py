"""What is made and kept in the repository: tables of the READMEs, the RBAC as plain YAML, the copy of a program."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from accel import __version__
from schedulers.kubernetes.manifests.code_delivery import UNPACK

from . import charts, helms

PLAIN = charts.ROOT / "deploy/kubernetes/rbac.yaml"
PLAIN_HEADER = (
    "# The service accounts and the least Role that helm/accel makes by default. Made from the chart: make golden\n"
)
MARKERS = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- /values -->)", re.DOTALL)


def assert_kept(path: Path, text: str) -> None:
    """The file holds this text, or gets it when asked to be renewed."""
    if os.environ.get("ACCEL_RENEW_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_the_readme_has_every_value(chart: Path) -> None:
    readme = chart / "README.md"
    table = charts.table(chart)
    assert_kept(readme, MARKERS.sub(lambda _: table, readme.read_text()))


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_every_value_is_said_once_in_each_place(chart: Path) -> None:
    keys = {key for key, _ in charts.leaves(chart)}
    defaults = charts.load(chart / "values.yaml")
    assert set(charts.comments(chart)) == keys
    for key in keys:
        charts.at(defaults, key)


@pytest.mark.parametrize("chart", charts.CHARTS, ids=lambda chart: chart.name)
def test_a_chart_says_for_which_accel_it_is(chart: Path) -> None:
    about = charts.load(chart / "Chart.yaml")
    assert about["appVersion"] == __version__
    assert about["name"] == chart.name


def test_the_job_chart_unpacks_code_as_the_builders_do() -> None:
    assert_kept(charts.ROOT / "helm/accel-job/files/unpack", UNPACK)


def test_the_plain_rbac_is_the_charts(helm3: helms.Helm3) -> None:
    text = helm3.render(charts.ROOT / "helm/accel", {"fullnameOverride": "accel"})
    wanted = [
        document.partition("\n")[2]
        for document in re.split(r"^---\n", text, flags=re.MULTILINE)
        if re.match(r"# Source: accel/templates/(serviceaccount|rbac)\.yaml\n", document)
    ]
    # Helm's own labels would make Helm believe that it has put them there.
    of_helm = re.compile(r"^ +(helm\.sh/chart|app\.kubernetes\.io/(instance|managed-by|version)): .*\n", re.MULTILINE)
    assert_kept(PLAIN, PLAIN_HEADER + "---\n".join(of_helm.sub("", document) for document in wanted))
