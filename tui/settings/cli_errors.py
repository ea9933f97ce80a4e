"""The exceptions that end a command with one line for the user, and their exit codes."""

DONE, FAILED, WRONG_USAGE = 0, 1, 2
TOO_LITTLE_DATA = 3
INTERRUPTED = 130  # Ctrl-C cut the work short; shells use the same code


class CommandFailed(Exception):  # noqa: N818 - reads as what happened
    """The command could not do its work; the message says what to do."""

    exit_code = FAILED


class Interrupted(CommandFailed):
    """The command was stopped before it was done; the message says which results exist."""

    exit_code = INTERRUPTED


class WrongUsage(CommandFailed):
    """The command was called with arguments or settings that it does not accept."""

    exit_code = WRONG_USAGE
