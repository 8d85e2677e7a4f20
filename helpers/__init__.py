"""What notebook cells import; names are resolved on first use, so that `import helpers` loads nothing heavy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.kernel import setup
    from helpers.launch import distributed
    from helpers.records import record
    from helpers.settings import choose

_HOME = {
    "distributed": "helpers.launch",
    "setup": "helpers.kernel",
    "choose": "helpers.settings",
    "record": "helpers.records",
}

__all__ = ["choose", "distributed", "record", "setup"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"helpers has no name {name!r}: it offers {', '.join(__all__)} and its modules.")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
