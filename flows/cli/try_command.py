"""The command `try`: a function of the user's on some documents, and what it would do to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.flows.cli.application import (
    EXIT_USAGE,
    JsonOption,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    print_json,
)
from gristmill.flows.cli.completion import complete_manifest

SHOWN_CHARACTERS = 200
"""Of a text, as far as the terminal is wide."""
MOST_OF_A_VALUE = 40
"""Characters."""


class Kind(StrEnum):
    """What a function is for."""

    ANNOTATE = "annotate"
    EDIT = "edit"
    READ = "read"


@app.command("try")
def try_(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="./FILE.py:NAME, or PACKAGE.MODULE:NAME.")],
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="SOURCE|PATH", help=("A source of the manifest, or else a file, glob, folder or URL.")
        ),
    ],
    manifest: Annotated[
        str | None,
        typer.Option(metavar="MANIFEST", help="The manifest whose source it is.", autocompletion=complete_manifest),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME=VALUE", help="An argument of the function; may be given several times."),
    ] = None,
    least: Annotated[
        list[str] | None, typer.Option("--min", metavar="COLUMN=X", help="Drop documents with less.")
    ] = None,
    most: Annotated[
        list[str] | None, typer.Option("--max", metavar="COLUMN=X", help="Drop documents with more.")
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="A column that the function returns, if its source does not show it."),
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column that a function of batches receives.")
    ] = None,
    documents: Annotated[int, typer.Option(metavar="N", help="Number of documents.", min=1)] = 100,
    kind: Annotated[
        Kind | None, typer.Option("--as", help="What the function is for.  [default: as it says]", show_default=False)
    ] = None,
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run your own function on some documents, and show what it would do."""
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.flows.authoring.try_function import kind_of, take_sample, try_reader, try_step
    from gristmill.mixtures.sources import OwnReader
    from gristmill.mixtures.steps.own_steps import Edit, OwnAnnotate
    from gristmill.mixtures.user_code import Own, OwnCodeError, take_code

    session = None if manifest is None else open_or_exit(manifest, set_, store)
    place = on if session is not None or "://" in on else str(Path(on).expanduser().resolve())
    try:
        use = take_code(Own.model_validate({"use": function}).use, Path.cwd())
        chosen = kind_of(use) if kind is None else kind.value
        section: dict[str, Any] = {"use": use, "with": pairs("--with", with_)}
        bounds = {"min": pairs("--min", least), "max": pairs("--max", most), "measures": measures or ()}
        if chosen == "read":
            source = None if session is None else session.manifest.document_sources.get(on)
            found = try_reader(OwnReader.model_validate(section), place if source is None else source.path, documents)
        else:
            section["columns"] = columns or ()
            step = (
                OwnAnnotate.model_validate(section | bounds) if chosen == "annotate" else Edit.model_validate(section)
            )
            with take_sample(place, session, documents) as sample:
                found = try_step(step, sample, documents)
    except (OwnCodeError, SourceError) as error:
        fail(str(error), EXIT_USAGE)
    except ValueError as error:  # pydantic's too: an option that is no setting of such a step
        fail(_in_a_sentence(error), EXIT_USAGE)
    found = {"function": use.reference, "kind": chosen, **found}
    if as_json:
        print_json(found)
        return
    show(found, 1 if session is None else session.manifest.engine.workers)


def _in_a_sentence(error: ValueError) -> str:
    from pydantic import ValidationError

    from gristmill.mixtures.yaml_text import in_words

    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {in_words(item)}" for item in error.errors())


