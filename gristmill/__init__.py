"""gristmill grinds raw text into a trained language model. This is its Python interface.

    import gristmill
    run = gristmill.run("recipe.yaml", until="filter")

Names are imported when they are first used, so that `import gristmill` costs nothing. `__all__` is what docs/api.md
describes; every other name and module is private and may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
"""The version of the distribution, which is built from this line."""

_PLACES: dict[str, str] = {"stream": "gristmill.train.data.row_stream"}
"""Public name -> the module that defines it."""
_GROUPS = ("losses", "training")
"""Modules of this package that offer names which belong together; what those have in `__all__` is public too."""

__all__ = [
    "__version__",
    "losses",
    "stream",
    "training",
]

if not (Path(__file__).parent / "flows").is_dir():
    # A checkout: the sub-packages are the folders beside this one. An installed package has them inside.
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    if name in _GROUPS:
        return import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
