"""`accel image build`: build an image with accel, torch and a project, with docker, podman, buildah or kaniko.

stdout holds the image: with --push its name and digest, `HOST/NAME@sha256:…`, else the tag. With kaniko it
holds the objects that build it in a cluster, as YAML. The builder's output goes to stderr.

--json          {"image", "tag", "digest", "builder", "labels", "warnings"}
--print --json  {"builder", "dockerfile", "commands"}
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedulers.config.named_targets import config_files, known_targets
from schedulers.errors import ConfigError, nearest
from schedulers.target import load_kind

from .. import arguments, atomic_write, exit_status
from ..arguments import Parser
from ..argv import UsageError
from ..output import note, print_json

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

    from yaml.nodes import MappingNode

    from .builders import Build
    from .context import Project


EXAMPLES = """\
  accel image build --tag registry.example.org/team/train:1 --push --write cluster
  accel image build --tag team/train:cpu --variant cpu
  accel image build --tag team/train:1 --base team/accel:cuda --print
  accel image build --tag host/team/train:1 --builder kaniko --kaniko-image KANIKO | kubectl replace --force -f -

Arguments after -- are passed to the builder: accel image build --tag team/train:1 -- --network host"""

_COMMAND = "accel image"
_BUILDERS = ("docker", "podman", "buildah", "kaniko")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="build [DIRECTORY]", help="project directory (default: this one)")
    parser.add_argument("--tag", metavar="IMAGE", help="name of the image: [HOST[:PORT]/]name[:tag]; required")
    content = parser.add_argument_group("contents")
    content.add_argument("--variant", choices=("cpu", "cuda"), help="build of torch (default: cuda)")
    content.add_argument("--base", metavar="IMAGE", help="build on this image, which has torch")
    requirements = "requirements file (default: requirements.txt, else the dependencies in pyproject.toml)"
    content.add_argument("--requirements", metavar="FILE", help=requirements)
    content.add_argument("--no-code", action="store_true", help="leave out the project's code, which submit uploads")
    argument = "build argument of the Dockerfile: TORCH_INDEX, PYTHON_IMAGE, …; repeatable"
    pairs: dict[str, Any] = {
        "metavar": "NAME=VALUE",
        "type": arguments.key_value,
        "action": "append",
        "default": [],
    }
    content.add_argument("--build-arg", **pairs, help=argument)
    content.add_argument("--label", **pairs, help="additional label; repeatable")
    build = parser.add_argument_group("build")
    build.add_argument("--builder", choices=_BUILDERS, help="program that builds (default: the first available)")
    build.add_argument("--push", action="store_true", help="push the image and print its digest")
    build.add_argument("--write", metavar="TARGET", help="write the pinned image to this target in accel.yaml")
    build.add_argument("--print", action="store_true", help="print the Dockerfile and the commands, build nothing")
    build.add_argument("--kaniko-image", metavar="IMAGE", help="with kaniko: image of kaniko")
    build.add_argument("--registry-secret", metavar="NAME", help="with kaniko: Secret of the registry")
    build.add_argument("--namespace", metavar="NAME", help="with kaniko: namespace of the build")
    build.add_argument("--json", action="store_true", help="print JSON")


def run_argv(argv: Sequence[str]) -> int:
    """Build the image. Raises UsageError, SpecError, ConfigError, SnapshotError, BuildError."""
    from .. import COMMANDS

    own_argv, extra_flags = list(argv), []
    if "--" in own_argv:
        index = own_argv.index("--")
        own_argv, extra_flags = own_argv[:index], own_argv[index + 1 :]
    parser = Parser("image", COMMANDS["image"][1], EXAMPLES)
    add_arguments(parser)
    return _build(parser.read(own_argv), extra_flags)


def _build(args: Namespace, extra_flags: list[str]) -> int:
    import tempfile
    from pathlib import Path

    from . import builders, context

    directory = _directory(args)
    project, arguments = _project(args, directory)
    file = check_config_entry(args.write) if args.write else None
    builder = builders.choose(args.builder)
    labels = _labels(args, directory)
    if args.print and builder != builders.KANIKO:
        build = _build_request(args, "CONTEXT", arguments, labels, extra_flags)
        return _show(builder, project, build, push=args.push, as_json=args.json)
    with tempfile.TemporaryDirectory(prefix="accel-image-") as scratch:
        warnings = context.make(Path(scratch), project, _epoch())
        for warning in warnings:
            note(f"warning: {warning}")
        build = _build_request(args, scratch, arguments, labels, extra_flags)
        if builder == builders.KANIKO:
            return _in_cluster(args, build)
        builders.build(builder, build)
    digest = builders.push(builder, args.tag) if args.push else None
    image = args.tag if digest is None else f"{builders.repository(args.tag)}@{digest}"
    if file is not None:
        write_config_entry(file, args.write, image)
        note(f"{file}: target {args.write} runs this image")
    if args.json:
        output = {"image": image, "tag": args.tag, "digest": digest, "builder": builder}
        print_json({**output, "labels": dict(labels), "warnings": warnings})
    else:
        print(image)
    return exit_status.OK


def _directory(args: Namespace) -> Path:
    """Return the project's directory. Raises UsageError for invalid arguments."""
    import os
    from pathlib import Path

    from .builders import check_tag

    positionals = args.words
    if positionals[:1] != ["build"] or len(positionals) > 2:
        raise UsageError(_COMMAND, f"expects build, or build DIRECTORY, not {' '.join(positionals)!r}")
    if args.tag is None:
        raise UsageError(_COMMAND, "build needs --tag: the name of the image")
    check_tag(args.tag)
    directory = Path(os.path.realpath(positionals[1] if len(positionals) > 1 else "."))
    if not directory.is_dir():
        raise UsageError(_COMMAND, f"build: directory {directory} does not exist")
    if args.builder != "kaniko":
        for option, value in (("--kaniko-image", args.kaniko_image), ("--registry-secret", args.registry_secret)):
            if value is not None:
                raise UsageError(_COMMAND, f"{option} needs --builder kaniko")
        if args.namespace is not None:
            raise UsageError(_COMMAND, "--namespace needs --builder kaniko")
        if args.write and not args.push:
            raise UsageError(_COMMAND, "--write needs --push: it writes the digest from the registry")
    elif args.kaniko_image is None:
        raise UsageError(_COMMAND, "--builder kaniko needs --kaniko-image: a kaniko image that the cluster can pull")
    elif args.write:
        raise UsageError(_COMMAND, "--write is not supported with kaniko: set `image:` once the pod has ended")
    return directory


