"""Servers out of reach: from the start, with every package; and one that stops answering in the middle of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from ...marks import long
from ..worlds import clean_env, free_port
from .scripts import NOWHERE, need, read_back, run_script, train

INTERRUPTED = """
import os, signal, sys
from accel import Accelerator
from accel.tracking import isolation as guard

guard.FIRST_PAUSE_S = 600.0  # it is over when we say so, not when a slow machine comes to the next step
server = int(sys.argv[1])
accelerator = Accelerator(cpu=True, log_with=["mlflow", "jsonl"], project_dir="logs")
accelerator.init_trackers("digits", {"lr": 0.1})
accelerator.log({"loss": 0.0}, step=0)
os.killpg(server, signal.SIGSTOP)
os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "3"
for step in (1, 2, 3):
    accelerator.log({"loss": float(step)}, step=step)
del os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
os.killpg(server, signal.SIGCONT)
for one in accelerator._guards:
    one._retry_at = 0.0
for step in (4, 5):
    accelerator.log({"loss": float(step)}, step=step)
accelerator.end_training()
"""

READ = """
import json
from mlflow.tracking import MlflowClient

client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
print(json.dumps([run.info.status, [m.step for m in client.get_metric_history(run.info.run_id, "loss")]]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, str, str]]:
    """A tracking server's process group, its address, and its database."""
    need("mlflow")
    port = free_port()
    database = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    env = clean_env(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", HOME=str(tmp_path))
    with (tmp_path / "server.txt").open("wb") as said:
        process = subprocess.Popen(
            [*command, "--backend-store-uri", database],
            cwd=tmp_path, env=env, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        _await(address, process, tmp_path / "server.txt")
        yield process.pid, address, database
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(address: str, process: subprocess.Popen[bytes], said: Path) -> None:
    ask = build_opener(ProxyHandler({})).open
    for _ in range(600):
        try:
            ask(f"{address}/api/2.0/mlflow/experiments/get-by-name?experiment_name=none", timeout=30).close()
        except HTTPError as error:
            error.close()
            if error.code == 404:
                return
        except OSError:
            assert process.poll() is None, said.read_text()
            time.sleep(0.2)
    pytest.fail(f"no answer from mlflow's server: {said.read_text()}")


def test_a_server_that_stops_answering_costs_records_and_not_the_training(
    server: tuple[int, str, str], tmp_path: Path
) -> None:
    group, address, database = server
    env = {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    said = run_script(INTERRUPTED, tmp_path, group, NO_PROXY="127.0.0.1", **env)
    assert "tracker 'mlflow' failed, training continues; records are lost until it works again" in said
    assert "tracker 'mlflow' works again; records lost so far: 3" in said
    assert "tracker 'mlflow' lost 3 records" in said
    status, steps = read_back(READ, tmp_path, MLFLOW_TRACKING_URI=database)
    assert status == "FINISHED"
    # What was sent while it did not answer may have been waiting for it.
    assert [step for step in steps if step != 1] == [0, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "logs/digits/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "log"] == [0, 1, 2, 3, 4, 5]


OUT_OF_REACH = {
    "wandb": {"WANDB_BASE_URL": NOWHERE, "WANDB_API_KEY": "0123456789" * 4},
    "comet_ml": {"COMET_URL_OVERRIDE": f"{NOWHERE}/clientlib/", "COMET_API_KEY": "abcdefghijklmnopqrstuvwxy"},
    "swanlab": {
        "SWANLAB_API_HOST": NOWHERE,
        "SWANLAB_WEB_HOST": NOWHERE,
        "SWANLAB_API_KEY": "abcdefghijklmnopqrstuvwxy",
    },
    "clearml": {"CLEARML_API_HOST": NOWHERE, "CLEARML_API_ACCESS_KEY": "a", "CLEARML_API_SECRET_KEY": "b"},
    "mlflow": {"MLFLOW_TRACKING_URI": NOWHERE},
}


@pytest.mark.parametrize("name", ["mlflow", "wandb", *long(*sorted(OUT_OF_REACH.keys() - {"mlflow", "wandb"}))])
def test_a_server_out_of_reach_is_said_and_training_goes_on(name: str, tmp_path: Path) -> None:
    need(name)
    said = train(tmp_path, name, None, **{"HTTP_PROXY": "", "HTTPS_PROXY": "", **OUT_OF_REACH[name]})
    assert f"tracker '{name}' cannot start, training continues without it: ConnectionError: 127.0.0.1:9" in said
    assert "trained with 0 trackers" in said
