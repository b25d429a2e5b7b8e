"""Commands that inspect a run's data: `explain`, `search`, `query`, `whatif`,
`losses`, `dialects`, `trace`, `takedown`, `browse`.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, echo

from gristmill.flows.cli.application import (
    JsonOption,
    PortOption,
    about_manifest,
    fail,
    open_or_exit,
    out_file,
    print_answer,
    print_json,
)

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

DocumentArgument = Annotated[
    str,
    Argument(
        metavar="DOC_ID",
        help="A document's id (32 hexadecimal digits, or a prefix) or its locator.",
    ),
]


@about_manifest
def explain(
    session: Session,
    document: DocumentArgument,
    text: Annotated[
        bool,
        Option("--text", help="Show the whole text with each stage's edits."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a document's history: why it was kept or dropped, and the training steps
    that read it.
    """
    from gristmill.flows.questions.explain import history

    print_answer(history(session, document, text), as_json)


@about_manifest
def search(
    session: Session,
    text: Annotated[
        str,
        Argument(
            metavar="TEXT",
            help="Words or sentences; a quoted phrase must occur verbatim.",
        ),
    ],
    by: Annotated[
        Literal["meaning", "words"] | None,
        Option("--by", help="Search by one method only; both if absent."),
    ] = None,
    limit: Annotated[
        int,
        Option(metavar="N", help="Number of documents shown.", min=1, max=1000),
    ] = 10,
    as_json: JsonOption = False,
) -> None:
    """Find documents by meaning and by words, kept or dropped, with the reason."""
    from gristmill.flows.questions.search import search as find

    print_answer(find(session, text, by, limit), as_json)


@about_manifest
def licences(
    session: Session,
    as_json: JsonOption = False,
) -> None:
    """Show the licences of the documents by source, with their shares; `unknown` is one
    of them.
    """
    from gristmill.flows.pages.terminal_pages import print_table
    from gristmill.flows.report.facts import gather_facts
    from gristmill.flows.report.licence_shares import licence_shares, licence_table
    from gristmill.flows.running.terminal import plain_console

    shares = licence_shares(session, gather_facts(session, whole=False))
    if as_json:
        print_json(asdict(shares))
        return
    print_table(plain_console(), licence_table(shares))
    echo(shares.describe())


