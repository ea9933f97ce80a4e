"""`Progress`: a bar on a terminal, plain lines elsewhere. Written to stderr."""

import os
import sys
import time
from typing import TYPE_CHECKING

from stepscope.tui.settings.terminal import cannot_be_drawn_on, only_ascii, said_environment

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_INTERVAL_S = 5.0


class Progress:
    """Shows the progress of long work. Call it with the name of the work and the share done.

    On a terminal it redraws one line, which disappears at the end. Elsewhere it prints a line when
    the name changes, and every few seconds.
    """

    def __init__(self) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_terminal = is_terminal and cannot_be_drawn_on(os.environ) is None
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._last_what = ""
        self._last_line_s = float("-inf")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, what: str, share: float | None, detail: str = "") -> None:
        """Show progress; `share` is 0 to 1, or None if the length of the work is unknown."""
        if self._is_terminal:
            self._draw(what, share, detail)
        else:
            self._print(what, share, detail)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, what: str, share: float | None, detail: str) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            has_blocks = only_ascii(said_environment()) is None
            self._bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                *((BarColumn(bar_width=24),) if has_blocks else ()),
                TextColumn("{task.fields[detail]}", markup=False),
                console=Console(stderr=True, force_terminal=True),  # whatever FORCE_COLOR says
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, detail="")
            self._bar.start()
        shown = detail or ("" if share is None else f"{share:.0%}")
        self._bar.update(
            self._task,
            description=what,
            total=None if share is None else 1.0,
            completed=share or 0.0,
            detail=shown,
        )

    def _print(self, what: str, share: float | None, detail: str) -> None:
        now_s = time.monotonic()
        is_new = what != self._last_what
        is_due = now_s - self._last_line_s >= _LINE_INTERVAL_S
        if (not is_new and not is_due) or sys.stderr is None:
            return
        self._last_what, self._last_line_s = what, now_s
        shown = detail or ("" if share is None or is_new else f"{share:.0%}")
        print(f"{what}: {shown}" if shown else what, file=sys.stderr, flush=True)
