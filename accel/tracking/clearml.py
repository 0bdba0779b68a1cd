"""ClearML."""

from __future__ import annotations

import os
from typing import Any

from accel.tracking.base import GeneralTracker, is_number, on_main_process, scalars, table_rows, warn_skipped

_SERIES = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """A tracker that logs to the current task of ``clearml``, or to a new one; ``.task`` is that task.

    ``kwargs`` go to a new task, whose project and name are those in ``kwargs``, else ``CLEARML_PROJECT`` and
    ``CLEARML_TASK``, else ``run_name``. `finish` does not close a task that existed before.
    """

    name = "clearml"
    requires_logging_directory = False
    offline = "CLEARML_OFFLINE_MODE=1 logs to an archive that Task.import_offline_session sends later"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs = kwargs
        self._initialized_externally = False

    @on_main_process
    def start(self) -> None:
        """Use the current task, or begin one."""
        from clearml import Task

        self.task: Any = Task.current_task()
        self._initialized_externally = bool(self.task)
        if self._initialized_externally:
            return
        project = os.environ.get("CLEARML_PROJECT", self.user_provided_run_name)
        task = os.environ.get("CLEARML_TASK", self.user_provided_run_name)
        self.task = Task.init(**{"project_name": project, "task_name": task, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """Connect ``values`` to the task as its configuration, and return what ClearML returns."""
        return self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers as scalars at ``step``, or as single values without a step.

        A name with the prefix ``eval_``, ``test_`` or ``train_`` goes to that series, without the prefix; any other
        to ``train``. ``kwargs`` go to ClearML's function.
        """
        reports = self.task.get_logger()
        for name, value in scalars(values).items():
            if not is_number(value):
                warn_skipped(self.name, name, value, "numbers")
            elif step is None:
                reports.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = self._get_title_series(name)
                reports.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report each value, one array (H × W × C) or PIL image."""
        reports = self.task.get_logger()
        for name, image in values.items():
            title, series = self._get_title_series(name)
            reports.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Report a table, from rows of ``data`` (``columns`` first, else in its first row) or a ``dataframe``.

        Raises `ArgumentError` without either.
        """
        rows = table_rows(self.name, columns, data, dataframe)
        title, series = self._get_title_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=rows, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task if this tracker began it."""
        if self.task and not self._initialized_externally:
            self.task.close()

    def server(self) -> str | None:
        """Return the API server, or None if ClearML is offline."""
        from clearml import Task
        from clearml.backend_api.session import Session

        return None if Task.is_offline() else str(Session.get_api_server_host())

    @staticmethod
    def _get_title_series(name: str) -> tuple[str, str]:
        for prefix in _SERIES:
            if name.startswith(f"{prefix}_"):
                return name[len(prefix) + 1 :], prefix
        return name, "train"
