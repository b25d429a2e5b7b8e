"""The command line, whole. Exit codes: 0 done, 1 a stage failed, 2 bad usage or manifest."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings

# Each module registers its commands when it is imported; command_groups.py says how `gristmill --help` lists them.
# isort: off
import gristmill.flows.cli.run_commands
import gristmill.flows.cli.recipe_commands
import gristmill.flows.cli.question_commands
import gristmill.flows.cli.look_command
import gristmill.flows.cli.data_commands
import gristmill.flows.cli.ladder_command
import gristmill.flows.cli.try_command
import gristmill.flows.cli.model_commands
import gristmill.flows.cli.serve_commands
import gristmill.flows.cli.slurm_command
import gristmill.flows.cli.bench_command  # noqa: F401

# isort: on
from gristmill.flows.cli.application import EXIT_INTERRUPTED, app


def main() -> None:
    """The console script."""
    warnings.formatwarning = format_warning
    # A closed pipe (`| head`) ends the printing, not the run's record with a traceback.
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    finally:
        if "duckdb" not in sys.modules:  # which takes for leaked, and says so, what is not collected at the end
            gc.freeze()  # or Python's end looks for garbage in all that was imported, 0.4 s long after a run


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning about the user's own manifest names a line of it, not of ours."""
    if category.__module__.startswith("gristmill."):
        return f"warning: {message}\n"
    return _plain_format(message, category, filename, lineno, line)


_plain_format = warnings.formatwarning

if __name__ == "__main__":
    main()