@about_manifest
def query(
    session: Session,
    sql: Annotated[
        str,
        Argument(
            metavar="SQL",
            help="One SELECT over the view `documents`; DESCRIBE "
            "documents lists its columns.",
        ),
    ],
    out: Annotated[
        Path | None,
        Option(metavar="FILE.parquet", help="Write the rows to a Parquet file."),
    ] = None,
    as_csv: Annotated[bool, Option("--csv", help="Print all rows as CSV.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Query all documents with SQL (DuckDB): one view with every step's values and
    verdicts.
    """
    from gristmill.flows.questions.find_documents import (
        committed_corpus,
    )
    from gristmill.flows.questions.query import ask, print_rows

    if (out is not None) + as_csv + as_json > 1:
        fail("give one of --out, --csv and --json")
    if out is not None:
        out_file("--out", out)
    with ask(committed_corpus(session), sql) as answer:
        if out is not None:
            echo(f"{answer.write_parquet(out):,} rows in {out}")
        elif as_csv:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(answer.columns)
            writer.writerows(answer.rows())
        elif as_json:
            print_json(
                [dict(zip(answer.columns, row, strict=True)) for row in answer.rows()]
            )
        else:
            print_rows(answer)


@about_manifest
def whatif(
    session: Session,
    samples: Annotated[
        int,
        Option(metavar="N", help="Documents shown on each side of a threshold.", min=0),
    ] = 20,
    scores: Annotated[
        str | None,
        Option(
            metavar="COLUMNS",
            help="Compare columns of numbers, separated by commas: rank correlation, "
            "overlap of the top share, and the AUC of the source's mean alone.",
        ),
    ] = None,
    top: Annotated[
        float,
        Option(metavar="SHARE", help="Top share for --scores.", min=0.0, max=1.0),
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Show what other thresholds would keep, from stored measurements: --set
    filter.gopher_quality.min_words=40.

    Without --set, list what each threshold drops, and what nearby values would drop;
    --scores quality,edu says how far scores agree.
    """
    from gristmill.flows.questions.find_documents import committed_corpus
    from gristmill.flows.questions.score_agreement import compare_scores
    from gristmill.flows.questions.whatif import (
        compare,
        print_thresholds,
        replay,
        thresholds,
    )
    from gristmill.flows.stages.registry import TOKENIZE

    if scores is not None:
        corpus = committed_corpus(session)
        print_answer(compare_scores(corpus, scores.split(","), top), as_json)
        return
    if not session.overrides:
        threshold_rows = thresholds(session)
        print_json(threshold_rows) if as_json else print_thresholds(
            threshold_rows, session.command("whatif", "--set", "KEY=VALUE")
        )
        return
    before = open_or_exit(session.manifest_file, None, session.store_option)
    comparison = compare(before, session)
    tokenized = before.committed(TOKENIZE)
    tokens = None if tokenized is None else tokenized.data
    print_answer(replay(comparison, samples, tokens), as_json)


@about_manifest
def losses(
    session: Session,
    as_json: JsonOption = False,
) -> None:
    """Show the sources, domains and languages that the preparation lost, with the rules
    and examples.
    """
    from gristmill.flows.questions.losses import losses as report

    print_answer(report(session), as_json)


@about_manifest
def dialects(
    session: Session,
    sample: Annotated[
        int,
        Option(
            metavar="N",
            help="Maximum number of documents, chosen by the hash of their ids.",
            min=1,
        ),
    ] = 20_000,
    as_json: JsonOption = False,
) -> None:
    """Show what each dialect of Gopher's rules would keep."""
    from gristmill.flows.questions.dialects import compare_dialects

    print_answer(compare_dialects(session, sample), as_json)


@about_manifest
def trace(
    session: Session,
    step: Annotated[
        int | None,
        Option(
            metavar="N",
            help="A training step, counted from 1: show what it read.",
            min=1,
        ),
    ] = None,
    document: Annotated[
        str | None,
        Option(
            metavar="ID",
            help="A document's id, id prefix or locator, or a fine-tuning example's "
            "id: show the steps that read it.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="A text, - for standard input: show its longest "
            "passages found in the training rows.",
        ),
    ] = None,
    stage: Annotated[
        str | None,
        Option(
            metavar="STAGE", help="The training stage of --step; pretrain if absent."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Trace data through training: what a step read, which steps read a document, and
    where a text occurs.
    """
    if sum(option is not None for option in (step, document, text)) != 1:
        fail("give one of --step N, --document ID and --text FILE")
    from gristmill.flows.stages.registry import PRETRAIN
    from gristmill.mixtures.yaml_text import why_unreadable

    content = None
    if text is not None:
        try:
            read = sys.stdin.buffer.read() if text == "-" else Path(text).read_bytes()
            content = read.decode()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--text {text}: {why_unreadable(error)}")
    if content is not None:
        from gristmill.flows.questions.trace_text import trace_text

        print_answer(trace_text(session, content), as_json)
    elif step is not None:
        from gristmill.flows.questions.trace import trace_step

        print_answer(trace_step(session, step, stage or PRETRAIN), as_json)
    elif document is not None:
        from gristmill.flows.questions.trace import trace_document

        print_answer(trace_document(session, document), as_json)


@about_manifest
def takedown(
    session: Session,
    ids: Annotated[
        Path,
        Option(
            metavar="FILE",
            help="Documents: an id, locator or URL per line, or JSON "
            "lines with one of these keys.",
        ),
    ],
    with_duplicates: Annotated[
        bool,
        Option("--with-duplicates", help="Also take down their near-duplicates."),
    ] = False,
    dry: Annotated[
        bool, Option("--dry", help="Only list what is affected; write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the shards and checkpoints that contain given documents, and write a
    manifest that continues without them.
    """
    from gristmill.flows.questions.takedown import (
        assess,
        read_list,
        write_takedown,
    )

    assessment = assess(session, read_list(ids), with_duplicates)
    written_files = None if dry else write_takedown(session, assessment)
    command = ""
    if written_files is not None and written_files.manifest is not None:
        command = session.command("run").replace(
            session.manifest_file, written_files.manifest
        )
    if as_json:
        print_json(
            {
                **asdict(assessment),
                "written": written_files,
                "command": command or None,
            }
        )
        return
    assessment.show(written_files, command)


@about_manifest
def browse(
    session: Session,
    port: PortOption = 4300,
) -> None:
    """Browse documents, thresholds, duplicates, packed rows and training steps on a
    local web page.
    """
    from gristmill.flows.browser.browsed_run import BrowsedRun
    from gristmill.flows.browser.server import make_app
    from gristmill.flows.pages.page_server import listen_locally, serve_pages

    listening = listen_locally(port)
    serve_pages(
        make_app(BrowsedRun(session)), listening, f"shows {session.manifest.name}"
    )
