"""Tracking: one run per job on a real SQLite store and a real server that comes and goes."""

import base64
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import settings, tracking
from helpers.journal import Journal
from helpers.provenance import masked, shown
from helpers.registry import PredictionsDiffer

ROOT = Path(__file__).resolve().parents[1]
PROFILE: dict[str, Any] = {
    "hardware": "2 CPU processes",
    "gpus": 2,
    "micro_batch": 64,
    "accumulation": 2,
    "learning_rate": 0.1,
    "hf_token": "hf_do_not_tell",
}
pytestmark = pytest.mark.timeout(400)  # the first ones make a store and start a server

OPEN = """
import sys
from helpers import tracking
with tracking.start("shared", name=sys.argv[1], system_metrics=False) as run:
    run.log_metrics({"loss": 0.5}, step=1)
print("id", run.run_id)
"""


def python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def first_touch(tmp_path_factory) -> tuple[Path, list[tuple[int, str]]]:
    """A runs folder whose store three processes have created at the same time, and how they fared."""
    runs = tmp_path_factory.mktemp("runs")
    started = [python(OPEN, f"job {number}", GALLERY_RUNS=str(runs), MLFLOW_TRACKING_URI="") for number in range(3)]
    outputs = [process.communicate(timeout=150)[0] for process in started]
    return runs, [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.fixture
def client(first_touch, monkeypatch) -> Iterator[Any]:
    """A client of the store above, which the tests below share since creating one takes seconds."""
    import mlflow

    uri = f"sqlite:///{first_touch[0] / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    yield mlflow.MlflowClient(uri)
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(uri)


def started(name: str = "tests", **options: Any) -> Any:
    chosen = settings.choose("smoke", smoke=PROFILE)
    return tracking.start(name, chosen, system_metrics=False, **options)


def values(client: Any, run: tracking.Run, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run.run_id, name)]


def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.1)
    return found


def test_three_jobs_that_create_the_store_at_the_same_time_all_get_their_run(first_touch):
    """Ranks or jobs that first touched a new SQLite store together failed on its tables, three times of three."""
    runs, fared = first_touch
    assert [code for code, _ in fared] == [0, 0, 0], "\n".join(output for _, output in fared)
    assert (runs / "mlflow.db").exists()
    assert len({output.split("id ")[1] for _, output in fared}) == 3


def test_what_describes_the_job_is_logged_before_the_first_step_and_secrets_are_not(client):
    with started(name="described", tags={"purpose": "test"}) as run:
        data = client.get_run(run.run_id).data
        assert client.get_run(run.run_id).info.status == "RUNNING"
    assert data.params == {
        "profile": "smoke",
        "hardware": "2 CPU processes",
        "gpus": "2",
        "world_size": "2",
        "micro_batch": "64",
        "accumulation": "2",
        "global_batch": "256",
        "learning_rate": "0.1",
        "hf_token": "(not logged)",
    }
    assert {"version_python", "version_torch", "version_mlflow", "hardware_found"} <= data.tags.keys()
    assert "CPU cores" in data.tags["hardware_found"]
    assert data.tags["purpose"] == "test"
    if (ROOT / ".git").exists():
        assert len(data.tags["git_commit"].split()[0]) == 40
    assert client.get_run(run.run_id).info.status == "FINISHED"
    assert not Path(run.journal).exists()


@pytest.mark.parametrize(
    "name", ["hf_token", "token", "API_KEY", "wandb_api_key", "db_password", "secret", "aws_secret"]
)
def test_names_of_secrets_are_masked_at_any_depth(name):
    assert masked({"outer": {name: "x"}}) == {"outer": {name: "(not logged)"}}


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "pad_token", "eos_token", "tokens_per_batch", "key"])
def test_names_that_only_resemble_secrets_are_logged(name):
    assert masked({name: "x"}) == {name: "x"}


