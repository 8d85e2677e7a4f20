"""One MLflow run per job: the parent owns it, rank 0 adds metrics, and losing the server never stops training."""

import contextlib
import logging
import os
import re
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from helpers import places, ranks
from helpers.journal import Journal, Sender
from helpers.provenance import first_lines, git_commit, hardware, masked, shown, versions
from helpers.registry import environment, register

__all__ = ["Run", "TrackingUnreachable", "flush", "register", "start", "store"]

_last: dict[str, tuple[int, float]] = {}  # run -> step and time of the last metrics, for the throughput
_senders: dict[str, Sender] = {}  # of runs whose parent is on another machine


class TrackingUnreachable(RuntimeError):
    """The tracking server did not answer before training started."""


@dataclass(frozen=True)
class Run:
    """The job's MLflow run: small, picklable, an argument for the rank function.

    tracking_uri, experiment_id, run_id: as MLflow knows them; all empty on a rank that is not 0 where the whole
    script runs under torchrun. journal: the file through which metrics go; global_batch: samples a step.
    """

    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""
    journal: str = ""
    global_batch: int = 0

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers on rank 0, and do nothing on the others; returns at once and never fails for the server's sake.

        metrics: name -> number or tensor of one element. step: optimizer steps done. With a step, the global batch
        and the time since the last call give samples_per_second, unless `metrics` holds one.
        Metrics are written to the journal, from which the parent sends them each second.
        Raises TypeError naming a metric that is not a number.
        """
        if ranks.rank() != 0 or not self.run_id:
            return
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        now = time.perf_counter()
        if step is not None and self.global_batch:
            before = _last.get(self.run_id)
            if before is None or step > before[0]:
                _last[self.run_id] = (step, now)
            if before is not None and step > before[0] and now > before[1]:
                rate = (step - before[0]) * self.global_batch / (now - before[1])
                numbers.setdefault("samples_per_second", rate)
        self._journal().append(numbers, step or 0)

    def attach(self) -> None:
        """Make the MLflow callbacks of frameworks (Hugging Face, Lightning) in this process log to this run."""
        if self.run_id:
            os.environ["MLFLOW_TRACKING_URI"] = self.tracking_uri
            os.environ["MLFLOW_EXPERIMENT_ID"] = self.experiment_id
            os.environ["MLFLOW_RUN_ID"] = self.run_id

    def _journal(self) -> Journal:
        if Path(self.journal).exists():
            return Journal(Path(self.journal))
        if self.run_id not in _senders:  # the parent is on another machine, or has closed the run
            _senders[self.run_id] = Sender(Journal.create_temporary(self.tracking_uri, self.run_id))
        return _senders[self.run_id].journal


@contextlib.contextmanager
def start(
    experiment: str,
    settings: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
    system_metrics: bool = True,
) -> Iterator[Run]:
    """Open the job's run in the parent, before launch, and close it with the job's outcome.

        with tracking.start("digits", settings) as run:
            results = train.distributed(settings, run)

    Where it goes: see `store`. In a process that has an active MLflow run the new run is nested in that; a run named
    by MLFLOW_RUN_ID is continued. Inside the block mlflow.log_figure and the like reach this run; after it, mlflow
    still points to the same store. Logged at once: settings (those that look like secrets masked), profile, world
    size, global batch, versions, git commit, hardware; in between the system metrics of this machine.
    The run ends FINISHED; FAILED with tag `error` and artifact error.txt when the block raises; KILLED when it is
    interrupted. Metrics that the server did not take stay in a file, with one warning: `flush(file)` sends them.
    Raises TrackingUnreachable within about ten seconds when the server does not answer, and nothing later.
    """
    if ranks.rank() != 0:  # the whole script runs under torchrun
        yield Run()
        return
    import mlflow

    for chatty in ("store.db.utils", "system_metrics.system_metrics_monitor"):
        logging.getLogger(f"mlflow.{chatty}").setLevel(logging.WARNING)
    run = _open(mlflow, experiment, settings or {}, name, dict(tags or {}))
    sender = Sender(Journal(Path(run.journal)))
    monitor = _monitor(run) if system_metrics else None
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        _close(mlflow, run, sender, monitor, status, error)
        raise
    else:
        _close(mlflow, run, sender, monitor, status, None)


def store() -> str:
    """The tracking URI: MLFLOW_TRACKING_URI if set, else "databricks" there, else SQLite in the runs folder.

    The runs folder is that of helpers.places. MLflow 2 gets mlflow2.db: it cannot open a store that MLflow 3 touched.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return "databricks"
    file = "mlflow2.db" if metadata.version("mlflow").startswith("2.") else "mlflow.db"
    return f"sqlite:///{places.runs() / file}"


def flush(journal: str | os.PathLike[str]) -> None:
    """Send what a journal kept because the server was lost, the run's end included; removes the file."""
    Journal(Path(journal)).send_all()


