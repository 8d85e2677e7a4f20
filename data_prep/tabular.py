"""Labelled tables, both real: handwritten digits (offline) and Forest CoverType (one download).

`prepare` runs once, in the parent, and leaves a folder of .npy files. `load` maps that folder into memory, in
the notebook and in every rank alike: eight ranks share one copy, and nothing large is pickled on the way.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_FORMAT = 1  # part of the cache's name: raise it when the files' meaning changes


@dataclass(frozen=True)
class Shape:
    """What is known of a data set before any of it is here."""

    n_rows: int
    n_features: int
    n_classes: int


SHAPES = {"digits": Shape(1_797, 64, 10), "covertype": Shape(581_012, 54, 7)}


class DataUnavailable(RuntimeError):
    """The data set is neither on this machine nor within reach; the message says how to bring it here."""


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a table: `rows[i]` is one (features, label) pair, `rows[[i, j]]` a batch, gathered at once.

    features: float32, shape (rows, features), standardised; labels: int64, shape (rows,), 0 ... classes - 1.
    Both are read-only maps of files; what indexing returns is a copy. A DataLoader gathers whole batches when
    it is given a BatchSampler as `sampler` and batch_size=None.
    """

    def __init__(self, features: np.ndarray, labels: np.ndarray) -> None:
        self.features = features
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        at = np.asarray(index)
        return torch.tensor(np.asarray(self.features[at])), torch.tensor(np.asarray(self.labels[at]))


@dataclass(frozen=True)
class Table:
    """A data set split into training and held-out rows, standardised on the training rows alone.

    mean, scale: float32, shape (features,): value in original units = standardised * scale + mean.
    image_shape: (height, width) when a row is a picture, else None.
    """

    name: str
    train: Rows
    held_out: Rows
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]
    mean: np.ndarray
    scale: np.ndarray
    image_shape: tuple[int, int] | None

    def original(self, features: torch.Tensor | np.ndarray) -> np.ndarray:
        """Standardised features, shape (..., features), back in the units they were measured in."""
        return np.asarray(features) * self.scale + self.mean

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.train):,} training and {len(self.held_out):,} held-out rows, "
            f"{len(self.feature_names)} features, {len(self.class_names)} classes"
        )


def prepare(name: str, *, held_out: int, seed: int = 0, root: str | Path | None = None) -> Path:
    """Make the data set's folder, or find it made already; to be called before the launch.

    name: of SHAPES: "digits" (pictures of 8 x 8 pixels, shipped with scikit-learn) or "covertype" (patches
      of forest and what grows there; scikit-learn downloads 11 MB at first use).
    held_out: number of rows that are never trained on; `seed` draws them, each class with its share.
    root: where the folder goes; None is $GALLERY_DATA_DIR, or data/ beside the package.
    Raises ValueError for an unknown name or an impossible `held_out`, DataUnavailable when a download fails.
    """
    if name not in SHAPES:
        raise ValueError(f"name={name!r} is unknown: choose {' or '.join(SHAPES)}.")
    home = Path(root or os.environ.get("GALLERY_DATA_DIR") or Path(__file__).resolve().parent.parent / "data")
    folder = home / f"{name}-v{_FORMAT}-held-out-{held_out}-seed-{seed}"
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    try:
        _write(unfinished, name, held_out, seed)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def load(folder: str | Path) -> Table:
    """Map what `prepare` made into memory; it costs milliseconds and no copy, so every rank calls it.

    Raises FileNotFoundError when the folder is not on this machine, ValueError when a file in it is damaged.
    """
    folder = Path(folder)
    if not (folder / "table.json").is_file():
        raise FileNotFoundError(f"{folder} holds no table: call prepare(...) here before the launch.")
    about = json.loads((folder / "table.json").read_text())
    array = partial(_mapped, folder)
    return Table(
        name=about["name"],
        train=Rows(array("train_features"), array("train_labels")),
        held_out=Rows(array("held_out_features"), array("held_out_labels")),
        feature_names=tuple(about["feature_names"]),
        class_names=tuple(about["class_names"]),
        mean=np.array(about["mean"], dtype=np.float32),
        scale=np.array(about["scale"], dtype=np.float32),
        image_shape=tuple(about["image_shape"]) if about["image_shape"] else None,
    )


