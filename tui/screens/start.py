"""The start screen: a list of what can be opened, and a prompt for an address.

The list has engines on this machine, recordings, samples, the tour and the demo. The start screen
is a separate application that ends with a `StartChoice`. Its caller opens what was chosen, and may
run the start screen again. It draws the first picture before it searches for anything.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from stepscope.recordings import samples
from stepscope.tui.screens.overlay import Prompt
from stepscope.tui.screens.textual_parts import bindings, keymap, palette, use_colours
from stepscope.tui.settings.action_table import Action
from stepscope.tui.settings.actions import ACTIONS, Abilities
from stepscope.tui.settings.terminal import forget_empty_no_color, log_path, see_log
from stepscope.tui.views.lines import Line, Lines, clean, facts, titled
from stepscope.tui.views.notices import Notices, Tone
from stepscope.tui.views.pages import start_page
from stepscope.tui.views.pages.start_page import Entry, Section, StartChoice
from stepscope.tui.views.panels import footer
from stepscope.tui.views.theme import Skin, ThemeName, colour_mode

if TYPE_CHECKING:
    from stepscope.tui.session.start_finder import Finder

log = logging.getLogger("stepscope.tui")

_TICK_S = 0.5
_SCREEN = 8  # lines
_ALL = 1_000_000
_AIRY_ROWS = 30
_NOTICE_LINES = 4
_LEAST_FOR_LINES = 15  # rows of a screen that shows a notice in more than one line
_QUESTION = "endpoint (tcp://HOST:PORT or a name; separate several by spaces), or a recording:"


class StartApp(App[StartChoice], inherit_bindings=False):
    """The start screen as an application. Its result is the operator's choice, or None.

    Args:
        check: tests whether a choice can be opened, on a separate thread; returns one line about
            what is wrong, or None.
        finder: makes the `Finder` of engines and recordings; called after the first picture.
        selected: the choice whose entry is selected first.
        notice: a text to show at once, such as why a session ended.
    """

    CSS = """
    Screen { padding: 0; border: none; overflow: hidden; }
    #start { width: 100%; height: 100%; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        *bindings(("start",)),
    ]

    def __init__(
        self,
        check: Callable[[StartChoice], str | None],
        finder: "Callable[[], Finder]",
        *,
        has_torch: bool = True,
        actions: tuple[Action, ...] = ACTIONS,
        configured: Sequence[str] = (),
        selected: StartChoice | None = None,
        notice: str | None = None,
        theme: ThemeName = "dark",
        ascii_only: bool = False,
        any_terminal: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        forget_empty_no_color()
        super().__init__()
        self.set_keymap(keymap(actions))
        colours = self.console.color_system, self.no_color
        mode = theme if any_terminal else colour_mode(theme, *colours)
        use_colours(self, mode)
        self.skin = Skin(mode, ascii_only)
        self.abilities = Abilities(actions=actions).written(ascii_only)
        self.handlers = self._table()
        self.notices = Notices(clock)
        if notice is not None:
            self.notices.warn(notice)
        self._check = check
        self._make_finder = finder
        self._has_torch = has_torch
        self._finder: Finder | None = None
        self._configured = tuple(configured)
        self._selected = selected
        self._wall_clock = wall_clock
        self._checking: StartChoice | None = None
        self._answers: queue.SimpleQueue[tuple[StartChoice, str | None]] = queue.SimpleQueue()
        self._prompt: Prompt | None = None  # while it is open
        self._list = Lines(self.skin, id="start")

    def compose(self) -> ComposeResult:
        yield self._list

    def on_mount(self) -> None:
        self.set_skin(self.skin)
        self.set_interval(_TICK_S, self._tick)
        self.call_after_refresh(self._tick)

    def close(self) -> None:
        if self._finder is not None:
            self._finder.stop()

    def sections(self) -> list[Section]:
        finder = self._finder
        shows = [(name, samples.SHOWS.get(name, "")) for name in samples.shipped()]
        engines, files = ((), ()) if finder is None else (finder.engines(), finder.files)
        return [
            start_page.engines_section(engines, self._configured, finder is None),
            start_page.recordings_section(files, self._wall_clock()),
            start_page.samples_section(shows, has_torch=self._has_torch),
            start_page.elsewhere_section(self.abilities.key("endpoint")),
        ]

    def _tick(self) -> None:
        try:
            self._finder = self._finder or self._make_finder()
            self._finder.look()
            self.receive_answers()
            self.draw()
        except Exception as error:  # the next tick tries again
            log.exception("looking for engines failed")
            self.notices.warn(f"looking failed, {see_log(error)}")

    def draw(self) -> None:
        width, height = self.size
        sections = self.sections()
        entries = start_page.entries_of(sections)
        chosen = self._number(entries)
        said: list[Line] = []
        standing: list[tuple[str, Tone]] = []
        if self._checking is not None:
            standing.append((f"opening {' '.join(self._checking.names)} …", "muted"))
        elif height >= _LEAST_FOR_LINES:
            said = self.notices.lines(width, _NOTICE_LINES)
        notice = self.notices.line(standing, width)
        said = said or [notice or facts(f" {clean(entries[chosen].about, width - 1)}")]
        what = "  every forward step of an LLM inference engine"
        header: list[Line] = [titled(f" stepscope {version('stepscope')}", what)]
        header += [()] if height >= _AIRY_ROWS else []
        room = max(1, height - len(header) - len(said) - 1)
        keys = footer.draw(self.abilities, True, width, "start")
        self._list.show([*header, *start_page.draw(sections, chosen, width, room), *said, *keys])

    def set_skin(self, skin: Skin) -> None:
        if skin.ascii_only != self.skin.ascii_only:
            self.abilities = self.abilities.written(skin.ascii_only)
        self.skin = skin
        self._list.set_skin(skin)
        use_colours(self, skin.mode)
        self.draw()

    def _number(self, entries: Sequence[Entry]) -> int:
        numbers = (n for n, entry in enumerate(entries) if entry.choice == self._selected)
        return next(numbers, 0)

    def move(self, direction: int) -> None:
        entries = self._entries
        number = self._number(entries) + direction
        self._selected = entries[max(0, min(len(entries) - 1, number))].choice
        self.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key acts on the list; the keys of an overlay above it are the overlay's."""
        return action != "do" or len(self.screen_stack) == 1

    def action_do(self, action_id: str) -> None:
        if any(each.id == action_id for each in self.abilities.on("start")):
            self.handlers[action_id]()

    def on_key(self, event: events.Key) -> None:
        """Say of a key for other screens that it does nothing here."""
        action = next((each for each in self.abilities.actions if event.key in each.keys), None)
        if action is not None and len(self.screen_stack) == 1:
            self.notices.refuse(self.abilities.where_else(action, "start"))
            self.draw()

    def _table(self) -> Mapping[str, Callable[[], object]]:
        return {
            "lane_up": partial(self.move, -1),
            "lane_down": partial(self.move, 1),
            "screen_back": partial(self.move, -_SCREEN),
            "screen_forward": partial(self.move, _SCREEN),
            "oldest": partial(self.move, -_ALL),
            "live": partial(self.move, _ALL),
            "inspect": lambda: self._open(self._number(self._entries)),
            "endpoint": partial(self.choose, StartChoice("ask")),
            "theme": self._other_theme,
            "glyphs": lambda: self.set_skin(Skin(self.skin.mode, not self.skin.ascii_only)),
            "redraw": lambda: self.screen.refresh(layout=True),
            "help": self._help,
            "palette": self._palette,
            "suspend": self.action_suspend_process,
            "quit": self.exit,
        }

    @property
    def _entries(self) -> list[Entry]:
        return start_page.entries_of(self.sections())

    def _open(self, number: int) -> None:
        entries = self._entries
        if number < len(entries):
            self.choose(entries[number].choice)

    def _other_theme(self) -> None:
        if self.skin.mode in ("dark", "light"):
            mode: ThemeName = "light" if self.skin.mode == "dark" else "dark"
            self.set_skin(Skin(mode, self.skin.ascii_only))

    def _help(self) -> None:
        # It imports all pages, which the start list does not need.
        from stepscope.tui.screens.help import HelpPage

        self.push_screen(HelpPage(self.skin, self.abilities, "start", log_path()))

    def _palette(self) -> None:
        self.push_screen(palette(self.screen, self.abilities.on("start"), self.action_do))

    def on_resize(self) -> None:
        self.call_later(self.draw)  # the application notes its new size after this handler

    def on_click(self, event: events.Click) -> None:
        kind, value = self._list.spot_at(event.x, event.y) or ("", "")
        if kind == "do":
            self.action_do(value)
        elif kind == "row":
            self._open(int(value))

    def on_mouse_scroll_up(self) -> None:
        self.move(-1)

    def on_mouse_scroll_down(self) -> None:
        self.move(1)

    def choose(self, choice: StartChoice) -> None:
        """Select a choice, ask for an address or check it, and end with it if it opens."""
        self._selected = choice
        if choice.kind == "ask":
            self._checking = None
            check = start_page.what_is_wrong
            self._prompt = Prompt(self.skin, _QUESTION, check=check, submit=self._typed)
            self.push_screen(self._prompt, self._prompt_closed)
        elif self._checking is None:
            self._checking = choice
            self.notices.dismiss()
            check_it = partial(self._check_choice, choice)
            threading.Thread(target=check_it, name="start check", daemon=True).start()
        self.draw()

    def _check_choice(self, choice: StartChoice) -> None:
        try:
            error = self._check(choice)
        except Exception as failure:  # our bug, but no reason to leave the list
            log.exception("checking %s failed", choice)
            error = f"internal error, {see_log(failure)}"
        self._answers.put((choice, error))
        self.call_later(self.receive_answers)

    def receive_answers(self) -> None:
        """Handle the results of checks: end with a choice that passed, or show the error."""
        while not self._answers.empty():
            choice, error = self._answers.get()
            if choice is not self._checking:
                continue  # the operator has given up on this choice
            self._checking = None
            if error is None:
                self.exit(choice)
            elif self._prompt is not None:
                self._prompt.refuse(error)
            else:
                self.notices.warn(error)
                self.draw()

    def _typed(self, text: str) -> None:
        """Handle text from the prompt, which stays open until the check has passed."""
        if not text.strip() and self._prompt is not None:
            self._prompt.dismiss(None)
        else:
            self.choose(start_page.typed_choice(text))

    def _prompt_closed(self, text: str | None) -> None:
        self._prompt = self._checking = None
        self.draw()
