"""The function, its arguments and what they capture, as bytes for fresh interpreters; refusals name the variable."""

import dis
import importlib
import inspect
import io
import linecache
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

LIMIT_BYTES = 64 * 2**20


class PayloadError(ValueError):
    """Something that the function needs cannot be carried to the ranks: it cannot be pickled, or is too large."""


def dump(function: Callable[..., Any], bound: inspect.BoundArguments) -> tuple[bytes, dict[str, str]]:
    """Pickle (function, args, kwargs), by value where they come from the notebook.

    Returns the bytes, and the source of each notebook cell among them by its file name: with it in linecache, the
    tracebacks of a rank show the cell's lines.
    Raises PayloadError naming the argument or captured variable that cannot be pickled or that exceeds 64 MiB.
    """
    cells: set[str] = set()
    try:
        content = _pickled((function, bound.args, bound.kwargs), cells)
    except Exception as error:  # whatever a __reduce__ may raise
        raise PayloadError(_explanation(function, bound, error)) from error
    return content, {name: "".join(linecache.getlines(name)) for name in cells}


class _TooLarge(Exception):
    pass


class _Limited(io.BytesIO):
    """Stops the pickler once the limit is passed, so that a captured 10 GB tensor costs no 10 GB."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LIMIT_BYTES:
            raise _TooLarge
        return super().write(data)


def _pickled(value: Any, cells: set[str] | None = None) -> bytes:
    import cloudpickle

    stock = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def keep_file_name(code: types.CodeType) -> tuple[Any, ...]:
        # cloudpickle names every function of a notebook "<dynamic-code>", and its tracebacks then show no source
        if cells is not None:
            cells.add(code.co_filename)
        build, arguments = stock(code)
        return build, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            # torch.ops and torch.classes are modules of types of their own. cloudpickle meets them in any function
            # that uses torch and an attribute of such a name, and cannot pickle them.
            if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
                for name, module in list(sys.modules.items()):
                    if module is obj:
                        return importlib.import_module, (name,)
            return super().reducer_override(obj)

        dispatch_table: ClassVar = ChainMap({types.CodeType: keep_file_name}, cloudpickle.Pickler.dispatch_table)

    buffer = _Limited()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _explanation(function: Callable[..., Any], bound: inspect.BoundArguments, error: Exception) -> str:
    name = getattr(function, "__name__", repr(function))
    for variable, value in _named_values(function, bound):
        try:
            _pickled(value)
        except _TooLarge:
            return (
                f"{name}: {variable} ({_kind(value)}) is larger than {LIMIT_BYTES // 2**20} MiB, and every rank would "
                "receive its own copy. Pass the path of a file and load it inside the function."
            )
        except Exception as cause:
            return (
                f"{name}: {variable} ({_kind(value)}) cannot be pickled for the ranks: {cause}. Create it inside the "
                "function, or pass what it is made from (a path, a name, numbers)."
            )
    if isinstance(error, _TooLarge):
        return (
            f"{name}: its arguments and captured variables together exceed {LIMIT_BYTES // 2**20} MiB. Pass paths of "
            "files and load them inside the function."
        )
    return f"{name} cannot be pickled for the ranks: {error}."


def _named_values(function: Callable[..., Any], bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """Every value that travels, under the name its author knows it by; functions it calls are searched as well."""
    for name, value in bound.arguments.items():
        yield f"argument {name!r}", value
    seen: set[int] = set()
    waiting: list[Any] = [function] if inspect.isfunction(function) else []
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for name, parameter in inspect.signature(current).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                yield f"the default of argument {name!r}", parameter.default
        code, known = current.__code__, current.__globals__
        cells = dict(zip(code.co_freevars, current.__closure__ or (), strict=True))
        nonlocals = {name: cell.cell_contents for name, cell in cells.items()}
        globals_ = {name: known[name] for name in _global_names(code) if name in known}
        for where, variables in (("captured variable", nonlocals), ("global variable", globals_)):
            for name, value in variables.items():
                if inspect.isfunction(value) and value.__module__ == "__main__":
                    waiting.append(value)
                elif not inspect.ismodule(value):
                    yield f"{where} {name!r}", value


def _global_names(code: types.CodeType) -> set[str]:
    """Names that a function reads as globals; co_names alone would hold its attributes as well."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
