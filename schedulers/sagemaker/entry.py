"""The entry program of a training job's container: it unpacks the code and accel, and runs `accel launch`.

It is sent as this one file and needs only the accel that it unpacks; from Python 3.8 on it can report why it cannot
continue. It reads the files next to it (`/opt/ml/input/data/code`), and writes the job's first error to
`/opt/ml/output/failure`.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo.html
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import traceback
import zipfile
from typing import Any

_NEEDS = {"torch": (2, 6), "numpy": (1, 26), "safetensors": (0, 4)}
_PYTHON = (3, 10)
END = "[accel] end"  # the last line of a container's log, for its readers
_LOG_FLUSH_S = 5.0  # of a launcher that has ended
_MAX_FAILURE = 1024  # characters; AWS drops the rest
_EFA = "/sys/class/infiniband"  # SageMaker's instances have no other adapters of that class
_RDMA = ("ml.p4d", "ml.p5", "ml.p6", "ml.trn1")  # on older EFA the variable ends the program


class EntryError(Exception):
    """The job cannot continue. The message has one line."""


def main() -> int:
    root = os.environ.get("ACCEL_SM_ROOT") or "/opt/ml"
    channel = os.path.dirname(os.path.abspath(__file__))
    work_dir = "/tmp/accel"
    # The first process of a container ignores SIGTERM unless it handles it.
    signal.signal(signal.SIGTERM, lambda received, _: sys.exit(128 + received))
    try:
        with open(os.path.join(channel, "job.json"), encoding="utf-8") as file:
            settings = json.load(file)
        check()
        unpack(channel, work_dir, settings)
        env = environment(root, work_dir, settings)
        prepare(os.path.join(work_dir, "code", settings["workdir"]), settings, env)
        return run(root, work_dir, settings, env)
    except EntryError as error:
        print(f"accel: {error}", flush=True)
        write_failure(root, str(error))
    except Exception as error:
        traceback.print_exc()
        write_failure(root, f"{type(error).__name__}: {error}")
    return 1


def unpack(channel: str, work_dir: str, settings: dict[str, Any]) -> None:
    """Unpack accel, and the code directory next to it."""
    for name, digest in settings["files"].items():
        if digest_of(os.path.join(channel, name)) != digest:
            raise EntryError(f"{name} is not what was submitted: its sha256 is another")
    code, accel = os.path.join(work_dir, "code"), os.path.join(work_dir, "accel")
    for path in (code, accel, os.path.join(work_dir, "logs")):
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
    with zipfile.ZipFile(os.path.join(channel, settings["wheel"])) as wheel:
        wheel.extractall(accel)
    sys.path.insert(0, accel)
    from schedulers.node.archive import extract

    with tarfile.open(os.path.join(channel, "code.tar.gz"), "r:gz", encoding="utf-8", errors="surrogateescape") as tar:
        extract(tar, code)


def digest_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(1 << 20), b""):
            digest.update(data)
    return digest.hexdigest()


def environment(root: str, work_dir: str, settings: dict[str, Any]) -> dict[str, str]:
    """Return the ranks' environment: the variables of SageMaker's toolkit, and the job's own."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([os.path.join(work_dir, "accel"), *filter(None, [env.get("PYTHONPATH")])])
    from schedulers.sagemaker import toolkit_env  # of the accel that `unpack` brought

    program = str(settings["spec"]["argv"][0])
    env = {**toolkit_env.variables(root, os.path.join(work_dir, "code"), program, env), **env}
    interface = env["SM_NETWORK_INTERFACE_NAME"]
    if interface in {name for _, name in socket.if_nameindex()}:
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    if os.path.isdir(_EFA) and os.listdir(_EFA):
        env.setdefault("FI_PROVIDER", "efa")
        if env["SM_CURRENT_INSTANCE_TYPE"].startswith(_RDMA):
            env.setdefault("FI_EFA_USE_DEVICE_RDMA", "1")
    for path in (env["SM_MODEL_DIR"], env["SM_OUTPUT_DATA_DIR"]):
        os.makedirs(path, exist_ok=True)
    env.update(settings["environment"])
    env.update(secrets(settings["secrets"], env))
    return env


