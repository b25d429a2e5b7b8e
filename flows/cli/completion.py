"""Shell completion of manifests and stages.

Each function gets the text before the cursor, and imports only what it needs, because
the shell waits for it. `gristmill --install-completion` sets up a shell.
"""

from __future__ import annotations

import glob
import os


def complete_manifest(incomplete: str) -> list[str]:
    """Complete YAML files and folders, and after the first character also named
    manifests.
    """
    from gristmill.mixtures.recipes.named_recipes import DEMOS, PREFIX, recipe_names

    named_manifests = []
    if incomplete:
        names = [*DEMOS, *(PREFIX + recipe for recipe in recipe_names())]
        named_manifests = [name for name in names if name.startswith(incomplete)]
    completions = []
    for path in sorted(glob.glob(f"{glob.escape(incomplete)}*")):
        if os.path.isdir(path):
            completions.append(f"{path}/")
        elif path.endswith((".yaml", ".yml")):
            completions.append(path)
    return completions + named_manifests


def complete_stage(incomplete: str) -> list[str]:
    """Complete stages, in the order in which they run."""
    from gristmill.flows.stages.registry import STAGES

    return [name for name in STAGES if name.startswith(incomplete)]
