"""accel.yaml: which file wins, and that every mistake is one line with its place."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from schedulers.config import named_targets
from schedulers.config.named_targets import known_targets, load_target, resolve_target, restore_target
from schedulers.errors import ConfigError, SpecError, UnknownTarget
from schedulers.store import paths
from schedulers.target import TargetContext

from ..test_target import install


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Login:
    host: str
    port: int = 22


@dataclass(frozen=True, kw_only=True)
class MoonOptions:
    hosts: tuple[str, ...]
    slots: int | None = None
    load: float = 1.0
    dry: bool = False
    size: Literal["small", "large"] = "small"
    color: Color = Color.RED
    login: Login | None = None
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.load < 0:
            raise SpecError("load must be 0 or more")


class Moon:
    Options: ClassVar[type] = MoonOptions

    def __init__(self, context: TargetContext) -> None:
        self.name, self.options, self.jobs = context.name, context.options, context.jobs


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project directory, the current one, with a package installed that adds the kind `moon`."""
    install(tmp_path / "site", f"moon = {__name__}:Moon")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "user"))
    directory = tmp_path / "project"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def moon(name: str = "lab", **options: Any) -> MoonOptions:
    target: Any = load_target(name, Path("/jobs"), overrides=options)
    found: MoonOptions = target.options
    return found


def options_of(name: str) -> Any:
    return resolve_target(name, Path("/jobs")).options


def test_a_named_target(project: Path) -> None:
    (project / "accel.yaml").write_text(
        "targets:\n  lab:\n    kind: moon\n    hosts: [a, b]\n    load: 2\n    size: large\n    color: blue\n"
        "    login: {host: x}\n    labels: {a: b}\n"
    )
    assert moon() == MoonOptions(
        hosts=("a", "b"), load=2.0, size="large", color=Color.BLUE, login=Login(host="x"), labels={"a": "b"}
    )


def test_the_project_wins_over_the_user_by_name(project: Path, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user/accel.yaml").write_text(
        "targets:\n  lab: {kind: moon, hosts: [user], slots: 3}\n  home: {kind: moon, hosts: [home]}\n"
    )
    (project / "accel.yaml").write_text("targets:\n  lab: {kind: moon, hosts: [project]}\n")
    assert moon() == MoonOptions(hosts=("project",))
    assert moon("home").hosts == ("home",)
    listed = {target.name: target for target in known_targets()}
    assert listed["lab"].source == "accel.yaml:2"
    assert listed["home"].source == f"{tmp_path}/user/accel.yaml:3"
    assert listed["local"].source == "built-in"
    assert listed["moon"].source == f"plug-in {__name__}:Moon"


def test_the_projects_file_is_looked_for_upward(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "accel.yaml").write_text("targets: {lab: {kind: moon, hosts: [a]}}")
    below = project / "a/b"
    below.mkdir(parents=True)
    monkeypatch.chdir("/")
    assert resolve_target("lab", Path("/jobs"), start=below).options == {"hosts": ["a"]}
    with pytest.raises(UnknownTarget):
        resolve_target("lab", Path("/jobs"))


def test_a_kind_is_a_target_without_a_file(project: Path) -> None:
    target: Any = load_target("local", Path("/jobs"))
    assert target.name == "local"
    assert moon("moon", hosts=["a"]).hosts == ("a",)


def test_options_from_the_command_line_win_and_may_be_text(project: Path) -> None:
    (project / "accel.yaml").write_text("targets: {lab: {kind: moon, hosts: [a], slots: 1}}")
    assert moon(slots="7", dry="true", load="0.5") == MoonOptions(hosts=("a",), slots=7, dry=True, load=0.5)
    assert moon(slots=8).slots == 8


def test_a_target_can_be_made_again_without_its_file(project: Path) -> None:
    (project / "accel.yaml").write_text("targets: {lab: {kind: moon, hosts: [a], color: blue, login: {host: x}}}")
    resolved = resolve_target("lab", Path("/jobs"), overrides={"slots": "2"})
    (project / "accel.yaml").unlink()
    again: Any = restore_target(resolved.name, resolved.kind, resolved.options, Path("/jobs"))
    assert again.options == MoonOptions(hosts=("a",), slots=2, color=Color.BLUE, login=Login(host="x"))


