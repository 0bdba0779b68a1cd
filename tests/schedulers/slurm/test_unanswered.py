"""What Slurm's commands say, by the numbers of its own library: a refusal, or no answer."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess

import pytest

from schedulers.slurm.batch.unanswered import is_unanswered
from tests.needs import missing

NO_ANSWER = {*range(1000, 1005), 1008, 1013, *range(1800, 1804), 2027, 2131, *range(5000, 5006)}
REFUSALS = {1005, *range(2000, 2200)} - NO_ANSWER  # slurm_errno.h: those of the controller


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Connection reset by peer",
        "slurm_load_jobs error: Transport endpoint is not connected",
        "Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "Batch job submission failed: Socket timed out on send/recv operation",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "error: Slurm temporarily unable to accept job, sleeping and retrying",
        f"connect: {os.strerror(errno.ENETUNREACH)}",
    ],
)
def test_no_answer(said: str) -> None:
    assert is_unanswered(said)


def test_the_errors_of_this_slurm() -> None:
    client = shutil.which("scontrol")
    linked = subprocess.run(["ldd", client or "scontrol"], capture_output=True, text=True).stdout if client else ""
    library = re.search(r"=> (/\S*libslurm\S*)", linked)
    if library is None:
        missing("libslurm", "apt-get install slurm-client")
    slurm = ctypes.CDLL(library[1])
    slurm.slurm_strerror.restype = ctypes.c_char_p
    words = {number: slurm.slurm_strerror(number).decode() for number in NO_ANSWER | REFUSALS}
    known = {number: text for number, text in words.items() if not text.startswith("Unknown error")}
    assert {number for number, text in known.items() if is_unanswered(text)} == NO_ANSWER & set(known), known
    assert len(known) > 100
