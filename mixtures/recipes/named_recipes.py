"""Manifests that come with the package, by name: `demo`, and `recipe:NAME` for those of this folder.

A name stands wherever a manifest's path does. Relative paths in such a manifest, and in settings that replace its keys,
are relative to the current folder: the package's own holds nobody's data.
"""

from __future__ import annotations

import re
from pathlib import Path

DEMO = "demo"
PREFIX = "recipe:"
NEEDS = "# Needs: "
_FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def describe_recipe(name: str) -> str:
    """The first sentence of a recipe: what it is for."""
    return recipe_file(PREFIX + name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def needs_of_recipe(name: str) -> str:
    """What a recipe's comment says that must be given before it runs: paths, folders of models, packages."""
    lines = recipe_file(PREFIX + name).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(NEEDS))
    last = next(number for number, line in enumerate(lines) if number > first and re.match(r"# [A-Z][\w ,]*:", line))
    return " ".join(line.removeprefix("# ") for line in lines[first:last]).removeprefix(NEEDS.removeprefix("# "))


def is_named(manifest: str | Path) -> bool:
    """Whether a manifest is one of the package, by its name. A file that is called so comes first."""
    path = Path(manifest)
    return (path.name == DEMO or path.name.startswith(PREFIX)) and not path.exists()


def manifest_file(manifest: str | Path) -> Path:
    """Where a manifest's text lies: of a name in the package, else at its path.

    Raises:
        FileNotFoundError: no recipe has this name; the message says which there are.
    """
    path = Path(manifest)
    if not is_named(path):
        return path
    return _FOLDER.parent / "demo.yaml" if path.name == DEMO else recipe_file(path.name)


def recipe_file(recipe: str) -> Path:
    """The file of `recipe:NAME`; the beginning of a name that no other has will do.

    Raises:
        FileNotFoundError: see `manifest_file`.
    """
    from gristmill.mixtures.yaml_text import did_you_mean

    name, names = recipe.removeprefix(PREFIX), recipe_names()
    begun = [one for one in names if one.startswith(name)]
    if name not in names and name and len(begun) == 1:
        return _FOLDER / f"{begun[0]}.yaml"
    if name not in names:
        raise FileNotFoundError(
            f"no recipe is called {name!r}{did_you_mean(name, names) or ';'} there are {', '.join(names)}"
        )
    return _FOLDER / f"{name}.yaml"
