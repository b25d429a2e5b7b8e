"""The command that writes a first manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.flows.command_line import EXIT_USAGE, app, fail, print_json

if TYPE_CHECKING:
    from gristmill.flows.look_at_data import Look


@app.command()
def new(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The manifest to write.  [default: NAME.yaml]",
                                                show_default=False)] = None,
    source: Annotated[list[str] | None, typer.Option(metavar="[NAME=]PATH", help=(
        "Data to look at: a file, glob, folder or URL; may be given several times. Without one, questions are asked."
    ))] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run.")] = None,
    language: Annotated[list[str] | None, typer.Option(
        metavar="CODE", help="A language to keep (en, de, ...); all if absent.")] = None,
    tokens: Annotated[int | None, typer.Option(
        metavar="N", help="Tokens to train on; what the data probably has if absent.",
        min=20_000)] = None,
    train: Annotated[bool, typer.Option(help="Whether to train a model, or only prepare documents.")] = True,
) -> None:
    """Write a manifest for your data: it looks at the files and proposes format, fields, weights and sizes."""
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.flows.look_at_data import look_at
    from gristmill.flows.new_manifest import Wishes, source_name, write_manifest
    from gristmill.mixtures.load import ManifestError

    asked = not source
    looks: dict[str, Look] = {}

    def take(given: str) -> str:
        """Look at one source, and return its name."""
        before, equals, after = given.partition("=")
        # `s3://bucket/a=b/*` has an equals sign too, but no name before it.
        named = bool(equals) and "/" not in before
        path = after if named else given
        if not path or (named and not before):
            raise SourceError(f"--source {given!r}: give a path, or NAME=PATH")
        chosen = before if named else source_name(path, list(looks))
        if chosen in looks:
            raise SourceError(f"source {chosen!r} is given twice; give one of them another name: NAME=PATH")
        looks[chosen] = look_at(chosen, path if "://" in path else str(Path(path).expanduser().resolve()))
        typer.echo(f"{chosen}: {describe(looks[chosen])}")
        return chosen

    try:
        for given in source or []:
            take(given)
        if asked:
            ask_for_sources(take)
            name = name or typer.prompt("Name of the run", default=next(iter(looks)))
            language = language or typer.prompt("Languages to keep, e.g. en de (empty for all)", default="",
                                                show_default=False).split()
            train = train and typer.confirm("Train a model?", default=True)
        wishes = Wishes(name or next(iter(looks)), language or [], tokens, train)
        target = file or Path(f"{wishes.name}.yaml")
        text = write_manifest(wishes, looks, str(target))
        with target.open("x", encoding="utf-8") as sink:
            sink.write(text)
    except typer.Abort:
        fail("nothing was written; without answers, say where the data is: gristmill new --source PATH", EXIT_USAGE)
    except (SourceError, ManifestError) as error:
        fail(f"{error}\nnothing was written", EXIT_USAGE)
    except FileExistsError:
        fail(f"{target} exists and was left alone; name another file: gristmill new OTHER.yaml", EXIT_USAGE)
    except OSError as error:
        fail(f"{target} cannot be written: {(error.strerror or str(error)).lower()}; name another file", EXIT_USAGE)
    typer.echo(f"\nwritten: {target}\nlook at it, then: gristmill plan {target}\n{'':17} gristmill run {target}")


def ask_for_sources(take: Callable[[str], str]) -> None:
    """Ask for paths until there is one and no more come; what cannot be read is asked for again."""
    from gristmill.dataprep.reading.sources import SourceError

    found = 0
    while True:
        question = "Where is your data? (file, glob, folder or URL)" if not found else "More data? (empty: no)"
        given = typer.prompt(question, default=None if not found else "", show_default=False)
        if not given:
            return
        try:
            take(given)
            found += 1
        except SourceError as error:
            typer.echo(f"  {error}")


def describe(look: Look) -> str:
    """What was seen of a source, in one line."""
    from gristmill.flows.look_at_data import size

    parts = [f"{look.files:,} file{'s' if look.files != 1 else ''}, {size(look.stored_bytes)}"]
    parts += [f"format {look.format}"] if look.format != "auto" else []
    parts += [f"text in field {look.text_field!r}"] if look.text_field else []
    parts += [f"ids in field {look.id_field!r}"] if look.id_field else []
    parts += ["HTML, to be extracted"] if look.extract else []
    parts += ["source code"] if look.is_code else []
    parts += [f"about {size(look.text_bytes)} of text"] if look.text_bytes else []
    return ", ".join([*parts, *look.remarks])


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference for people instead.")] = False,
) -> None:
    """Print the manifest's JSON Schema, for editors."""
    from gristmill.flows.reference import markdown as reference
    from gristmill.mixtures.manifest import Manifest

    if markdown:
        typer.echo(reference(), nl=False)
        raise typer.Exit
    print_json(Manifest.model_json_schema())
