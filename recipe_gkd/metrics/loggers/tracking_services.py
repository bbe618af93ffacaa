"""Metrics for tracking services: Weights & Biases, MLflow and SwanLab.

The clients read their usual environment variables (``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``,
``SWANLAB_MODE=offline``, API keys). A resumed run continues the run of the service: its id is in the run folder.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe_gkd.checkpoints.run_folder import CONFIG
from recipe_gkd.config.stored import PRIVATE_KEYS
from recipe_gkd.metrics.loggers.background_logger import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, LoggerSource
from recipe_gkd.metrics.loggers.logger_interface import GLOBAL_STEP, Logger, RunInfo

RUN_ID = "run_id"
"""File in the service's folder with the id of the run. MLflow's name ends with a hash of the address."""

_MARGIN_S = 5.0
"""Time between a client's own deadline and the one of the thread that calls it."""
_MAX_PARAMS, _MAX_PARAM_CHARS, _MAX_METRICS = 100, 6000, 1000
"""MLflow's limits of one call."""
_INVALID_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


def tracking_source(spec: str) -> LoggerSource | None:
    """Return the constructor of the logger for a tracking service. None if ``spec`` is not a service."""
    if (found := _SERVICES.get(spec)) is None:
        return None
    create, start, remedy = found
    return LoggerSource(spec, create, call=start, remedy=remedy)


class WandbLogger:
    """Logger for Weights & Biases."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        folder = _folder_of(run, "wandb")
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            id=_run_id(folder, run, lambda: secrets.token_hex(8)),
            resume="allow",
            dir=str(folder),
            config=read_hyperparameters(run.folder),
            # The deadline of finish() also holds for the client's own hook at the exit of the process.
            settings=wandb.Settings(
                console="off", init_timeout=OPEN_TIMEOUT_S - _MARGIN_S, finish_timeout=CLOSE_TIMEOUT_S - _MARGIN_S
            ),
        )
        # A resumed run repeats steps. The service's own step would have to increase.
        self._run.define_metric("*", step_metric=GLOBAL_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step."""
        self._run.log(dict(metrics))

    def close(self) -> None:
        """Upload what is queued and end the run of the service."""
        self._run.finish()

    def fail(self) -> None:
        """End the run of the service as failed."""
        self._run.finish(exit_code=1)


class MlflowLogger:
    """Logger for MLflow. Without ``MLFLOW_TRACKING_URI`` it writes files into the run folder."""

    def __init__(self, run: RunInfo) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder = _folder_of(run, "mlflow")
        if not (address := os.environ.get("MLFLOW_TRACKING_URI")):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need more packages
            address = (folder / "mlruns").absolute().as_uri()
        self._client = MlflowClient(address)
        self._id = _run_id(folder, run, lambda: self._create_run(run), address)
        known = self._client.get_run(self._id).data.params  # a value cannot be changed
        params = [
            Param(_INVALID_IN_MLFLOW.sub("_", name), str(value)[:_MAX_PARAM_CHARS])
            for name, value in _flatten(read_hyperparameters(run.folder))
        ]
        for batch in _batches([param for param in params if param.key not in known], _MAX_PARAMS):
            self._client.log_batch(self._id, params=batch)
        self._client.update_run(self._id, status="RUNNING")

    def _create_run(self, run: RunInfo) -> str:
        client = self._client
        experiment = client.get_experiment_by_name(run.project_name)
        identifier = client.create_experiment(run.project_name) if experiment is None else experiment.experiment_id
        return str(client.create_run(identifier, run_name=run.experiment_name).info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step. Characters that MLflow rejects in names become ``_``."""
        from mlflow.entities import Metric

        at_ms = int(time.time() * 1000)
        values = [
            Metric(_INVALID_IN_MLFLOW.sub("_", name), float(value), at_ms, step) for name, value in metrics.items()
        ]
        for batch in _batches(values, _MAX_METRICS):
            self._client.log_batch(self._id, metrics=batch)

    def close(self) -> None:
        """End the run of the service."""
        self._client.set_terminated(self._id)

    def fail(self) -> None:
        """End the run of the service as failed."""
        self._client.set_terminated(self._id, status="FAILED")


class SwanLabLogger:
    """Logger for SwanLab."""

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        folder = _folder_of(run, "swanlab")
        self._run = swanlab.init(
            project=run.project_name,
            name=run.experiment_name,
            id=_run_id(folder, run, lambda: secrets.token_hex(8)),
            resume="allow",
            log_dir=str(folder),
            config=read_hyperparameters(run.folder),
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is queued and end the run of the service."""
        self._run.finish()


_NETWORK = "check the network, the address and the API key of the service"
_SERVICES: dict[str, tuple[Callable[[RunInfo], Logger], str, str]] = {
    "wandb": (WandbLogger, "wandb.init()", f"{_NETWORK}, or set WANDB_MODE=offline"),
    "mlflow": (MlflowLogger, "the start of the run", f"{_NETWORK}, or unset MLFLOW_TRACKING_URI to write files"),
    "swanlab": (SwanLabLogger, "swanlab.init()", f"{_NETWORK}, or set SWANLAB_MODE=offline"),
}
"""Logger of each service, the call that starts a run, and what the user does if that fails."""


def read_hyperparameters(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in ``folder``, without values that can be secrets. Empty if there is none."""
    path = folder / CONFIG
    if not path.exists():
        return {}
    config = OmegaConf.load(path)
    for key in PRIVATE_KEYS:
        if OmegaConf.select(config, key):
            OmegaConf.update(config, key, "(not uploaded)", merge=False)
    values: Any = OmegaConf.to_container(config, resolve=True)
    return dict(values)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _batches(values: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _folder_of(run: RunInfo, service: str) -> Path:
    folder = run.folder.absolute() / service
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_id(folder: Path, run: RunInfo, create: Callable[[], str], address: str = "") -> str:
    """Return the id of the run at the service: the id of an earlier start if this run is resumed, else a new one.

    Args:
        run: Properties of the run.
        create: Function that returns a new id.
        address: Address of the service, if the id is valid only there.
    """
    suffix = f"_{blake2b(address.encode(), digest_size=4).hexdigest()}" if address else ""
    path = folder / f"{RUN_ID}{suffix}"
    if run.completed_steps and path.exists():
        return path.read_text(encoding="utf-8").strip()
    identifier = create()
    path.write_text(f"{identifier}\n", encoding="utf-8")
    return identifier