def look(table: Table, rows: Rows, indices: Sequence[int], captions: Sequence[str] | None = None) -> Any:
    """Some rows as a person would want to see them: pictures (a figure), or original units (a DataFrame).

    captions: one text per index; None gives the true class.
    """
    features, labels = rows[indices]
    captions = captions or [table.class_names[label] for label in labels]
    values = table.original(features)
    if table.image_shape is None:
        import pandas

        columns = [f"row {index}: {caption}" for index, caption in zip(indices, captions, strict=True)]
        shown = pandas.DataFrame(values.T, index=list(table.feature_names), columns=columns)
        return shown[(values != 0).any(axis=0)].round(1)  # one-hot columns that are 0 in all say nothing
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.15 * len(indices), 1.5), layout="constrained")
    for axes, picture, caption in zip(
        np.ravel(figure.subplots(1, len(indices), squeeze=False)), values, captions, strict=True
    ):
        axes.imshow(picture.reshape(table.image_shape), cmap="gray_r")
        axes.set_title(caption, fontsize=8)
        axes.set_axis_off()
    return figure


def _digits() -> dict[str, Any]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return {
        "features": bunch.data,
        "labels": bunch.target,
        "feature_names": list(bunch.feature_names),
        "class_names": [str(name) for name in bunch.target_names],
        "image_shape": bunch.images.shape[1:],
    }


def _covertype() -> dict[str, Any]:
    from sklearn.datasets import fetch_covtype, get_data_home

    try:
        bunch = fetch_covtype(n_retries=2, delay=1.0)
    except OSError as error:  # URLError, timeouts and a failed checksum are all of this kind
        home = Path(get_data_home())
        fetch = "from sklearn.datasets import fetch_covtype; fetch_covtype()"
        raise DataUnavailable(
            f"Forest CoverType is not in {home / 'covertype'} and could not be downloaded ({error}). Where "
            f"there is a network, run `python -c '{fetch}'`; then copy ~/scikit_learn_data/covertype "
            f"from there to {home}, or point SCIKIT_LEARN_DATA at a folder that has it. The digits of "
            "profile smoke need no network."
        ) from error
    return {
        "features": bunch.data,
        "labels": bunch.target.astype(np.int64) - 1,  # published as 1 ... 7
        "feature_names": list(bunch.feature_names),
        "class_names": [
            "Spruce/Fir",
            "Lodgepole Pine",
            "Ponderosa Pine",
            "Cottonwood/Willow",
            "Aspen",
            "Douglas-fir",
            "Krummholz",
        ],
        "image_shape": None,
    }


_SOURCES = {"digits": _digits, "covertype": _covertype}


def _write(folder: Path, name: str, held_out: int, seed: int) -> None:
    from sklearn.model_selection import train_test_split

    source = _SOURCES[name]()
    features, labels = source.pop("features"), source.pop("labels")
    classes = SHAPES[name].n_classes
    if not classes <= held_out <= len(labels) - classes:
        raise ValueError(
            f"held_out={held_out}: {name} has {len(labels):,} rows of {classes} classes, so give "
            f"{classes} to {len(labels) - classes:,}."
        )
    every = np.arange(len(labels))
    train, rest = train_test_split(every, test_size=held_out, stratify=labels, random_state=seed)
    mean = features[train].mean(axis=0)
    scale = features[train].std(axis=0)
    scale[scale == 0] = 1  # a constant column (digits has some) stays constant
    for split, at in (("train", train), ("held_out", rest)):
        np.save(folder / f"{split}_features.npy", ((features[at] - mean) / scale).astype(np.float32))
        np.save(folder / f"{split}_labels.npy", labels[at].astype(np.int64))
    about = {"name": name, **source, "mean": mean.tolist(), "scale": scale.tolist()}
    (folder / "table.json").write_text(json.dumps(about))


def _publish(unfinished: Path, folder: Path) -> None:
    """Give a finished folder its name in one step; whoever else finished first has made the same files."""
    unfinished.chmod(0o755)  # mkdtemp makes it private
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _mapped(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete {folder} and prepare it again.") from error
