"""The screens of the dashboard, and the table of what an operator can do: keys, screens, words.

`actions.py` builds the footer, the help and the palette from it. A lower-case key only changes what
is shown; most upper-case keys change something for good or write a file.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from stepscope.tui.settings.key_names import shown

# In the order of their keys: 1, 2, ...
Page: TypeAlias = Literal["live", "step", "request", "kv", "latency", "knobs", "compare", "fleet"]
PAGES: tuple[Page, ...] = get_args(Page)

# The screens of the dashboard, and the one that `stepscope` alone opens.
Place: TypeAlias = Page | Literal["start"]
Group: TypeAlias = Literal["global", "screens", "time", "view", "act", "start"]
GROUPS: dict[Group, str] = {
    "screens": "Screens",
    "time": "Time",
    "view": "View",
    "act": "Act",
    "global": "Everywhere",
    "start": "Start screen",
}
# Places where an action may differ from its usual meaning: a screen, or any replay.
Where: TypeAlias = Place | Literal["replay"]
WHERE: dict[Where, str] = {
    "live": "main screen",
    "kv": "KV map",
    "latency": "latencies",
    "compare": "two runs",
    "fleet": "several engines",
    "start": "start screen",
    "replay": "replay",
}
NO_KEY = "no key"
# What the session must have for an action to make sense.
Need: TypeAlias = Literal["engine", "recorder", "replay", "live", "tour", "files"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing an operator can do.

    `elsewhere`: (screen or "replay", text) pairs: the text replaces `help` there, because the
    action does something else.
    """

    id: str  # names the action, also in `[keys]` of the config file
    keys: tuple[str, ...]
    label: str
    help: str  # what the action does. `{id}` stands for the first key of the action with that id
    group: Group
    footer: int = 0  # position in the footer, from 1; 0 keeps the action out of the footer
    needs: frozenset[Need] = frozenset()
    changes_engine: bool = False
    pages: frozenset[Place] = frozenset(PAGES)  # the screens where it has an effect
    ascii_only: bool = False  # whether `shown` and `key` avoid glyphs such as arrows
    elsewhere: tuple[tuple[Where, str], ...] = ()

    @property
    def shown(self) -> str:
        """The keys as people read them, or "no key"."""
        return " ".join(shown(key, self.ascii_only) for key in self.keys) or NO_KEY

    def help_on(self, page: Place, *, is_replay: bool) -> str:
        texts = dict(self.elsewhere)
        return texts.get(page) or (texts.get("replay") if is_replay else None) or self.help

    @property
    def key(self) -> str:
        """The first key as people read it, or "no key"."""
        return shown(self.keys[0], self.ascii_only) if self.keys else NO_KEY


_ENGINE: frozenset[Need] = frozenset({"engine"})
_FILES: frozenset[Need] = frozenset({"files"})  # those of this machine are not a browser's
_MAIN: frozenset[Place] = frozenset({"live"})
_FLEET: frozenset[Place] = frozenset({"fleet"})
_COMPARE: frozenset[Place] = frozenset({"compare"})
_REVERSED: frozenset[Place] = frozenset({"latency", "fleet"})
_ORDERED: frozenset[Place] = frozenset({"live", "kv", "latency", "compare", "fleet"})
_START: frozenset[Place] = frozenset({"start"})

