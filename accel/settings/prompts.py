"""Questions of `accel config`: what one is, and those about a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME
from .setting import Setting, read, switch

# A question: its setting, default and choices; and conditions on earlier answers.

Answers = Mapping[str, Any]
Condition = Callable[[Answers], bool]


class Machine(NamedTuple):
    """This machine's hardware.

    kind, devices: kind (cuda, xpu, mps, cpu) and number of its devices.
    cores:         usable processors.
    project:       True if the directory belongs to a project with its own `accel.yaml`.
    """

    kind: str
    devices: int
    cores: int = 1
    project: bool = False


class Question(NamedTuple):
    """One question.

    name:    of the answer, and of its setting, if there is one.
    options: (value, displayed text) of a choice; empty if the setting defines its values.
    when:    returns True if the question is open after these answers.
    default: the proposed answer; None without a sensible one.
    own:     the setting of a question that is about no setting of a launch.
    common:  the choices shown first, if there are many; the others are behind "another one".
    target:  (kind, option) of the target that the answer is about; None if it is about the launch.
    """

    name: str
    text: str
    when: Condition
    options: tuple[tuple[str, str], ...] = ()
    default: Callable[[Answers, Machine], Any] | None = None
    may_be_empty: bool = False
    own: Setting | None = None
    common: tuple[str, ...] = ()
    target: tuple[str, str] | None = None

    @property
    def setting(self) -> Setting:
        """The question's setting. Raises KeyError if it has no single one."""
        return self.own or BY_NAME[self.name]

    @property
    def many(self) -> bool:
        """True if the answer is a list, read one word at a time."""
        return not self.options and self.setting.kind == "words"

    def choices(self) -> tuple[tuple[str, str], ...]:
        """Return the choices as (value, displayed text), or nothing for a typed answer."""
        if self.options:
            return self.options
        if self.setting.kind in ("switch", "yesno"):
            return (("yes", "yes"), ("no", "no"))
        return tuple((choice, choice) for choice in self.setting.choices)

    def offered(self, answers: Answers, machine: Machine) -> Any:
        """Return the default after these answers, or None."""
        if self.default is not None:
            return self.default(answers, machine)
        return None if self.options else self.setting.default

    def parse(self, raw: object) -> Any:
        """Return the answer that `raw` means. Raises BadValue."""
        if self.may_be_empty and raw in ("", None, []):
            return None
        if not self.options:
            return read(self.setting, raw)
        return read(Setting(self.name, self.text, choices=tuple(value for value, _ in self.options)), raw)


def ask(name: str, text: str, when: Condition, **fields: Any) -> Question:
    """Return a question; `offer` is a constant default."""
    if "offer" in fields:
        value = fields.pop("offer")
        fields["default"] = lambda answers, machine: value
    return Question(name, text, when, **fields)


def answer_is(name: str, *values: Any) -> Condition:
    """Return the condition that the answer to `name` is one of `values`."""
    return lambda answers: answers.get(name) in values


def both(first: Condition, second: Condition) -> Condition:
    """Return a condition that holds when both do."""
    return lambda answers: first(answers) and second(answers)


def at_least(name: str, minimum: int) -> Condition:
    """Return the condition that the answer to `name` is a number of at least `minimum`."""
    return lambda answers: int(answers.get(name) or 0) >= minimum


# Questions about a target. An answer is an option of its entry in `accel.yaml`.

KINDS = ("ssh", "slurm", "kubernetes", "sagemaker", "tpu")
_FILES = (
    ("project", "the project's accel.yaml, shared with all who check it out"),
    ("user", "your own accel.yaml, for all projects"),
)
_WORKLOADS = (
    ("pytorchjob", "a PyTorchJob (Kubeflow's training operator)"),
    ("jobset", "a JobSet"),
    ("job", "an Indexed Job, with no operator"),
    ("trainjob", "a TrainJob (Kubeflow Trainer 2)"),
)
_TRANSPORTS = (
    ("ssh", "SSH, with the keys of ~/.ssh"),
    ("gcloud", "gcloud's SSH, with its own keys and OS Login"),
)
_RUNTIMES = (
    ("torch_tpu", "torch_tpu: one rank per chip"),
    ("torch_xla", "torch_xla, which calls a function of the script on every core"),
)
_CONTAINERS = (
    ("none", "nothing: jobs run on the nodes as they are"),
    ("pyxis", "pyxis (enroot)"),
    ("apptainer", "apptainer"),
    ("singularity", "singularity"),
)


def entry_of(answers: Answers) -> tuple[str, dict[str, Any]] | None:
    """Return the target's name and its entry in `accel.yaml`; None if the answers describe no target."""
    kind = answers.get("place")
    if not _target(answers):
        return None
    entry: dict[str, Any] = {"kind": kind}
    for question in TARGET_QUESTIONS:
        if question.target is not None and question.target[0] == kind:
            value = answers.get(question.name)
            if value not in (None, "none", False):
                entry[question.target[1]] = value
    if answers.get("device") == "cpu":
        entry["cpu"] = True
    return str(answers["target"]), entry


