"""Optional libraries: the extra that provides each, and messages about missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

TORCH = "torch"
EXTRA_OF = {
    **dict.fromkeys((TORCH, "tensorboard", "sympy"), "train"),
    **dict.fromkeys(("prefect", "fastapi", "starlette", "uvicorn", "prometheus_client"), "ui"),
    **dict.fromkeys(("sacrebleu", "rouge_score"), "eval"),
    **dict.fromkeys(("torchao", "bitsandbytes"), "quant"),
    **dict.fromkeys(("datatrove", "spacy"), "languages"),
    "datasets": "hf",
    **{name: name for name in ("fasttext", "kenlm", "mlflow", "pandas", "polars", "trackio", "vllm", "wandb")},
}
"""Import name of a library that `pip install gristmill` leaves out -> extra of pyproject.toml."""
WANTED = {"fasttext": "a C++ compiler", "kenlm": "a C++ compiler and Python 3.12 or older"}
"""Libraries without wheels, which pip compiles -> requirements of the build."""


class MissingLibraryError(ImportError):
    """A needed library is not installed; the message says how to install it."""


def is_installed(library: str) -> bool:
    """True if a library can be imported; does not import it."""
    return find_spec(library) is not None


def sentence_of(library: str, feature: str) -> str:
    """Message about a missing library.

    Args:
        library: a key of EXTRA_OF.
        feature: the feature that needs it.
    """
    compiled = f"{_to_compile(library)}," if library in WANTED else ""
    return (
        f"{feature} needs {library}, which is not installed; install it{compiled} with: "
        f"pip install 'gristmill[{EXTRA_OF[library]}]'"
    )


def check_libraries(session: Session, stages: Iterable[str], force: frozenset[str] = frozenset()) -> None:
    """Raise MissingLibraryError, with one sentence about all missing libraries, if some stages of a run lack them here.

    Args:
        force: committed stages that run all the same; other committed ones need no libraries.
    """
    missing: dict[str, list[str]] = {}
    for name in stages:
        if name in force or session.committed(name) is None:
            for feature, library in _needed(session, name):
                if not is_installed(library) and feature not in missing.setdefault(library, []):
                    missing[library].append(feature)
    if len(missing) == 1:
        ((library, needing),) = missing.items()
        keys = [feature for feature in needing if "." in feature]
        raise MissingLibraryError(
            sentence_of(library, _called(session, library, needing)) + (f", or remove {_and(keys)}" if keys else "")
        )
    if missing:
        listed = "; ".join(f"{library}{_to_compile(library)}: {_and(needing)}" for library, needing in missing.items())
        extras = ",".join(sorted({EXTRA_OF[library] for library in missing}))
        raise MissingLibraryError(
            f"some stages need what is not installed ({listed}); install it with: pip install 'gristmill[{extras}]'"
        )


def _needed(session: Session, name: str) -> Iterator[tuple[str, str]]:
    """Yield what needs a library of an extra (the stage, or a key of its settings), and the library."""
    stage, step = session.plan[name].stage, session.manifest.steps.get(name)
    if stage.needs_torch:
        yield name, TORCH
    section = session.manifest if stage.instances is None else stage.instances(session.manifest)[name]
    for key, library in stage.needs_libraries(section if step is None else step.config):
        yield key or name, library


def _called(session: Session, library: str, needing: Sequence[str]) -> str:
    if len(needing) > 1:
        return f"what computes with a model ({', '.join(needing)})" if library == TORCH else f"each of {_and(needing)}"
    kind = "" if "." in needing[0] else "the step " if needing[0] in session.manifest.steps else "the stage "
    return f"{kind}{needing[0]}"


def _to_compile(library: str) -> str:
    return f", which needs {WANTED[library]}" if library in WANTED else ""


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
