"""The command `try`: run a user's function on some documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from gristmill.flows.cli.application import (
    JsonOption,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    pairs,
    print_json,
)
from gristmill.flows.cli.completion import complete_manifest
from gristmill.flows.pages.page_elements import value_text

if TYPE_CHECKING:
    from gristmill.flows.authoring.try_function import StepTrial

SHOWN_CHARACTERS = 200
"""Maximum characters of a text; a narrow terminal shows fewer."""
MOST_OF_A_VALUE = 40
"""Maximum characters of a value."""


@app.command("try")
def try_(
    function: Annotated[
        str,
        Argument(metavar="FUNCTION", help="./FILE.py:NAME, or PACKAGE.MODULE:NAME."),
    ],
    on: Annotated[
        str,
        Option(
            "--on",
            metavar="SOURCE|PATH",
            help=("A source of the manifest, or a file, glob, folder or URL."),
        ),
    ],
    manifest: Annotated[
        str | None,
        Option(
            metavar="MANIFEST",
            help="The manifest of the source.",
            autocompletion=complete_manifest,
        ),
    ] = None,
    with_: Annotated[
        list[str] | None,
        Option(
            "--with",
            metavar="NAME=VALUE",
            help="An argument of the function; may be given several times.",
        ),
    ] = None,
    minimums: Annotated[
        list[str] | None,
        Option(
            "--min", metavar="COLUMN=X", help="Drop documents with a smaller value."
        ),
    ] = None,
    maximums: Annotated[
        list[str] | None,
        Option("--max", metavar="COLUMN=X", help="Drop documents with a larger value."),
    ] = None,
    measures: Annotated[
        list[str] | None,
        Option(
            metavar="COLUMN",
            help="A column that the function returns, if "
            "its source code does not name it.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        Option(metavar="COLUMN", help="A column passed to a function of batches."),
    ] = None,
    documents: Annotated[
        int, Option(metavar="N", help="Number of documents.", min=1)
    ] = 100,
    kind: Annotated[
        Literal["annotate", "edit"], Option("--as", help="Kind of the function.")
    ] = "annotate",
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run your own function on some documents, and show its effect."""
    from pydantic import ValidationError

    from gristmill.flows.authoring.try_function import take_sample, try_step
    from gristmill.mixtures.steps.own_steps import Edit, OwnAnnotate
    from gristmill.mixtures.user_code import Own, take_code
    from gristmill.mixtures.yaml_text import problems_of

    session = None if manifest is None else open_or_exit(manifest, set_, store)
    location = (
        on
        if session is not None or "://" in on
        else str(Path(on).expanduser().resolve())
    )
    section: dict[str, object] = {
        "with": pairs("--with", with_),
        "columns": columns or (),
    }
    if kind == "annotate":
        section["min"] = pairs("--min", minimums)
        section["max"] = pairs("--max", maximums)
        section["measures"] = measures or ()
    try:
        section["use"] = take_code(
            Own.model_validate({"use": function}).use, Path.cwd()
        )
        step = (Edit if kind == "edit" else OwnAnnotate).model_validate(section)
        with take_sample(location, session, documents) as sample:
            trial = try_step(step, sample, documents)
    except ValidationError as error:
        # such as an option that this kind of step does not have
        fail(problems_of(error))
    except ValueError as error:
        fail(str(error))
    if as_json:
        print_json(trial)
        return
    show(trial)


def show(trial: StepTrial) -> None:
    """Print the effect of a function, in lines that fit a narrow terminal."""
    from gristmill.flows.running.terminal import plain_console

    console = plain_console()
    console.print(
        f"{trial.function} ({trial.kind}) on {trial.documents:,} documents: {trial.on}"
    )
    for line in _step_lines(trial):
        is_text = line.startswith("    ")
        console.print(line, no_wrap=is_text, overflow="ellipsis" if is_text else None)
    if trial.differs:
        console.print(f"\nnot deterministic: {trial.differs}")
    if trial.documents:
        rate = trial.documents / max(trial.seconds, 1e-9)
        console.print(f"\n{rate:,.0f} documents per second in one process")


def _step_lines(trial: StepTrial) -> Iterator[str]:
    from gristmill.flows.authoring.try_function import NumberColumn

    for name, column in trial.columns.items():
        missing = f", {column.missing:,} missing" if column.missing else ""
        if isinstance(column, NumberColumn):
            yield (
                f"\ncolumn {name}: {_value(column.min)} to {_value(column.max)}, median "
                f"{_value(column.median)}{missing}"
            )
            yield f"  {column.bars}"
            continue
        counts = [f"{_value(value)} {n:,}" for value, n in column.values.items()]
        if column.others:
            counts.append(f"others {column.others:,}")
        yield f"\ncolumn {name}: {', '.join(counts)}{missing}"
    edits = trial.edits
    if edits is not None:
        yield (
            f"\nchanges {edits.changed:,} documents in {edits.times:,} places: "
            f"-{edits.bytes_removed:,} +{edits.bytes_added:,} bytes"
        )
        for edited in edits.shown:
            yield f"  {edited.locator}"
            for difference in edited.differences:
                for mark, side in (("-", difference.before), ("+", difference.after)):
                    text = difference.left + side + difference.right
                    escaped = text.replace("\n", "\\n")
                    yield f"    {mark} {escaped}"
    dropped = trial.dropped
    if dropped.total or edits is None:
        reasons = ", ".join(
            f"{reason} {number:,}" for reason, number in dropped.by_reason.items()
        )
        summary = f"\nwould drop {dropped.total:,} of {trial.documents:,}"
        yield f"{summary}: {reasons}" if reasons else summary
        for document in dropped.shown:
            values = ", ".join(
                f"{name} {_value(value)}" for name, value in document.values.items()
            )
            yield f"  {document.locator}: {values or document.reason}"
            yield f"    {_short(document.text)}"
    if trial.errors.total:
        yield f"\nwould quarantine {trial.errors.total:,} of {trial.documents:,}"
        for failure in trial.errors.shown:
            yield f"  {failure.locator}: {failure.error}"


def _value(value: Any) -> str:
    return "none" if value is None else _short(value_text(value), MOST_OF_A_VALUE)


def _short(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
