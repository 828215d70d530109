"""The program `wellhead`: `python -m wellhead` and the console script start here."""

from __future__ import annotations

import sys

from wellhead.cli import run


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
