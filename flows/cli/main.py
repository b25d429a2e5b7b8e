"""The command line, whole. Exit codes: 0 done, 1 a stage failed, 2 bad usage or manifest."""

from __future__ import annotations

import os
import signal
import sys

# Each module registers its commands when it is imported; `gristmill --help` lists them in this order.
# isort: off
import gristmill.flows.cli.run_commands
import gristmill.flows.cli.question_commands
import gristmill.flows.cli.data_commands
import gristmill.flows.cli.model_commands
import gristmill.flows.cli.serve_commands
import gristmill.flows.cli.bench_command  # noqa: F401
# isort: on
from gristmill.flows.cli.application import EXIT_INTERRUPTED, app


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
