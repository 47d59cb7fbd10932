"""waitfold: PostgreSQL wait events as intervals, tables and flame graphs."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waitfold.api import Recording, load

__all__ = ["Recording", "load"]
__version__ = version("waitfold")


def __getattr__(name: str) -> Any:
    # pandas takes longer to import than a small capture to read, and the command rarely needs it.
    if name in __all__:
        from waitfold import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
