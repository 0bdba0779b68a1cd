"""The image of a target, written into the accel.yaml that describes it; all else in the file stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from schedulers.config.named_targets import config_files, known_targets
from schedulers.errors import ConfigError, nearest
from schedulers.target import load_kind

from .. import atomic_write

if TYPE_CHECKING:
    from yaml.nodes import MappingNode


def check(target: str) -> Path:
    """The file that describes the target. Raises ConfigError where none does, or it takes no image."""
    described = {each.name: each for each in known_targets() if each.file is not None}
    if target not in described:
        known = f" (targets: {', '.join(described)})" if described else ""
        raise ConfigError(
            f"--write {target}: no accel.yaml has a target of that name{nearest(target, described)}{known}"
        )
    found = described[target]
    if "image" not in load_kind(found.kind).Options.__dataclass_fields__:
        raise ConfigError(f"--write {target}: {found.source}: a {found.kind} target keeps no image; give it to submit")
    # The one that wins is the one that is shown.
    return Path(next(path for path in reversed(config_files()) if _mapping(Path(path).read_text(), target) is not None))


def write(path: Path, target: str, image: str) -> None:
    """Sets `image` of the target. Raises ConfigError, UsageError."""
    atomic_write.write("image build", [(str(path), changed(path.read_text(), target, image))])


def changed(text: str, target: str, image: str) -> str:
    """The file's text with that image."""
    from ..yaml_edit import with_value

    return with_value(text, ("targets", target, "image"), image)


def _mapping(text: str, target: str) -> MappingNode | None:
    """Where the file describes the target."""
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for step in ("targets", target):
        node = next((value for key, value in getattr(node, "value", None) or () if key.value == step), None)
    return node if isinstance(node, yaml.MappingNode) else None