def secrets(references: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """Return the values of `secretsmanager:ID[#KEY]` and `ssm:NAME`, read here and stored nowhere."""
    if not references:
        return {}
    try:
        import boto3
    except ImportError:
        raise EntryError("--secret needs the package boto3 in the image") from None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    values: dict[str, str] = {}
    for name, reference in references.items():
        kind, _, secret_id = reference.partition(":")
        try:
            client = boto3.client(kind, region_name=region)
            if kind == "ssm":
                values[name] = client.get_parameter(Name=secret_id, WithDecryption=True)["Parameter"]["Value"]
            else:
                secret_id, _, key = secret_id.partition("#")
                text = client.get_secret_value(SecretId=secret_id)["SecretString"]
                values[name] = str(json.loads(text)[key]) if key else text
        except Exception as error:  # botocore raises many kinds; none holds a value
            raise EntryError(f"secret {name}: {reference}: {' '.join(str(error).split())}") from None
    env["ACCEL_SECRETS"] = ",".join(values)
    return values


def check() -> None:
    """Raise EntryError, which lists everything that is missing, if the image cannot run accel."""
    if sys.version_info[:2] < _PYTHON:
        raise EntryError(
            f"the image has Python {sys.version.split()[0]}, and accel needs {'.'.join(map(str, _PYTHON))}"
        )
    from importlib import metadata

    problems = []
    for name, minimum in _NEEDS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
            continue
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
        if release < minimum:
            problems.append(f"{name} {version} is older than {'.'.join(map(str, minimum))}")
    if problems:
        raise EntryError(f"the image cannot run accel: {'; '.join(problems)}")


def prepare(directory: str, settings: dict[str, Any], env: dict[str, str]) -> None:
    """Install the requirements and run the setup commands."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-r", settings["requirements"]]
    for argv in [*([pip] if pip[-1] else []), *settings["setup"]]:
        try:
            code = subprocess.call(argv, cwd=directory, env=env)
        except OSError as error:
            raise EntryError(f"setup: {argv[0]}: {error.strerror}") from None
        if code:
            raise EntryError(f"setup: {' '.join(argv)} ended with code {code}")


def run(root: str, work_dir: str, settings: dict[str, Any], env: dict[str, str]) -> int:
    """Run the launcher to its end, write its failure if any, and return its exit code."""
    logs = os.path.join(work_dir, "logs")
    argv = [sys.executable, "-m", "accel", "launch", "--log_dir", logs, *settings["launch"]]
    cwd = os.path.join(work_dir, "code", settings["workdir"])
    launcher = subprocess.Popen(argv, cwd=cwd, env=env, stderr=subprocess.PIPE)
    assert launcher.stderr is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda received, _: launcher.send_signal(received))
    last: list[bytes] = [b""]
    copying = threading.Thread(target=copy, args=(launcher.stderr.fileno(), last), daemon=True)
    copying.start()
    code = launcher.wait()
    code = code if code >= 0 else 128 - code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first host that ends makes SageMaker stop the others
    copying.join(_LOG_FLUSH_S)
    if code:
        lines = last[0].decode(errors="replace").strip().splitlines()
        write_failure(root, report(logs) or (lines[-1] if lines else f"the launcher ended with code {code}"))
    return code


def copy(fd: int, last: list[bytes]) -> None:
    """Forward the launcher's output, and keep its end."""
    while True:
        data = os.read(fd, 65_536)
        if not data:
            return
        os.write(2, data)
        last[0] = (last[0] + data)[-_MAX_FAILURE:]


def report(logs: str) -> str | None:
    """Return the gang's failure as recorded by the launcher, the same on all hosts, or None."""
    from schedulers.node.logs import newest_event

    event = newest_event(os.path.join(logs, "launch.jsonl"), "failure")
    if event is None:
        return None
    error = event["failure"]
    subject = "the launcher" if error["rank"] is None else f"rank {error['rank']}"
    cause = f" ({error['cause']})" if error.get("cause") else ""
    return f"{subject} on node {error['node']}: {error['message'] or error['how']}{cause} [accel {error['reason']}]"


def write_failure(root: str, text: str) -> None:
    path = os.path.join(root, "output", "failure")
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text[:_MAX_FAILURE])


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        print(END, flush=True)
