"""Shell completion of manifests and stages.

Each function gets the text before the cursor, and imports only what it needs, because
the shell waits for it. `gristmill --install-completion` sets up a shell.
"""

from __future__ import annotations

import os
from pathlib import Path


def complete_manifest(incomplete: str) -> list[str]:
    """Complete YAML files and folders, and after the first character also named
    manifests.
    """
    from gristmill.mixtures.recipes.named_recipes import DEMO, PREFIX, recipe_names

    named_manifests = []
    if incomplete:
        names = [DEMO, *(PREFIX + recipe for recipe in recipe_names())]
        named_manifests = [name for name in names if name.startswith(incomplete)]
    folder, _, prefix = incomplete.rpartition("/")
    folder_path = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    try:
        entries = sorted(os.scandir(folder_path), key=lambda entry: entry.name)
    except OSError:
        return named_manifests
    folder_prefix = incomplete[: len(incomplete) - len(prefix)]
    completions = []
    for entry in entries:
        if not entry.name.startswith(prefix) or (
            entry.name.startswith(".") and not prefix
        ):
            continue
        if entry.is_dir():
            completions.append(f"{folder_prefix}{entry.name}/")
        elif entry.name.endswith((".yaml", ".yml")):
            completions.append(folder_prefix + entry.name)
    return completions + named_manifests


def complete_stage(incomplete: str) -> list[str]:
    """Complete stages, in the order in which they run."""
    from gristmill.flows.stages.registry import STAGES

    return [name for name in STAGES if name.startswith(incomplete)]
