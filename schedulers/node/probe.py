"""A program that reports a host's facts and tests connections. JSON: one line in, one out, until the input ends.

{"do": "facts", "root": "~/.accel"}                               the first request
{"do": "listen", "ports": [0], "token": "…"}                      sends `token` to every client, from now on
{"do": "connect", "to": [{"addresses": ["…"], "port": 1, "token": "…"}], "seconds": 3}    tries all at once
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import socket
import struct
import sys
import threading
import time

from .listen import listen
from .program import free_bytes, write_reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Request = dict[str, Any]

LIFETIME_S = 600  # the client is long gone
SIOCGIFCONF = 0x8912
NVML = "libnvidia-ml.so.1"
TOKEN_BYTES = 64
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def main() -> None:
    signal.alarm(LIFETIME_S)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            reply = ACTIONS[request["do"]](request)
        except OSError as error:
            reply = {"error": error.strerror or str(error)}
        write_reply(reply)


def facts(request: Request) -> dict[str, Any]:
    import resource

    nproc, nofile = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE))

    disk, disk_free, writable = disk_of(os.path.expanduser(request["root"]))
    counted = gpus()
    report = {
        "name": socket.gethostname(),
        "machine": machine(),
        "user": user(),
        "home": os.path.expanduser("~"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "packages": {name: version(name, module) for name, module in request["packages"].items()},
        "disk": disk,
        "disk_free": disk_free,
        "disk_writable": writable,
        "shm_free": disk_of("/dev/shm")[1],
        "processes": max(-1, nproc),
        "files": max(-1, nofile),
        "gpus": counted,
        "devices": devices(counted),
        "addresses": addresses(),
        "queue": queue(os.path.expanduser(request["root"])),
    }
    report["time"] = time.time()  # last: the caller compares it with the time of the reply
    return report


def machine() -> str:
    """Return the same text for two names of one machine, and for nothing else (containers of one differ)."""
    parts = [socket.gethostname(), *filter(None, map(text_of, (BOOT_ID, "/etc/machine-id")))]
    if os.path.lexists("/proc/self/ns/net"):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def text_of(path: str) -> str:
    """Return the file's text; "" if it cannot be read."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read().strip()
    return ""


def user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def version(name: str, module: str) -> str | None:
    """Return an installed package's version without importing it; `?` if it has none, None if it is missing."""
    import importlib.metadata
    import importlib.util

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    match = re.search(r"""^__version__ *= *["']([^"']+)""", text_of(spec.origin), re.MULTILINE)
    return match.group(1) if match else "?"


def disk_of(path: str) -> tuple[str, int, bool]:
    """Return the nearest existing directory, its free bytes for this user, and True if this user may write to it."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path, free_bytes(path), os.access(path, os.W_OK | os.X_OK)


def gpus() -> dict[str, Any]:
    """Return the number of GPUs and who counted them, or what is wrong with them."""
    problem = ""
    for method, count in (("nvml", nvml_gpus), ("nvidia-smi", smi_gpus), ("driver", driver_gpus), ("kfd", amd_gpus)):
        outcome = count()
        if isinstance(outcome, int):
            return {"count": outcome, "how": method, "problem": "" if method != "driver" else problem}
        problem = problem or outcome
    return {"count": 0, "how": "", "problem": problem}


def nvml_gpus() -> int | str:
    import ctypes

    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return ""
    status = library.nvmlInit_v2()
    if status != 0:
        return f"NVML does not start (error {status}; 18: library and driver differ in version)"
    count = ctypes.c_uint()
    return int(count.value) if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else "NVML counts no GPUs"


def smi_gpus() -> int | str:
    import shutil
    import subprocess

    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        completed = subprocess.run(
            [command, "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer ({error})"
    if completed.returncode != 0:
        lines = (completed.stdout + completed.stderr).strip().splitlines()
        return lines[0][:200] if lines else "nvidia-smi fails"
    return sum(line.startswith("GPU ") for line in completed.stdout.splitlines())


def driver_gpus() -> int | str:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return ""


def amd_gpus() -> int | str:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    count = 0
    try:
        for node in os.listdir(nodes):
            with open(os.path.join(nodes, node, "properties")) as file:
                count += re.search(r"^simd_count [1-9]", file.read(), re.MULTILINE) is not None
    except OSError:
        return ""
    return count


def devices(counted: dict[str, Any]) -> dict[str, Any]:
    """Return the devices that `accel launch` finds if accel is installed; GPUs unknown to it, by number."""
    detected, problem = launch_devices()
    known = detected is not None and (detected["kind"] != "cpu" or counted["how"] in ("", "nvml"))
    if detected is None:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        detected = {"kind": "cpu", "ids": ["cpu"], "cpus": cpus}
    if counted["count"] and not known:
        detected = {**detected, "kind": "cuda", "ids": [str(number) for number in range(counted["count"])]}
    return {**{name: detected[name] for name in ("kind", "ids", "cpus")}, "problem": problem}


def launch_devices() -> tuple[dict[str, Any] | None, str]:
    """Return the devices that `accel launch` finds, from a process of its own, and that process's problem.

    A driver's library may end the process. Without accel there are no devices, and no problem.
    """
    import subprocess

    code = (
        "import runpy,sys;from importlib.util import find_spec;sys.path[:]=[p for p in sys.path if p];"
        "find_spec('accel') and runpy.run_module(sys.argv[1],None,'__main__')"
    )
    argv = [sys.executable, "-c", code, "accel.launch.devices"]
    try:
        completed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None, "does not answer within 20 s"
    except OSError as error:
        return None, f"does not start: {error.strerror or error}"
    with contextlib.suppress(ValueError):
        return json.loads(completed.stdout), ""
    if completed.returncode == 0:
        return None, ""
    lines = completed.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
    outcome = f"signal {-completed.returncode}" if completed.returncode < 0 else f"exit code {completed.returncode}"
    return None, f"failed ({outcome}): {lines[-1][:200]}"


def queue(root: str) -> dict[str, Any]:
    """Return the held slots and the number of waiting jobs. Testing a lock holds it for a moment."""
    node = platform.node() or "this-machine"
    # Earlier versions: the host's name.
    tops = [os.path.join(root, "local", name) for name in (text_of(BOOT_ID) or node, node)]
    top = next(filter(os.path.isdir, tops), tops[0])
    return {"held": locked_names(os.path.join(top, "slots")), "waiting": len(locked_names(os.path.join(top, "queue")))}


def locked_names(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if locked(os.path.join(directory, name))]
    except OSError:
        return []


def locked(path: str) -> bool:
    import fcntl

    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def addresses() -> list[dict[str, Any]]:
    """Return every address that another host might reach: neither the loopback's nor link-local IPv6 ones."""
    entries = []
    for interface, address in ipv4() + ipv6():
        if interface != "lo":
            speed = number(f"/sys/class/net/{interface}/speed")
            virtual = os.path.isdir(f"/sys/devices/virtual/net/{interface}")
            entries.append({"interface": interface, "address": address, "speed": max(0, speed), "virtual": virtual})
    return entries


