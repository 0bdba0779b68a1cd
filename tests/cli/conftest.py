"""The command line as people use it: a process of its own, a home of its own, the real local target.

Or in this process, for what a command refuses before it does anything.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel.cli import main
from tests import warm

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Accel:
    """Runs `accel` in `here`, with its store in `home`."""

    here: Path
    home: Path

    def start(self, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*argv),
            cwd=self.here,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *argv: str, code: int = 0, **env: str) -> str:
        """What `accel argv` prints, after checking that it exits with `code`."""
        done = self.finish(*argv, **env)
        assert done.returncode == code, done.stderr.decode()
        assert b"accel/cli/" not in done.stderr  # as a traceback of our own would say; a job's is its report
        return done.stdout.decode()

    def finish(self, *argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end, in a process that is forked from one which has the commands loaded."""
        return warm.finish(
            self.command(*argv), cwd=self.here, env=self.env(**env), loaded=warm.LIGHT,
            timeout=280,  # `accel test` is three launches
        )  # fmt: skip

    def in_process(self, *argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Run it in this process."""
        printed = io.BytesIO(), io.BytesIO()
        out, err = (io.TextIOWrapper(stream, encoding="utf-8", write_through=True) for stream in printed)
        variables = self.env(**env)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in list(os.environ):
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(self.here)
            try:
                code: object = main(argv)
            except SystemExit as end:
                code = end.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(argv, code, *(stream.getvalue() for stream in printed))

    def cancel_all(self) -> None:
        """Cancel the jobs that a test which failed half way has left."""
        if self.home.is_dir():
            jobs = json.loads(self("list", "--all", "--json"))["jobs"]
            live = [job["id"] for job in jobs if job["state"] in ("submitting", "queued", "running")]
            if live:
                self.finish("cancel", *live)

    def script(self, text: str, name: str = "train.py") -> str:
        (self.here / name).write_text(text)
        return name

    def command(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "accel", *argv]

    def env(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "ACCEL_HOME": str(self.home),
            "ACCEL_CONFIG_HOME": str(self.home / "no-config"),
            "HF_HOME": str(self.home / "no-default-file"),
            "LANG": "C.UTF-8",
        } | more


@pytest.fixture
def accel(tmp_path: Path) -> Iterator[Accel]:
    here = tmp_path / "it's a; $(dir)\n"
    here.mkdir()
    runner = Accel(here=here, home=tmp_path / "home")
    yield runner
    runner.cancel_all()