def test_scalars_follow_yaml_12_and_texts_keep_their_spelling(project: Path) -> None:
    (project / "accel.yaml").write_text(
        "targets:\n"
        "  base: &base {kind: slurm, sbatch: &sbatch {nice: 0200, wckey: x}}\n"
        "  lab:\n"
        "    <<: *base\n"
        "    account: 0123\n"
        "    qos: 1.10\n"
        "    snapshot: yes\n"
        "    cpu: off\n"
        "    array_throttle: 010\n"
        "    exclusive: true\n"
        "    start_timeout_s: 1e2\n"
        "    slurm_version: 23.10\n"
        "    nodelist: [007, 2024-01-01]\n"
        "    mail_user: null\n"
        "    sbatch:\n"
        "      <<: *sbatch\n"
        "      time-min: 1:00:00\n"
        "      begin: 16:20\n"
        "      nice: 0100\n"
        "      wckey: on\n"
        "      hold: true\n"
        "      priority: 10\n"
        "  pod:\n"
        "    kind: kubernetes\n"
        "    patch: {spec: {suspend: true, limit: 0o10, weight: .5, mode: yes, none: ~}}\n"
    )
    assert options_of("lab") == {
        "account": "0123",
        "qos": "1.10",
        "snapshot": True,
        "cpu": False,
        "array_throttle": 10,
        "exclusive": True,
        "start_timeout_s": 100.0,
        "slurm_version": "23.10",
        "nodelist": ["007", "2024-01-01"],
        "mail_user": None,
        "sbatch": {
            "wckey": "on",
            "nice": "0100",
            "time-min": "1:00:00",
            "begin": "16:20",
            "hold": True,
            "priority": 10,
        },
    }
    patch = {"spec": {"suspend": True, "limit": 8, "weight": 0.5, "mode": "yes", "none": None}}
    assert options_of("pod") == {"patch": patch}


LAB = "targets:\n  lab:\n    kind: moon\n    hosts: [a]\n"

