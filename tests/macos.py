"""Programs that find themselves on macOS, as far as Python can be made to say so on Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_CLIENT = """
import json, sys, schedulers
argv, given = json.loads(sys.argv[1])
job = schedulers.submit(argv[0], argv[1:], entry="command", **given)
text = "".join(line.text for line in job.logs(follow=True) if line.rank is not None)
print(json.dumps([sys.platform, job.wait(60).state.value, text]))
"""

# Run at the start of every interpreter, once os, signal, select, socket, resource and psutil have been imported.
_SITECUSTOMIZE = '''
import os, resource, select, signal, socket, sys, sysconfig, types
sysconfig.get_config_vars()  # of a file that has the platform in its name
try:
    import psutil
except ImportError:
    pass
sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # what urllib asks on macOS for the system's proxies
sys.modules["_scproxy"]._get_proxy_settings = sys.modules["_scproxy"]._get_proxies = dict
missing = {
    os: """
        pidfd_open memfd_create pipe2 eventfd eventfd_read eventfd_write timerfd_create copy_file_range splice
        posix_fallocate posix_fadvise fdatasync getrandom unshare setns getresuid getresgid setresuid setresgid
        getxattr setxattr listxattr removexattr waitid P_PIDFD preadv2 sched_getaffinity sched_setaffinity
        sched_getparam sched_setparam sched_getscheduler sched_setscheduler sched_rr_get_interval
        O_PATH O_TMPFILE O_DIRECT O_NOATIME O_LARGEFILE O_RSYNC
    """,
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT SIGPOLL SIGCLD SIGRTMIN SIGRTMAX",
    select: "epoll EPOLLIN EPOLLOUT POLLRDHUP",
    socket: """
        AF_NETLINK AF_PACKET AF_VSOCK AF_ALG SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED SO_PASSCRED SO_BINDTODEVICE
        SO_DOMAIN SO_PROTOCOL SO_MARK SO_PRIORITY TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_CORK TCP_INFO TCP_QUICKACK
        TCP_SYNCNT TCP_DEFER_ACCEPT TCP_LINGER2 TCP_WINDOW_CLAMP MSG_NOSIGNAL MSG_CMSG_CLOEXEC MSG_MORE MSG_ERRQUEUE
    """,
    resource: """
        prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING RUSAGE_THREAD
    """,
}
for module, names in missing.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
'''


def path(directory: Path) -> Path:
    """A directory for the beginning of PYTHONPATH, for the program and all Python programs that it starts."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    return directory


def submit(directory: Path, argv: list[str], given: Mapping[str, Any]) -> list[str]:
    """Submits a command from such a client and follows it: the client's platform, the final state and the ranks' lines.

    `directory` is one that `path` has made; `given` are more arguments of `schedulers.submit`.
    """
    env = {**os.environ, "PYTHONPATH": f"{directory}:{_ROOT}"}
    command = [sys.executable, "-c", _CLIENT, json.dumps([argv, dict(given)])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    answer: list[str] = json.loads(done.stdout)
    return answer
