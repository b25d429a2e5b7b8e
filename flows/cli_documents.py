"""The commands that ask why documents were kept or dropped: `explain`, `whatif`, `dialects`."""

from __future__ import annotations

from typing import Annotated

import typer

from gristmill.flows.command_line import (
    EXIT_USAGE,
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    print_json,
)


@app.command()
def explain(
    manifest: ManifestArgument,
    document: Annotated[str, typer.Argument(metavar="DOC_ID", help="A document's id (32 hexadecimal digits, or the "
                                            "first few) or its locator.")],
    text: Annotated[bool, typer.Option("--text", help="Show the whole text, with what each stage took out and put "
                                       "in.")] = False,
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Show a document's journey: why it was kept or dropped, and which training steps read it."""
    from gristmill.flows.explain import journey, print_journey
    from gristmill.flows.lookup import DocumentNotFoundError

    session = open_or_exit(manifest, set_, store)
    try:
        found = journey(session, document, text)
    except DocumentNotFoundError as error:
        fail(str(error), EXIT_USAGE)
    print_json(found) if as_json else print_journey(found)


@app.command()
def whatif(
    manifest: ManifestArgument,
    set_: SetOption = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Documents shown on each side of a cut.", min=0)] = 20,
    store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Show what other thresholds would keep, from stored measurements: --set filter.gopher_quality.min_words=40.

    Without --set it lists the thresholds, with what each of them drops and what its neighbours would.
    """
    from gristmill.dataprep.replay import NotReplayableError
    from gristmill.flows.whatif import compare, replay, thresholds
    from gristmill.flows.whatif_tables import print_replay, print_thresholds

    before, after = open_or_exit(manifest, None, store), open_or_exit(manifest, set_, store)
    try:
        if not set_:
            listed = thresholds(before)
            print_json(listed) if as_json else print_thresholds(listed, before.command("whatif", "--set", "KEY=VALUE"))
            return
        comparison = compare(before, after)
    except NotReplayableError as error:
        fail(str(error), EXIT_USAGE)
    tokenized = before.committed("tokenize")
    found = replay(comparison, samples, None if tokenized is None else tokenized.data)
    print_json(found) if as_json else print_replay(found)


@app.command()
def dialects(
    manifest: ManifestArgument,
    sample: Annotated[int, typer.Option(
        metavar="N", help="Documents to judge at most, chosen by the hash of their ids.",
        min=1)] = 20_000,
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Show what the Gopher rules keep by each project's definitions, and documents on which they disagree."""
    from gristmill.flows.dialects import NothingIngestedError, compare_dialects, print_dialects

    session = open_or_exit(manifest, set_, store)
    try:
        found = compare_dialects(session, sample)
    except NothingIngestedError as error:
        fail(str(error), EXIT_USAGE)
    print_json(found) if as_json else print_dialects(found)
