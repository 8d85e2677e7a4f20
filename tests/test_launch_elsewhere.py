"""The same function under other launchers: torchrun, accelerate launch, and Databricks' own packages."""

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import distributed

SCRIPT = """
from helpers import distributed, ranks

@distributed(gpus=2)
def job(value):
    place = ranks.init()
    return value + place.rank, ranks.all_mean(place.rank)

results = job.distributed(5)
print("results", results)
"""


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        # with --cpu, accelerate launch starts one process whatever --num_processes says; --multi_gpu goes by it
        (
            *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no"),
        ),
    ],
    ids=["torchrun", "accelerate launch"],
)
def test_under_another_launcher_the_function_runs_in_place_and_returns_all_values(
    script: Callable[..., Any], command: tuple[str, ...]
) -> None:
    if "accelerate" in command[1]:
        pytest.importorskip("accelerate")
    done = script(SCRIPT, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[(5, 0.5), (6, 0.5)]") == 2, done.stdout + done.stderr


def test_another_world_size_than_asked_for_is_refused_in_place(script: Callable[..., Any]) -> None:
    done = script(SCRIPT, env={"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert done.returncode != 0
    assert "gpus=2 is asked for, but this process was launched as one of WORLD_SIZE=4" in done.stderr


class FakePlatform:
    """A stand-in of the documented shape that notes what it was asked for and runs the function twice."""

    def __init__(self, parameters: str) -> None:
        self.asked: dict[str, Any] = {}
        names = [name.strip() for name in parameters.split(",")]
        self.signature = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names]
        )

    def module(self, name: str) -> types.ModuleType:
        def platform(**arguments: Any) -> Callable[..., Any]:
            self.signature.bind(**arguments)
            self.asked = arguments
            return lambda function: types.SimpleNamespace(
                distributed=lambda *args, **kwargs: [function(*args, **kwargs) for _ in range(2)]
            )

        platform.__signature__ = self.signature  # type: ignore[attr-defined]
        module = types.ModuleType(name)
        module.distributed = platform  # type: ignore[attr-defined]
        return module


OLD = ("serverless_gpu", "gpus, gpu_type, remote", {"gpus": 8, "gpu_type": "H100", "remote": False})
NEW = (
    "databricks.air",
    "num_accelerators, accelerator_type, remote, timeout, gpus, gpu_type",
    {"num_accelerators": 8, "accelerator_type": "H100", "remote": False, "timeout": 60},
)


@pytest.mark.parametrize(("name", "parameters", "expected"), [OLD, NEW], ids=["serverless_gpu", "databricks.air"])
def test_on_databricks_the_platform_gets_the_job_under_its_own_names(
    name: str, parameters: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakePlatform(parameters)
    for known in ("databricks.air", "databricks.air.launcher", "serverless_gpu"):
        monkeypatch.setitem(sys.modules, known, None)  # as on an image without it
    if name == "databricks.air":
        monkeypatch.setitem(sys.modules, "databricks", types.ModuleType("databricks"))
    monkeypatch.setitem(sys.modules, name, fake.module(name))
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "client.4")

    job = distributed(gpus=8, gpu_type="H100", timeout=60)(lambda a, b=1: a + b)
    assert job.distributed(1, b=2) == [3, 3]
    assert fake.asked == expected


def test_the_arguments_fit_the_real_signature_of_databricks_sdk_air(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's top-level name forwards *args; its launcher module has the signature that must be met."""
    pytest.importorskip("databricks.air")
    from databricks.air import distributed as platform

    from helpers.launch.decorator import Job, _platform_arguments

    arguments = _platform_arguments(platform, Job(8, "GPU_8xH100", False, None, 0, "auto"))
    assert arguments == {
        "num_accelerators": 8,
        "accelerator_type": "GPU_8xH100",
        "remote": False,
        "timeout": None,
    }


def test_restarts_are_refused_on_databricks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "client.4")
    with pytest.raises(ValueError, match=r"max_restarts=1: Databricks does not restart"):
        distributed(gpus=2, max_restarts=1)(lambda: None).distributed()


def test_databricks_without_its_package_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("databricks.air", "serverless_gpu"):
        monkeypatch.setitem(sys.modules, known, None)
    with pytest.raises(ModuleNotFoundError, match="attach the notebook to serverless GPU compute"):
        distributed(gpus=2, on="databricks")(lambda: None).distributed()


def test_nothing_of_databricks_is_imported_elsewhere(script: Callable[..., Any], tmp_path: Path) -> None:
    done = script("import helpers, sys\nhelpers.distributed\nprint([m for m in sys.modules if 'databricks' in m])")
    assert done.stdout.strip() == "[]", done.stderr
