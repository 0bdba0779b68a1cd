"""The image of a target, written into the accel.yaml that describes it without other changes."""

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
    """Return the file that describes the target. Raises ConfigError if none does, or if the target has no image."""
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
    """Set the target's `image` in the file. Raises ConfigError, UsageError."""
    atomic_write.write("image build", [(str(path), changed(path.read_text(), target, image))])


def changed(text: str, target: str, image: str) -> str:
    from ..yaml_edit import with_value

    return with_value(text, ("targets", target, "image"), image)


def _mapping(text: str, target: str) -> MappingNode | None:
    """Return the YAML node of the target, or None."""
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for step in ("targets", target):
        node = next((value for key, value in getattr(node, "value", None) or () if key.value == step), None)
    return node if isinstance(node, yaml.MappingNode) else None
