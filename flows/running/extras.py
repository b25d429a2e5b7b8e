"""Libraries that an installation may lack: which extra brings each, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session
    from gristmill.mixtures.manifest import Manifest

EXTRA_OF = {"torch": "train", "tensorboard": "train", "prefect": "ui", "fastapi": "ui", "uvicorn": "ui",
            "fasttext": "fasttext"}
"""What `pip install gristmill` alone leaves out -> the extra of pyproject.toml that has it."""
COMPILED = frozenset({"fasttext"})
"""What pip compiles, as nobody offers it compiled."""


TRACKERS = ("wandb", "mlflow", "trackio")
"""Keys of `engine`, libraries and extras at once."""
METRICS = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge": "rouge_score"}
"""How metrics of `evaluate` begin -> what computes them."""


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
    for name in stages:
        if session.plan[name].stage.needs_torch and session.committed(name) is None:
            for key, library, extra in libraries_of_settings(session.manifest, name):
                if not is_installed(library):
                    return (f"{key} needs {library.replace('_', '-')}, which is not installed; install it with: pip "
                            f"install 'gristmill[{extra}]', or remove {key}")
    waiting = [name for name in stages if session.plan[name].stage.needs_torch and session.committed(name) is None]
    if not waiting or is_installed("torch"):
        return None
    named = f"the stage {waiting[0]}" if len(waiting) == 1 else f"what computes with a model ({', '.join(waiting)})"
    return sentence_of("torch", named)


def libraries_of_settings(manifest: Manifest, stage: str) -> Iterator[tuple[str, str, str]]:
    """What the settings of a stage that computes with a model ask for besides torch: key, library, its extra.

    Each would be missed only when the stage begins, which may be hours after the run has.
    """
    from gristmill.mixtures.evaluation import Evaluate

    section = getattr(manifest, stage, None)
    if hasattr(section, "optimizer"):
        yield from ((f"engine.{name}", name, name) for name in TRACKERS if getattr(manifest.engine, name) is not None)
    if getattr(getattr(section, "optimizer", None), "kind", None) == "adamw8bit":
        yield f"{stage}.optimizer.kind", "torchao", "quant"
    if getattr(section, "float8", "off") != "off":
        yield f"{stage}.float8", "torchao", "quant"
    if getattr(getattr(section, "lora", None), "base", None) == "nf4":
        yield f"{stage}.lora.base", "bitsandbytes", "quant"
    for task in section.tasks if isinstance(section, Evaluate) else ():
        for metric in task.built_in_metrics:
            if library := next((found for begin, found in METRICS.items() if metric.startswith(begin)), None):
                yield f"{stage}.tasks.{task.name}.metrics", library, "eval"
