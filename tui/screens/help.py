"""The help page: the keys that work here and how to read the screen; what words and glyphs mean.

`TERMS`, `GLYPHS`: the glossary, which is also docs/glossary.md.
"""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

from textual.geometry import Region

from stepscope.recordings.attribution.causes import WORDS
from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.settings.action_table import GROUPS, Place
from stepscope.tui.settings.actions import Abilities
from stepscope.tui.views import format as fmt
from stepscope.tui.views.lines import Line, Run, clean, fitted, framed
from stepscope.tui.views.theme import CAUSE_GLYPHS, KV_LEGEND, LEGEND, Skin

_KEY_WIDTH = 8
_WORD_WIDTH = 15
_GLOSSARY_KEY = "g"
_TWO_COLUMNS = 116  # the least width for two columns
_MAX_WIDTH = 190
# Screen -> its name, and how to read it.
_READINGS: Mapping[Place, tuple[str, str]] = {
    "live": (
        "main screen",
        "The budget chart has two scales. The upper rows show the prefill tokens of each step "
        "against the token budget (dotted line). The bottom row shows which steps decoded; its "
        "label says how many requests decoded at the cursor (RUN counts all running requests, at "
        "most max_num_seqs, also those that prefill). Below the chart each request has a lane; a "
        "column is the same step in both. A column that merges several steps shows the worst of "
        "them: preempted, then ended, then prefill, then decode. Latencies are exact samples of "
        "the last minute, from the engine's own clock; the operator's pauses are not counted.",
    ),
    "step": (
        "step inspector",
        "One forward step. The bar on top shows its time: s scheduling, l preparing the launch, ━ "
        "the model; a part shorter than a cell is not drawn. Below it: how much of the token "
        "budget, of max_num_seqs and of the KV blocks the step used. Beside it: what changed "
        "since the step before, and what happened to requests. Each row is a request with the "
        "positions computed in this step and the blocks it holds (+ taken in this step).",
    ),
    "request": (
        "request inspector",
        "The life of one request over time; a cell shows the worst state in it. Below it is a bar "
        "for each token: the time since the token before. Bars above the dotted line broke the "
        "service level; a wait caused by the operator's pause (‖) does not count. The wait for "
        "each late token is split into its causes; the parts sum to the wait.",
    ),
    "kv": (
        "KV map",
        "Every block of the KV cache in the order of block ids, by state or by owner ({sort}). A "
        "is the request with the most blocks. Shared blocks hold a prompt prefix that requests "
        "have in common: a block with 3 references saves 2 blocks. Fragmentation is the share of "
        "slots in used blocks that hold no token.",
    ),
    "latency": (
        "latency screen",
        "Exact percentiles over two windows, and the share of samples within the service level. "
        "In the heat map time runs to the right and latency upwards on a logarithmic scale; bands "
        "beyond the service level are marked !. Each breach is listed with the causes of its "
        "wait, the newest or the longest ({reverse}) first. Time in which the operator paused the "
        "engine never counts.",
    ),
    "knobs": (
        "knobs screen",
        "The knobs can change while the engine runs; * marks a value that is not the default. "
        "Each change is listed with who made it, the first step it applied to, and the latencies "
        "in the ten seconds before and after it (less if another change is nearer). The list also "
        "shows other commands and refusals: pauses, single steps, resets, workloads, floods. In a "
        "replay it shows changes after the cursor too, and {inspect} goes to them.",
    ),
    "compare": (
        "compare screen",
        "Two runs, A and B. A figure reads A→B, then the better run and by what factor; = is "
        "alike, ? is an uncertain difference. 'At least' is the near end of the 99 % interval of "
        "the factor. Under ITL stand the waits without and beside a prefill. If the loads differ, "
        "only the run that did better with more work wins; elsewhere ▼ is lower in B, ▲ higher. "
        "In the charts A grows up and B down from one axis: prefill tokens against each run's own "
        "budget, events next to the axis, and the longest wait for a token in each column.",
    ),
    "fleet": (
        "fleet screen",
        "A line per engine; a dash is a figure the engine does not report. Latencies and "
        "preemptions cover a minute, budget and rates ten seconds; ! breaks the service level. ▲ "
        "marks a figure that has been far above the median of the other engines for several "
        "seconds. The load of all engines is drawn on one scale; ● means that the engine is being "
        "recorded. Two minutes of each engine stay in memory; of the one opened last, everything "
        "that fits.",
    ),
    "start": (
        "start screen",
        "The engines on this machine and in the config file, the recordings in this folder, the "
        "samples, and the demo. {inspect} opens the selected line, a click any. The list looks for "
        "engines once a second. If a session ends with an error, the error stands below the list.",
    ),
}
_Meaning: TypeAlias = tuple[str, str, str]  # a glyph, its style, and what it stands for
TERMS: Mapping[str, str] = {
    "TTFT":
        "time to first token: from the arrival of a request to its first token. Queueing and "
        "prefill are part of it.",
    "ITL": "inter-token latency: the time between two tokens of one request.",
    "TPOT":
        "time per output token: the mean ITL of one finished request, that is (E2E - TTFT) / "
        "(output tokens - 1).",
    "E2E": "end-to-end latency: from the arrival of a request to its last token.",
    "service level":
        "the bounds an operator promises: a longest TTFT and a longest ITL. Key b sets them. A "
        "latency above its bound is a breach (!).",
    "goodput":
        "requests a second that finished and kept every service level, or their share of all that"
        " finished. Throughput counts the others too.",
    "step":
        "one forward pass of the model. It computes prefill tokens of some requests and one "
        "decode token each of others.",
    "prefill": "computing the tokens of a prompt and storing their keys and values.",
    "decode": "computing the next output token of a request; one token a step.",
    "mixed step": "a step that prefills and decodes. Its decodes wait for its prefill.",
    "chunk":
        "the part of a prompt that one step prefills. Chunked prefill cuts a long prompt into "
        "several, so that decodes need not wait for all of it.",
    "budget":
        "max_num_batched_tokens: the most tokens that one step may compute. A lower budget means "
        "shorter steps, hence lower ITL and higher TTFT.",
    "knee":
        "the tokens from which on a step is bound by compute. With fewer it takes as long, "
        "because it reads all weights: a lower budget wastes the device, a far higher one gains "
        "little.",
    "CUDA graph":
        "the kernels of a step, recorded once and launched as one. A step of more tokens than the "
        "largest graph has its kernels launched one by one.",
    "seats": "max_num_seqs: how many requests may run at a time. The others wait.",
    "KV block":
        "a fixed number of token slots (16 by default) in the memory of keys and values. A "
        "request takes blocks as its context grows.",
    "prefix hit":
        "prompt tokens whose KV blocks another request left in the cache. They are not computed "
        "again. The hit rate is their share of all prompt tokens.",
    "preemption":
        "the engine takes back the KV blocks of a running request, because others need them. The "
        "request waits until there is room again.",
    "recompute":
        "the prefill a preempted request repeats, over its prompt and the output it had, before "
        "it decodes again. The recompute tax is its share of the time in steps.",
    "held up":
        "a step that took several times as long as others with the same work: the machine or the "
        "engine was busy with something else.",
    "rank":
        "a worker of an engine that several devices share: it computes a part of each layer (tp) "
        "or some of the layers (pp, a pipeline stage). The others wait for the slowest.",
    "stall":
        "a token that came later than the ITL of the service level allows; all such tokens of one "
        "step are one stall.",
    "overlap":
        "the next step is launched before the tokens of the last one have reached the CPU, so "
        "that the device does not idle between steps.",
    "gap":
        "in the header and for an engine: messages that were lost on their way here. In a lane: a"
        " time without a token.",
    "lane": "the row of one request on the main screen; a column is a step or a time.",
}  # fmt: skip

