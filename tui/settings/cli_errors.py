"""How a command fails: the exceptions that a person sees as one line, and their exit codes."""

DONE, FAILED, WRONG_USAGE = 0, 1, 2
INTERRUPTED = 130  # Ctrl-C in what was not to be ended by it, as shells have it


class CommandFailed(Exception):  # noqa: N818 - reads as what happened
    """The command could not do its work; the message says what to do."""

    exit_code = FAILED


class Interrupted(CommandFailed):
    """It was stopped before it was done; the message says what there is of it."""

    exit_code = INTERRUPTED


class WrongUsage(CommandFailed):
    """It was called with something it does not take."""

    exit_code = WRONG_USAGE
