"""Command `recipes`: the manifests of the package that follow published work."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, echo

from gristmill.flows.cli.application import (
    JsonOption,
    app,
    print_json,
)
from gristmill.mixtures.recipes.named_recipes import (
    PREFIX,
    describe_recipe,
    recipe_file,
    recipe_names,
)


@app.command()
def recipes(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="Show this recipe: its sources, how it differs from them, and its "
            "keys.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the manifests that follow published work, or print one; run it as
    recipe:NAME.
    """
    from gristmill.flows.cli.application import fail
    from gristmill.flows.pages.page_elements import Table
    from gristmill.flows.pages.terminal_pages import print_table
    from gristmill.flows.running.terminal import plain_console

    if name is not None:
        try:
            echo(
                recipe_file(name.removeprefix(PREFIX)).read_text(encoding="utf-8"),
                nl=False,
            )
        except FileNotFoundError as error:
            fail(str(error))
        return
    descriptions = {recipe: describe_recipe(recipe) for recipe in recipe_names()}
    if as_json:
        print_json(
            [
                {"name": recipe, "about": description}
                for recipe, description in descriptions.items()
            ]
        )
        return
    console = plain_console()
    print_table(console, Table(["recipe", ""], list(descriptions.items())))
    console.print(
        "\ngristmill recipes NAME shows one\ngristmill run recipe:NAME --set "
        "sources.web.path=DATA runs it\n"
        "gristmill recipes NAME > mine.yaml copies it for editing"
    )
