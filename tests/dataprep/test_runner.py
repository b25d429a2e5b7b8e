"""Before a job is handed to a runner, somebody has to answer there."""

from __future__ import annotations

import socket

import pytest

from gristmill.dataprep.jobs.job_errors import WorkerError
from gristmill.dataprep.jobs.runner import make_pipeline


def test_a_job_server_that_says_nothing_is_named_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WorkerError, match=rf"no job server answers at {endpoint} within 0\.2 s; start it, or"):
            make_pipeline("PortableRunner", 1, {"job_endpoint": endpoint, "job_server_timeout": 0.2})