MISTAKES = {
    "unknown key": (
        LAB.replace("hosts", "hots"),
        "accel.yaml:4: target lab: unknown key 'hots'; did you mean 'hosts'? "
        "(keys: hosts, slots, load, dry, size, color, login, labels)",
    ),
    "wrong type": (LAB + "    slots: four\n", "accel.yaml:5: target lab: slots: expects int, got str 'four'"),
    "list for text": (LAB.replace("[a]", "[a, []]"), "accel.yaml:4: target lab: hosts[1]: expects str, got list []"),
    "text for a list": (LAB.replace("[a]", "a"), "accel.yaml:4: target lab: hosts: expects array, got str 'a'"),
    "nothing": (LAB.replace("[a]", ""), "accel.yaml:4: target lab: hosts: expects array, got nothing"),
    "true for a number": (LAB + "    slots: yes\n", "accel.yaml:5: target lab: slots: expects int, got str 'yes'"),
    "no such choice": (
        LAB + "    size: huge\n",
        "accel.yaml:5: target lab: size: expects one of 'small', 'large', got 'huge'",
    ),
    "no such color": (
        LAB + "    color: pink\n",
        "accel.yaml:5: target lab: color: expects one of 'red', 'blue', got 'pink'",
    ),
    "missing": (
        "targets:\n  lab:\n    kind: moon\n",
        "accel.yaml:2: target lab: missing 'hosts'",
    ),
    "missing inside": (
        LAB + "    login:\n      port: 3\n",
        "accel.yaml:6: target lab: login: Object missing required field `host`",
    ),
    "unknown inside": (
        LAB + "    login:\n      host: x\n      prot: 3\n",
        "accel.yaml:7: target lab: login: unknown key 'prot'; did you mean 'port'? (keys: host, port)",
    ),
    "refused by the target": (LAB + "    load: -1\n", "accel.yaml:2: target lab: load must be 0 or more"),
    "wrong inside a mapping": (
        LAB + "    labels:\n      a: [3]\n",
        "accel.yaml:6: target lab: labels: expects str, got dict {'a': [3]}",
    ),
    "no kind": (
        "targets:\n  lab: {hosts: [a]}\n",
        "accel.yaml:2: target lab: no kind (kinds: moon, local, ssh, slurm, kubernetes, sagemaker, tpu, service)",
    ),
    "a leading zero in a patch": (
        "targets:\n  lab: {kind: kubernetes, pod_patch: {spec: {volumes: [{defaultMode: 0400}]}}}\n",
        "accel.yaml:2: target lab: pod_patch.spec.volumes[0].defaultMode: 0400 is ambiguous. "
        "Write 400, 0o400 for octal, or quotes for text",
    ),
    "kind is no text": ("targets:\n  lab: {kind: 3}\n", "accel.yaml:2: target lab: kind: expects str, got int 3"),
    "unknown kind": (
        "targets:\n  lab: {kind: mon}\n",
        "accel.yaml:2: no kind of target 'mon'; did you mean 'moon'? "
        "(kinds: moon, local, ssh, slurm, kubernetes, sagemaker, tpu, service)",
    ),
    "a built-in name": (
        "targets:\n  local: {kind: moon, hosts: [a]}\n",
        "accel.yaml:2: target local: 'local' is a kind of target; only kind: local may have that name",
    ),
    "target is no mapping": (
        "targets:\n  lab: moon\n",
        "accel.yaml:2: target lab: expects a mapping with the key 'kind', got str 'moon'",
    ),
    "name is no text": (
        "targets:\n  false: {kind: moon}\n",
        "accel.yaml:2: False is not a name for a target; put it in quotes",
    ),
    "targets is no mapping": ("targets: [a]\n", "accel.yaml:1: targets: expects a mapping of names, got list ['a']"),
    "no mapping": ("- a\n", "accel.yaml:1: expects a mapping with the key 'targets', got list ['a']"),
    "unknown section": (
        "\ntarget: {}\n",
        "accel.yaml:2: unknown key 'target'; did you mean 'targets'? (keys: targets)",
    ),
    "the same key twice": (LAB + "    hosts: [b]\n", "accel.yaml:5: key 'hosts' is already on line 4"),
    "the same target twice": (LAB + "  lab: {kind: moon}\n", "accel.yaml:5: key 'lab' is already on line 2"),
    "not YAML": ("targets:\n  lab: {kind: moon\n", "accel.yaml:2: '{' is never closed"),
    "brackets one in another": ("targets:\n  lab: {hosts: [a, b],\n    x: [1\n", "accel.yaml:3: '[' is never closed"),
    "a tab": ("targets:\n\tlab: 1\n", r"accel.yaml:2: found character '\t' that cannot start any token"),
    "a Python object": (
        "targets: !!python/object/apply:os.getcwd []\n",
        "accel.yaml:1: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
    "an alias to itself": ("targets: &a\n  x: *a\n", "accel.yaml:1: a value that is inside itself"),
    "a control character": ("targets:\n  a: \x01\n", r"accel.yaml:2: a character that YAML forbids: '\x01'"),
    "no such number": (
        "targets:\n  a: !!int x\n",
        "accel.yaml:2: a value cannot be read: invalid literal for int() with base 10: 'x'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_place(project: Path, mistake: str) -> None:
    text, said = MISTAKES[mistake]
    (project / "accel.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_target("local" if mistake == "a built-in name" else "lab", Path("/jobs"))
    assert sorted_kinds(str(raised.value)) == sorted_kinds(said)


def sorted_kinds(message: str) -> str:
    """The order of entry points is the file system's."""
    return message.replace("local, moon", "moon, local")


def test_bytes_that_are_not_utf8(project: Path) -> None:
    (project / "accel.yaml").write_bytes(b"targets:\n  lab: \xff\n")
    with pytest.raises(ConfigError, match=r"^accel.yaml:2: not UTF-8$"):
        load_target("lab", Path("/jobs"))


def test_nesting_without_end(project: Path) -> None:
    (project / "accel.yaml").write_text("targets: " + "[" * (sys.getrecursionlimit() * 2))
    with pytest.raises(ConfigError, match=r"^accel.yaml:1: nested too deeply$"):
        load_target("lab", Path("/jobs"))


def test_merge_keys_and_anchors_are_yaml_as_usual(project: Path) -> None:
    (project / "accel.yaml").write_text(
        "targets:\n  lab: &lab\n    kind: moon\n    hosts: [a]\n  big:\n    <<: *lab\n    slots: 9\n    hosts: [b]\n"
    )
    assert moon("big") == MoonOptions(hosts=("b",), slots=9)


@pytest.mark.parametrize("text", ["", "# nothing\n", "targets:\n", "targets: {}\n"])
def test_a_file_without_targets(project: Path, text: str) -> None:
    (project / "accel.yaml").write_text(text)
    assert [target.name for target in known_targets()] == [
        "kubernetes",
        "local",
        "moon",
        "sagemaker",
        "service",
        "slurm",
        "ssh",
        "tpu",
    ]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"slots": "four"}, "--option slots: expects int, got str 'four'"),
        ({"slots": None, "hosts": 3}, "--hosts: expects array, got int 3"),
        (
            {"slot": 3},
            "--option slot: the moon target has no such option; did you mean 'slots'?",
        ),
        ({"login": {"host": "x", "prot": 1}}, "--option login: unknown key 'prot'; did you mean 'port'?"),
        ({"size": "huge"}, "--option size: expects one of 'small', 'large', got 'huge'"),
    ],
)
def test_a_wrong_option_is_named_and_no_file(project: Path, option: dict[str, Any], said: str) -> None:
    (project / "accel.yaml").write_text(LAB)
    with pytest.raises(ConfigError) as raised:
        moon(**option)
    assert str(raised.value).startswith(said)


