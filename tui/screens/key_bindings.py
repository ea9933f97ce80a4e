"""The keys of all actions as Textual's bindings and keymap.

The bindings have priority: the application handles a key before it takes the next one. Otherwise a
key typed in one burst with the key that opens an overlay could reach the screen below it.
"""

from collections.abc import Iterable

from textual.binding import Binding, BindingType

from stepscope.tui.settings.action_table import Action, Place
from stepscope.tui.settings.actions import ACTIONS, BY_ID

_NEVER = "no_key"  # no terminal sends it: the key of an action without one


def bindings(places: Iterable[Place]) -> list[BindingType]:
    """Return the default keys of the actions of these screens, which run them in `action_do`."""
    return [
        Binding(_keys(each), f"do('{each.id}')", each.label, show=False, priority=True, id=each.id)
        for each in ACTIONS
        if not each.pages.isdisjoint(places)
    ]


def keymap(actions: Iterable[Action]) -> dict[str, str]:
    """Return the keys of the actions that have others than the default ones, by action id."""
    return {each.id: _keys(each) for each in actions if each.keys != BY_ID[each.id].keys}


def _keys(action: Action) -> str:
    return ",".join(action.keys) or _NEVER