# Glyphs of figures, lists and badges. Those of charts come from the tables used to draw them.
_OTHERS = (
    ("▲", "caution", "rises, or is higher than in other engines or run A; in events: "
     "what an operator did, or what happened to the engine"),
    ("▼", "good", "falls, or is lower than in other engines or run A"),
    ("≈", "text", "an estimate: from the buckets of a histogram, or from a sample"),
    ("–", "muted", "a figure that the engine does not report (also — and -)"),
    ("…", "muted", "cut off here; more is there"),
    ("▶", "text", "the selected line"),
    ("◂", "muted", "text of the prompt"),
    ("▸", "muted", "text of the output"),
    ("▔", "prefill", "run B of a comparison: its bars hang from the axis (also ▀)"),
)  # fmt: skip

GLYPHS: Mapping[str, tuple[_Meaning, ...]] = {
    "Charts and lanes": LEGEND,
    "KV map": KV_LEGEND,
    "Why a token was late": tuple((*g, WORDS[cause].label) for cause, g in CAUSE_GLYPHS.items()),
    "Figures and lists": _OTHERS,
}
_KV_LEGEND: tuple[Run, ...] = (
    *((glyph, style) for glyph, style, _ in KV_LEGEND),
    ("    KV blocks: " + ", ".join(meaning for *_, meaning in KV_LEGEND), "text"),
)


