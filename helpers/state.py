"""What a checkpoint holds: a job's state as plain data and tensors, and the way back into live objects.

Small values become one tree of plain data. A large tensor goes to torch.distributed.checkpoint, which stores what
ranks hold alike once and cuts shards anew; in the tree stays {"$tensor": its key}.
"""

import contextlib
import io
import pickle
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Tensors = dict[str, torch.Tensor]

INLINE = 4096  # bytes; a smaller tensor costs more as an entry of its own than inside the tree


def take(state: Mapping[str, Any], *, aside: bool = True) -> tuple[dict[str, Any], Tensors]:
    """The state as a tree of plain data and, unless `aside` is False, its large and sharded tensors by key.

    Nothing is copied but small views of large storages. Tied weights are stored once.
    """
    tensors: Tensors = {}
    seen: dict[tuple[Any, ...], str] = {}  # tied weights are stored once

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach()
            sharded = hasattr(value, "to_local")
            if not aside or not (sharded or value.nbytes >= INLINE):
                whole = value.nbytes == value.untyped_storage().nbytes()
                return value if whole else value.clone()  # torch.save would store all that a view looks at
            local = value.to_local() if sharded else value
            place = (local.data_ptr() or path, value.dtype, value.shape, value.stride())
            key = seen.setdefault(place, path)
            if key == path and tensors.setdefault(key, value) is not value:
                raise TypeError(f"two tensors of the state are both called {path}: rename one.")
            return {"$tensor": key, "shape": list(value.shape), "dtype": value.dtype}
        if isinstance(value, dict):
            return {name: walk(part, f"{path}/{name}") for name, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(part, f"{path}/{number}") for number, part in enumerate(value))
        return value

    trees = {}
    for name, value in state.items():
        holder = unwrap(value) if isinstance(value, torch.nn.Module) else value
        trees[name] = walk(holder.state_dict() if hasattr(holder, "state_dict") else holder, name)
    return trees, tensors


def pack(tree: Mapping[str, Any]) -> bytes:
    """The tree as a file that torch.load reads with weights_only=True, that is, without running code from it.

    Raises TypeError naming the value that is not plain data.
    """
    try:
        return _packed(tree)
    except Exception:
        for name, part in tree.items():
            try:
                _packed(part)
            except Exception as error:
                raise TypeError(
                    f"{name!r} holds something that is not plain data, so no checkpoint can keep it: store numbers, "
                    f"strings, tensors, lists and dicts, or give the object state_dict and load_state_dict. "
                    f"{str(error).splitlines()[0]}"
                ) from error
        raise


def unpack(path: Path) -> dict[str, Any]:
    """Read a file that `pack` made, with its tensors on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def put_back(path: Path, state: MutableMapping[str, Any], trees: Mapping[str, Any]) -> None:
    """Load trees into the objects of `state`, reading the large tensors from the folder `path`.

    Live parameters are read in place. Raises ValueError when names or shapes do not fit, before anything is read.
    """
    tensors: Tensors = {}
    filled = {}
    for name, value in state.items():
        places = _places(name, value)
        if isinstance(value, torch.nn.Module):
            _check_names(name, unwrap(value).state_dict(), trees[name])
        filled[name] = _filled(trees[name], name, places, tensors)
    if tensors:
        _read_tensors(path, tensors)
    for name, tree in filled.items():
        value = state[name]
        if isinstance(value, torch.nn.Module):
            live = unwrap(value).state_dict()  # an OrderedDict with the versions that load_state_dict looks at
            live.update(tree)
            unwrap(value).load_state_dict(live)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(tree)
        else:
            state[name] = tree.to(value.device) if isinstance(value, torch.Tensor) else tree


def write_tensors(folder: Path, tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Write the tensors below a folder, each rank a part of them. A collective call.

    Raises OSError naming the first rank that failed, on every rank.
    """
    import torch.distributed.checkpoint as dcp

    alone = not dist.is_initialized()
    if alone and not tensors:
        return
    if not alone and dist.get_rank() > 0:
        tensors = _alike(state, tensors)
    with _plain_errors():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=alone)


