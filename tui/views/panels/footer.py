"""The footer: the most useful keys of the action table, as many as fit; above it, the screens."""

from stepscope.tui.settings.action_table import Page, Place
from stepscope.tui.settings.actions import Abilities, footer_entries
from stepscope.tui.views.lines import Line, Run

_ALWAYS = frozenset({"help", "quit"})
_LAST = _ALWAYS | {"palette"}
_TABS: dict[Page, str] = {
    "live": "Live",
    "step": "Step",
    "request": "Request",
    "kv": "KV",
    "latency": "Latency",
    "knobs": "Knobs",
    "compare": "Compare",
    "fleet": "Fleet",
}
_FIRST = 4  # the palette is left out if fewer other entries than this would fit


def draw(abilities: Abilities, live: bool, width: int, page: Place = "live") -> list[Line]:
    placed = _placed(abilities, live, width, page)
    return [tuple(run for _, runs in placed for run in runs)]


def action_at(
    abilities: Abilities, live: bool, width: int, x: int, page: Place = "live"
) -> str | None:
    """Return the action whose key is shown at cell `x`; None if there is none."""
    begin = 0
    for action_id, runs in _placed(abilities, live, width, page):
        end = begin + sum(len(text) for text, _ in runs)
        if begin <= x < end:
            return action_id
        begin = end
    return None


def tabs(abilities: Abilities, page: Page) -> Line:
    """Return the names of the screens with their keys, the current one in brackets."""
    line: list[Run] = [(" ", "text")]
    for each, (key, name) in _tabs(abilities).items():
        if each == page:
            line.append((f"[{key} {name}]", "strong"))
        else:
            line += [(f" {key} ", "key"), (f"{name} ", "muted")]
    return tuple(line)


def tab_at(abilities: Abilities, page: Page, x: int) -> str | None:
    """Return the action of the screen whose name `tabs` shows at cell `x`; None without one."""
    begin = 1
    for each, (key, name) in _tabs(abilities).items():
        end = begin + len(key) + len(name) + 3
        if begin <= x < end:
            return None if each == page else f"screen_{each}"
        begin = end
    return None


def _tabs(abilities: Abilities) -> dict[Page, tuple[str, str]]:
    actions = {page: abilities.action(f"screen_{page}") for page in _TABS}
    return {
        page: (action.key, _TABS[page])
        for page, action in actions.items()
        if action.keys and abilities.allows(action)
    }


def _placed(
    abilities: Abilities, live: bool, width: int, page: Place
) -> list[tuple[str, tuple[Run, Run]]]:
    entries = [
        (each[0], ((f" {each[1]} ", "key"), (f"{_label(abilities, each, live, page)} ", "muted")))
        for each in footer_entries(abilities, page)
    ]
    others = [entry for entry in entries if entry[0] not in _LAST]
    shown: list[tuple[str, tuple[Run, Run]]] = []
    for kept in (_LAST, _ALWAYS):
        last = [entry for entry in entries if entry[0] in kept]
        shown = _fitting(others, width - sum(_length(runs) for _, runs in last))
        if len(shown) >= min(_FIRST, len(others)):
            break
    return [*shown, *last]


def _fitting(
    entries: list[tuple[str, tuple[Run, Run]]], room: int
) -> list[tuple[str, tuple[Run, Run]]]:
    shown = []
    for action_id, runs in entries:
        room -= _length(runs)
        if room < 0:
            break
        shown.append((action_id, runs))
    return shown


def _label(abilities: Abilities, entry: tuple[str, str, str], live: bool, page: Place) -> str:
    action_id, _, label = entry
    if page in ("fleet", "start"):
        label = {"step_back": "Order by", "inspect": "Open"}.get(action_id, label)
    if action_id == "live" and (page in ("compare", "start") or "replay" in abilities.has):
        return "End"
    return "Go on" if action_id == "pause" and not live else label


def _length(runs: tuple[Run, Run]) -> int:
    return sum(len(text) for text, _ in runs)
