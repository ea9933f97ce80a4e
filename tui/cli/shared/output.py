"""What commands print: lines, notes, JSON, tables and times, and the progress of long work."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.tui.settings.cli_errors import DONE, CommandFailed
from stepscope.tui.settings.terminal import cannot_be_drawn_on
from stepscope.tui.views import format as fmt

if TYPE_CHECKING:
    from rich.status import Status


@contextmanager
def writing_output() -> Iterator[None]:
    """A context for writing to standard output. That a reader closed the pipe is no failure."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # Caught here, because typer would end the process with exit code 1.
        sys.stdout = None
        raise typer.Exit(DONE) from None
    except OSError as error:
        sys.stdout = None  # else Python tries and complains again at exit
        raise CommandFailed(f"standard output cannot be written: {error.strerror}") from error


def say(*lines: str) -> None:
    """Print and flush lines for a person. Raises CommandFailed if they cannot be written."""
    with writing_output():
        for line in lines:
            print(line)


def note(text: str | None, begin: str = "note: ") -> None:
    """Print a note on stderr, beside the output; None: nothing."""
    if text is not None and sys.stderr is not None:
        print(f"stepscope: {begin}{text}", file=sys.stderr)


def write_json_line(**fields: object) -> None:
    """Write a line of JSON that begins with the time, for a program that reads line by line."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    say(json.dumps({"time": now, **fields}))  # ASCII: JSON in any encoding of the output


def write_json(document: object) -> None:
    """Write a JSON document to standard output. Raises CommandFailed if it cannot be written."""
    import msgspec  # imported here: some commands do not need it

    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
    with writing_output():
        sys.stdout.buffer.write(encoded + b"\n")


# Tables and texts


def text_table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str | None = None
) -> list[str]:
    """Return a table as aligned lines; `sides` has < or > for each column, by default <>>>."""
    sides = sides or "<" + ">" * (len(heading) - 1)
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in [heading, *rows]
    ]


def session_text(
    name: str, num_steps: float | None, seconds: float | None, last_s: float | None = None
) -> str:
    """Return the name of a session, the part that is meant (its last seconds), and its steps."""
    part = "" if last_s is None else f", last {last_s:g} s"
    steps = "unknown steps" if num_steps is None else fmt.plural(round(num_steps), "step")
    return f"{name}{part}: {steps}" + ("" if seconds is None else f" in {seconds:,.1f} s")


def model_on_text(info: EngineInfo, *more: str) -> str:
    by = f"attention by {info.attention_backend}" if info.attention_backend else None
    parts = (info.dtype, info.device, info.implementation, by, *more)
    return f"{info.model} ({', '.join(filter(None, parts))})"


def ms(ns: float | None) -> str:
    """Return 1,234.5 ms; a dash if it is unknown."""
    return "—" if ns is None else f"{ns / 1e6:,.1f} ms"


def in_ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def told(each: Any, *names: str) -> dict[str, Any]:
    """Return attributes (default: all fields) for JSON: ns become ms, named tuples objects."""
    found = {}
    for name in names or type(each).__match_args__:
        value, is_ns = getattr(each, name), name == "ns" or name.endswith("_ns")
        found[f"{name[:-2]}ms" if is_ns else name] = in_ms(value) if is_ns else plain(value)
    return found


def plain(value: Any) -> Any:
    """Return a value for JSON in which named tuples are objects, as `told` says."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return told(value) if hasattr(value, "_fields") else [plain(each) for each in value]
    return value


def clock_ms(wall_ns: int | None) -> str:
    """Return a time of day with its milliseconds; a dash if it is unknown."""
    return "—" if wall_ns is None else f"{fmt.clock(wall_ns)}.{wall_ns // 1_000_000 % 1000:03d}"


# Progress

_DRAW_INTERVAL_S, _LINE_INTERVAL_S = 0.1, 5.0


class Progress(AbstractContextManager["Progress"]):
    """Shows the progress of long work: in one line of a terminal, else a line now and then."""

    def __init__(self) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_terminal = is_terminal and cannot_be_drawn_on(os.environ) is None
        self._status: Status | None = None
        self._last: tuple[str, float] = "", float("-inf")  # the last line: of what, and when

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, what: str, share: float | None, detail: str = "") -> None:
        """Show progress; `share` is 0 to 1, or None if the length of the work is unknown."""
        shown = detail or ("" if share is None else f"{share:.0%}")
        is_new, now_s = what != self._last[0], time.monotonic()
        interval_s = _DRAW_INTERVAL_S if self._is_terminal else _LINE_INTERVAL_S
        if sys.stderr is None or not (is_new or now_s - self._last[1] >= interval_s):
            return
        self._last = what, now_s
        if self._is_terminal:
            in_all = "" if share is None or not detail else f" ({share:.0%})"
            self._draw(f"{what}: {shown}{in_all}" if shown else what)
        else:
            shown = detail if is_new else shown
            print(f"{what}: {shown}" if shown else what, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _draw(self, line: str) -> None:
        from rich.console import Console  # takes long to import
        from rich.text import Text

        if self._status is None:
            console = Console(stderr=True, force_terminal=True)  # whatever FORCE_COLOR says
            self._status = console.status("", spinner="line")
            self._status.start()
        self._status.update(Text(line))
