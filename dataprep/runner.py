"""Beam's own local runner, named explicitly, with what it lacks on a workstation.

Named explicitly because the default runner tries to download a binary first. Its gRPC servers are bound to the
loopback address: as shipped they listen on all interfaces, without authentication.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

_loopback_lock = threading.Lock()


def import_beam() -> Any:
    """Import Beam without its warning about Google's optional libraries, which concerns nobody here."""
    root = logging.getLogger()

    def is_about_beam(record: logging.LogRecord) -> bool:
        return "apitools" not in record.getMessage()

    root.addFilter(is_about_beam)
    try:
        import apache_beam
    finally:
        root.removeFilter(is_about_beam)
    return apache_beam


def bind_grpc_to_loopback() -> None:
    """Make every gRPC server of this process listen on 127.0.0.1 where it asked for all interfaces."""
    import grpc

    with _loopback_lock:
        if getattr(grpc.server, "_gristmill_loopback", False):
            return
        original = grpc.server

        def server(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            add_insecure_port = made.add_insecure_port
            made.add_insecure_port = lambda address: add_insecure_port(
                address.replace("[::]:", "127.0.0.1:").replace("0.0.0.0:", "127.0.0.1:")
            )
            return made

        server._gristmill_loopback = True  # type: ignore[attr-defined]
        grpc.server = server


def make_pipeline(runner: str, workers: int, options: Mapping[str, Any]) -> Any:
    """Make an empty Beam pipeline.

    Args:
        runner: `local` for Beam's own local runner, or any name that Beam knows.
        workers: parallel workers of the local runner: threads, since the kernels release the GIL.
        options: pipeline options for another runner, by Beam's names.
    """
    beam = import_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    if runner != "local":
        return beam.Pipeline(options=PipelineOptions(flags=[], runner=runner, **options))
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bind_grpc_to_loopback()
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    mode = "in_memory" if workers == 1 else "multi_threading"
    return beam.Pipeline(
        runner=FnApiRunner(),
        options=PipelineOptions(flags=[], direct_num_workers=workers, direct_running_mode=mode),
    )