def _project(args: Namespace, directory: Path) -> tuple[Project, dict[str, str]]:
    """Return the project and the arguments of its Dockerfile."""
    from schedulers.errors import nearest

    from . import dockerfile
    from .context import Project, requirements_of

    if args.base and args.variant:
        raise UsageError(_COMMAND, "--base and --variant contradict each other: keep one")
    project = Project(
        code=directory,
        requirements=requirements_of(directory, args.requirements),
        with_code=not args.no_code,
        on_base=args.base is not None,
    )
    accepted = dockerfile.arguments(project.dockerfile())
    build_args = {"BASE": args.base} if args.base else {"VARIANT": args.variant or "cuda"}
    for name, value in args.build_arg:
        if name not in accepted:
            raise UsageError(
                _COMMAND,
                f"--build-arg: unknown argument {name!r}{nearest(name, accepted)} (known: {', '.join(accepted)})",
            )
        if build_args.setdefault(name, value) != value:
            raise UsageError(_COMMAND, f"--build-arg sets {name} twice, to different values: keep one")
    return project, build_args


def _build_request(
    args: Namespace, context: str, arguments: Mapping[str, str], labels: Mapping[str, str], extra_flags: list[str]
) -> Build:
    from .builders import Build

    return Build(
        tag=args.tag, context=context, arguments=arguments, labels=labels, epoch=_epoch(), extra_flags=extra_flags
    )


