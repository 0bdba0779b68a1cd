"""docs/serve.md, followed line by line: each command that it shows runs, and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

from .test_server import Start

PAGE = Path(__file__).parents[2] / "docs/serve.md"
# The fixture starts the server; a local target allows no second user; the log-in is used on.
_NOT_RUN = ("pip install", "accel serve", "accel token create --user", "accel logout")
_VARIES = re.compile(r"accel_\w+…|2nf\w{8}|root|ada")


def test_the_page_can_be_followed(serve: Start, homes: Path) -> None:
    port = free_port()
    (homes / "config/accel.yaml").write_text("targets: {lab: {kind: local, cpu: true}}\n")
    (homes / "config/serve.yaml").write_text(f"port: {port}\n")
    (homes / "train.py").write_text("print('trained')\n")
    serve("--port", str(port))
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    sections = PAGE.read_text().partition("## Settings")[0]
    blocks = re.findall(r"```console\n(.*?)```", sections, re.DOTALL)
    assert len(blocks) == 3
    url, token_file = f"http://127.0.0.1:{port}", homes / "home/service/owner-token"
    for command, shown in _commands("".join(blocks)):
        if command.startswith(_NOT_RUN):
            continue
        typed = command.replace("https://jobs.example.org", url)
        if typed.startswith("accel login"):
            typed += f" --token-file {token_file}"
        done = subprocess.run(typed, shell=True, cwd=homes, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (typed, done.stderr)
        printed = (done.stdout + done.stderr).replace(url, "https://jobs.example.org").replace("\t", "  ")
        for line in shown:
            if line != "token:":  # what it asks for without a file
                assert _VARIES.sub("", line) in _VARIES.sub("", printed), (typed, printed)


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands, and the lines that are shown after each."""
    commands: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:].partition("  #")[0].strip(), []))
        else:
            commands[-1][1].append(line)
    return commands
