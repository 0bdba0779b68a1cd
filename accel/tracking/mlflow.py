"""MLflow: a database, files, or a tracking server, depending on ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import json
import os
from typing import Any

from accel.errors import ArgumentError
from accel.tracking.base import GeneralTracker, is_number, on_main_process, plain, scalars, warn_skipped
from accel.world.environment import read_flag

# MLflow's error codes of an unavailable server: mlflow/protos/databricks.proto, ErrorCode.
_UNAVAILABLE = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED")


class MLflowTracker(GeneralTracker):
    """A tracker that logs to a run of ``mlflow``; ``.active_run`` is that run.

    ``experiment_name``: created if missing, with its artifacts in ``logging_dir``.
    ``run_id``: an earlier run to continue.
    ``tags``: a dict, or one in JSON.
    ``nested_run``: nest the run in the active one.

    ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` and ``MLFLOW_NESTED_RUN`` override the
    arguments.

    With a server, `log` waits for its response unless ``log_kwargs={"mlflow": {"synchronous": False}}``.
    """

    name = "mlflow"
    requires_logging_directory = False
    waits_for_server = True
    offline = "MLFLOW_TRACKING_URI=sqlite:///mlflow.db logs to a file"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = _tags(os.environ.get("MLFLOW_TAGS", tags))
        self.nested_run = read_flag(os.environ, "MLFLOW_NESTED_RUN", bool(nested_run))
        self.run_name = run_name
        self.description = description

    @on_main_process
    def start(self) -> None:
        """Find or create the experiment, and begin or continue the run."""
        import mlflow

        self.active_run: Any = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self) -> str | None:
        """Return the experiment's id; without a name ``None``, which is MLflow's default."""
        import mlflow

        if self.experiment_name is None:
            return None
        experiment = mlflow.get_experiment_by_name(self.experiment_name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(mlflow.create_experiment(self.experiment_name, artifact_location=location, tags=self.tags))

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log ``values`` as parameters; one too long for MLflow is skipped with a warning."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        accepted: list[tuple[str, Any]] = []
        for name, value in plain(values).items():
            if len(str(value)) <= MAX_PARAM_VAL_LENGTH:
                accepted.append((name, value))
            else:
                warn_skipped(self.name, name, value, f"parameters of at most {MAX_PARAM_VAL_LENGTH} characters")
        for start in range(0, len(accepted), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(accepted[start : start + MAX_PARAMS_TAGS_PER_BATCH]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics; ``kwargs`` go to `mlflow.log_metrics`."""
        import mlflow

        metrics = {}
        for name, value in scalars(values).items():
            if is_number(value):
                metrics[name] = value
            else:
                warn_skipped(self.name, name, value, "numbers")
        mlflow.log_metrics(metrics, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Save a matplotlib or plotly ``figure`` as the artifact ``artifact_file``."""
        import mlflow

        mlflow.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Save all files of ``local_dir`` among the run's artifacts, under ``artifact_path``."""
        import mlflow

        mlflow.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Save one file among the run's artifacts, under ``artifact_path``."""
        import mlflow

        mlflow.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        import mlflow

        mlflow.end_run()

    def server(self) -> str | None:
        """Return the tracking URI."""
        import mlflow

        return str(mlflow.get_tracking_uri())

    def is_outage(self, error: BaseException) -> bool:
        """Return True if a tracking server reported that it is unavailable."""
        from mlflow.exceptions import MlflowException

        return isinstance(error, MlflowException) and error.error_code in _UNAVAILABLE


def _tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    try:
        read = json.loads(tags)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ArgumentError(f'MLflow tags {tags!r} are not a JSON object such as {{"team": "speech"}}')
    return read
