"""How a command ends: writing to standard output, and the line for an error."""

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from stepscope.engine.protocol.settings.config_error import ConfigError, WrongValue
from stepscope.recordings.errors import NotInRecording, RecordingError
from stepscope.tui.settings.cli_errors import DONE, FAILED, WRONG_USAGE, CommandFailed

# What pydantic's kinds of error begin with, and what was expected then.
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}


@contextmanager
def writing_output() -> Iterator[None]:
    """A context for writing to standard output: a failure there is not a bug.

    Raises:
        CommandFailed: it cannot be written.
        typer.Exit: the reader closed the pipe ('| head'); this is not an error.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # Caught here, because typer would end the process with 1.
        sys.stdout = None
        raise typer.Exit(DONE) from None
    except OSError as error:
        sys.stdout = None  # or Python tries once more, and complains once more, when it ends
        raise CommandFailed(f"standard output cannot be written: {error.strerror}") from error


def say(*lines: str) -> None:
    """Print lines for a person, at once; CommandFailed when standard output cannot be written."""
    with writing_output():
        for line in lines:
            print(line)


def write_json(document: object) -> None:
    """One JSON document to standard output; CommandFailed when that cannot be written."""
    import msgspec  # some commands need none

    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
    with writing_output():
        sys.stdout.buffer.write(encoded + b"\n")


def report(error: BaseException) -> int:
    """Say on stderr, in one line, what went wrong; returns the exit code.

    `STEPSCOPE_DEBUG=1` shows the traceback as well.
    """
    if os.environ.get("STEPSCOPE_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    exit_code, message = expected(error) or (
        FAILED,
        f"{type(error).__name__}: {error} (this is a bug in stepscope: "
        "run it again with STEPSCOPE_DEBUG=1 and report what it shows)",
    )
    line = " ".join(message.split())
    if sys.stderr is not None:  # else Python takes standard output in its place
        print(f"stepscope: error: {line}", file=sys.stderr)
    return exit_code


def expected(error: BaseException) -> tuple[int, str] | None:
    """Exit code and message of an expected error; None for a bug."""
    # An exception of a module that was never imported cannot have been raised, and importing it
    # just to look would cost the commands that do not need it.
    client = sys.modules.get("stepscope.engine.client.errors")
    if isinstance(error, CommandFailed):
        return error.exit_code, str(error)
    if isinstance(error, ConfigError):
        return (WRONG_USAGE if isinstance(error, WrongValue) else FAILED), str(error)
    if client is not None and isinstance(error, client.EngineUnreachable):
        return FAILED, str(error)
    if client is not None and isinstance(error, client.CommandRefused):
        return FAILED, f"the engine refused: {error}"
    if isinstance(error, RecordingError):
        is_asked_wrong = isinstance(error, NotInRecording)
        return (WRONG_USAGE if is_asked_wrong else FAILED), str(error)
    if isinstance(error, typer.TyperException):
        return error.exit_code, _in_words(error) + _where_to_look(error)
    if isinstance(error, OSError) and error.filename is not None:
        return FAILED, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return FAILED, f"cannot write: {error.strerror}"
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return FAILED, "the name of a file is not valid UTF-8: rename the file"
    return None


def _in_words(error: typer.TyperException) -> str:
    """A number that is none, said as our own options say it; anything else as typer does."""
    said = error.format_message()
    errors = getattr(error.__cause__, "errors", None)  # of pydantic, which parses for typer
    first = errors()[0] if errors is not None else {}
    expected = _EXPECTED.get(first.get("type", "").partition("_")[0])
    if expected is None:
        return said
    option = said.removeprefix("Invalid value for ").partition(":")[0].strip("'")
    return f"{option}: expected {expected}, got {first['input']!r}"


def _where_to_look(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "stepscope"
    return f" (see '{command} --help')"
