"""Recipe 01: its text agrees with its code, and its training function does what the numbered comments promise."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import joblib
import nbformat
import numpy as np
import pytest
import torch

import helpers
from data_prep import tabular
from helpers import ranks
from helpers.tracking import Run

NOTEBOOK = nbformat.read(Path(__file__).parents[1] / "notebooks" / "01_pytorch_ddp_mlp.ipynb", as_version=4)
CELLS = {cell.id: cell.source for cell in NOTEBOOK.cells}
PROSE = {cell.id: cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown"}


def cells(*names: str, changed: tuple[str, str] | None = None) -> SimpleNamespace:
    """Execute some of the notebook's cells, one line changed if wanted, and return the names they define."""
    space: dict[str, object] = {"profile": "smoke", "__name__": "recipe"}
    for name in ("imports", "parameters-code", "settings-code", *names):
        source = CELLS[name].replace("%matplotlib inline", "")
        if changed and changed[0] in source:
            source, changed = source.replace(*changed), None
        exec(compile(source, name, "exec"), space)
    assert changed is None, f"no cell holds {changed}"
    return SimpleNamespace(**space)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tabular.prepare("digits", held_out=397, root=tmp_path_factory.mktemp("data"))


@pytest.fixture
def trained_here(folder):
    """Train with one rank, in this process; gives the return value of `train`."""

    def run(changed: tuple[str, str] | None = None, **settings: object) -> dict:
        recipe = cells("model", "evaluate", "train-code", changed=changed)
        wanted = recipe.settings.replace(**{"gpus": 1, "epochs": 2, "log_every": 1, **settings})
        return recipe.train.func(wanted, folder, Run(), None, None, True)

    yield run
    ranks.shut_down()


def test_the_table_under_the_title_agrees_with_settings_metadata_and_traced_memory():
    recipe = cells("model")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in CELLS["title"].splitlines()[-2:]]
    assert [row[0].strip("`") for row in rows] == list(recipe.settings.profiles)
    for name, hardware, model, _, global_batch, minutes, memory in rows:
        profile = name.strip("`")
        settings = helpers.choose(profile, **recipe.settings.profiles)
        told = NOTEBOOK.metadata.gallery.profiles[profile]
        assert hardware == settings.hardware == told.hardware
        assert model == f"{settings.depth} x {settings.width}"
        assert global_batch == f"{settings.global_batch:,}"
        assert minutes == (f"{told.minutes} min" if told.ran else "not run yet")
        assert memory == ("no GPU" if "CPU" in hardware else f"{gib_of_the_fit_cell():.1f} GiB per GPU")


def gib_of_the_fit_cell() -> float:
    answer = cells("model", "fit-code", changed=("display(answer, answer.plot())", "")).answer
    return answer.estimates["ddp"].total() / 2**30


def test_no_number_in_the_prose_was_typed_by_hand():
    """Numbers come from cells; what may stand in text are references to lines, code, and names that hold digits."""
    for name, text in PROSE.items():
        if name == "title":
            continue  # the test above checks its table
        plain = re.sub(r"```.*?```|`[^`]+`|\(\d+(, \d+)*\)|rank [01]\b", "", text, flags=re.DOTALL)
        assert not re.search(r"\d", plain), f"{name}: {re.search(r'.*[0-9].*', plain)[0]}"


def test_the_distributed_lines_are_numbered_without_a_gap_and_every_reference_leads_to_one():
    numbers = [int(number) for number in re.findall(r"# \((\d+)\)", CELLS["train-code"])]
    assert numbers == list(range(1, len(numbers) + 1))
    for name, text in CELLS.items():
        for group in re.findall(r"(?<!\w)\((\d+(?:, \d+)*)\)", text):
            assert {int(number) for number in group.split(", ")} <= set(numbers), f"{name} refers to ({group})"


def test_the_training_code_does_not_know_which_profile_it_runs_in():
    for name in ("model", "evaluate", "train-code"):
        assert "profile" not in CELLS[name]
        assert "smoke" not in CELLS[name]


def test_every_training_row_is_read_once_per_epoch_in_a_new_order(trained_here):
    trace = trained_here()["trace"]
    by_epoch = [[], []]
    for samples, epoch in zip(trace["samples"], trace["epochs"], strict=True):
        by_epoch[epoch] += samples
    assert Counter(by_epoch[0]) == Counter(by_epoch[1]) == Counter(range(1400))
    assert by_epoch[0] != by_epoch[1]


