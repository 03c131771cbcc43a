"""MLflow."""

import os
import pathlib
from typing import Any

from fedmpi.config.grammar import flatten
from fedmpi.runs.trackers.base import Tracker


class MLflow(Tracker):
    """A run of MLflow in `mlruns` beside the run folders, or at MLFLOW_TRACKING_URI."""

    module = "mlflow"
    extra = "mlflow"

    def begin(self, folder: pathlib.Path, settings: dict[str, Any], done: int) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow 3 refuses to write to files
            self.package.set_tracking_uri((folder.parent / "mlruns").resolve().as_uri())
        self.package.set_experiment("fedmpi")
        self.package.start_run(run_name=folder.name)
        self.package.log_params({key: str(value)[:500] for key, value in flatten(settings).items()})

    def round(self, number: int, values: dict[str, float]) -> None:
        self.package.log_metrics({title.replace("/", "."): value for title, value in values.items()}, step=number)

    def close(self) -> None:
        self.package.end_run()
