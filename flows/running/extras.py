"""Libraries that an installation may lack: which extra brings each, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

EXTRA_OF = {"torch": "train", "tensorboard": "train", "prefect": "ui", "fastapi": "ui", "uvicorn": "ui",
            "fasttext": "fasttext"}
"""What `pip install gristmill` alone leaves out -> the extra of pyproject.toml that has it."""
COMPILED = frozenset({"fasttext"})
"""What pip compiles, as nobody offers it compiled."""


def is_installed(library: str) -> bool:
    """Whether a library can be imported, without importing it."""
    return find_spec(library) is not None


def sentence_of(library: str, what: str) -> str:
    """What is said where a library is missing.

    Args:
        library: a key of EXTRA_OF.
        what: what needs it.
    """
    compiler = ", which needs a C++ compiler," if library in COMPILED else ""
    return (f"{what} needs {library}, which is not installed; install it{compiler} with: "
            f"pip install 'gristmill[{EXTRA_OF[library]}]'")


def why_not_runnable(session: Session, stages: Iterable[str]) -> str | None:
    """Why some stages of a run cannot work here: one that is not made needs a library of an extra that is missing."""
    steps = session.manifest.steps
    for name in stages:
        if name in steps and session.committed(name) is None:
            for library in session.plan[name].stage.needs_libraries(steps[name].config):
                if not is_installed(library):
                    return sentence_of(library, f"the step {name}")
    waiting = [name for name in stages if session.plan[name].stage.needs_torch and session.committed(name) is None]
    if not waiting or is_installed("torch"):
        return None
    named = f"the stage {waiting[0]}" if len(waiting) == 1 else f"what computes with a model ({', '.join(waiting)})"
    return sentence_of("torch", named)
