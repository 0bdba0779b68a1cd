"""Every tracker with its real package, without a network, and what it left read back."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from .scripts import CLEARML_QUIET, LOG_READER, need, read_back, run_script, train

LOSSES = [1.5, 0.75, 0.5]


def only(places: Any) -> Path:
    (place,) = places
    return Path(place)


def test_tensorboard(tmp_path: Path) -> None:
    need("tensorboard")
    said = train(tmp_path, "tensorboard")
    assert said.count("skipped 'many' (list)") == 1, "said once, not at every step"
    read = read_back(
        """
        import glob, json
        import yaml
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        def load(place):
            events = EventAccumulator(place)
            events.Reload()
            return events

        events = load("logs/digits")
        text = events.Tensors("note/text_summary")[0].tensor_proto.string_val[0].decode()
        (hparams,) = glob.glob("logs/digits/*/hparams.yml")
        print(json.dumps({
            "loss": [(e.step, e.value) for e in events.Scalars("loss")],
            "accuracy": [e.value for e in events.Scalars("train_accuracy")],
            "text": text,
            "pair": [load(f"logs/digits/pair_{x}").Scalars("pair")[0].value for x in "ab"],
            "hparams": yaml.safe_load(open(hparams)),
        }))
        """,
        tmp_path,
    )
    assert read["loss"] == [[step, loss] for step, loss in enumerate(LOSSES)]
    assert read["accuracy"] == [0.25] * 3
    assert read["text"] == "hello"
    assert read["pair"] == [1.0, 2.0]
    assert read["hparams"] == {"lr": 0.1, "layers": [1, 2], "model": "tiny", "nothing": None}


def test_tensorboard_images(tmp_path: Path) -> None:
    need("tensorboard")
    script = """
    import numpy as np
    from accel import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")
    accelerator.init_trackers("digits", init_kwargs={"tensorboard": {"flush_secs": 1}})
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    accelerator.get_tracker("tensorboard").log_images({"seen": images}, step=4, dataformats="NHWC")
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("own", 7.0)
    accelerator.end_training()
    """
    run_script(script, tmp_path)
    read = read_back(
        """
        import json
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator("logs/digits")
        events.Reload()
        image = events.Images("seen")[0]
        print(json.dumps([image.step, image.width, image.height, events.Scalars("own")[0].value]))
        """,
        tmp_path,
    )
    assert read == [4, 16, 8, 7.0], "two images side by side"


def test_wandb(tmp_path: Path) -> None:
    need("wandb")
    train(tmp_path, "wandb", {"name": "first", "tags": ["a"]}, WANDB_MODE="offline")
    read = read_back(
        LOG_READER
        + """
import glob, json
from wandb.proto.wandb_internal_pb2 import Record

found = {"history": []}
(path,) = glob.glob("wandb/offline-run-*/run-*.wandb")
for one in map(Record.FromString, records(path)):
    kind = one.WhichOneof("record_type")
    if kind == "run":
        found["run"] = [one.run.project, one.run.display_name, list(one.run.tags)]
    elif kind == "config":
        found["config"] = {u.key: json.loads(u.value_json) for u in one.config.update if u.key}
    elif kind == "history":
        row = {"/".join([i.key] if i.key else i.nested_key): json.loads(i.value_json) for i in one.history.item}
        found["history"].append({k: v for k, v in row.items() if k == "_step" or not k.startswith("_")})
