"""The program `microtome`, also run by `python -m microtome`."""

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while modules are imported."""
    try:
        from microtome.cli import main as commands

        commands(prog_name="microtome")
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted\n")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further Ctrl-C ends the process at once


if __name__ == "__main__":
    main()