def ipv4() -> list[tuple[str, str]]:
    import array
    import fcntl

    size = 40 if struct.calcsize("P") == 8 else 32
    buffer = array.array("B", bytes(size * 512))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock, SIOCGIFCONF, struct.pack("iP", len(buffer), buffer.buffer_info()[0]))
        except OSError:
            return []
    length = struct.unpack("iP", reply)[0]
    raw = buffer.tobytes()
    return [
        (
            raw[offset : offset + 16].partition(b"\0")[0].decode(errors="replace").partition(":")[0],
            socket.inet_ntoa(raw[offset + 20 : offset + 24]),
        )
        for offset in range(0, length, size)
    ]


def ipv6() -> list[tuple[str, str]]:
    rows = [line.split() for line in text_of("/proc/net/if_inet6").splitlines()]
    # The fourth column is the scope: 0 is global, which unique local addresses are too.
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] == "00"]


def number(path: str) -> int:
    try:
        return int(text_of(path))
    except ValueError:
        return 0


def listen_on_first(request: Request) -> dict[str, Any]:
    """Listen on the first free port (0 is any)."""
    problem = "no ports were given"
    for port in request["ports"]:
        try:
            server = listen(port)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
            continue
        threading.Thread(target=serve, args=(server, request["token"].encode()), daemon=True).start()
        return {"port": server.getsockname()[1]}
    return {"error": problem}


def serve(server: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                connection.sendall(token)
            except OSError:
                continue


def connect(request: Request) -> dict[str, Any]:
    """Return, for each host and each of its addresses, `null` if the right host answered there, else why not."""
    seconds = request["seconds"]
    reached: list[dict[str, str | None]] = [dict.fromkeys(host["addresses"], "no answer") for host in request["to"]]
    threads = [
        threading.Thread(target=try_address, args=(address, host, seconds, attempts), daemon=True)
        for host, attempts in zip(request["to"], reached)  # noqa: B905  # `strict` is younger than some hosts' Python
        for address in host["addresses"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 5)
    return {"reached": [dict(attempts) for attempts in reached]}


def try_address(address: str, host: Request, seconds: float, attempts: dict[str, str | None]) -> None:
    deadline = time.monotonic() + seconds
    token = host["token"].encode()
    try:
        with socket.create_connection((address, host["port"]), timeout=seconds) as connection:
            received = b""
            while len(received) < len(token) and time.monotonic() < deadline:
                data = connection.recv(TOKEN_BYTES)
                if not data:
                    break
                received += data
        attempts[address] = None if received == token else "another machine answers there"
    except socket.timeout:  # noqa: UP041  # its name until Python 3.10
        attempts[address] = f"no answer within {seconds:g} s"
    except OSError as error:
        attempts[address] = (error.strerror or str(error)).lower()


ACTIONS = {"facts": facts, "listen": listen_on_first, "connect": connect}