print(json.dumps(found))
""",
        tmp_path,
    )
    assert read["run"] == ["digits", "first", ["a"]]
    assert read["config"] == {"lr": 0.1, "layers": [1, 2], "model": "tiny", "nothing": None}
    assert [(row["_step"], row["loss"]) for row in read["history"]] == list(enumerate(LOSSES))
    assert read["history"][0]["note"] == "hello"


def test_wandb_images_and_tables(tmp_path: Path) -> None:
    need("wandb")
    script = """
    import numpy as np
    from accel import Accelerator

    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("digits")
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"seen": [np.full((8, 8, 3), shade, dtype=np.uint8) for shade in (0, 255)]}, step=0)
    tracker.log_table("errors", columns=["digit", "count"], data=[[3, 5], [8, 2]], step=1)
    assert accelerator.get_tracker("wandb", unwrap=True) is tracker.run
    accelerator.end_training()
    """
    run_script(script, tmp_path, WANDB_MODE="offline")
    media = tmp_path / "wandb"
    assert len(list(media.glob("offline-run-*/files/media/images/*.png"))) == 2
    table = json.loads(only(media.glob("offline-run-*/files/media/table/errors_*.json")).read_text())
    assert table["columns"] == ["digit", "count"]
    assert table["data"] == [[3, 5], [8, 2]]


def test_mlflow(tmp_path: Path) -> None:
    need("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    said = train(tmp_path, "mlflow", {"run_name": "first", "tags": {"team": "vision"}}, MLFLOW_TRACKING_URI=uri)
    assert said.count("skipped 'note' (str)") == 1
    read = read_back(
        """
        import json
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        experiment = client.get_experiment_by_name("digits")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        print(json.dumps({
            "loss": [(m.step, m.value) for m in history],
            "params": run.data.params,
            "run": [run.info.run_name, run.info.status, run.data.tags["team"]],
        }))
        """,
        tmp_path,
        MLFLOW_TRACKING_URI=uri,
    )
    assert read["loss"] == [[step, loss] for step, loss in enumerate(LOSSES)]
    assert read["params"] == {"lr": "0.1", "layers": "[1, 2]", "model": "tiny", "nothing": "None"}
    assert read["run"] == ["first", "FINISHED", "vision"]


def test_mlflow_goes_on_with_a_run_and_stores_many_parameters_and_artifacts(tmp_path: Path) -> None:
    need("mlflow")
    script = """
    import json, os
    from pathlib import Path
    from accel import Accelerator
    import mlflow

    def train(config, **how):
        accelerator = Accelerator(cpu=True, log_with="mlflow")
        accelerator.init_trackers("it's an experiment", config, init_kwargs={"mlflow": {"logging_dir": "kept", **how}})
        tracker = accelerator.get_tracker("mlflow")
        accelerator.log({"loss": 1.0}, step=0)
        Path("seen.txt").write_text("seen")
        tracker.log_artifact("seen.txt", "notes")
        run = tracker.tracker.info.run_id
        accelerator.end_training()
        return run

    first = train({f"p{i}": i for i in range(250)} | {"long": "x" * 10_000})
    os.environ["MLFLOW_RUN_ID"] = first
    assert train({"later": 1}, run_id="not this one") == first
    run = mlflow.get_run(first)
    artifacts = [a.path for a in mlflow.artifacts.list_artifacts(run_id=first, artifact_path="notes")]
    print(json.dumps([len(run.data.params), artifacts, run.info.artifact_uri.endswith(f"kept/{first}/artifacts")]))
    """
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    said = run_script(script, tmp_path, MLFLOW_TRACKING_URI=uri)
    last = next(line for line in reversed(said.splitlines()) if line.startswith("["))
    assert json.loads(last) == [251, ["notes/seen.txt"], True]
    assert "parameters of at most 6000 characters: skipped 'long'" in said


@pytest.mark.long
def test_comet(tmp_path: Path) -> None:
    need("comet_ml")
    train(tmp_path, "comet_ml", COMET_START_ONLINE="0", COMET_OFFLINE_DIRECTORY=str(tmp_path / "offline"))
    archive = zipfile.ZipFile(only((tmp_path / "offline").glob("*.zip")))
    messages = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
    assert json.loads(archive.read("experiment.json"))["project_name"] == "digits"

    def payloads(kind: str) -> list[dict[str, Any]]:
        return [message["payload"] for message in messages if message["type"] == kind]

    metrics = [payload["metric"] for payload in payloads("metric_msg")]
    assert [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == "loss"] == list(enumerate(LOSSES))
    assert [m["metricValue"] for m in metrics if m["metricName"] == "b"] == [2.0] * 3
    parameters = {p["param"]["paramName"]: p["param"]["paramValue"] for p in payloads("parameter_msg") if "param" in p}
    assert (parameters["lr"], parameters["model"]) == (0.1, "tiny")
    assert "hello" in [payload["value"] for payload in payloads("log_other")]


@pytest.mark.long
def test_clearml(tmp_path: Path) -> None:
    need("clearml")
    train(tmp_path, "clearml", CLEARML_QUIET, CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path))
    session = only((tmp_path / "offline").glob("*/task.json")).parent
    task = json.loads((session / "task.json").read_text())
    assert (task["project_name"], task["name"]) == ("digits", "digits")
    assert 'model = "tiny"' in task["configuration"]["General"]["value"]
    reports = [one for line in (session / "metrics.jsonl").read_text().splitlines() for one in json.loads(line)]
    scalars = [(r["metric"], r["variant"], r["iter"], r["value"]) for r in reports]
    assert [s for s in scalars if s[0] == "loss"] == [("loss", "train", step, loss) for step, loss in enumerate(LOSSES)]
    assert ("accuracy", "train", 0, 0.25) in scalars, "train_ names the series"


@pytest.mark.long
def test_clearml_leaves_a_task_that_was_there(tmp_path: Path) -> None:
    need("clearml")
    script = """
    import json, sys
    import numpy as np
    from accel import Accelerator
    from clearml import Task

    task = Task.init("mine", "own", **json.loads(sys.argv[1]))
    accelerator = Accelerator(cpu=True, log_with="clearml")
    accelerator.init_trackers("digits")
    tracker = accelerator.get_tracker("clearml")
    assert tracker.tracker is task
    accelerator.log({"eval_loss": 0.5})
    tracker.log_table("test_errors", columns=["digit", "count"], data=[[3, 5]], step=1)
    tracker.log_images({"seen": np.zeros((8, 8, 3), dtype=np.uint8)}, step=1)
    accelerator.end_training()
    assert Task.current_task() is task
    task.close()
    """
    run_script(script, tmp_path, json.dumps(CLEARML_QUIET), CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path))
    session = only((tmp_path / "offline").glob("*/task.json")).parent
    text = (session / "metrics.jsonl").read_text()
    assert '"metric": "Summary", "variant": "eval_loss"' in text
    assert '"metric": "errors", "variant": "test"' in text
    assert '"metric": "seen", "variant": "train"' in text


@pytest.mark.long
def test_dvclive(tmp_path: Path) -> None:
    need("dvclive")
    train(tmp_path, "dvclive", {"dir": "live", "save_dvc_exp": False})
    rows = [line.split("\t") for line in (tmp_path / "live/plots/metrics/loss.tsv").read_text().splitlines()]
    assert rows == [["step", "loss"], ["0", "1.5"], ["1", "0.75"], ["2", "0.5"]]
    metrics = json.loads((tmp_path / "live/metrics.json").read_text())
    assert (metrics["loss"], metrics["train_accuracy"], metrics["note"]) == (0.5, 0.25, "hello")
    assert "lr: 0.1" in (tmp_path / "live/params.yaml").read_text()


@pytest.mark.long
def test_swanlab(tmp_path: Path) -> None:
    need("swanlab")
    said = train(tmp_path, "swanlab", SWANLAB_MODE="offline")
    assert said.count("skipped 'many' (list)") >= 1
    read = read_back(
        LOG_READER
        + """
