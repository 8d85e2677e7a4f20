"""Claims about helpers.records: what a claim may say, when it holds, and what the notebook stores."""

from __future__ import annotations

import json
import math

import pytest

from helpers.records import MIME, ClaimFailed, InvalidClaim, bundle, evaluate, record

METRICS = {"accuracy": 0.97, "baseline": 0.9, "steps": 100, "device": "cpu", "broken": math.nan}


@pytest.mark.parametrize(
    "claim",
    [
        "accuracy >= 0.95",
        "accuracy>baseline",
        "steps == 100",
        "accuracy != 1",
        "baseline < 9.1e-1",
        "steps <= +1E2",
    ],
)
def test_a_claim_compares_a_metric_with_a_number_or_with_another_metric(claim):
    assert evaluate(METRICS, [claim])[0].holds


def test_a_failed_claim_names_value_and_bound(capsys):
    with pytest.raises(ClaimFailed, match=r"2 claims do not hold: accuracy >= 0.99 \(0.97 against 0.99\); base"):
        record(METRICS, ["accuracy >= 0.99", "baseline > accuracy", "steps == 100"])
    assert "[FAILS] accuracy >= 0.99" in capsys.readouterr().out  # the table is shown before the error


@pytest.mark.parametrize("sign", [">=", "<=", "==", "!=", "<", ">"])
def test_nan_satisfies_no_claim(sign):
    assert not evaluate(METRICS, [f"broken {sign} 1"])[0].holds
    assert not evaluate(METRICS, [f"accuracy {sign} nan"])[0].holds


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("acuracy >= 0.9", "'acuracy', which is not recorded. Did you mean 'accuracy'"),
        ("accuracy >= bseline", "Did you mean 'baseline'"),
        ("accuracy is good", "cannot be read"),
        ("0.95 <= accuracy", "cannot be read"),
        ("accuracy >= 0.9 and steps > 1", "cannot be read"),
        ("device == 1", "device='cpu', which is text"),
        ("", "cannot be read"),
    ],
)
def test_a_claim_that_cannot_be_decided_is_an_error_and_not_a_pass(claim, message):
    with pytest.raises(InvalidClaim, match=message.replace("(", r"\(")):
        evaluate(METRICS, [claim])


@pytest.mark.parametrize("claims", [[], "accuracy > 0.5"])
def test_a_record_without_a_list_of_claims_is_refused(claims):
    with pytest.raises(InvalidClaim, match="give a list of at least one"):
        record(METRICS, claims)


def test_a_metric_that_is_no_number_is_refused_by_name():
    with pytest.raises(TypeError, match="metric 'curve' is neither"):
        record({"curve": [1.0, 2.0]}, ["curve > 0"])


def test_one_element_arrays_and_tensors_are_unwrapped(capsys):
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    record({"a": numpy.float32(0.5), "b": torch.tensor(2)}, ["a == 0.5", "b == 2"])
    with pytest.raises(TypeError, match="metric 'c'"):
        record({"c": torch.ones(2)}, ["c > 0"])


def test_the_bundle_is_strict_json_and_is_judged_alike_when_read_back():
    metrics = {"loss": math.nan, "ratio": math.inf, "accuracy": 0.97}
    stored = json.dumps(bundle(metrics, evaluate(metrics, ["loss < 1", "ratio > 1"])), allow_nan=False)
    again = json.loads(stored)
    verdicts = evaluate(again["metrics"], [claim["claim"] for claim in again["claims"]])
    assert [verdict.holds for verdict in verdicts] == [False, True]


def test_a_notebook_cell_shows_a_table_and_stores_the_bundle(monkeypatch):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    capture = pytest.importorskip("IPython.utils.capture").capture_output
    shell.instance()
    try:
        with capture() as captured:
            record({"name": "<b>", "accuracy": 0.97}, ["accuracy >= 0.95"])
    finally:
        shell.clear_instance()
    (output,) = captured.outputs
    assert output.data[MIME]["metrics"] == {"name": "<b>", "accuracy": 0.97}
    assert "&lt;b&gt;" in output.data["text/html"]
    assert "accuracy  0.97" in output.data["text/plain"]


@pytest.mark.parametrize("claim", ["a >= a", "a > -inf", "a < inf", "a <= +Infinity"])
def test_a_claim_that_no_measurement_could_refute_is_refused(claim):
    with pytest.raises(InvalidClaim, match="whatever was measured"):
        evaluate({"a": 1.0}, [claim])
