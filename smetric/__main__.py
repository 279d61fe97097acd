"""The program `smetric`, also as `python -m smetric`: runs the command line, which Ctrl-C may meet half imported."""

import signal
import sys


def run() -> None:
    """Run the command line and end this process."""
    try:
        from smetric.cli import main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    main(prog_name="smetric")


if __name__ == "__main__":
    run()