def random_state() -> dict[str, Any]:
    """This process's random state as plain data: Python's, NumPy's where it is loaded, torch's, this GPU's."""
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy else None
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": [legacy[0], legacy[1].tolist(), *legacy[2:]] if legacy else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel and torch.compile."""
    inside: Any = model
    while True:
        if isinstance(inside, torch.nn.parallel.DistributedDataParallel):
            inside = inside.module
        elif hasattr(inside, "_orig_mod"):  # torch.compile
            inside = inside._orig_mod
        else:
            return inside


def _packed(tree: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    return buffer.getvalue()


def _check_names(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    def shape(part: Any) -> Any:
        if isinstance(part, dict) and "$tensor" in part:
            return tuple(part["shape"])
        return tuple(part.shape) if isinstance(part, torch.Tensor) else None

    for here, there, where in ((live, saved, "the checkpoint"), (saved, live, "the model")):
        if missing := [key for key in here if key not in there]:
            raise ValueError(f"{name!r}: {where} lacks {', '.join(missing[:5])} ({len(missing)} in all).")
    for key, part in live.items():
        if shape(part) != shape(saved[key]):
            raise ValueError(f"{name!r}: {key} is {shape(part)} in the model and {shape(saved[key])} when saved.")


def _filled(tree: Any, path: str, places: Tensors, tensors: Tensors) -> Any:
    """The tree with a tensor to read into at each reference: the live one where there is one, else a new one."""
    if isinstance(tree, dict) and "$tensor" in tree:
        shape, like = torch.Size(tree["shape"]), places.get(path)
        if like is None or like.shape != shape:
            like = places.get(path.rpartition("/")[0])  # optimizer/state/3/exp_avg is laid out as parameter 3
            if like is not None and like.shape == shape:
                like = torch.empty_like(like, dtype=tree["dtype"])
            else:
                like = torch.empty(shape, dtype=tree["dtype"])
        return tensors.setdefault(tree["$tensor"], like)
    if isinstance(tree, dict):
        return {name: _filled(part, f"{path}/{name}", places, tensors) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_filled(part, f"{path}/{n}", places, tensors) for n, part in enumerate(tree))
    return tree


def _places(name: str, value: Any) -> Tensors:
    if isinstance(value, torch.nn.Module):
        found = unwrap(value).state_dict().items()
        return {f"{name}/{key}": part.detach() for key, part in found if isinstance(part, torch.Tensor)}
    if isinstance(value, torch.optim.Optimizer):
        params = (param for group in value.param_groups for param in group["params"])
        return {f"{name}/state/{number}": param.detach() for number, param in enumerate(params)}
    return {}


def _alike(state: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Those that all ranks hold alike for certain, or in shards. The others (buffers) are rank 0's, as in DDP."""
    heads = tuple(f"{name}/" for name, value in state.items() if isinstance(value, torch.optim.Optimizer))
    parameters = {
        f"{name}/{key}"
        for name, value in state.items()
        if isinstance(value, torch.nn.Module)
        for key, _ in unwrap(value).named_parameters(remove_duplicate=False)
    }
    return {
        key: part
        for key, part in tensors.items()
        if key in parameters or key.startswith(heads) or hasattr(part, "to_local")
    }


def _read_tensors(path: Path, tensors: Tensors) -> None:
    import torch.distributed.checkpoint as dcp

    class Metadata(pickle.Unpickler):
        """DCP keeps its index as a pickle: let it name the classes of that index and nothing else."""

        def find_class(self, module: str, name: str) -> Any:
            index = "torch.distributed.checkpoint.metadata"
            if (
                (module == index and "." not in name and getattr(sys.modules[index], name).__module__ == index)
                or (module == "torch" and (name == "Size" or isinstance(getattr(torch, name), torch.dtype)))
                or (module.startswith("pathlib") and name == "PosixPath")
                or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
                or (module, name) == ("torch.serialization", "_get_layout")
            ):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f".metadata asks for {module}.{name}, which no checkpoint needs.")

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(path / ".metadata", "rb") as file:
                return Metadata(file).load()

    with _plain_errors():
        dcp.load(tensors, storage_reader=Reader(path), no_dist=not dist.is_initialized())


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP's errors are no Exceptions, hold one traceback per rank, and it warns in a job of one process."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
