"""serve.yaml and the flags: what wins, and that every mistake is one line with its place."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.serve.settings import Settings, TargetRules, read_settings
from accel.serve.targets import offered_targets
from schedulers.errors import ConfigError


def test_the_defaults_serve_this_computer_alone(homes: Path) -> None:
    settings = read_settings(None, {})
    assert settings.address == "http://127.0.0.1:8765"
    assert settings.home == str(homes / "home/service")
    assert (settings.max_body, settings.max_code, settings.max_log) == (2**20, 2**31, 2**30)


def test_flags_win_over_the_file(homes: Path) -> None:
    (homes / "config/serve.yaml").write_text(
        "port: 1234\nhome: ~/jobs\nmax_code: 1.5 GiB\npoll_s: 2\n"
        "targets: {lab: {run_as: service, allow_options: [partition, qos]}}\n"
    )
    settings = read_settings(None, {"port": 4321})
    assert (settings.port, settings.poll_s, settings.max_code) == (4321, 2.0, 3 << 29)
    assert settings.home == str(Path("~/jobs").expanduser())
    assert settings.targets == {"lab": TargetRules(run_as="service", allow_options=("partition", "qos"))}


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("host: 127.0.0.1\n\nprot: 1\n", {}, r"serve.yaml:3: unknown key 'prot'; did you mean 'port'\? \(keys: host, "),
        ("port: high\n", {}, r"serve.yaml:1: port: expects int, got str 'high'"),
        ("port: 70000\n", {}, r"serve.yaml:1: port must be from 0 to 65535, not 70000"),
        (
            "max_code: 2 parsecs\n",
            {},
            r"serve.yaml:1: max_code must be a size such as 2 GiB or 500 MB, not '2 parsecs'",
        ),
        ("- 1\n", {}, r"serve.yaml: expects a mapping, got list"),
        ("targets: {lab: {run_as: user}}\n", {}, r"serve.yaml:1: targets.*run_as.*'user'"),
        ("targets: {lab: {alow: [a]}}\n", {}, r"serve.yaml:1: targets.lab: unknown key 'alow'"),
        ("port: 1\n\nkeep: -1\n", {}, r"serve.yaml:3: keep must be 0 days or more, not -1"),
        ("port: 1\n", {"port": 70000}, r"serve.yaml: port must be from 0 to 65535"),
        ("database: mysql\n", {}, "serve.yaml:1: database must be sqlite, env:NAME or file:PATH, not 'mysql'"),
        (
            "",
            {"host": "0.0.0.0"},
            "--host 0.0.0.0: others could reach it: give --url and --tls-cert with",
        ),
        ("", {"host": "::", "url": "https://x"}, "--host ::: others could reach it"),
        ("", {"host": "0.0.0.0", "url": "http://x", "behind_proxy": ["10.0.0.0/8"]}, "url must begin with https://"),
        ("", {"behind_proxy": ["10.0.0.1/8"]}, "behind_proxy: 10.0.0.1/8 has host bits set"),
        ("", {"tls_cert": "a.pem"}, "tls_cert without tls_key: give both, or none"),
        ("", {"url": "jobs.example.org"}, "url must be https://HOST, perhaps with a port, not 'jobs.example.org'"),
    ],
)
def test_each_mistake_is_one_line(homes: Path, text: str, flags: dict[str, Any], message: str) -> None:
    (homes / "config/serve.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_settings(None, flags)
    assert "\n" not in str(raised.value)


def test_a_home_is_not_that_of_a_client(homes: Path) -> None:
    for home in (homes / "home", homes / "home/service/.."):
        with pytest.raises(
            ConfigError, match=r"home .*/home is \$ACCEL_HOME, which has your own jobs: give another one"
        ):
            read_settings(None, {"home": str(home)})


def test_no_accel_yaml_of_a_project_is_read(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one above the server's home, nor in the user's home directory, nor in the current directory."""
    monkeypatch.setenv("HOME", str(homes))
    monkeypatch.chdir(homes)
    (homes / "accel.yaml").write_text("targets: {mine: {kind: local}}\n")
    (homes / "config/accel.yaml").write_text("targets: {lab: {kind: local}}\n")
    (homes / "project/.git").mkdir(parents=True)
    (homes / "project/accel.yaml").write_text("no YAML: [\n")
    settings = read_settings(None, {"home": str(homes / "project/jobs")})
    offers = offered_targets(settings)
    assert list(offers) == ["lab", "local"]
    assert offers["lab"].resolve(settings, {}).source == f"{homes}/config/accel.yaml:1"
    (homes / "config/accel.yaml").unlink()
    assert list(offered_targets(settings)) == ["local"]


def test_the_page_shows_every_key(homes: Path) -> None:
    page = Path(__file__).parents[2] / "docs/serve.md"
    (block,) = re.findall(r"```yaml serve.yaml\n(.*?)```", page.read_text(), re.DOTALL)
    (homes / "serve.yaml").write_text(block)
    settings = read_settings(str(homes / "serve.yaml"), {})
    assert set(yaml.safe_load(block)) == {field.name for field in dataclasses.fields(Settings)}
    assert settings.targets["lab"].allow_options == ("partition", "qos")


def test_others_may_reach_it_over_tls(homes: Path) -> None:
    flags = {"host": "0.0.0.0", "url": "https://jobs.example.org/", "behind_proxy": ["10.0.0.0/8"]}
    assert read_settings(None, flags).address == "https://jobs.example.org"