import glob, json
import yaml
from swanlab.proto.swanlab.record.v1.record_pb2 import Record

(path,) = glob.glob("swanlog/run-*/*.swanlab")
found = {"scalars": [], "texts": 0}
for one in map(Record.FromString, records(path)):
    if one.HasField("start"):
        found["project"] = one.start.project
    elif one.HasField("scalar"):
        found["scalars"].append([one.scalar.key, one.scalar.step, one.scalar.value.number])
    elif one.HasField("media"):
        found["texts"] += one.media.key == "note"
(config,) = glob.glob("swanlog/run-*/files/config.yaml")
found["config"] = {name: one["value"] for name, one in yaml.safe_load(open(config)).items()}
print(json.dumps(found))
""",
        tmp_path,
    )
    assert read["project"] == "digits"
    assert [s[1:] for s in read["scalars"] if s[0] == "loss"] == [[step, loss] for step, loss in enumerate(LOSSES)]
    assert ["pair/b", 0, 2.0] in read["scalars"]
    assert read["texts"] == 3
    assert (read["config"]["lr"], read["config"]["model"]) == (0.1, "tiny")


@pytest.mark.long
def test_swanlab_images(tmp_path: Path) -> None:
    need("swanlab")
    script = """
    import numpy as np
    from accel import Accelerator

    accelerator = Accelerator(cpu=True, log_with="swanlab")
    accelerator.init_trackers("digits")
    accelerator.get_tracker("swanlab").log_images(
        {"seen": [np.full((8, 8, 3), shade, dtype=np.uint8) for shade in (0, 255)]}, step=0
    )
    accelerator.end_training()
    """
    run_script(script, tmp_path, SWANLAB_MODE="offline")
    assert len(list(tmp_path.glob("swanlog/run-*/media/image/*.png"))) == 2


@pytest.mark.long
def test_trackio(tmp_path: Path) -> None:
    need("trackio")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    said = train(tmp_path, "trackio", {"name": "first", "auto_log_cpu": False}, **env)
    assert said.count("Run finished") == 1
    read = read_back(
        """
        import json
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs("digits", "first")
        print(json.dumps([logs, SQLiteStorage.get_run_config("digits", "first")]))
        """,
        tmp_path,
        **env,
    )
    logs, config = read
    assert [(row["step"], row["loss"]) for row in logs] == list(enumerate(LOSSES))
    assert logs[0]["note"] == "hello"
    assert {"lr": 0.1, "layers": [1, 2], "model": "tiny"}.items() <= config.items()
    assert "allow_val_change" not in config


@pytest.mark.long
def test_aim(tmp_path: Path) -> None:
    need("aim")
    said = train(tmp_path, "aim", {"system_tracking_interval": None})
    assert said.count("skipped 'many'") <= 1
    read = read_back(
        """
        import json
        from aim import Repo, Run

        (key,) = Repo.from_path("logs").list_all_runs()
        run = Run(key, repo="logs")
        found = {m.name: m.values.sparse_numpy()[1].tolist() for m in run.metrics()}
        print(json.dumps({"name": run.name, "hparams": run["hparams"], "metrics": found}))
        """,
        tmp_path,
    )
    assert read["name"] == "digits"
    assert read["hparams"] == {"lr": 0.1, "layers": [1, 2], "model": "tiny", "nothing": None}
    assert sorted(read["metrics"]["loss"], reverse=True) == LOSSES
    assert read["metrics"]["pair/b"] == [2.0] * 3


def test_a_key_that_is_missing_stops_the_run_at_its_start(tmp_path: Path) -> None:
    need("wandb")
    script = """
    from accel import Accelerator
    from accel.errors import TrackerError

    accelerator = Accelerator(cpu=True, log_with="wandb")
    try:
        accelerator.init_trackers("digits")
    except TrackerError as error:
        print("said:", error)
    """
    said = run_script(script, tmp_path)
    (line,) = [line for line in said.splitlines() if line.startswith("said:")]
    assert "tracker 'wandb' did not start: UsageError:" in line
    assert "WANDB_MODE=offline" in line


def test_a_folder_with_a_packages_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "aim").mkdir()
    script = """
    import importlib.util
    from accel.tracking import get_available_trackers

    spec = importlib.util.find_spec("aim")
    assert spec is not None
    assert ("aim" in get_available_trackers()) == (spec.origin is not None)
    """
    run_script(script, tmp_path)
