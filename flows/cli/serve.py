"""Commands for Prefect's UI: `serve` and `up`."""

from __future__ import annotations

import os
from typing import Annotated

from typer import Argument, Option

from gristmill.flows.cli.application import StoreOption, app, fail
from gristmill.flows.cli.completion import complete_manifest

ManifestsArgument = Annotated[
    list[str] | None,
    Argument(
        metavar="MANIFEST",
        help="Manifests that get deployments with their own stages.  [default: those "
        "in this "
        "folder and in its subfolders]",
        autocompletion=complete_manifest,
    ),
]
LimitOption = Annotated[
    int, Option(metavar="N", help="Number of concurrent flow runs.", min=1)
]


@app.command()
def serve(
    manifests: ManifestsArgument = None,
    limit: LimitOption = 1,
    allow_open_server: Annotated[
        bool,
        Option(
            "--allow-open-server",
            help="Also register with a server without a "
            "password, which any web page can use.",
        ),
    ] = False,
) -> None:
    """Register the deployments with a running Prefect server, and execute the flow runs
    started there.
    """
    require_prefect()
    from gristmill.flows.prefect.serving import serve_deployments

    check_manifests(manifests or [])
    serve_deployments(limit, manifests or [], allow_open_server)


@app.command()
def up(
    manifests: ManifestsArgument = None,
    port: Annotated[
        int,
        Option(
            metavar="N",
            help="Port of the Prefect server on the loopback address; reports use "
            "the next one.",
            min=1,
            max=65534,
        ),
    ] = 4200,
    limit: LimitOption = 1,
    store: StoreOption = None,
) -> None:
    """Start the Prefect server and its UI on this machine, and serve the deployments
    and the metrics of a store's runs.
    """
    require_prefect()
    from gristmill.core.store import store_at
    from gristmill.flows.prefect.serving import up_and_serve

    check_manifests(manifests or [])
    opened_store = store_at(store)
    if store is not None:  # runs started in Prefect's UI read it
        os.environ["GRISTMILL_STORE"] = store
    up_and_serve(port, limit, opened_store, manifests or [])


def require_prefect() -> None:
    """Exit with code 2 if Prefect is not installed."""
    from gristmill.flows.running.missing_libraries import is_installed, sentence_of

    if not is_installed("prefect"):
        fail(sentence_of("prefect", ["this command"]))


def check_manifests(manifests: list[str]) -> None:
    """Exit with code 2 if a manifest is invalid, before any server starts."""
    import gristmill.flows.stages.registry  # noqa: F401 - registers the steps of `prepare`
    from gristmill.mixtures.loader import load_manifest

    for manifest in manifests:
        load_manifest(manifest, [])
