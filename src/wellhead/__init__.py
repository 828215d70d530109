"""Hidden states you can trust, from a file of conversations: planned to the byte, resumable, proven.

`wellhead.open(RUN)` gives a read-only `Run`. Nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellhead.run import Record, Run, open

__version__ = "0.1.0"
__all__ = ["Record", "Run", "__version__", "open"]

_LAZY = {"Record": "wellhead.run", "Run": "wellhead.run", "open": "wellhead.run"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'wellhead' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
