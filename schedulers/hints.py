"""Hints for words of other launchers, and the check that a script is a Python program."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping

from .errors import SpecError, nearest

_OMIT = "leave it out: accel sets it"
_IN_FILE = "set it in a file (accel config) and give --config_file FILE"
# Place -> what to do -> words of torchrun, Accelerate, DeepSpeed, srun, sbatch and SkyPilot for it (`-` for `_`).
_REMEDIES: Mapping[str, Mapping[str, str]] = {
    "accel submit": {
        "use --procs-per-node": "--nproc-per-node --num-processes --ntasks-per-node --ntasks -n",
        "use --nodes": "--nnodes --num-machines --num-nodes -N",
        "use --gpus": "--gpus-per-node --gpu-ids --num-gpus -G",
        "use --gpus and --accelerator": "--accelerators",
        "use --cpus": "--cpus-per-task -c",
        "use --memory": "--mem",
        "use --time-limit": "--time -t",
        "use --name": "--job-name -J",
        "use --after": "--dependency -d",
        "use --code": "--chdir --workdir -D",
        "use --image": "--image-id --container-image",
        "use --target": "--infra --cloud --cluster",
        "use --env": "--export --envs",
        "use --env OMP_NUM_THREADS=N": "--num-cpu-threads-per-process",
        "use --grace": "--signal --shutdown-timeout",
        "use --max-restarts": "--requeue",
        "use --detach": "--detach-run",
        "use --dry-run": "--test-only",
        "use --no-python COMMAND": "--wrap",
        "use accel logs": "--output --error --log-dir --tee --redirects -o -e",
        "use --option partition=NAME": "--partition -p",
        "use --option account=NAME": "--account -A",
        "use --option qos=NAME": "--qos -q",
        "use --option constraint=FEATURES": "--constraint -C",
        "use --option nodelist=HOSTS": "--nodelist -w",
        "use --option exclude=HOSTS": "--exclude -x",
        "use --option gres=GRES": "--gres",
        "use --option exclusive=true": "--exclusive",
        "use --option 'sbatch={NAME: VALUE}'": "--begin --mem-per-cpu --mem-per-gpu --cpus-per-gpu --licenses --nice",
        _OMIT: "--machine-rank --main-process-ip --main-process-port --same-network --node-rank --master-addr "
        "--master-port --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id --role --standalone --start-method",
        _IN_FILE: "--mixed-precision --multi-gpu --use-fsdp --use-deepspeed --use-megatron-lm --zero-stage "
        "--deepspeed-config-file --dynamo-backend --gradient-accumulation-steps --use-parallelism-config",
        "use --env ACCELERATE_USE_CPU=1": "--cpu --use-cpu",
    },
    "accel launch": {
        "use --num_processes, the total of all machines": "--nproc-per-node --procs-per-node --ntasks-per-node "
        "--ntasks --num-gpus --gpus --gpus-per-node",
        "use --num_machines": "--nnodes --nodes --num-nodes",
        "use --machine_rank": "--node-rank",
        "use --main_process_ip": "--master-addr",
        "use --main_process_port": "--master-port",
        "use --main_process_ip and --main_process_port": "--rdzv-endpoint",
        "use --num_cpu_threads_per_process": "--cpus-per-task",
        "use --mixed_precision fp16": "--fp16",
        "use --log_dir": "--redirects -r",
        "use --shutdown_timeout": "--grace",
        "use --deepspeed_hostfile": "--hostfile",
        "use accel submit --target": "--target",
        "leave it out: nothing needs it": "--standalone --ipex --use-xpu --use-mps-device --mpirun-ccl",
    },
    "sbatch": {
        "use account": "A", "use begin": "b", "use constraint": "C", "use exclude": "x", "use licenses": "L",
        "use nodelist": "w", "use oversubscribe": "s", "use partition": "p", "use qos": "q", "use --gpus": "G",
        "use --nodes": "N", "use --procs-per-node": "n", "use --time-limit": "t", "use --cpus": "c",
        "use --name": "J", "use --after": "d", "use --code": "D", "use accel logs": "o e",
    },
    "ssh": {
        "set IdentityFile in ~/.ssh/config, or in the file of ssh_config": "key key-file key-filename identity "
        "identity-file identityfile private-key ssh-private-key pem",
        "use user": "username ssh-user",
    },
    "target": {
        "use accel submit --nodes": "nodes num-nodes nnodes",
        "use accel submit --gpus": "gpus accelerators",
        "use accel submit --cpus": "cpus",
        "use accel submit --memory": "memory mem",
        "use accel submit --time-limit": "time time-limit",
        "use accel submit --code": "workdir",
        "use accel submit --env": "env envs",
        "use accel submit --image": "image image-id",
    },
}  # fmt: skip

# Programs that start processes or Python, as accel does -> what to leave out.
_LAUNCHERS = {
    **{name: f"{name} and its options" for name in ("torchrun", "deepspeed", "srun", "mpirun", "mpiexec", "sbatch")},
    **{name: f"{name} launch" for name in ("accelerate", "accel", "sky")},
    "accelerate-launch": "accelerate-launch",
}
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")

_PYTHON_ENDS = (".py", ".pyw", ".pyc", ".pyz", ".zip")
_SHELL = ("a shell script", "run it with --no-python bash {}")
_SETTINGS = ("a configuration file", "write --config_file {} SCRIPT")
_MANIFEST = ("a Kubernetes manifest", "give the script: accel writes the manifest (kubectl apply -f {} sends this one)")
_ENDS = {
    **dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm", ".pbs", ".lsf"), _SHELL),
    **dict.fromkeys((".yaml", ".yml", ".json"), _SETTINGS),
    ".ipynb": ("a notebook", "convert it with jupyter nbconvert --to script {}"),
}
_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe")  # of Linux and macOS
_HEAD_SIZE = 65_536


def hint(word: str, valid: Iterable[str], *places: str) -> str:
    """Return `; use X` for a word of another launcher, else `nearest`'s hint."""
    dashed = word.replace("_", "-")
    for place in places:
        for remedy, words in _REMEDIES.get(place, {}).items():
            if dashed in words.split():
                return f"; {remedy}"
    return nearest(word, valid)


