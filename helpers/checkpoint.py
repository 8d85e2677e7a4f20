"""Checkpoints that survive a kill at any moment: a collective, atomic save, the newest valid one, exact resume."""

import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

import torch

from helpers import ranks
from helpers.state import pack, put_back, random_state, set_random_state, take, unpack, write_tensors

_NAME, _RANDOM = re.compile(r"save-(\d{6,})-step-(\d+)"), "$random"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what to do."""


class WorldSizeDiffers(CheckpointError):
    """The checkpoint was saved by another number of ranks, and its state cannot be shared out anew."""


def save(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int = 3,
    per_rank: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of the whole job and return its folder. A collective call: every rank must make it.

    folder: where the checkpoints live; on several nodes, a folder that all nodes share.
    state: what all ranks hold alike (or sharded, as FSDP2 does), by name: modules (those in DDP or torch.compile are
    saved as what is inside), optimizers, schedulers, anything with state_dict and load_state_dict, and plain data.
    per_rank: the same for what each rank has of its own, such as the state of a stateful data loader.
    The random state of every rank (Python, NumPy, torch, CUDA) is saved always.
    step: optimizer steps done. keep: how many valid checkpoints stay; older ones are removed.
    Each rank writes a part of the parameters. The files become visible under their name by one rename, after they
    reached the disk, with a manifest of their digests; until then the previous checkpoint is the newest.
    Raises CheckpointError on every rank if one of them failed (a full disk, say), and TypeError for a value that
    could not be loaded without running code from the file.
    """
    if keep < 1 or step < 0:
        raise ValueError(f"keep={keep}, step={step}: keep at least 1 checkpoint, at a step of 0 or more.")
    folder, rank = Path(folder), ranks.rank()
    with _together(folder) as outcome:
        own, _ = take(per_rank or {}, aside=False)
        trees, tensors = take(state)
        blobs = {f"rank-{rank}.pt": pack(own | {_RANDOM: random_state()})}
        if rank == 0:
            blobs["objects.pt"] = pack(trees)
            outcome.value = _prepare(folder, step)
    target = outcome.everyone[0]
    writing = target.with_name(f".writing-{target.name}")
    with _together(folder, writing) as outcome:
        write_tensors(writing, tensors, state)
        outcome.value = _write(writing, blobs)
    manifest = {
        "step": step,
        "world_size": ranks.world_size(),
        "per_rank": sorted(per_rank or {}),
        "torch": torch.__version__,
        "files": {name: entry for part in outcome.everyone for name, entry in part.items()},
    }
    with _together(folder, writing):
        if rank == 0:
            _publish(writing, target, manifest)
            _prune(folder, keep)
    return target


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest valid checkpoint below a folder, or None; one that is damaged is skipped with a warning.

    Newest is what was saved last, even when an older checkpoint has a higher step. Not a collective call: each
    file is read and its digest compared, which takes about a second per gigabyte.
    """
    for candidate in reversed(_candidates(Path(folder))):
        fault = _fault(candidate)
        if fault is None:
            return candidate
        warnings.warn(f"skipping a damaged checkpoint: {fault}.", RuntimeWarning, stacklevel=2)
    return None


def resume(
    folder: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    per_rank: MutableMapping[str, Any] | None = None,
    world_size: Literal["any", "fixed"] = "any",
) -> int:
    """Load the newest valid checkpoint into `state` and return its step; 0, with nothing touched, when none exists.

    A collective call. Takes the names that `save` got. Objects are loaded in place; plain data is put back
    into the dict, as `state["epoch"]`. Every rank continues its own random stream.
    world_size: "any" accepts a checkpoint of another number of ranks where that is sound: state that all ranks
    hold alike, or shards, which are cut anew; random streams then start afresh (a warning says so), and the job
    continues exactly only if the global batch is the same and nothing random is drawn. State `per_rank` cannot be
    shared out anew and is refused. "fixed" refuses every other number of ranks.
    Raises WorldSizeDiffers for those, CheckpointError when checkpoints exist but none is valid, or when the names,
    parameters or shapes do not fit `state`. Files are only ever read as plain data, never as code.
    """
    if world_size not in ("any", "fixed"):
        raise ValueError(f"world_size={world_size!r} is unknown: choose 'any' or 'fixed'.")
    folder = Path(folder)
    names = ranks.gather([path.name for path in _candidates(folder)])[0]  # rank 0's view counts
    for name in reversed(names):
        faults = [f for f in ranks.gather(_fault(folder / name, ranks.rank(), ranks.world_size())) if f is not None]
        if not faults:
            return _load(folder / name, state, {} if per_rank is None else per_rank, world_size)
        if ranks.rank() == 0:
            warnings.warn(f"skipping a damaged checkpoint: {faults[0]}.", RuntimeWarning, stacklevel=2)
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints in {folder} is valid (see the warnings above): "
            "restore one, or remove the folder to start from step 0."
        )
    return 0


def remaining(batches: Iterable[Any], done: int) -> Iterator[Any]:
    """The batches of an epoch after the first `done`, drawing no random number that an undisturbed run would not.

    Their order must depend on (seed, epoch) alone, as DistributedSampler's does after set_epoch. The skipped
    batches are read and dropped, and the random state is then put back. With workers that draw random
    augmentations, give the DataLoader a generator seeded from (seed, epoch) too.
    """
    if done == 0:
        yield from batches
        return
    before = random_state()
    iterator = iter(batches)
    skipped = sum(1 for _ in itertools.islice(iterator, done))
    if skipped < done:
        raise ValueError(f"cannot skip {done} batches: the epoch has {skipped}. Did the batch size change?")
    set_random_state(before)
    yield from iterator


def _load(path: Path, state: MutableMapping[str, Any], per_rank: MutableMapping[str, Any], world_size: str) -> int:
    manifest = json.loads((path / "manifest.json").read_text())
    trees = unpack(path / "objects.pt")
    saved, here, own = manifest["world_size"], ranks.world_size(), manifest["per_rank"]
    if saved != here and (world_size == "fixed" or own):
        reason = f"each rank's own state ({', '.join(own)}) cannot be shared out anew" if own else "it must be equal"
        raise WorldSizeDiffers(
            f"{path} was saved by {saved} ranks and this job has {here}: {reason}. "
            f"Start {saved} ranks, or train from a fresh folder."
        )
    for wanted, found, argument in ((set(state), set(trees), "state"), (set(per_rank), set(own), "per_rank")):
        if wanted != found:
            raise CheckpointError(
                f"{path} holds {sorted(found)} as {argument} and resume was given {sorted(wanted)}: "
                "pass the same names as to save."
            )
    try:
        put_back(path, state, trees)
        if saved == here:
            mine = unpack(path / f"rank-{ranks.rank()}.pt")
            put_back(path, per_rank, mine)
            set_random_state(mine[_RANDOM])
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be loaded into what resume was given: {error}") from error
    if saved != here and ranks.rank() == 0:
        warnings.warn(
            f"{path} was saved by {saved} ranks and this job has {here}: model, optimizer and position are restored; "
            "random streams (dropout, augmentation) start afresh.",
            RuntimeWarning,
            stacklevel=3,
        )
    return manifest["step"]


def _prepare(folder: Path, step: int) -> Path:
    """Clear away what a killed save left, make the folder to write in, and name the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
        shutil.rmtree(left)
    last = max((_number(path) for path in _candidates(folder)), default=0)
    target = folder / f"save-{last + 1:06d}-step-{step}"
    target.with_name(f".writing-{target.name}").mkdir()
    return target