def _open(mlflow: Any, experiment: str, settings: Mapping[str, Any], name: str | None, tags: dict[str, str]) -> Run:
    active = mlflow.active_run()
    uri = mlflow.get_tracking_uri() if active else store()
    if uri.startswith("databricks") and not experiment.startswith("/"):
        experiment = f"/Shared/{experiment}"  # there, experiments are workspace paths
    continued = None if active else os.environ.get("MLFLOW_RUN_ID")
    with _alone(uri):
        mlflow.set_tracking_uri(uri)
        client = mlflow.MlflowClient(uri)
        try:
            with _patience(8):
                found = client.get_run(continued).info if continued else client.get_experiment_by_name(experiment)
        except mlflow.exceptions.MlflowException as error:
            raise TrackingUnreachable(
                f"MLflow at {shown(uri)} does not answer: {first_lines(error, 2)}\nNothing was started. "
                f"Start the server, correct MLFLOW_TRACKING_URI, or unset it to log into {places.runs()}."
            ) from error
        experiment_id = found.experiment_id if continued else _experiment(client, experiment, uri, found)
        if continued:
            mlflow.set_experiment(experiment_id=experiment_id)  # else MLflow refuses after another set_experiment
        opened = mlflow.start_run(
            run_id=continued, experiment_id=experiment_id, run_name=name, nested=active is not None
        )
        run_id = opened.info.run_id
        try:
            _describe(client, run_id, settings, tags, opened.data.params)
        except BaseException:
            mlflow.end_run("FAILED")
            raise
    print(f"MLflow run {opened.info.run_name} ({run_id}) in experiment {experiment} at {shown(uri)}")
    journal = Journal.create(places.this_run() / f"metrics-{run_id}.jsonl", uri, run_id)
    return Run(uri, experiment_id, run_id, str(journal.path), int(getattr(settings, "global_batch", 0)))


def _experiment(client: Any, name: str, uri: str, found: Any) -> str:
    if found is None:
        beside = None
        if uri.startswith("sqlite:///"):  # else MLflow puts artifacts into the working directory
            folder = re.sub(r"\W+", "-", name).strip("-") or "experiment"
            beside = (Path(uri.removeprefix("sqlite:///")).resolve().parent / "artifacts" / folder).as_uri()
        try:
            return client.create_experiment(name, artifact_location=beside)
        except Exception:  # another job may have been faster
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise ValueError(f"experiment {name!r} was deleted in {shown(uri)}: restore it or choose another name.")
    return found.experiment_id


def _describe(
    client: Any, run_id: str, settings: Mapping[str, Any], tags: dict[str, str], known: Mapping[str, str]
) -> None:
    from mlflow.entities import Param, RunTag

    given = dict(settings) | {
        key: getattr(settings, key) for key in ("profile", "global_batch") if hasattr(settings, key)
    }
    if "gpus" in settings:
        given["world_size"] = settings["gpus"]
    params = {key: str(value)[:6000] for key, value in masked(given).items() if key not in known}
    facts = versions() | {"git_commit": git_commit(), "hardware_found": hardware()} | tags
    rows = [Param(key, value) for key, value in params.items()]
    for begin in range(0, len(rows), 100):  # as many as the server takes at once
        client.log_batch(run_id, params=rows[begin : begin + 100])
    client.log_batch(run_id, tags=[RunTag(key, str(value)) for key, value in facts.items() if value])


def _monitor(run: Run) -> Any:
    try:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(run.run_id, sampling_interval=5, tracking_uri=run.tracking_uri)
        monitor.start()
        return monitor
    except Exception as error:
        warnings.warn(f"no system metrics in this run: {error}", RuntimeWarning, stacklevel=4)
        return None


def _close(mlflow: Any, run: Run, sender: Sender, monitor: Any, status: str, error: BaseException | None) -> None:
    """Nothing here may raise: training is over, and its result or its own error counts."""
    with _patience(20):
        if monitor is not None:  # its thread may sit in MLflow's long retries
            finishing = threading.Thread(target=monitor.finish, daemon=True)
            finishing.start()
            finishing.join(5)
        closing: dict[str, Any] = {"status": status}
        if error is not None:
            closing |= {"error": first_lines(error, 5), "traceback": "".join(traceback.format_exception(error))}
        sender.stop(closing)
        with contextlib.suppress(Exception):  # the journal has told the server, or warned
            mlflow.end_run(status)
    if os.environ.get("MLFLOW_RUN_ID") == run.run_id:  # from attach() in this process
        del os.environ["MLFLOW_RUN_ID"]


def _patience(seconds: int) -> contextlib.AbstractContextManager[None]:
    """One try of so many seconds. MLflow's own bounds add up to minutes, which suits the middle of a job alone."""
    return environment(
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
        MLFLOW_HTTP_REQUEST_TIMEOUT=str(seconds),
        MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT=str(seconds),
        MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true",  # start() has said where the run is
    )


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Processes that create the tables of one SQLite file at once fail: one after the other."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    from filelock import FileLock

    file = Path(uri.removeprefix("sqlite:///"))
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=300):
        yield


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric {name!r} is {value!r}, not a number: log numbers or one-element tensors.") from None
