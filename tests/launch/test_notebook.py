"""`notebook_launcher` in a notebook: cells that a real Jupyter kernel executes."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from ..needs import missing

ROOT = Path(__file__).parents[2]

CELLS = [
    """
import os, signal, threading, time
import torch
from accel.errors import ProcessError
from accel.launch.function import notebook_launcher

torch.randn(300, 300) @ torch.randn(300, 300)
factor = 3


def train(count):
    from accel import Accelerator

    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor(1.0)).item()
    print("rank", accelerator.process_index, "of", accelerator.num_processes, total * count * factor)
""",
    "notebook_launcher(train, (2,), num_processes=2)",
    """
def bad():
    from accel import Accelerator

    if Accelerator().process_index == 1:
        raise ValueError("the reason")
    time.sleep(300)


try:
    notebook_launcher(bad, num_processes=2)
except ProcessError as error:
    print(error)
""",
    """
def forever():
    time.sleep(300)


threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    notebook_launcher(forever, num_processes=2)
except KeyboardInterrupt:
    print("interrupted")
""",
]


def _execute(cells: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell printed."""
    nbclient, nbformat = importlib.import_module("nbclient"), importlib.import_module("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]


@pytest.mark.filterwarnings("default")  # Jupyter's packages have some of their own
def test_cells_train_fail_and_are_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            missing(package, "pip install ipykernel nbclient")
    _, trained, failed, interrupted = _execute(CELLS, monkeypatch)
    assert sorted(line for line in trained.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 12.0",
        "rank 1 of 2 12.0",
    ]
    assert "process 1 of 2 failed first: ValueError: the reason" in failed
    assert 'raise ValueError("the reason")' in failed
    assert interrupted.splitlines()[-1] == "interrupted"
