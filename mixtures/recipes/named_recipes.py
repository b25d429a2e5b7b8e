"""Manifests that come with the package, by name: `demo`, `demo-chat`, and `recipe:NAME`
for those of this folder.

A name can stand wherever a manifest's path can. Relative paths in such a manifest, and
in settings that replace its keys, are relative to the current folder, since the package
contains no user data.
"""

from __future__ import annotations

from pathlib import Path

DEMO, CHAT_DEMO = DEMOS = ("demo", "demo-chat")
PREFIX = "recipe:"
_FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def describe_recipe(name: str) -> str:
    """Return the first sentence of a recipe, which says its purpose."""
    return (
        recipe_file(PREFIX + name)
        .read_text(encoding="utf-8")
        .partition("\n")[0]
        .removeprefix("# ")
    )


def is_named(manifest: str | Path) -> bool:
    """Return True if a manifest is the name of one in the package. An existing file of
    that name takes precedence.
    """
    path = Path(manifest)
    return (path.name in DEMOS or path.name.startswith(PREFIX)) and not path.exists()


def is_manifest(argument: str) -> bool:
    """Return True if an argument that may also be a folder names a manifest."""
    return argument.endswith((".yaml", ".yml")) or is_named(argument)


def manifest_file(manifest: str | Path) -> Path:
    """Return the path of a manifest's text, which may be named or at its own path.

    Raises:
        FileNotFoundError: no recipe has this name; the message lists the recipes.
    """
    path = Path(manifest)
    if not is_named(path):
        return path
    if path.name in DEMOS:
        return _FOLDER.parent / f"{path.name}.yaml"
    return recipe_file(path.name)


def recipe_file(recipe: str) -> Path:
    """Return the file of `recipe:NAME`; an unambiguous beginning of a name is enough.

    Raises:
        FileNotFoundError: see `manifest_file`.
    """
    from gristmill.mixtures.yaml_text import unknown_name

    name, names = recipe.removeprefix(PREFIX), recipe_names()
    completions = [candidate for candidate in names if candidate.startswith(name)]
    if name not in names and name and len(completions) == 1:
        return _FOLDER / f"{completions[0]}.yaml"
    if name not in names:
        raise FileNotFoundError(f"no recipe is called {unknown_name(name, names)}")
    return _FOLDER / f"{name}.yaml"