_ACTIONS: tuple[Action, ...] = (
    # screens
    Action("screen_live", ("1",), "Screens",
           "main screen; on it: follow the newest step", "screens", footer=6,
           elsewhere=(("replay", "main screen; on it: go to where the replay plays"),
                      ("fleet", "main screen of the chosen engine"))),
    Action("screen_step", ("2",), "Step", "everything about the step at the cursor",
           "screens"),
    Action("screen_request", ("3",), "Request",
           "one request: its life, its gaps, and why each late token was late", "screens"),
    Action("screen_kv", ("4",), "KV map", "every KV block, by state, owner or kind ({sort})",
           "screens"),
    Action("screen_latency", ("5",), "Latency",
           "latencies against the service levels, over time, and why late tokens were late",
           "screens"),
    Action("screen_knobs", ("6",), "Knobs screen",
           "knobs, who changed them, and the latencies before and after", "screens"),
    Action("screen_compare", ("7",), "Compare",
           "two runs side by side: which is better, in what, and where it comes from", "screens"),
    Action("screen_fleet", ("8",), "Fleet", "several engines: a line each, and which of them "
           "stands out", "screens"),
    # time
    Action(
        "pause", ("space",), "Pause", "stop here, or go on (receiving never stops)",
        "time", footer=1,
        elsewhere=(("replay", "stop, or play on from here; at the end, from the beginning"),),
    ),
    Action("step_back", ("left", "h"), "Step", "one column back in time", "time", footer=2,
           elsewhere=(("fleet", "order engines by the column before"),)),
    Action("step_forward", ("right", "l"), "Step", "one column forward in time", "time",
           elsewhere=(("fleet", "order engines by the next column"),)),
    Action("ten_back", ("shift+left",), "×10", "ten columns back", "time"),
    Action("ten_forward", ("shift+right",), "×10", "ten columns forward", "time"),
    Action("screen_back", ("pageup",), "Screen",
           "a screen back; in a list ten rows up", "time"),
    Action("screen_forward", ("pagedown",), "Screen",
           "a screen forward; in a list ten rows down", "time"),
    Action("oldest", ("home",), "Oldest", "the oldest step in memory", "time",
           elsewhere=(("replay", "the first step of the file"), ("compare", "the first column"),
                      ("start", "the first line"))),
    Action("live", ("L", "end"), "Live", "the newest step, and follow it", "time", footer=10,
           elsewhere=(("replay", "the end of the file"), ("compare", "the last column"),
                      ("start", "the last line"))),
    Action("previous_event", ("left_square_bracket",), "Find event", "previous event: a change, "
           "mark, preemption, abort, refusal, late token or loss", "time", footer=3,
           elsewhere=(("replay", "previous event in the file: a change, mark, preemption, abort, "
                       "refusal, late token or loss"),
                      ("compare", "previous change, mark, preemption, late token or loss in "
                      "either run"))),
    Action("next_event", ("right_square_bracket",), "Find event", "next event", "time"),
    Action("previous_preemption", ("left_curly_bracket",), "Preempt", "previous preemption",
           "time", footer=12),
    Action("next_preemption", ("right_curly_bracket",), "Preempt", "next preemption", "time"),
    Action("previous_of_request", ("comma",), "Request", "previous step of the selected "
           "request (in memory)", "time"),
    Action("next_of_request", ("full_stop",), "Request", "next step of the selected request "
           "(in memory)", "time"),
    Action("previous_mark", ("apostrophe",), "Mark", "previous mark (before the first one: the "
    "last)", "time"),
    Action("worst", ("w",), "Worst stall", "the worst stall in memory (one a second); again: the "
    "next worst", "time",
           elsewhere=(("replay", "the worst stall of the file, once it is searched (one a "
           "second); again: the next worst"),)),
    Action("goto", ("g",), "Go to", "go to a step (1200), a time (12:41:58), or a distance (-30s, "
    "+2m)", "time", footer=13),
    Action("previous_session", ("p",), "Before restart",
           "the session before the engine restarted (again, or {live}: back)", "time",
           needs=frozenset({"live"})),
    Action("slower", ("less_than_sign",), "Speed", "play at half the speed", "time",
           footer=5, needs=frozenset({"replay"})),
    Action("faster", ("greater_than_sign",), "Speed", "play at twice the speed", "time",
           needs=frozenset({"replay"})),
    # view
    Action("zoom_in", ("z",), "Zoom", "fewer steps in a column", "view", footer=11,
           pages=_MAIN | _COMPARE),
    Action("zoom_out", ("x",), "Zoom",
           "more steps in a column; it shows the worst state among them", "view",
           pages=_MAIN | _COMPARE),
    Action("axis", ("t",), "Axis", "columns are steps, or equal stretches of time", "view",
           footer=14, pages=_MAIN),
    Action("lane_up", ("up", "k"), "Lane", "select the line above", "view",
           elsewhere=(("live", "select the request above"),)),
    Action("lane_down", ("down", "j"), "Lane", "select the line below", "view",
           elsewhere=(("live", "select the request below"),)),
    Action("follow", ("f",), "Follow", "keep the selected request in sight (again: stop)",
           "view", footer=23),
    Action("sort", ("o",), "Sort", "order of the lanes: arrival, state, blocks, latest first",
           "view", footer=15, pages=_ORDERED,
           elsewhere=(("kv", "blocks by state, owner or kind of layer"),
                      ("latency", "kind of latency"),
                      ("compare", "align runs by time, step or request"),
                      ("fleet", "order engines by the next column"))),
    Action("compare_with", ("c",), "Compare with", "choose what to compare: a recording, or this "
           "session before and after a mark or a knob change", "view", footer=24),
    Action("other_side", ("s",), "Other side", "the side of the comparison that {inspect} opens",
           "view", footer=9, pages=_COMPARE),
    Action("reverse", ("i",), "Reverse", "breaches newest first, or longest first", "view",
           footer=16, pages=_REVERSED,
           elsewhere=(("fleet", "order engines the other way round"),)),
    Action("filter", ("slash",), "Filter",
           "which lanes to show: state:dec state:pre state:wait state:end id:12, text, !regex",
           "view", footer=7, pages=_MAIN),
    Action("service_levels", ("b",), "Levels",
           "service levels: a latency above is a breach (ttft=500 itl=50, in ms)", "view",
           pages=frozenset(PAGES) - _COMPARE),
    Action("glyphs", ("v",), "Glyphs", "block or ASCII characters", "view"),
    Action("inspect", ("enter",), "Inspect", "go where the selected line leads", "view", footer=5,
           elsewhere=(("live", "the selected request; without one there, the step at the cursor"),
                      ("compare", "the step or request at the cursor, on the chosen side"),
                      ("fleet", "the screens of the chosen engine"),
                      ("start", "open the selected line"))),
    Action("copy", ("y",), "Copy", "put what this screen says on the clipboard", "view",
           elsewhere=(("live", "put the key figures and the latencies on the clipboard"),)),
    # act
    Action("budget", ("B",), "Budget",
           "token budget of a step: ←/→ 5 %, ⇧←/→ 25 %, digits type it, Enter applies, Esc drops",
           "act", footer=4, needs=_ENGINE, changes_engine=True),
    Action("knobs", ("K",), "Knobs", "all knobs of the engine, with their bounds", "act",
           footer=8, needs=_ENGINE, changes_engine=True),
    Action("undo", ("U",), "Undo", "undo your last knob change (again: redo)", "act",
           footer=18, needs=_ENGINE, changes_engine=True),
    Action("autopilot", ("A",), "Autopilot", "move the budget by itself, so that 95 % of the gaps "
           "between tokens keep the ITL level (again: stop it, whoever began it)", "act",
           needs=_ENGINE, changes_engine=True),
    Action("pause_engine", ("P",), "Pause engine", "pause the engine itself, or resume it",
           "act", footer=22, needs=_ENGINE, changes_engine=True),
    Action("step_engine", ("N",), "Run a step", "let the engine run one step, then pause",
           "act", footer=16, needs=_ENGINE, changes_engine=True),
    Action("workload", ("W",), "Workload",
           "the engine's own synthetic load: rate=2 output_tokens=64, or off", "act",
           footer=24, needs=_ENGINE, changes_engine=True),
    Action("record", ("R",), "Record", "start or end a recording", "act", footer=6,
           needs=frozenset({"recorder", "files"}),
           elsewhere=(("fleet", "start or end a recording of the chosen engine"),)),
    Action("screenshot", ("S",), "Screenshot", "write this screen to an SVG file", "act",
           footer=19, needs=_FILES),
    Action("keep_steps", ("D",), "Keep steps", "write all steps in memory to a recording, also "
    "those from before you recorded", "act", needs=frozenset({"recorder", "files"})),
    Action("mark", ("M",), "Mark", "put a mark with a note at this step, in this dashboard and "
    "its recordings only", "act", footer=17,
           elsewhere=(("replay", "put a mark with a note at this step; it lasts until you leave "
           "the replay"),)),
    # global
    Action("tour_next", ("tab",), "Next", "in the tour: go on", "global", footer=1,
           needs=frozenset({"tour"})),
    Action("tour_again", ("shift+tab",), "Again", "in the tour: back to the beginning of the "
           "chapter, then to the chapter before", "global", needs=frozenset({"tour"})),
    Action("help", ("question_mark", "f1"), "Help", "the keys and the legend", "global",
           footer=20),
    Action("palette", ("ctrl+p",), "Palette", "find an action by name", "global", footer=21),
    Action("theme", ("T",), "Theme", "dark or light", "global"),
    Action("more_frames", ("plus", "equals_sign"), "Faster frames",
           "one more frame a second", "global"),
    Action("fewer_frames", ("minus",), "Fewer frames", "one frame a second less", "global"),
    Action("redraw", ("ctrl+l",), "Redraw", "draw the whole screen again", "global"),
    Action("back", ("escape",), "Back",
           "the screen before", "global",
           elsewhere=(("live", "deselect the request; then back to the list of engines, if there "
           "are several"),)),
    Action("suspend", ("ctrl+z",), "Suspend", "back to the shell; 'fg' returns", "global"),
    Action("quit", ("q",), "Quit",
           "quit, as ctrl+c always does (the engine runs on, unless 'demo' started it)", "global",
           footer=25),
    # start screen
    Action("endpoint", ("e",), "Address",
           "type an engine's address or name (separate several by spaces), or a recording's path",
           "start", footer=6, pages=_START),
)  # fmt: skip

# The fleet screen may record an engine, but not change one or move in its time. Of the actions on
# one engine, only these work there.
_ON_FLEET = frozenset({"step_back", "step_forward", "screenshot", "record"})
# Left out of the compare screen: a comparison has its own time axis, and no step to mark.
_NOT_ON_COMPARE = frozenset(
    {"pause", "previous_of_request", "next_of_request", "previous_mark", "worst", "goto", "slower"}
    | {"faster", "previous_session", "mark", "follow", "keep_steps"}
)
# The start screen is a list: it has the actions that move in a list, and the global ones.
_ON_START = frozenset(
    {"lane_up", "lane_down", "screen_back", "screen_forward", "oldest", "live", "inspect"}
    | {"glyphs", "help", "palette", "theme", "redraw", "suspend", "quit"}
)


def _pages(action: Action) -> frozenset[Place]:
    pages = action.pages | _START if action.id in _ON_START else action.pages
    of_one_engine = action.group in ("time", "act") or action.id in ("follow", "compare_with")
    if of_one_engine and action.id not in _ON_FLEET:
        pages -= _FLEET
    return pages - _COMPARE if action.id in _NOT_ON_COMPARE else pages


TABLE = tuple(replace(each, pages=_pages(each)) for each in _ACTIONS)
