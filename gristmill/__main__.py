"""`python -m gristmill` is the command line."""

from gristmill.flows.cli.main import main

if __name__ == "__main__":
    main()
