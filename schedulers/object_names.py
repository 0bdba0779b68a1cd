"""What a job is called where its backend names things: by its own name and its id."""

from __future__ import annotations

import hashlib
import re
import unicodedata

# Names of pods and Services are made of it: `NAME-worker-9999`, `NAME-node-0-9999-abcde`, and 63 is the end.
MOST = 40
HASH = 8
# As the store makes them: no hyphen, so that the last one of a name is before the id.
_PLAIN_ID = re.compile(r"[0-9a-z]{1,20}\Z")


def object_name(name: str, job_id: str) -> str:
    """What the job's object is called: `train-2mxaaaaaaaa`, out of nothing but these two, and no other job's.

    A DNS-1035 label of at most `MOST` characters: it begins with a letter, since Services are called after it.
    """
    tail = job_id if _PLAIN_ID.match(job_id) else f"{slug(job_id)[:11].rstrip('-') or 'x'}-{short_hash(job_id)}"
    head = slug(name).lstrip("0123456789-")[: MOST - len(tail) - 1].rstrip("-")
    return f"{head or 'job'}-{tail}"


def slug(text: str) -> str:
    """The letters and digits of the text, in lower case, with hyphens between them."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:HASH]