def _write(writing: Path, blobs: Mapping[str, bytes]) -> dict[str, list[Any]]:
    """Write this rank's small files; return {name: [bytes, sha256]} of these and of its tensor files."""
    for name, blob in blobs.items():
        with open(writing / name, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
    names = [*blobs, *(path.name for path in writing.glob(f"__{ranks.rank()}_*"))]
    if ranks.rank() == 0 and (writing / ".metadata").exists():
        names.append(".metadata")
    return {name: [(writing / name).stat().st_size, _digest(writing / name)] for name in names}


def _publish(writing: Path, target: Path, manifest: Mapping[str, Any]) -> None:
    if missing := [name for name in manifest["files"] if not (writing / name).exists()]:
        raise OSError(f"{', '.join(missing)} of other ranks are not there: choose a folder that all nodes share")
    with open(writing / "manifest.json", "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(writing)
    writing.rename(target)
    _sync_folder(target.parent)


def _prune(folder: Path, keep: int) -> None:
    kept = 0
    for path in reversed(_candidates(folder)):
        if kept == keep:
            gone = path.rename(path.with_name(f".removing-{path.name}"))  # never half a checkpoint under its name
            shutil.rmtree(gone)
        elif _fault(path, digests=False) is None:
            kept += 1  # a damaged one does not count


def _fault(path: Path, share: int = 0, shares: int = 1, *, digests: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None. Looks at every `shares`-th file only."""
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
        if manifest["step"] != int(path.name.split("-")[3]):
            return f"{file} is of step {manifest['step']}"
        for name, (size, digest) in sorted(manifest["files"].items())[share::shares]:
            file = path / name
            if (found := file.stat().st_size) != size:
                return f"{file} has {found} bytes instead of {size}"
            if digests and _digest(file) != digest:
                return f"{file} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{file} cannot be read ({type(error).__name__}: {error})"
    return None


def _candidates(folder: Path) -> list[Path]:
    """All checkpoints below the folder, valid or not, in the order of saving."""
    found = folder.iterdir() if folder.is_dir() else []
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _together:
    """A part of a save: when it fails on one rank it fails on all, and what was written is removed."""

    def __init__(self, folder: Path, writing: Path | None = None) -> None:
        self.folder, self.writing = folder, writing
        self.value: Any = None
        self.everyone: list[Any] = []

    def __enter__(self) -> "_together":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: no time for the others
        told = None if error is None else f"{type(error).__name__}: {error}"
        answers = ranks.gather((self.value, told))
        self.everyone = [value for value, _ in answers]
        failed = [(rank, text) for rank, (_, text) in enumerate(answers) if text]
        if not failed:
            return
        if self.writing is not None and ranks.rank() == 0:
            shutil.rmtree(self.writing, ignore_errors=True)
        if isinstance(error, (TypeError, ValueError)):
            return  # the caller's mistake, shown as it is
        free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
        raise CheckpointError(
            f"saving to {self.folder} failed on rank {failed[0][0]}: {failed[0][1]}. {free / 2**20:.0f} MiB are free "
            "there now; earlier checkpoints are untouched."
        ) from error
