"""Optional libraries: the extra that provides each, and messages about missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

TORCH = "torch"
EXTRA_OF = {
    **dict.fromkeys((TORCH, "tensorboard", "sympy"), "train"),
    **dict.fromkeys(
        ("prefect", "fastapi", "starlette", "uvicorn", "prometheus_client"), "ui"
    ),
    **dict.fromkeys(("sacrebleu", "rouge_score"), "eval"),
    **dict.fromkeys(("torchao", "bitsandbytes"), "quant"),
    **dict.fromkeys(("datatrove", "spacy"), "languages"),
    "datasets": "hf",
    **{
        name: name
        for name in (
            "fasttext",
            "kenlm",
            "mlflow",
            "pandas",
            "polars",
            "trackio",
            "vllm",
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


def sentence_of(library: str, feature: str) -> str:
    """Message about a missing library.

    Args:
        library: a key of EXTRA_OF.
        feature: the feature that needs it.
    """
    compiled = (
        f"{_build_requirement(library)}," if library in BUILD_REQUIREMENTS else ""
    )
    return (
        f"{feature} needs {library}, which is not installed; install it{compiled} "
        f"with: pip install 'gristmill[{EXTRA_OF[library]}]'"
    )


def check_libraries(
    session: Session, stages: Iterable[str], force: frozenset[str] = frozenset()
) -> None:
    """Raise MissingLibraryError, with one message about all missing libraries, if
    stages of a run need them here.

    Args:
        force: committed stages that are rebuilt; other committed stages need no
            libraries.
    """
    missing: dict[str, list[str]] = {}
    for name in stages:
        if name not in force and session.committed(name) is not None:
            continue
        for feature, library in _requirements(session, name):
            if not is_installed(library) and feature not in missing.setdefault(
                library, []
            ):
                missing[library].append(feature)
    if len(missing) == 1:
        ((library, features),) = missing.items()
        if len(features) == 1:
            kind = "step" if features[0] in session.manifest.steps else "stage"
            message = sentence_of(
                library,
                features[0] if "." in features[0] else f"the {kind} {features[0]}",
            )
        elif library == TORCH:
            message = sentence_of(
                library, f"computing with a model ({', '.join(features)})"
            )
        else:
            message = sentence_of(library, f"each of {_and(features)}")
        keys = [feature for feature in features if "." in feature]
        raise MissingLibraryError(
            f"{message}, or remove {_and(keys)}" if keys else message
        )
    if missing:
        entries = [
            f"{library}{_build_requirement(library)}: {_and(features)}"
            for library, features in missing.items()
        ]
        extras = ",".join(sorted({EXTRA_OF[library] for library in missing}))
        raise MissingLibraryError(
            "some stages need libraries that are not installed "
            f"({'; '.join(entries)}); install them with: "
            f"pip install 'gristmill[{extras}]'"
        )


def _requirements(session: Session, name: str) -> Iterator[tuple[str, str]]:
    """Yield (feature, library): a stage, or a key of its settings, and the library of
    an extra that it needs.
    """
    stage = session.plan[name].stage
    if stage.requirements.torch:
        yield name, TORCH
    section: Any
    if name in session.manifest.steps:
        section = session.manifest.steps[name].config
    elif stage.instances is not None:
        section = stage.instances(session.manifest)[name]
    else:
        section = session.manifest
    for library in stage.requirements.libraries(section):
        yield library.key or name, library.name


def _build_requirement(library: str) -> str:
    return (
        f", which needs {BUILD_REQUIREMENTS[library]}"
        if library in BUILD_REQUIREMENTS
        else ""
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
