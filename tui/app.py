"""The dashboard as an application, and the two ways to start it.

The caller owns the source and the history: it starts the source before and stops it afterwards;
the dashboard only reads, and asks a replay source to seek and play.
"""

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.types import CSSPathType

from stepscope.engine.client import ControlClient
from stepscope.recordings.history import History
from stepscope.recordings.source import Source
from stepscope.tui.actions import Abilities, Need
from stepscope.tui.engine_link import EngineLink
from stepscope.tui.key_order import KeyOrder
from stepscope.tui.log_file import log_path, logged_to_file
from stepscope.tui.record_switch import RecordSwitch
from stepscope.tui.screens.main import MainScreen
from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.session import Session
from stepscope.tui.theme import Skin, ThemeName, colour_mode

if TYPE_CHECKING:
    from stepscope.recordings.recorder import Recorder

log = logging.getLogger("stepscope.tui")


def run_dashboard(
    source: Source,
    history: History,
    *,
    control_endpoint: str | None = None,
    readonly: bool = False,
    fps: float | None = None,
    ascii: bool = False,
    recorder: "Recorder | None" = None,
    on_exit: Callable[[], None] | None = None,
    title: str = "stepscope",
    theme: ThemeName = "dark",
) -> None:
    """Run the dashboard in this terminal until the operator quits. Blocks.

    Args:
        source: fills `history` from its own daemon thread; started and stopped by the caller.
        history: what is drawn; its SLO tells what is a breach.
        control_endpoint: control address of the engine, as `Endpoint.parse` takes it; None where
            there is none (a replay): actions that change the engine are hidden then.
        readonly: hide and disable everything that changes the engine.
        fps: frames a second; None: 10, or 5 over SSH. `+` and `-` change it.
        ascii: draw with ASCII characters only.
        recorder: a recording of `source` that is under way already; it ends with `R` or with the
            dashboard. Without one `R` starts a new file in the current folder.
        on_exit: called once after the terminal is restored, also after an error.
        title: shown first in the header line, and the title of screenshots.
        theme: "dark" or "light"; `T` changes it. 16 colours and NO_COLOR are found out from the
            terminal.

    Raises:
        SystemExit: the application itself broke, and has printed how. A failing source, recorder
            or engine is a visible line instead.
    """
    app = Dashboard(
        source,
        history,
        control_endpoint=control_endpoint,
        readonly=readonly,
        fps=fps,
        ascii_only=ascii,
        recorder=recorder,
        title=title,
        theme=theme,
    )
    try:
        with logged_to_file(log_path()), shown_thread_errors(app), _calm_collector():
            app.run()
        if app.return_code:
            raise SystemExit(app.return_code)
    finally:
        app.close()
        if on_exit is not None:
            on_exit()


class ActionCommands(Provider):
    """The action table in the command palette."""

    async def discover(self) -> Hits:
        for name, help_text, run in self._entries():
            yield DiscoveryHit(name, run, help=help_text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, help_text, run in self._entries():
            score = max(matcher.match(name), matcher.match(help_text))
            if score > 0:
                yield Hit(score, matcher.highlight(name), run, help=help_text)

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], None]]]:
        screen = self.screen
        if isinstance(screen, MainScreen):
            for action in screen.session.abilities.available():
                if action.id != "palette" and screen.view.page in action.pages:
                    name = f"{action.label} ({action.shown})"
                    yield name, action.help, partial(screen.action_do, action.id)


class Dashboard(App[None]):
    """One main screen over one session.

    Args:
        any_terminal: do not ask what the terminal can show; for pictures.

    The other arguments are those of `run_dashboard`.
    """

    CSS_PATH: ClassVar[CSSPathType | None] = "app.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {ActionCommands}
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source,
        history: History,
        *,
        control_endpoint: str | None = None,
        readonly: bool = False,
        fps: float | None = None,
        ascii_only: bool = False,
        recorder: "Recorder | None" = None,
        title: str = "stepscope",
        theme: ThemeName = "dark",
        any_terminal: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self.title = title
        mode = (
            theme if any_terminal else colour_mode(theme, self.console.color_system, self.no_color)
        )
        self.theme = {"light": "textual-light", "dark": "textual-dark"}.get(mode, "ansi-dark")
        needs: set[Need] = {"live" if source.is_live else "replay"}
        if control_endpoint is not None:
            needs.add("engine")
        switch = None
        if source.is_live:
            switch = RecordSwitch(source, Path.cwd(), recorder)
            needs.add("recorder")
        link = None
        if control_endpoint is not None:
            link = EngineLink(partial(ControlClient, control_endpoint))
        session = Session(
            source,
            history,
            link,
            switch,
            Abilities(readonly, frozenset(needs)),
            title,
            shown_endpoint(control_endpoint) or source.name,
        )
        if clock is not None:
            session.clock = clock
        self.session = session
        self.main = MainScreen(session, Skin(mode, ascii_only), fps)
        self.key_order = KeyOrder(self, self.main)

    def get_default_screen(self) -> MainScreen:
        return self.main

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and not self.key_order.admits(event):
            return
        await super().on_event(event)
        self.key_order.release_in_time()

    def on_key(self, event: events.Key) -> None:
        """Hand on what was typed for an overlay before it was there, explain what does nothing.

        An overlay keeps its keys to itself: one that gets here meanwhile was sent to the screen
        below, in one burst with the key that opened the overlay (a paste, a slow connection).
        """
        if isinstance(self.screen, Overlay):
            event.prevent_default()
            self.screen.post_message(events.Key(event.key, event.character))
        elif self.screen is self.main:
            self.main.explain(event.key)

    def close(self) -> None:
        """End the thread of the engine link, and a recording that is under way."""
        if self.session.link is not None:
            self.session.link.close()
        switch = self.session.record_switch
        if switch is not None:
            switch.stop()


def shown_endpoint(control: str | None) -> str | None:
    """An address as people read it: without the folder that holds the sockets."""
    if control is None or not control.startswith("ipc://"):
        return control
    return f"ipc://{Path(control.removeprefix('ipc://')).name}"


@contextmanager
def shown_thread_errors(app: Dashboard) -> Iterator[None]:
    """An exception that ends a background thread becomes a line on the screen."""
    before = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        name = "a thread" if args.thread is None else args.thread.name
        log.error("%s died", name, exc_info=args.exc_value)
        app.session.background_error = f"{name} died, see the log: {args.exc_value!r}"

    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _calm_collector() -> Iterator[None]:
    """Collect cyclic garbage less often: a frame makes many small objects and hardly a cycle.

    Measured: a tenth of what drawing costs.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
