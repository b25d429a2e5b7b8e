"""A worker process of the local runner: `python -m gristmill.dataprep.jobs.worker PARENT`, which `worker_processes.py`
starts.

It is Beam's own SDK worker with one thread for Arrow, which ends with its parent whatever ends that, and leaves
Ctrl-C to it.
"""

from __future__ import annotations

import os
import signal
import sys

from gristmill.dataprep.jobs.runner import import_beam, quieten_beam
from gristmill.dataprep.processes import end_with_parent


def main(argv: list[str]) -> None:
    """Serve the bundles of the parent process, whose number is the only argument, until it closes the connection."""
    (parent,) = argv
    end_with_parent(signal.SIGKILL, int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_beam()
    quieten_beam()
    import pyarrow as pa
    from apache_beam.runners.worker import sdk_worker_main

    pa.set_cpu_count(1)
    _, harness, _ = sdk_worker_main.create_harness(os.environ)
    harness.run()


if __name__ == "__main__":
    main(sys.argv[1:])
