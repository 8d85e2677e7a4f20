"""The tables that recipe 01 trains on: what is promised of splits, scaling, caching and bad input."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import BatchSampler, DataLoader

from data_prep import tabular

HELD_OUT = 397


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tabular.prepare("digits", held_out=HELD_OUT, root=tmp_path_factory.mktemp("data"))


@pytest.fixture
def covertype_in_cache(tmp_path, monkeypatch):
    """A folder as scikit-learn keeps it, with 2,000 made-up rows: it is the conversion that is tested."""
    generator = np.random.default_rng(0)
    kept = tmp_path / "scikit_learn_data" / "covertype"
    kept.mkdir(parents=True)
    joblib.dump(generator.normal(100, 5, size=(2000, 54)), kept / "samples_py3")
    joblib.dump(generator.integers(1, 8, size=2000).astype(np.int32), kept / "targets_py3")
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(kept.parent))


def test_every_row_is_in_exactly_one_split(folder):
    table = tabular.load(folder)
    both = np.concatenate([table.original(rows.features[:]) for rows in (table.train, table.held_out)])
    ours = sorted(map(tuple, both.round().astype(int)))
    assert ours == sorted(map(tuple, load_digits().data.astype(int)))
    assert len(table.held_out) == HELD_OUT


def test_the_held_out_rows_have_the_classes_in_the_shares_of_the_whole(folder):
    table = tabular.load(folder)
    held_out = np.bincount(table.held_out.labels) / HELD_OUT
    assert held_out == pytest.approx(np.bincount(load_digits().target) / 1797, abs=1 / HELD_OUT)


def test_scaling_comes_from_the_training_rows_alone(folder):
    table = tabular.load(folder)
    varying = table.train.features.std(axis=0) > 0
    assert varying.sum() > 50
    assert table.train.features.mean(axis=0) == pytest.approx(0, abs=1e-5)
    assert table.train.features.std(axis=0)[varying] == pytest.approx(1, abs=1e-4)
    # the held-out means would be 0 as well if those rows had had a say
    assert abs(table.held_out.features[:, varying].mean(axis=0)).max() > 1e-3
    assert np.isfinite(table.held_out.features).all()


def test_the_same_seed_gives_the_same_split_and_another_seed_another(folder, tmp_path):
    same = tabular.load(tabular.prepare("digits", held_out=HELD_OUT, root=tmp_path))
    other = tabular.load(tabular.prepare("digits", held_out=HELD_OUT, seed=1, root=tmp_path))
    table = tabular.load(folder)
    assert np.array_equal(table.train.features, same.train.features)
    assert not np.array_equal(table.train.labels, other.train.labels)


def test_the_shape_that_is_told_before_any_data_is_here_is_the_shape_of_the_data(folder):
    table = tabular.load(folder)
    told = tabular.SHAPES["digits"]
    assert told.n_rows == len(table.train) + len(table.held_out)
    assert (told.n_features, told.n_classes) == (table.train.features.shape[1], len(table.class_names))


def test_the_second_call_finds_the_folder_and_writes_nothing(folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert tabular.prepare("digits", held_out=HELD_OUT, root=folder.parent) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_two_notebooks_that_prepare_at_once_end_with_one_whole_folder(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(tabular.prepare, "digits", held_out=HELD_OUT, root=tmp_path / "data") for _ in range(4)]
    folders = {start.result() for start in starts}
    assert list((tmp_path / "data").iterdir()) == list(folders)
    assert len(tabular.load(folders.pop()).train) == 1797 - HELD_OUT


def test_an_interrupted_preparation_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="held_out=5: digits has 1,797 rows of 10 classes"):
        tabular.prepare("digits", held_out=5, root=tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_batch_is_gathered_at_once_and_equals_its_rows_one_by_one(folder):
    rows = tabular.load(folder).train
    loader = DataLoader(rows, sampler=BatchSampler(range(10), batch_size=4, drop_last=False), batch_size=None)
    batches = list(loader)
    one_by_one = torch.stack([rows[index][0] for index in range(10)])
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([features for features, _ in batches]), one_by_one)
    assert batches[0][0].dtype == torch.float32
    assert batches[0][1].dtype == torch.int64


def test_a_batch_is_a_copy_so_that_training_cannot_change_the_data(folder):
    rows = tabular.load(folder).train
    rows[3][0].fill_(9)
    rows[[3, 4]][0].fill_(9)
    assert rows.features[3].max() < 9


def test_ranks_share_the_files_and_the_path_is_all_that_travels(folder):
    table = tabular.load(folder)
    assert isinstance(table.train.features, np.memmap)
    assert not table.train.features.flags.writeable
    assert len(pickle.dumps(folder)) < 1000


def test_covertype_becomes_mappable_files_with_labels_from_zero(covertype_in_cache, tmp_path):
    table = tabular.load(tabular.prepare("covertype", held_out=201, root=tmp_path / "data"))
    assert isinstance(table.train.features, np.memmap)
    assert (len(table.train), len(table.held_out)) == (1799, 201)
    assert set(table.train.labels) == set(range(7))
    assert table.feature_names[0] == "Elevation"
    told = tabular.SHAPES["covertype"]
    assert len(table.feature_names) == table.train.features.shape[1] == told.n_features
    assert len(table.class_names) == told.n_classes
    assert table.original(table.train.features[:]).mean() == pytest.approx(100, abs=0.5)


@pytest.mark.filterwarnings("ignore:Retry downloading")
def test_without_a_network_covertype_says_how_to_bring_the_data_here(tmp_path, monkeypatch):
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens on the discard port
    with pytest.raises(tabular.DataUnavailable, match=r"fetch_covtype\(\).*SCIKIT_LEARN_DATA.*smoke"):
        tabular.prepare("covertype", held_out=201, root=tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="'iris' is unknown: choose digits or covertype"):
        tabular.prepare("iris", held_out=10, root=tmp_path)


def test_a_truncated_file_is_named_together_with_the_remedy(tmp_path):
    folder = tabular.prepare("digits", held_out=HELD_OUT, root=tmp_path)
    damaged = folder / "train_features.npy"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"train_features\.npy is damaged.*delete"):
        tabular.load(folder)


def test_a_folder_that_is_not_there_is_refused_before_training(tmp_path):
    with pytest.raises(FileNotFoundError, match="call prepare"):
        tabular.load(tmp_path / "elsewhere")


def test_digits_are_shown_as_pictures_and_covertype_in_its_own_units(folder, covertype_in_cache, tmp_path):
    digits = tabular.load(folder)
    figure = tabular.look(digits, digits.held_out, [0, 1, 2])
    assert [axes.get_title() for axes in figure.axes] == [str(label) for label in digits.held_out.labels[:3]]
    forest = tabular.load(tabular.prepare("covertype", held_out=201, root=tmp_path / "data"))
    shown = tabular.look(forest, forest.held_out, [0, 1], ["a", "b"])
    assert list(shown.columns) == ["row 0: a", "row 1: b"]
    assert 80 < shown.loc["Elevation", "row 0: a"] < 120
