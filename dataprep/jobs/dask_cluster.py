"""A Dask cluster as the runner of a job: what Beam's own Dask runner leaves out.

Beam's runner returns before the work is done, keeps its connection open for ever, and waits in silence where no
worker comes. It serves linear chains only (see `chain.py`), and counts nothing: Beam's metrics are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.dataprep.jobs.job_errors import WorkerError

CONNECT_SECONDS = 15
FIRST_WORKER_SECONDS = 60
"""How long a cluster that is still starting may have no worker."""


def dask_options(address: str | None, num_tasks: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Beam's Dask runner: one partition per task, where its own default is one per 128."""
    found = {} if address is None else {"dask_client_address": address}
    return {**found, "dask_npartitions": num_tasks, **options}


def check_cluster(options: Mapping[str, Any]) -> None:
    """Raise WorkerError unless the scheduler answers and has a worker, or gets one soon.

    Args:
        options: with `dask_client_address` or `dask_scheduler_file`.
    """
    from distributed import Client

    address, file = options.get("dask_client_address"), options.get("dask_scheduler_file")
    where = address or file
    try:
        client = Client(address=address, scheduler_file=file, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"no Dask scheduler answers at {where} ({type(error).__name__}: {error}); start one with `dask scheduler`, "
            "or correct engine.address"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=FIRST_WORKER_SECONDS)
        except TimeoutError as error:
            raise WorkerError(
                f"the Dask scheduler at {where} has no worker after {FIRST_WORKER_SECONDS} s; start some with "
                f"`dask worker {where}`"
            ) from error


def wait_for(result: Any) -> None:
    """Wait until a pipeline has ended, and let go of the cluster.

    Raises:
        WorkerError: the cluster gave up on a task, because each worker that had it died; or its scheduler is gone.
    """
    client = getattr(result, "client", None)
    try:
        result.wait_until_finish()
        # Beam takes a future that was lost for one that is done.
        if client is not None and any(future.status != "finished" for future in result.futures):
            raise WorkerError("the Dask scheduler ended, or the job was cancelled there; rerun to do what is missing")
    except Exception as error:
        if type(error).__name__ != "KilledWorker":
            raise
        raise WorkerError(f"the Dask cluster gave up: {error} Most likely a shard needs more memory.") from error
    finally:
        if client is not None:
            client.cancel(result.futures)
            client.close()
