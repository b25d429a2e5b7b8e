"""Optional libraries: the extra that provides each, and messages about missing ones."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

TORCH = "torch"
EXTRA_OF = {
    **dict.fromkeys((TORCH, "tensorboard", "sklearn", "sympy"), "train"),
    **dict.fromkeys(
        ("prefect", "fastapi", "starlette", "uvicorn", "prometheus_client"), "ui"
    ),
    **dict.fromkeys(("torchao", "bitsandbytes"), "quant"),
    "datasets": "hf",
    "lm_eval": "eval",
    "openlineage": "lineage",
    **dict.fromkeys(("readability", "markdownify"), "extract"),
    "transformers": "models",
    "datatrove": "languages",
    **{
        name: name
        for name in (
            "fasttext",
            "gguf",
            "kenlm",
            "mlflow",
            "pandas",
            "polars",
            "spacy",
            "wandb",
        )
    },
}
"""Import name of a library that `pip install gristmill` leaves out -> extra of
pyproject.toml.
"""
BUILD_REQUIREMENTS = {
    "fasttext": "a C++ compiler",
    "kenlm": "a C++ compiler and Python 3.12 or older",
}
"""Libraries without wheels, which pip compiles -> requirements of the build."""


class MissingLibraryError(ImportError):
    """A needed library is not installed; the message says how to install it."""


def is_installed(library: str) -> bool:
    """True if a library can be imported; does not import it."""
    return find_spec(library) is not None


def sentence_of(library: str, features: Iterable[str]) -> str:
    """Message about a missing library.

    Args:
        library: a key of EXTRA_OF.
        features: stages, keys or a command that need it.
    """
    build = ""
    if library in BUILD_REQUIREMENTS:
        build = f", which needs {BUILD_REQUIREMENTS[library]},"
    return (
        f"{library} is not installed (needed by {', '.join(features)}); install "
        f"it{build} with: pip install 'gristmill[{EXTRA_OF[library]}]'"
    )


def check_libraries(
    session: Session, stages: Iterable[str], force: frozenset[str] = frozenset()
) -> None:
    """Raise MissingLibraryError, with a line for each missing library, if stages of a
    run need them here.

    Args:
        force: committed stages that are rebuilt; other committed stages need no
            libraries.
    """
    steps = session.manifest.steps
    missing: dict[str, dict[str, None]] = {}
    if session.manifest.engine.lineage and not is_installed("openlineage"):
        missing["openlineage"] = {"engine.lineage": None}
    for name in session.unfinished(stages, force):
        stage = session.plan[name].stage
        section = steps[name].config if name in steps else session.part_of(name)
        required = [*stage.libraries(section), *([(TORCH, "")] if stage.torch else [])]
        for library, key in required:
            if not is_installed(library):
                missing.setdefault(library, {})[key or name] = None
    if missing:
        lines = (sentence_of(*features) for features in missing.items())
        raise MissingLibraryError("\n".join(lines))