def test_rank_zero_alone_logs_and_the_parent_sends_while_the_job_runs(client):
    code = """
import base64, pickle, sys
run = pickle.loads(base64.b64decode(sys.argv[1]))
for step in range(1, 2501):
    run.log_metrics({"loss": 1.0 / step}, step=step)
assert "mlflow" not in sys.modules
"""
    with started() as run:
        argument = base64.b64encode(pickle.dumps(run)).decode()
        ranks = [python(code, argument, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        wait_for(lambda: len(values(client, run, "loss")) == 2500)  # before the block ends, and not 5000
    loss = sorted(values(client, run, "loss"))
    assert loss == [(step, 1.0 / step) for step in range(1, 2501)]
    assert [step for step, _ in sorted(values(client, run, "samples_per_second"))] == list(range(2, 2501))


def test_throughput_is_steps_times_global_batch_over_the_time_between(client):
    with started() as run:
        run.log_metrics({"loss": 1}, step=10)
        begin = time.perf_counter()
        time.sleep(0.2)
        run.log_metrics({"loss": torch.tensor([1.0])}, step=14)
        seconds = time.perf_counter() - begin
        run.log_metrics({"accuracy": 0.5}, step=14)
        run.log_metrics({"samples_per_second": 7}, step=15)
    (_, first), (_, own) = sorted(values(client, run, "samples_per_second"))
    assert first == pytest.approx(4 * 256 / seconds, rel=0.1)
    assert own == 7


def test_a_metric_that_is_no_number_is_refused_by_name(client):
    with started() as run, pytest.raises(TypeError, match=r"metric 'loss' is 'low', not a number"):
        run.log_metrics({"loss": "low"})


def test_a_failed_job_ends_its_run_as_failed_with_the_error_and_the_whole_traceback(client):
    import mlflow

    with contextlib.suppress(ZeroDivisionError), started() as run:
        run.log_metrics({"loss": 3.0}, step=7)
        raise ZeroDivisionError("rank 1\nsaid so")
    found = client.get_run(run.run_id)
    assert found.info.status == "FAILED"
    assert found.data.tags["error"] == "ZeroDivisionError: rank 1\nsaid so"
    assert values(client, run, "loss") == [(7, 3.0)]
    text = mlflow.artifacts.load_text(f"{found.info.artifact_uri}/error.txt")
    assert "Traceback (most recent call last)" in text
    assert "test_tracking.py" in text


def test_an_interrupted_job_ends_its_run_as_killed(client):
    with pytest.raises(KeyboardInterrupt), started() as run:
        raise KeyboardInterrupt
    assert client.get_run(run.run_id).info.status == "KILLED"


def test_an_active_run_is_respected_and_the_new_one_is_nested_in_it(client):
    import mlflow

    mlflow.set_tracking_uri(tracking.store())
    mlflow.set_experiment("outer")
    with mlflow.start_run() as outer:
        with started() as run:
            assert mlflow.active_run().info.run_id == run.run_id
            mlflow.log_metric("from_the_notebook", 1)
        assert mlflow.active_run().info.run_id == outer.info.run_id
    assert client.get_run(run.run_id).data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert client.get_run(run.run_id).data.metrics["from_the_notebook"] == 1
    assert client.get_run(outer.info.run_id).info.status == "FINISHED"


def test_the_run_that_mlflow_run_id_names_is_continued(client, monkeypatch):
    with started() as run:
        run.log_metrics({"loss": 2.0}, step=1)
    monkeypatch.setenv("MLFLOW_RUN_ID", run.run_id)
    with started("another experiment") as again:
        again.log_metrics({"loss": 1.0}, step=2)
    assert (again.run_id, again.experiment_id) == (run.run_id, run.experiment_id)
    assert sorted(values(client, run, "loss")) == [(1, 2.0), (2, 1.0)]
    assert client.get_run(run.run_id).info.status == "FINISHED"


def test_callbacks_of_frameworks_find_the_attached_run_and_the_process_forgets_it_at_the_end(client, monkeypatch):
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with started() as run:
        run.attach()
        assert os.environ["MLFLOW_RUN_ID"] == run.run_id
        assert os.environ["MLFLOW_TRACKING_URI"] == run.tracking_uri
    assert "MLFLOW_RUN_ID" not in os.environ
    os.environ.pop("MLFLOW_EXPERIMENT_ID")


def test_ranks_that_run_the_whole_script_get_a_run_that_does_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with tracking.start("tests", PROFILE) as run:
        run.log_metrics({"loss": 1.0}, step=1)
        run.attach()
    assert run == tracking.Run()


def test_a_rank_that_cannot_see_the_parents_journal_sends_by_itself(client, tmp_path):
    with started() as run:
        away = replace(run, journal=str(tmp_path / "elsewhere" / "metrics.jsonl"))
        away.log_metrics({"loss": 1.0}, step=1)
        tracking._senders.pop(run.run_id).stop()
    assert values(client, run, "loss") == [(1, 1.0)]


def test_system_metrics_of_this_machine_are_logged(client, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    with tracking.start("tests", PROFILE) as run:
        wait_for(lambda: "system/cpu_utilization_percentage" in client.get_run(run.run_id).data.metrics)


def test_where_runs_go_follows_one_rule(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    monkeypatch.setenv("GALLERY_RUNS", str(tmp_path))
    assert tracking.store() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.delenv("GALLERY_RUNS")
    assert tracking.store() == f"sqlite:///{ROOT}/runs/mlflow.db"
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.22.5")
    assert tracking.store() == f"sqlite:///{ROOT}/runs/mlflow2.db"
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert tracking.store() == "databricks"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking.store() == "http://tracking:5000"


# --- servers that do not answer -------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("listening", [False, True], ids=["nobody listens", "somebody listens and never answers"])
def test_an_unreachable_server_is_a_clear_error_within_ten_seconds(monkeypatch, listening):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        uri = f"http://someone:hunter2@127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        begin = time.monotonic()
        with pytest.raises(tracking.TrackingUnreachable, match="does not answer") as error, started():
            pytest.fail("the block was entered")
    assert time.monotonic() - begin < 12
    assert "unset it to log into" in str(error.value)
    assert "hunter2" not in str(error.value)
    assert shown(uri) == uri.replace("someone:hunter2@", "")
    assert os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES") is None


class Forwarder:
    """A port that leads to the server while it is open; nothing listens on it while it is closed."""

    def __init__(self, target: int) -> None:
        self.target, self.port, self._sockets = target, free_port(), []

    def open(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def close(self) -> None:
        for end in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                inner, outer = socket.create_connection(("127.0.0.1", self.target)), listening.accept()[0]
            except OSError:
                return
            self._sockets += [inner, outer]
            for one, other in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def server(first_touch) -> Iterator[Forwarder]:
    """A real `mlflow server` on the store of this file."""
    port = free_port()
    runs = first_touch[0]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{runs / 'mlflow.db'}",
        "--artifacts-destination",
        str(runs / "served"),
    ]
    with open(runs / "server.log", "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # else it starts more processes
        )
    try:
        answers = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
        limit = time.monotonic() + 150
        while True:
            try:
                urllib.request.urlopen(answers, timeout=30).close()
                break
            except OSError:
                assert process.poll() is None, (runs / "server.log").read_text()
                assert time.monotonic() < limit, (runs / "server.log").read_text()
                time.sleep(0.2)
        yield Forwarder(port)
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


@pytest.fixture
def through_server(server, client, monkeypatch) -> Iterator[tuple[Forwarder, Any]]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.port}")
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    server.open()
    yield server, client
    server.close()


def test_a_server_lost_in_mid_run_costs_one_warning_and_what_it_missed_is_sent_when_it_is_back(through_server):
    forwarder, client = through_server
    with warnings.catch_warnings(record=True) as warned, started() as run:
        warnings.simplefilter("always")
        run.log_metrics({"loss": 3.0}, step=1)
        arrived = wait_for(lambda: values(client, run, "loss"))
        forwarder.close()
        begin = time.monotonic()
        run.log_metrics({"loss": 2.0}, step=2)
        kept_waiting = time.monotonic() - begin
        wait_for(lambda: [w for w in warned if "MLflow" in str(w.message)])
        run.log_metrics({"loss": 1.0}, step=3)
        meanwhile = values(client, run, "loss")
        forwarder.open()
    assert arrived == meanwhile == [(1, 3.0)]
    assert kept_waiting < 0.5
    assert sorted(values(client, run, "loss")) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert client.get_run(run.run_id).info.status == "FINISHED"
    (text,) = [str(w.message) for w in warned if "MLflow" in str(w.message)]
    assert "Training goes on; its metrics are kept in" in text
    assert not Path(run.journal).exists()


def test_a_server_that_stays_lost_leaves_a_file_that_can_be_sent_later_with_the_runs_end(through_server):
    forwarder, client = through_server
    with warnings.catch_warnings(record=True) as warned, contextlib.suppress(EOFError), started() as run:
        warnings.simplefilter("always")
        forwarder.close()
        run.log_metrics({"loss": 2.0, "accuracy": 0.5}, step=2)
        begin = time.monotonic()
        raise EOFError("the job's own error, not the server's")
    assert time.monotonic() - begin < 25
    assert "2 metrics did not reach MLflow and are kept: helpers.tracking.flush(" in str(warned[-1].message)
    assert client.get_run(run.run_id).info.status == "RUNNING"
    forwarder.open()
    tracking.flush(run.journal)
    found = client.get_run(run.run_id)
    assert found.info.status == "FAILED"
    assert found.data.tags["error"].startswith("EOFError: the job's own error")
    assert values(client, run, "loss") == [(2, 2.0)]
    assert not Path(run.journal).exists()


def test_a_journal_line_still_being_written_is_left_for_the_next_time(tmp_path):
    journal = Journal.create(tmp_path / "metrics.jsonl", "sqlite:///unused.db", "run")
    journal.append({"loss": 1.0}, 1)
    with open(journal.path, "a") as file:
        file.write('[["loss", 2.0, 2')
    assert journal.unsent() == 1


# --- models ---------------------------------------------------------------------------------------------------


def test_a_registered_model_predicts_what_the_trained_one_does_without_its_class(client):
    import mlflow

    class OfTheNotebook(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = OfTheNotebook().train()
    with started() as run:
        pass
    done = tracking.register(run, model, "digits", torch.randn(5, 4))
    assert model.training  # the trained one stays as it was
    assert done.uri == f"models:/digits/{done.version}"
    assert done.max_difference < 1e-6
    assert client.get_run(run.run_id).info.status == "FINISHED"
    assert client.get_model_version("digits", done.version).run_id == run.run_id
    info = mlflow.models.get_model_info(done.uri)
    assert info.signature.inputs.inputs[0].shape == (-1, 4)
    assert info.signature.outputs.inputs[0].shape == (-1, 3)
    assert info.saved_input_example_info is not None
    assert mlflow.pyfunc.load_model(done.uri).predict(torch.randn(9, 4).numpy()).shape == (9, 3)  # another batch size


def test_a_registered_model_that_predicts_something_else_is_an_error(client):
    class Hidden(torch.nn.Module):
        """What it returns depends on something outside its state."""

        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Hidden.calls += 1
            return x * Hidden.calls

    with (
        started() as run,
        pytest.raises(PredictionsDiffer, match=r"models:/hidden/1, loaded back, differs .* by up to"),
    ):
        tracking.register(run, Hidden(), "hidden", torch.ones(2, 4))


def test_unity_catalog_wants_three_levels_and_an_example_wants_a_batch(client):
    import mlflow

    before = mlflow.get_registry_uri()
    try:
        mlflow.set_registry_uri("databricks-uc")
        with pytest.raises(ValueError, match=r"name='digits' is not a Unity Catalog name .*give catalog.schema.model"):
            tracking.register(tracking.Run(), torch.nn.Linear(4, 3), "digits", torch.ones(2, 4))
    finally:
        mlflow.set_registry_uri(before)
    with pytest.raises(ValueError, match=r"input_example has shape \(1, 4\): give \(batch, ...\)"):
        tracking.register(tracking.Run(), torch.nn.Linear(4, 3), "digits", torch.ones(1, 4))
