"""Host keys revoked by a file (`RevokedHostKeys`): a list of public keys, or a KRL of ssh-keygen."""

from __future__ import annotations

import subprocess

from .errors import one_line

_KRL = b"SSHKRL\n\0"
_COMMAND_TIMEOUT_S = 20
_REVOKED = 1


def problem(file: str, key_type: str, key: str) -> str | None:
    """Return why this key (its base64 text) must not be trusted; None if the file does not revoke it.

    As with OpenSSH, a file that cannot be read, or has a line that is no key, revokes every key.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read()
    except OSError as error:
        return _unreadable(file, (error.strerror or str(error)).lower())
    if content.startswith(_KRL):
        return _in_krl(file, key_type, key)
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) < 2:
            return _unreadable(file, f"its line {number} is no public key")
        if fields[1] == key:
            return f"is revoked ({file}:{number})"
    return None


def _in_krl(file: str, key_type: str, key: str) -> str | None:
    try:
        completed = subprocess.run(
            ["ssh-keygen", "-Q", "-f", file, "/dev/stdin"],
            input=f"{key_type} {key}\n".encode(),
            capture_output=True,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _unreadable(file, one_line(str(error)))
    if completed.returncode == 0:
        return None
    return f"is revoked ({file})" if completed.returncode == _REVOKED else _unreadable(file, one_line(completed.stderr))


def _unreadable(file: str, reason: str) -> str:
    return f"may be revoked: RevokedHostKeys names {file}, which cannot be used ({reason})"
