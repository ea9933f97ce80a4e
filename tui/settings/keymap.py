"""Gives actions the keys of the `[keys]` section of the config file.

A line is `pause = "p"` or `pause = ["p", "f5"]`. `pause = []` leaves the action without a key; the
palette still finds it.
"""

import difflib
import string
from collections.abc import Mapping

from stepscope.tui.settings.action_table import Action
from stepscope.tui.settings.actions import ACTIONS, BY_ID, with_keys
from stepscope.tui.settings.key_names import KeyNameError, parse, shown


class KeyMapError(ValueError):
    """A line of `[keys]` is not valid; the message names the line and says what is valid."""


def remapped(lines: Mapping[str, object]) -> tuple[Action, ...]:
    """Return the table of actions with the keys that these lines of `[keys]` set.

    Actions without a line keep their default keys.

    Raises:
        KeyMapError: a line names an unknown action or key, or two actions share a key.
    """
    actions = with_keys({name: _keys(name, value) for name, value in lines.items()})
    owners: dict[str, Action] = {}
    for action in actions:
        for key in action.keys:
            other = owners.setdefault(key, action)
            if other is not action:
                raise KeyMapError(_conflict(key, lines, action, other, owners))
    return actions


def _keys(name: str, value: object) -> tuple[str, ...]:
    if name not in BY_ID:
        close = " or ".join(repr(each) for each in difflib.get_close_matches(name, BY_ID, 3))
        hint = f" (did you mean {close}?)" if close else ""
        raise KeyMapError(
            f"unknown key {name!r} in [keys]{hint}; 'STEPSCOPE_CONFIG=none stepscope config keys' "
            "lists all there are"
        )
    texts = value if isinstance(value, list) else [value]
    keys: list[str] = []
    for text in texts:
        if not isinstance(text, str):
            raise KeyMapError(f'[keys] {name} = {value!r}: write "p", or ["p", "f5"]')
        try:
            keys.append(parse(text))
        except KeyNameError as error:
            raise KeyMapError(f"[keys] {name} = {value!r}: {error}") from error
    return tuple(dict.fromkeys(keys))


def _conflict(
    key: str,
    lines: Mapping[str, object],
    action: Action,
    other: Action,
    owners: Mapping[str, Action],
) -> str:
    mine, its = (action, other) if action.id in lines else (other, action)
    taken = {*owners, *(each for one in ACTIONS for each in one.keys)}
    free = " ".join(each for each in string.ascii_letters if each not in taken)
    return (
        f"[keys] {mine.id} = {lines[mine.id]!r}: {shown(key)} is the key of {its.id} ({its.label})"
        f"; give {its.id} another one, or take one that is free: {free} f2 to f24"
    )