def test_an_unknown_target_names_the_nearest(project: Path) -> None:
    (project / "accel.yaml").write_text(LAB)
    with pytest.raises(
        UnknownTarget,
        match=r"no target or kind 'lap'; did you mean 'lab'\? "
        r"\(targets: lab, kubernetes, local, moon, sagemaker, service, slurm, ssh, tpu\)",
    ):
        moon("lap")


def test_the_directories_are_those_of_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    for variable in ("ACCEL_HOME", "ACCEL_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert paths.data_home() == platformdirs.user_data_dir("accel")
    assert paths.config_home() == platformdirs.user_config_dir("accel")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/mine")
    assert (paths.data_home(), paths.config_home()) == ("/data/accel", "/etc/mine/accel")
    assert paths.data_home() == platformdirs.user_data_dir("accel")
    monkeypatch.setenv("ACCEL_HOME", "~/there")
    assert paths.data_home() == str(Path.home() / "there")


def test_no_file_is_named_by_a_start_that_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path))
    assert named_targets.config_files(tmp_path) == []


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    url: str
    target: str = ""
    others: Mapping[str, Any] = field(default_factory=dict, metadata={"rest": True})


class Gate(Moon):
    Options: ClassVar[type] = GateOptions


def test_options_that_the_schema_does_not_name_go_to_the_field_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    install(tmp_path / "gates", f"gate = {__name__}:Gate")
    monkeypatch.syspath_prepend(str(tmp_path / "gates"))
    text = "targets:\n  far:\n    kind: gate\n    url: http://x\n    queue: a\n    begin: 16:20\n"
    (project / "accel.yaml").write_text(text)
    resolved = resolve_target("far", project, overrides={"queue": "b", "target": "lab", "nice": "3"})
    others = {"queue": "b", "begin": "16:20", "nice": "3"}
    assert resolved.target.options == GateOptions(url="http://x", target="lab", others=others)  # type: ignore[attr-defined]
    assert resolved.options == {"url": "http://x", "target": "lab", "others": others}
    restored = restore_target("far", "gate", resolved.options, project)
    assert restored.options == resolved.target.options  # type: ignore[attr-defined]
    # Named options are still checked.
    (project / "accel.yaml").write_text("targets:\n  far:\n    kind: gate\n    queue: a\n")
    with pytest.raises(ConfigError, match=r"accel.yaml:2: target far: missing 'url'"):
        resolve_target("far", project)