def answers_of_entry(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the answers that an entry of `accel.yaml` represents, as defaults."""
    kind = str(entry.get("kind"))
    names = {question.target: question.name for question in TARGET_QUESTIONS if question.target is not None}
    offered = {names[kind, key]: value for key, value in entry.items() if (kind, key) in names}
    return {
        "target": name,
        **{key: ",".join(value) if isinstance(value, list) else value for key, value in offered.items()},
    }


def _option(kind: str, option: str, text: str, *, when: Condition | None = None, **fields: Any) -> Question:
    at_kind = answer_is("place", kind)
    setting = None if "options" in fields else Setting(f"{kind}_{option}", text)
    condition = at_kind if when is None else both(at_kind, when)
    return ask(
        f"{kind}_{option}", text, condition, own=setting, target=(kind, option), **({"may_be_empty": True} | fields)
    )


def _file(answers: Answers, machine: Machine) -> str:
    return "project" if machine.project else "user"


def _remote(answers: Answers) -> bool:
    return answers.get("slurm_login") is not None


def _target(answers: Answers) -> bool:
    """Return True if the place is a target; for a TPU that is a question of its own."""
    return answers.get("place") in KINDS and (answers["place"] != "tpu" or _SLICE(answers))


_SLICE = both(answer_is("place", "tpu"), answer_is("tpu_submit", True))
_CREATED = both(_SLICE, answer_is("slice_name", None))

TARGET_QUESTIONS: tuple[Question, ...] = (
    ask("tpu_submit", "Submit jobs to it (accel submit)?", answer_is("place", "tpu"),
        own=switch("tpu_submit", "submit jobs to a slice")),
    ask("target", "The target's name (accel submit --target NAME)?", _target,
        own=Setting("target", "a name"), default=lambda answers, machine: answers["place"]),
    _option("ssh", "hosts", "Which machines: a,b or user@host:port or gpu[01-16] (empty: those of a hostfile)?"),
    _option("ssh", "hostfile", "The hostfile, one machine per line?", when=answer_is("ssh_hosts", None),
            may_be_empty=False),
    _option("ssh", "user", "The user there (empty: as ~/.ssh/config says)?"),
    _option("ssh", "venv", "The virtual environment there that has accel and torch (empty: python3's packages)?"),
    _option("ssh", "interface", "The network interface between the machines (empty: any)?"),
    _option("slurm", "login", "The login node, as user@host:port (empty: this machine is one)?"),
    _option("slurm", "python", "The interpreter on the nodes that has accel and torch?", when=_remote,
            may_be_empty=False, offer="python3"),
    _option("slurm", "partition", "The partition (empty: the cluster's default)?"),
    _option("slurm", "account", "The account that is charged (empty: yours)?"),
    _option("slurm", "qos", "The quality of service (empty: the default)?"),
    _option("slurm", "container", "What runs container images (accel submit --image)?", options=_CONTAINERS,
            offer="none", may_be_empty=False),
    _option("kubernetes", "context", "The kubeconfig's context (empty: the current one)?"),
    _option("kubernetes", "namespace", "The namespace (empty: the context's)?"),
    _option("kubernetes", "workload", "Which workload is a job there?", options=_WORKLOADS, offer="pytorchjob",
            may_be_empty=False),
    _option("kubernetes", "image", "The container image with accel and torch (empty: each job names its own)?"),
    _option("kubernetes", "code_claim", "A PersistentVolumeClaim for code of more than 1 MiB (empty: none)?"),
    _option("kubernetes", "queue", "Kueue's queue (empty: none)?"),
    *(
        ask(name, text, answer_is("place", "sagemaker"), target=("sagemaker", option), **rest)
        for name, option, text, rest in (
            ("profile", "profile", "The AWS profile with the credentials (empty: those of the environment)?",
             {"offer": "default", "may_be_empty": True}),
            ("region", "region", "The AWS region?", {}),
            ("iam_role_name", "role", "The IAM role that the job runs as?", {}),
            ("ec2_instance_type", "instance_type", "The machines' type?", {"offer": "ml.p3.2xlarge"}),
            ("image_uri", "image", "A container image: a URI, or pytorch:VERSION (empty: each job names its own)?",
             {"may_be_empty": True}),
        )
    ),
    _option("sagemaker", "s3_output_path", "Where in S3, s3://BUCKET/PREFIX (empty: SageMaker's default bucket)?"),
    *(
        ask(f"slice_{option}", text, when, target=("tpu", option),
            **({"own": Setting(f"slice_{option}", text)} | rest))
        for option, text, when, rest in (
            ("project", "The Google Cloud project (empty: that of the credentials)?", _SLICE, {"may_be_empty": True}),
            ("zone", "The zone, such as us-central2-b?", _SLICE, {}),
            ("name", "The name of an existing slice (empty: create one for each job)?", _SLICE,
             {"may_be_empty": True}),
            ("accelerator_type", "The accelerator type to create, such as v4-32?", _CREATED, {}),
            ("version", "Its software (gcloud compute tpus tpu-vm versions list)?", _CREATED, {}),
            ("spot", "Use spot capacity, which may be preempted?", _CREATED, {"own": switch("slice_spot", "spot")}),
            ("venv", "The virtual environment there that has accel and torch (empty: python3's packages)?", _SLICE,
             {"may_be_empty": True}),
            ("checkpoint_uri", "Where are checkpoints stored, gs://BUCKET/PREFIX/{id} (empty: nowhere)?", _SLICE,
             {"may_be_empty": True}),
            ("transport", "How are its hosts reached?", _SLICE, {"options": _TRANSPORTS, "offer": "ssh"}),
            ("runtime", "Which runtime drives the chips?", _SLICE, {"options": _RUNTIMES, "offer": "torch_tpu"}),
        )
    ),
    ask("target_file", "Which file gets the target?", _target, options=_FILES, default=_file),
)  # fmt: skip
