"""Classification of a Slurm command's failure as a refusal or a lost connection. All exit with 1."""

from __future__ import annotations

import errno
import os
import re

# Errors of a connection to a daemon; Slurm's commands print the system's messages untranslated.
_SYSTEM = (
    "EAGAIN", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EINPROGRESS", "ENETDOWN",
    "ENETRESET", "ENETUNREACH", "ENOBUFS", "ENOTCONN", "EPIPE", "ESHUTDOWN", "ETIMEDOUT",
)  # fmt: skip
# In Slurm's own words (slurm_strerror(3)): its errors 1000 to 1004, 1008, 1013, 1800 to 1803, 2027, 2131 and 5000 to
# 5005; and sbatch's messages while it retries.
_SLURM = (
    r"unable to (contact|establish|connect)", r"(connect|connection|send|receive|shutdown) failure", r"timed out",
    r"insane message", r"unexpected message", r"missing socket", r"standby mode", r"message length", r"zero length",
    r"entire message", r"header lengths", r"zero bytes were transmitted", r"temporarily unable",
)  # fmt: skip
_WORDS = re.compile(
    "|".join([*_SLURM, *(re.escape(os.strerror(getattr(errno, name))) for name in _SYSTEM if hasattr(errno, name))]),
    re.IGNORECASE,
)


def is_unanswered(complaint: str) -> bool:
    """Return True if the command may not have reached the daemon. It may or may not have had its effect."""
    return _WORDS.search(complaint) is not None
