"""Log a trained model, register it, load the registered copy and compare its predictions with the original's."""

import contextlib
import copy
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

import torch

from helpers.state import unwrap

if TYPE_CHECKING:
    from helpers.tracking import Run


class PredictionsDiffer(RuntimeError):
    """The registered model, loaded back, does not predict what the trained one does."""


@dataclass(frozen=True)
class Registered:
    """A registered model: `uri` loads it; the greatest difference of its predictions is `max_difference`."""

    name: str
    version: str
    uri: str
    max_difference: float


def register(
    run: "Run",
    model: torch.nn.Module,
    name: str,
    input_example: Any,
    *,
    tolerance: float = 1e-5,
    serialization_format: Literal["pt2", "pickle"] = "pt2",
) -> Registered:
    """Log a model to the job's run with signature and input example, register it, load it back and compare.

    To be called in the parent, inside or after the run's block: ranks would each log a model, and an upload would
    keep them waiting.
    model: a module that maps one tensor to one tensor; wrappers of DDP and torch.compile are taken off, and it is
    logged in evaluation mode, on the CPU, as a copy.
    name: of the registered model; catalog.schema.model where the registry is Unity Catalog.
    input_example: array or tensor of shape (batch, ...) with a batch of at least 2, so that its size stays free.
    tolerance: absolute and relative, of the predictions. serialization_format: "pt2" is a traced graph, which loads
    without the class (a notebook's class exists nowhere else) and without running code from the file; "pickle" is
    for models that torch.export cannot trace. It is always named, since MLflow's own choice differs on Databricks.
    Raises ValueError for a wrong name or example, PredictionsDiffer with the greatest difference.
    """
    import mlflow
    import numpy

    _check_name(mlflow, name)
    example = input_example.detach().cpu().numpy() if isinstance(input_example, torch.Tensor) else input_example
    example = numpy.asarray(example)
    if example.ndim < 2 or len(example) < 2:
        raise ValueError(f"input_example has shape {example.shape}: give (batch, ...) with a batch of at least 2.")
    plain = _plain_copy(model)
    logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)  # it misses pip in environments of uv
    with torch.no_grad():
        expected = plain(torch.from_numpy(example)).numpy()
    with _inside(mlflow, run):
        logged = mlflow.pytorch.log_model(
            plain,
            signature=mlflow.models.infer_signature(example, expected),
            input_example=example,
            pip_requirements=_requirements(),
            **_spelling(mlflow, serialization_format),
        )
        version = mlflow.register_model(logged.model_uri, name)
        uri = f"models:/{name}/{version.version}"
        found = mlflow.pyfunc.load_model(uri).predict(example)
    difference = float(numpy.max(numpy.abs(numpy.asarray(found, dtype=numpy.float64) - expected)))
    if not numpy.allclose(found, expected, rtol=tolerance, atol=tolerance):
        raise PredictionsDiffer(
            f"{uri}, loaded back, differs from the trained model by up to {difference:.3g} (tolerance {tolerance:g}): "
            "do not use it. Parts of the model that are not in its state, or random layers, are the usual cause."
        )
    return Registered(name, str(version.version), uri, difference)


def _check_name(mlflow: Any, name: str) -> None:
    registry = mlflow.get_registry_uri() or ""
    if registry.startswith("databricks-uc") and (name.count(".") != 2 or not all(name.split("."))):
        raise ValueError(f"name={name!r} is not a Unity Catalog name ({registry}): give catalog.schema.model.")


def _plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside its wrappers, copied to the CPU, in evaluation mode; the trained one stays as it is."""
    return copy.deepcopy(unwrap(model)).cpu().eval()


def _spelling(mlflow: Any, serialization_format: str) -> dict[str, Any]:
    """What MLflow 2 and 3 call differently. MLflow 2 has pickle only."""
    known = inspect.signature(mlflow.pytorch.log_model).parameters
    place = {"name": "model"} if "name" in known else {"artifact_path": "model"}
    return place | ({"serialization_format": serialization_format} if "serialization_format" in known else {})


def _requirements() -> list[str]:
    # named, since MLflow would find them by loading the model in another process; "+cpu" is on no registry
    return [f"{package}=={metadata.version(package).partition('+')[0]}" for package in ("mlflow", "torch", "numpy")]


@contextlib.contextmanager
def _inside(mlflow: Any, run: "Run") -> Iterator[None]:
    """Make the job's run the active one, whether its block is still open or has ended."""
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run.run_id:
        yield
        return
    if not run.run_id:
        raise ValueError("this run belongs to rank 0: register the model there.")
    mlflow.set_tracking_uri(run.tracking_uri)
    with (
        environment(MLFLOW_RUN_ID=None, MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true"),
        mlflow.start_run(run_id=run.run_id, nested=active is not None, log_system_metrics=False),
    ):
        yield


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables that hold inside the block only; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