def help_blocks(
    abilities: Abilities, page: Place, width: int = 0, log_file: Path | None = None
) -> list[list[Line]]:
    """Return the blocks of the page, each with a heading: the screen, its keys, its glyphs."""
    name, reading = _READINGS[page]
    reading = reading.format_map({action.id: action.key for action in abilities.actions})
    blocks: list[list[Line]] = [[_heading(f"This is the {name}"), *_text(reading, width)]]
    available = abilities.on(page)
    for group, title in GROUPS.items():
        actions = [(each.shown, "key", each.help) for each in available if each.group == group]
        blocks += [_block(f"{title}: keys", actions, width)] if actions else []
    if glyphs := _glyphs(page, width):
        blocks.append([_heading("Glyphs"), *glyphs])
    if log_file is not None:
        blocks.append([(), *_text(f"Errors are written to {clean(str(log_file), 80)}", width)])
    return blocks


def glossary_blocks(width: int) -> list[list[Line]]:
    words = [(word, "key", meaning) for word, meaning in TERMS.items()]
    glyphs = [_block(title, meanings, width) for title, meanings in GLYPHS.items()]
    return [_block("Words", words, width, _WORD_WIDTH), *glyphs]


def _block(
    title: str, entries: Sequence[_Meaning], width: int, key_width: int = _KEY_WIDTH
) -> list[Line]:
    lines = [line for each in entries for line in _entry(*each, width, key_width)]
    return [_heading(title), *lines]


def _heading(text: str) -> Line:
    return ((f" {text}", "title"),)


def _text(text: str, width: int) -> list[Line]:
    return [((f"  {line}", "text"),) for line in _wrapped(text, width - 4)]


def _entry(key: str, style: str, text: str, width: int, key_width: int = _KEY_WIDTH) -> list[Line]:
    first, *more = _wrapped(text, width - key_width - 4)
    gap = " " * max(1, key_width - len(key))
    line: Line = (("  ", "text"), (key, style), (gap, "text"), (first, "text"))
    return [line, *(((" " * (key_width + 2) + rest, "text"),) for rest in more)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) if width > 20 else [text]


def _glyphs(page: Place, width: int) -> list[Line]:
    """Return how to read the glyphs of a page, if they are drawn on it alone; see the glossary."""
    of_causes = ((*glyph, WORDS[cause].label) for cause, glyph in CAUSE_GLYPHS.items())
    shown = {"request": of_causes, "live": LEGEND}.get(page, ())
    lines = [line for each in shown for line in _entry(*each, width)]
    return [*lines, (("  ", "text"), *_KV_LEGEND)] if page in ("live", "kv") else lines


class HelpPage(Overlay[None]):
    """The help on a page. It scrolls and turns to the glossary and back; other keys close it."""

    def __init__(
        self, skin: Skin, abilities: Abilities, page: Place, log_file: Path | None = None
    ) -> None:
        super().__init__(skin)
        self._abilities = abilities
        self._page: Place = page
        self._log_file = log_file
        self._first = 0
        self._is_glossary = False

    def _blocks(self, width: int) -> list[list[Line]]:
        if self._is_glossary:
            return glossary_blocks(width)
        return help_blocks(self._abilities, self._page, width, self._log_file)

    def _content(self, width: int) -> list[Line]:
        if width < _TWO_COLUMNS:
            return _joined(self._blocks(width))
        half = width // 2
        blocks = self._blocks(half)
        total = sum(len(block) + 1 for block in blocks)
        left = [blocks.pop(0)]
        while blocks and sum(len(block) + 1 for block in left) + len(blocks[0]) <= total // 2 + 4:
            left.append(blocks.pop(0))
        columns = zip_longest(_joined(left), _joined(blocks), fillvalue=())
        return [(*fitted(line, half), *other) for line, other in columns]

    def place(self, width: int, height: int) -> Region:
        box_width = min(width, _MAX_WIDTH)
        box_height = min(height, len(self._content(box_width - 2)) + 2)
        return Region((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        content = self._content(width - 2)
        self._first = max(0, min(self._first, len(content) - (height - 2)))
        more = len(content) - self._first - (height - 2)
        below = f" {more} more lines below;" if more > 0 else ""
        name, other = ("glossary", "help") if self._is_glossary else ("help", "glossary")
        turn = f"{below} {_GLOSSARY_KEY} {other}, ↑/↓"
        forms = (f"{turn} PgUp/PgDn scroll, any other key closes", f"{turn} scroll")
        hint = fmt.first_fitting([self.hint(form) for form in forms], width - 16)
        return framed(content[self._first :], width, height, name, hint)

    def clicked(self, x: int, y: int) -> None:
        self.dismiss(None)

    def pressed(self, key: str, character: str | None) -> None:
        page = max(1, self.size.height - 6)
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": page, "pageup": -page}
        if key in steps:
            self._first += steps[key]
        elif key == _GLOSSARY_KEY:
            self._is_glossary = not self._is_glossary
            self._first = 0
        else:
            self.dismiss(None)


def _joined(blocks: Sequence[list[Line]]) -> list[Line]:
    return [line for block in blocks for line in (*block, ())][:-1]