def _labels(args: Namespace, directory: Path) -> dict[str, str]:
    """Return the image's labels.

    https://github.com/opencontainers/image-spec/blob/main/annotations.md
    """
    import time

    from accel import __version__

    from .context import origin_url, revision

    epoch = _epoch()
    created = time.gmtime(time.time() if epoch is None else epoch)
    labels = {
        "org.opencontainers.image.created": time.strftime("%Y-%m-%dT%H:%M:%SZ", created),
        "org.opencontainers.image.revision": revision(directory),
        "org.opencontainers.image.source": origin_url(directory),
        "dev.accel.version": __version__,
    }
    return {**{key: value for key, value in labels.items() if value}, **dict(args.label)}


def _epoch() -> int | None:
    """Return SOURCE_DATE_EPOCH (https://reproducible-builds.org/specs/source-date-epoch/) or None."""
    import os

    from schedulers.errors import ConfigError

    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"SOURCE_DATE_EPOCH={text}: expects seconds since 1970")
    return int(text)


def _show(builder: str, project: Project, build: Build, *, push: bool, as_json: bool) -> int:
    import shlex

    from . import builders

    commands = [builders.command(builder, build)]
    if push:
        commands.append([builder, "push", build.tag])
    if as_json:
        print_json({"builder": builder, "dockerfile": project.dockerfile(), "commands": commands})
    else:
        print(project.dockerfile(), end="")
        print("\n".join(f"$ {shlex.join(argv)}" for argv in commands))
    return exit_status.OK


def _in_cluster(args: Namespace, build: Build) -> int:
    from schedulers.kubernetes import names
    from schedulers.kubernetes.manifests.build import to_yaml

    from . import kaniko

    python = build.arguments.get("PYTHON_IMAGE") or args.base or "python:3.12-slim"
    cluster = kaniko.Cluster(
        image=args.kaniko_image, python=python, namespace=args.namespace, secret=args.registry_secret
    )
    context = kaniko.pack_context(build)
    objects, name = kaniko.objects(build, cluster, context), kaniko.object_name(build, context)
    if args.json:
        print_json({"builder": "kaniko", "objects": objects})
    else:
        print(to_yaml(objects), end="")
    sys.stdout.flush()
    note("run kubectl replace --force -f; the pod's termination message is the digest for accel.yaml: NAME@DIGEST")
    note(f"delete its ConfigMaps afterwards: kubectl delete configmaps --selector {names.JOB_ID}={name}")
    return exit_status.OK


# The image of a target, written into the accel.yaml that describes it; all else in the file stays as it is.


def check_config_entry(target: str) -> Path:
    """Return the file that describes the target. Raises ConfigError if none does, or if the target has no image."""
    entries = {candidate.name: candidate for candidate in known_targets() if candidate.file is not None}
    if target not in entries:
        hint = f" (targets: {', '.join(entries)})" if entries else ""
        raise ConfigError(f"--write {target}: no target of that name in accel.yaml{nearest(target, entries)}{hint}")
    entry = entries[target]
    if "image" not in load_kind(entry.kind).Options.__dataclass_fields__:
        raise ConfigError(f"--write {target}: {entry.source}: {entry.kind} targets have no image: use submit --image")
    # The last file with the target takes precedence.
    return Path(next(path for path in reversed(config_files()) if _mapping(Path(path).read_text(), target) is not None))


def write_config_entry(path: Path, target: str, image: str) -> None:
    """Set the target's `image` in the file. Raises ConfigError, UsageError."""
    atomic_write.write("image build", [(str(path), with_image(path.read_text(), target, image))])


def with_image(text: str, target: str, image: str) -> str:
    from ..yaml_edit import with_value

    return with_value(text, ("targets", target, "image"), image)


def _mapping(text: str, target: str) -> MappingNode | None:
    """Return the YAML node of the target, or None."""
    import yaml

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for step in ("targets", target):
        node = next((value for key, value in getattr(node, "value", None) or () if key.value == step), None)
    return node if isinstance(node, yaml.MappingNode) else None
