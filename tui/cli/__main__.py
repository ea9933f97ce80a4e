"""Entry point of the `stepscope` command. It prints no traceback, however early Ctrl-C comes."""

import gc
import sys

_INTERRUPTED = 130  # as in `cli_errors`, which takes long to import


def main() -> None:
    """Entry point of the console script; ends the process."""
    # Imports make objects that stay; looking through them again and again is a tenth of a start.
    gc.set_threshold(20_000)
    try:
        from stepscope.tui.cli.command_line import run  # takes a tenth of a second

        exit_code = run()
    except KeyboardInterrupt:
        exit_code = _INTERRUPTED
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
