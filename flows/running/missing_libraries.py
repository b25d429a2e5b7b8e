"""Optional libraries: the extra that provides each, and messages about missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

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
    "datasets": "hf",
    "transformers": "models",
    "datatrove": "languages",
    **{
        name: name
        for name in (
            "fasttext",
            "kenlm",
            "mlflow",
            "pandas",
            "polars",
            "spacy",
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
    steps = session.manifest.steps
    missing: dict[str, list[str]] = {}
    for name in session.unfinished(stages, force):
        needs = session.plan[name].stage.requirements
        section = steps[name].config if name in steps else session.part_of(name)
        required = [(name, TORCH)] if needs.torch else []
        required += [
            (key or name, library) for library, key in needs.libraries(section)
        ]
        for feature, library in required:
            if not is_installed(library) and feature not in missing.get(library, ()):
                missing.setdefault(library, []).append(feature)
    if not missing:
        return
    if len(missing) > 1:
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
    ((library, features),) = missing.items()
    user = f"each of {_and(features)}"
    if len(features) == 1:
        kind = "step" if features[0] in steps else "stage"
        user = features[0] if "." in features[0] else f"the {kind} {features[0]}"
    elif library == TORCH:
        user = f"computing with a model ({', '.join(features)})"
    message = sentence_of(library, user)
    keys = [feature for feature in features if "." in feature]
    raise MissingLibraryError(f"{message}, or remove {_and(keys)}" if keys else message)


def _build_requirement(library: str) -> str:
    return (
        f", which needs {BUILD_REQUIREMENTS[library]}"
        if library in BUILD_REQUIREMENTS
        else ""
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