def test_without_line_8_every_epoch_has_the_same_order(trained_here):
    samples = trained_here(changed=("sampler.set_epoch(epoch)", "pass"))["trace"]["samples"]
    assert samples[: len(samples) // 2] == samples[len(samples) // 2 :]


def test_accumulating_uneven_micro_batches_gives_the_gradient_of_the_whole_batch(trained_here):
    """In each epoch's last step some micro-batches are short: 1,400 rows in micro-batches of 48."""
    whole = trained_here(micro_batch=384, accumulation=1)["trace"]
    parts = trained_here(micro_batch=48, accumulation=8)["trace"]
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert parts["gradient_norms"] == pytest.approx(whole["gradient_norms"], rel=1e-4)


def test_a_mean_of_micro_batch_means_would_not(trained_here):
    planted = ("(loss * here.world_size / all_rows)", "(loss / len(labels) / len(group))")
    whole = trained_here(micro_batch=384, accumulation=1)["trace"]
    parts = trained_here(changed=planted, micro_batch=48, accumulation=8)["trace"]
    assert parts["gradient_norms"] != pytest.approx(whole["gradient_norms"], rel=1e-4)


def test_three_ranks_count_each_held_out_row_once_and_end_with_one_model(folder):
    """Neither 397 held-out rows nor 1,400 training rows divide by three."""
    recipe = cells("model", "evaluate", "train-code")
    settings = recipe.settings.replace(gpus=3, epochs=1)
    results = recipe.train.with_overrides(gpus=3).distributed(settings, folder, Run(), None)
    truth = torch.tensor(tabular.load(folder).held_out.labels)
    for result in results:
        assert torch.equal(result["after"].sum(dim=1), torch.bincount(truth))
    assert len({result["weights_hash"] for result in results}) == 1
    assert {result["losses"][-1]["loss"] for result in results} == {results[0]["losses"][-1]["loss"]}
    assert len({result["losses"][-1]["rank_0"] for result in results}) == 3


def test_the_full_size_profile_trains_by_the_same_cells(tmp_path, monkeypatch):
    """On made-up rows of CoverType's shape: the real ones need a download."""
    kept = tmp_path / "scikit_learn_data" / "covertype"
    kept.mkdir(parents=True)
    generator = np.random.default_rng(0)
    labels = generator.integers(1, 8, size=2000)
    joblib.dump(generator.normal(labels[:, None], 1, size=(2000, 54)), kept / "samples_py3")
    joblib.dump(labels.astype(np.int32), kept / "targets_py3")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(kept.parent))
    forest = tabular.prepare("covertype", held_out=201, root=tmp_path / "data")
    recipe = cells("model", "evaluate", "train-code")
    full = helpers.choose("h100x8", **recipe.settings.profiles)
    small = full.replace(gpus=1, width=32, epochs=5, micro_batch=32, learning_rate=1e-2)
    try:
        result = recipe.train.func(small, forest, Run(), None)
    finally:
        ranks.shut_down()
    assert recipe.accuracy(result["after"]) > recipe.accuracy(result["before"]) + 0.2


def test_a_job_that_was_killed_after_its_last_step_resumes_to_its_result(folder, tmp_path):
    recipe = cells("model", "evaluate", "train-code")
    settings = recipe.settings.replace(gpus=1, epochs=1, checkpoint_every=1)
    try:
        done = recipe.train.func(settings, folder, Run(), tmp_path / "checkpoints")
        again = recipe.train.func(settings.replace(epochs=1), folder, Run(), tmp_path / "checkpoints")
    finally:
        ranks.shut_down()
    assert again["first_step"] == done["steps"]
    assert torch.equal(again["after"], done["after"])


def test_a_run_resumed_in_mid_epoch_ends_with_the_weights_of_an_undisturbed_one(folder, tmp_path):
    recipe = cells("model", "evaluate", "train-code")
    settings = recipe.settings.replace(gpus=1, epochs=2, checkpoint_every=4)

    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 6:
            raise Stop

    try:
        undisturbed = recipe.train.func(settings, folder, Run(), None)
        with pytest.raises(Stop):
            recipe.train.func(settings, folder, Run(), tmp_path / "checkpoints", stop)
        resumed = recipe.train.func(settings, folder, Run(), tmp_path / "checkpoints")
    finally:
        ranks.shut_down()
    assert resumed["first_step"] == 4
    assert resumed["weights_hash"] == undisturbed["weights_hash"]
    assert resumed["losses"] == undisturbed["losses"]