def check_program(entry: str, word: str, directory: str) -> None:
    """Raise SpecError, with what to write, for a script that is not a Python program, and a file that is not found.

    A module is given without `.py`; a command in `directory` that is not on PATH needs `./`.
    """
    path = os.path.join(directory, word)
    if not word or "\0" in word:
        return  # JobSpec rejects these
    if entry == "script":
        _check_script(word, path)
    elif entry == "module" and word.endswith(".py") and os.path.isfile(path):
        module = word.removesuffix(".py").replace("/", ".")
        raise SpecError(f"-m {word} is a file, not a module: leave out -m, or write -m {module}")
    elif entry == "command" and "/" not in word and os.path.isfile(path) and not _is_on_path(word):
        raise SpecError(f"--no-python {word} is a file, and commands are looked up on PATH: write --no-python ./{word}")


def _check_script(script: str, path: str) -> None:
    if os.path.isfile(os.path.join(path, "__main__.py")):
        return
    if not os.path.exists(path) or os.path.isdir(path):
        raise SpecError(_missing(script, path))
    if script.lower().endswith(_PYTHON_ENDS) or not os.path.isfile(path):  # a pipe can be read once
        return
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_SIZE)
    except OSError:
        return  # for Python to report
    kind = _kind(script, head)
    if kind:
        raise SpecError(f"{script} is {kind[0]}, not a Python program: {kind[1].replace('{}', script)}")


def _missing(script: str, path: str) -> str:
    launcher = "python" if _PYTHON.fullmatch(script) else _LAUNCHERS.get(script)
    if launcher:
        return f"{script!r} is not a script: leave out {launcher}, and give the script (or -m MODULE)"
    problem = "it is a directory without __main__.py" if os.path.isdir(path) else "it does not exist"
    with contextlib.suppress(OSError):
        problem += nearest(os.path.basename(script), os.listdir(os.path.dirname(path)))
    remedy = "a module: -m; a command that is not Python: --no-python"
    if _is_on_path(script):
        remedy = f"to run the command: --no-python {script}"
    return f"no script at {os.path.normpath(path)}: {problem} ({remedy})"


def _is_on_path(command: str) -> bool:
    import shutil  # with three compression libraries

    return shutil.which(command) is not None


def _kind(script: str, head: bytes) -> tuple[str, str] | None:
    """Return what a file is that has no Python program's end, and what to write instead; None for a Python program."""
    if head.startswith(b"#!"):
        interpreter = head[2:].partition(b"\n")[0].decode(errors="replace").strip()
        if "python" in interpreter or "pypy" in interpreter:
            return None
        return f"a script for {interpreter} (its first line)", f"run it with --no-python {interpreter} {{}}"
    if head.startswith(_MAGIC):
        is_python = _PYTHON.fullmatch(os.path.basename(script))
        return "a compiled program", "leave it out" if is_python else "run it with --no-python {}"
    end = os.path.splitext(script)[1].lower()
    if end in _ENDS:
        what, remedy = _ENDS[end]
        what = f"{what} (its name ends in {end})"
    elif _is_mapping(head):
        what, remedy = _SETTINGS
    else:
        return None
    return _MANIFEST if remedy is _SETTINGS[1] and b"apiVersion" in head else (what, remedy)


def _is_mapping(head: bytes) -> bool:
    """Return True for a YAML or JSON mapping of names. Python's `try: main()` is YAML too."""
    import json
    import keyword

    import yaml

    text = head.decode(errors="replace")
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        pass
    try:
        value = next(yaml.safe_load_all(text), None)
    except (ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(value, dict) and all(
        isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key) for key in value
    )
