"""The actions with their keys, for the footer, the help and the palette.

A line of the `[keys]` section of the config file gives an action other keys: `pause = "p"`, or
`pause = ["p", "f5"]`. `pause = []` leaves it without a key; the palette still finds it.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from stepscope.tui.settings.action_table import PAGES, TABLE, WHERE, Action, Need, Place
from stepscope.tui.settings.key_names import KeyNameError, parse, shown, spelled


def with_keys(keys: Mapping[str, tuple[str, ...]], ascii_only: bool = False) -> tuple[Action, ...]:
    """Return the table with other keys; `{id}` in a help becomes the first key of that action."""
    actions = [
        replace(each, keys=keys.get(each.id, each.keys), ascii_only=ascii_only) for each in TABLE
    ]
    first = {action.id: action.key for action in actions}

    def filled(text: str) -> str:
        return (spelled(text) if ascii_only else text).format_map(first)

    return tuple(
        replace(
            each,
            help=filled(each.help),
            elsewhere=tuple((where, filled(text)) for where, text in each.elsewhere),
        )
        for each in actions
    )


ACTIONS = with_keys({})
BY_ID = {action.id: action for action in ACTIONS}

# Pairs of actions that share one entry in the footer.
_PAIRS = {
    "step_back": "step_forward",
    "previous_event": "next_event",
    "previous_preemption": "next_preemption",
    "zoom_in": "zoom_out",
    "slower": "faster",
}


@dataclass(frozen=True, slots=True)
class Abilities:
    """The actions with their keys, and which of them this dashboard allows."""

    readonly: bool = False  # actions that change the engine are forbidden
    has: frozenset[Need] = frozenset()  # what the session has
    actions: tuple[Action, ...] = ACTIONS

    def written(self, ascii_only: bool) -> "Abilities":
        """Return a copy that writes keys with glyphs, or with ASCII characters only."""
        keys = {each.id: each.keys for each in self.actions}
        return replace(self, actions=with_keys(keys, ascii_only))

    def action(self, action_id: str) -> Action:
        return next(each for each in self.actions if each.id == action_id)

    def key(self, action_id: str) -> str:
        """Return the first key of an action as people read it, for use in a sentence."""
        return self.action(action_id).key

    def allows(self, action: Action) -> bool:
        return action.needs <= self.has and not (action.changes_engine and self.readonly)

    def why_not(self, action: Action) -> str:
        """Return a line that says why an action is not allowed in this dashboard."""
        if action.changes_engine and self.readonly:
            return f"{action.shown} changes the engine, and this dashboard is --readonly"
        if "files" in action.needs - self.has:
            return f"{action.shown} writes a file, and this dashboard is in a browser"
        if "tour" in action.needs:
            return f"{action.shown} is for 'stepscope tour'"
        if "replay" in action.needs:
            return f"{action.shown} is for replays: this is a live engine"
        return f"{action.shown} needs a live engine: this is a recording"

    def where_else(self, action: Action, page: Place) -> str:
        """Return a line for an action that does nothing on this screen: where it does something."""
        text = f"{action.shown} does nothing here; "
        if page == "start":
            return f"{text}{self.key('inspect')} opens a line"
        if "live" not in action.pages:
            where = next(each for each in PAGES if each in action.pages)
            return f"{text}it is for {WHERE[where]} ({self.key(f'screen_{where}')})"
        text += f"{self.key('screen_live')} is the main screen"
        if page == "fleet":
            text += f" of the chosen engine, {self.key('inspect')} opens it"
        return text

    def available(self) -> Iterator[Action]:
        return (action for action in self.actions if self.allows(action))

    def on(self, page: Place) -> list[Action]:
        is_replay = "replay" in self.has
        return [
            replace(each, help=each.help_on(page, is_replay=is_replay))
            for each in self.available()
            if page in each.pages
        ]


def footer_entries(abilities: Abilities, page: Place = "live") -> list[tuple[str, str, str]]:
    """Return the entries of the footer: (action id, keys, label), the most useful first."""
    chosen = sorted(
        (a for a in abilities.available() if a.footer and a.keys and page in a.pages),
        key=lambda a: a.footer,
    )
    return [(a.id, _footer_keys(abilities, a), a.label) for a in chosen]


def _footer_keys(abilities: Abilities, action: Action) -> str:
    if action.id == "screen_live":
        keys = [abilities.key(f"screen_{page}") for page in PAGES]
        numbers = [str(number) for number in range(1, len(PAGES) + 1)]
        return f"{keys[0]}-{keys[-1]}" if keys == numbers else " ".join(keys)
    if action.id not in _PAIRS:
        return action.key
    first, second = action.key, abilities.key(_PAIRS[action.id])
    return f"{first} {second}" if first in "[{(<" else f"{first}/{second}"


def remapped(lines: Mapping[str, object]) -> tuple[Action, ...]:
    """Return the action table with the keys of `[keys]`; KeyNameError names the wrong line."""
    actions = with_keys({name: _keys(name, value) for name, value in lines.items()})
    owners: dict[str, Action] = {}
    for action in actions:
        for key in action.keys:
            other = owners.setdefault(key, action)
            if other is not action:
                mine, its = (action, other) if action.id in lines else (other, action)
                raise KeyNameError(
                    f"[keys] {mine.id} = {lines[mine.id]!r}: {shown(key)} is the key of {its.id} "
                    f"({its.label}); give {its.id} another one, or take one of f2 to f24"
                )
    return actions


def _keys(name: str, value: object) -> tuple[str, ...]:
    if name not in BY_ID:
        close = " or ".join(repr(each) for each in difflib.get_close_matches(name, BY_ID, 3))
        hint = f" (did you mean {close}?)" if close else ""
        raise KeyNameError(
            f"unknown key {name!r} in [keys]{hint}; 'STEPSCOPE_CONFIG=none stepscope config keys' "
            "lists all there are"
        )
    texts = value if isinstance(value, list) else [value]
    keys: list[str] = []
    for text in texts:
        if not isinstance(text, str):
            raise KeyNameError(f'[keys] {name} = {value!r}: write "p", or ["p", "f5"]')
        try:
            keys.append(parse(text))
        except KeyNameError as error:
            raise KeyNameError(f"[keys] {name} = {value!r}: {error}") from error
    return tuple(dict.fromkeys(keys))
