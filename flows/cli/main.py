"""The command line with all commands. Exit codes: 0 done, 1 a stage failed, 2 bad usage
or manifest.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings

# Each module registers its commands when it is imported; command_groups.py has the
# order of `gristmill --help`.
# isort: off
import gristmill.flows.cli.run
import gristmill.flows.cli.demo
import gristmill.flows.cli.recipes
import gristmill.flows.cli.annotators
import gristmill.flows.cli.questions
import gristmill.flows.cli.look
import gristmill.flows.cli.data
import gristmill.flows.cli.ladder
import gristmill.flows.cli.ablate
import gristmill.flows.cli.try_command
import gristmill.flows.cli.models
import gristmill.flows.cli.serve
import gristmill.flows.cli.slurm
import gristmill.flows.cli.bench  # noqa: F401

# isort: on
from gristmill.flows.cli.application import EXIT_INTERRUPTED, app

COLLECTION_OBJECTS = 50_000
"""New objects before a garbage collection. With Python's 700, imports, which leave no
garbage, spend a seventh of their time on it.
"""


def main() -> None:
    """Run the console script."""
    warnings.formatwarning = format_warning
    gc.set_threshold(COLLECTION_OBJECTS)
    # A closed pipe (`| head`) ends the output without a traceback.
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    finally:
        # DuckDB reports objects that are not collected at exit as leaks
        if "duckdb" not in sys.modules:
            # saves 0.4 s: at exit Python would collect garbage among all imported
            # modules
            gc.freeze()


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning of gristmill about the user's manifest without a line of our
    code.
    """
    if category.__module__.startswith("gristmill."):
        return f"warning: {message}\n"
    return _plain_format(message, category, filename, lineno, line)


_plain_format = warnings.formatwarning

if __name__ == "__main__":
    main()
