"""Slurm's lists of nodes: as Slurm itself expands them, and refused where it would be guessing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.errors import SpecError
from schedulers.slurm.topology import expand
from tests.needs import missing


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1,3,5-6]", ["gpu1", "gpu3", "gpu5", "gpu6"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("login,gpu-a[7]-ib", ["login", "gpu-a7-ib"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n1]", "n[3-1]", "n[a-b]", "n[]", "n1,,n2", "n[[1]]", "n[1-99999999]", "a b"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not a list of Slurm's nodes"):
        expand(text)


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What `scontrol show hostnames` makes of a list; it asks no controller for that."""
    if shutil.which("scontrol") is None:
        missing("scontrol", "apt-get install slurm-client")
    conf: Path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")

    def show(text: str) -> list[str]:
        command = ["scontrol", "show", "hostnames", text]
        done = subprocess.run(
            command, env={**os.environ, "SLURM_CONF": str(conf)}, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()

    return show


_numbers = st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(1, 4)).map(
    lambda t: f"{str(t[0]).zfill(t[2])}-{str(t[0] + t[1]).zfill(t[2])}" if t[1] else str(t[0]).zfill(t[2])
)
_brackets = st.lists(_numbers, min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")
_names = st.tuples(st.from_regex(r"[a-z]{1,6}-?", fullmatch=True), st.one_of(_brackets, st.just(""), st.just("7")))
_lists = st.lists(_names.map("".join).filter(lambda name: not name.endswith("-")), min_size=1, max_size=4)


@settings(deadline=None)
@given(words=_lists)
def test_as_slurm_expands_them(scontrol: Callable[[str], list[str]], words: list[str]) -> None:
    text = ",".join(words)
    assert expand(text) == scontrol(text)
