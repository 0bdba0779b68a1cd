"""Names of a job's objects in its backend, made from the job's name and id."""

from __future__ import annotations

import hashlib
import re
import unicodedata

# Names of pods and Services add to it (`NAME-worker-9999`, `NAME-node-0-9999-abcde`), and 63 is their limit.
MAX_LENGTH = 40
HASH = 8
# Ids as the store creates them have no hyphen: the last hyphen of a name is before the id.
_PLAIN_ID = re.compile(r"[0-9a-z]{1,20}\Z")


def object_name(name: str, job_id: str) -> str:
    """Return the name of the job's object, as `train-2mxaaaaaaaa`: unique, from these two arguments only.

    A DNS-1035 label of at most `MAX_LENGTH` characters; begins with a letter, since Services are named after it.
    """
    tail = job_id if _PLAIN_ID.match(job_id) else f"{slug(job_id)[:11].rstrip('-') or 'x'}-{short_hash(job_id)}"
    head = slug(name).lstrip("0123456789-")[: MAX_LENGTH - len(tail) - 1].rstrip("-")
    return f"{head or 'job'}-{tail}"


def slug(text: str) -> str:
    """Return the text's ASCII letters and digits in lower case, with hyphens in place of anything else."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def short_hash(text: str) -> str:
    """Return the first `HASH` hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:HASH]
