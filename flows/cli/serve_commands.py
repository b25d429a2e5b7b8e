"""The commands that bring gristmill to Prefect's UI: `serve` and `up`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gristmill.flows.cli.application import EXIT_STAGE_FAILED, EXIT_USAGE, StoreOption, app, fail, open_store
from gristmill.flows.cli.completion import complete_manifest

ManifestsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MANIFEST",
        help="Manifests that get deployments with their own stages.  [default: those in this "
        "folder and in the folders right below it]",
        autocompletion=complete_manifest,
    ),
]


@app.command()
def serve(
    manifests: ManifestsArgument = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Flow runs at the same time.", min=1)] = 1,
    allow_open_server: Annotated[
        bool,
        typer.Option(
            "--allow-open-server", help="Also register at a server without a password, which any web page can use."
        ),
    ] = False,
) -> None:
    """Register the deployments at a running Prefect server, and run what is started there."""
    require_prefect()
    from gristmill.flows.orchestration.serving import NoServerError, OpenServerError, serve_deployments

    check_manifests(manifests or [])
    try:
        serve_deployments(limit, manifests or [], allow_open_server)
    except (NoServerError, OpenServerError) as error:
        fail(str(error), EXIT_USAGE)


@app.command()
def up(
    manifests: ManifestsArgument = None,
    port: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Port of the Prefect server on the loopback address; reports use the next one.",
            min=1,
            max=65534,
        ),
    ] = 4200,
    limit: Annotated[int, typer.Option(metavar="N", help="Flow runs at the same time.", min=1)] = 1,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="PostgreSQL database of the server, postgresql://...  [default: a file, SQLite]",
            envvar="GRISTMILL_DATABASE",
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Start the Prefect server with its UI on this machine, and serve the deployments, and metrics of a store's runs."""
    require_prefect()
    from gristmill.flows.orchestration.server_settings import DatabaseError
    from gristmill.flows.orchestration.serving import NoServerError, PortTakenError, up_and_serve

    check_manifests(manifests or [])
    opened = open_store(store)
    if store is not None:  # the runs that are started in Prefect's UI
        os.environ["GRISTMILL_STORE"] = store
    try:
        up_and_serve(port, limit, opened, database, manifests or [])
    except (DatabaseError, PortTakenError) as error:
        fail(str(error), EXIT_USAGE)
    except NoServerError as error:
        fail(str(error), EXIT_STAGE_FAILED)


def require_prefect() -> None:
    """End with a sentence where Prefect is not installed."""
    from gristmill.flows.running.missing_libraries import is_installed, sentence_of

    if not is_installed("prefect"):
        fail(sentence_of("prefect", "this command"), EXIT_USAGE)


def check_manifests(manifests: list[str]) -> None:
    """End with what is wrong with them, before anything is started."""
    import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in manifests
    from gristmill.mixtures.load import ManifestError, load_manifest

    for manifest in manifests:
        try:
            load_manifest(manifest, [])
        except ManifestError as error:
            fail(str(error), EXIT_USAGE)