def pairs(option: str, given: Sequence[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` options as a mapping, or exit with code 2."""
    import yaml

    from gristmill.mixtures.yaml_text import parse_yaml

    found: dict[str, Any] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name:
            fail(f"{option} {one!r}: this is written {option} NAME=VALUE", EXIT_USAGE)
        try:
            found[name] = parse_yaml(value)
        except yaml.YAMLError:
            found[name] = value
    return found


def show(found: Mapping[str, Any], workers: int) -> None:
    """Print what a function did, in lines that fit a narrow terminal."""
    from gristmill.flows.running.terminal import plain_console

    console = plain_console()
    for line in (*_lines(found), *_speed(found, workers)):
        is_text = line.startswith("    ")
        console.print(line, no_wrap=is_text, overflow="ellipsis" if is_text else None)


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['function']} ({found['kind']}) on {found['documents']:,} documents: {found['on']}"
    if found["kind"] == "read":
        yield from _of_reader(found)
    for name, column in found.get("columns", {}).items():
        yield f"\ncolumn {name}: {_described(column)}"
        if "bars" in column:
            yield f"  {column['bars']}"
    if edits := found.get("edits"):
        yield (
            f"\nchanges {edits['changed']:,} documents in {edits['times']:,} places: -{edits['bytes_removed']:,} "
            f"+{edits['bytes_added']:,} bytes"
        )
        for one in edits["shown"]:
            yield f"  {one['locator']}"
            for difference in one["differences"]:
                yield from (
                    f"    {mark} {_with_line_ends(difference['left'] + difference[side] + difference['right'])}"
                    for mark, side in (("-", "before"), ("+", "after"))
                )
    if (dropped := found.get("dropped")) and (dropped["total"] or found["kind"] == "annotate"):
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in dropped["by_reason"].items())
        yield f"\nwould drop {dropped['total']:,} of {found['documents']:,}{f': {reasons}' if reasons else ''}"
        for one in dropped["shown"]:
            values = ", ".join(f"{name} {_value(value)}" for name, value in one["values"].items())
            yield f"  {one['locator']}: {values or one['reason']}"
            yield f"    {_short(one['text'])}"
    if (errors := found.get("errors")) and errors["total"]:
        yield f"\nwould quarantine {errors['total']:,} of {found['documents']:,}"
        yield from (f"  {one['locator']}: {one['error']}" for one in errors["shown"])
    if found["differs"]:
        yield f"\nnot deterministic: {found['differs']}"


def _of_reader(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"\n{found['records']:,} records: {found['documents']:,} documents, {found['empty']:,} without text, "
        f"{len(found['quarantined']):,} quarantined"
    )
    for one in found["shown"]:
        yield f"  {one['locator']} {one['metadata']}"
        yield f"    {_short(one['text'])}"
    yield from (f"  record {one['record']}: {one['error']}" for one in found["quarantined"][:3])


def _described(column: Mapping[str, Any]) -> str:
    missing = f", {column['missing']:,} missing" if column["missing"] else ""
    if "values" in column:
        shown = ", ".join(f"{_value(value)} {number:,}" for value, number in column["values"].items())
        return shown + (f", others {column['others']:,}" if column["others"] else "") + missing
    return f"{_value(column['min'])} to {_value(column['max'])}, median {_value(column['median'])}{missing}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else _short(str(value), MOST_OF_A_VALUE)


def _with_line_ends(text: str) -> str:
    return text.replace("\n", "\\n")


def _short(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def _speed(found: Mapping[str, Any], workers: int) -> Iterator[str]:
    from gristmill.flows.questions.status import duration

    number, seconds, whole = found.get("records", found["documents"]), found["seconds"], found["whole"]
    if not number:
        return
    what = "records" if "records" in found else "documents"
    yield f"\n{number / max(seconds, 1e-9):,.0f} {what} per second in one process"
    if whole["seconds"] is None:
        yield "nothing tells how many there are in all"
        return
    about = "" if whole["is_exact"] else "about "
    if whole["seconds"] < 1:
        yield f"all {about}{whole['documents']:,} would take less than a second"
        return
    yield (
        f"all {about}{whole['documents']:,} would take {duration(whole['seconds'])}"
        + (f", with {workers} workers {duration(whole['seconds'] / workers)}" if workers > 1 else "")
    )
