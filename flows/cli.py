"""The command line, whole. Exit codes: 0 done, 1 a stage failed, 2 bad usage or manifest."""

from __future__ import annotations

import os
import signal
import sys

# Each module registers its commands when it is imported; `gristmill --help` lists them in this order.
# isort: off
import gristmill.flows.cli_run
import gristmill.flows.cli_documents
import gristmill.flows.cli_runs
import gristmill.flows.cli_provenance
import gristmill.flows.cli_new
import gristmill.flows.cli_mixtures
import gristmill.flows.cli_tokens
import gristmill.flows.cli_evaluate
import gristmill.flows.cli_models
import gristmill.flows.cli_serve
import gristmill.flows.cli_bench  # noqa: F401
# isort: on
from gristmill.flows.command_line import EXIT_INTERRUPTED, app


def main() -> None:
    """The console script."""
    # A closed pipe (`| head`) ends the printing, not the run's record with a traceback.
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


if __name__ == "__main__":
    main()
