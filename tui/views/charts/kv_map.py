"""The KV map: the state of every KV block, in the order of block ids."""

import re
import string
from array import array
from functools import lru_cache
from itertools import pairwise, product, starmap

from stepscope.engine.protocol.wire import CACHED, EMPTY, EngineInfo, GroupCounts, KVGroup
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import beside
from stepscope.tui.views.lines import Line, Run, clean, fitted, framed
from stepscope.tui.views.theme import KV_CACHED, KV_EMPTY, KV_GLYPHS, KV_SHARED, KV_STYLES, KV_USED

_GROUP_STYLES = ("kv_used", "decode", "prefill", "kv_shared")
_NAMES = ("free", "cached", "used", "shared")
_SHORT_DTYPES = {"float8_e4m3fn": "FP8", "bfloat16": "BF16"}
_OWNERS_WIDTH = 26
_MAX_SAMPLED = 16_384  # most blocks to look at; of more, evenly spaced ones
_FEW = 3  # blocks in a cell, at most, for the lookup table


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    inner = width - 4
    with_owners = inner >= 90
    map_width = inner - (_OWNERS_WIDTH if with_owners else 0)
    rows = height - 3
    body = state_map(frame, map_width, rows)
    if with_owners:
        body = beside([fitted(line, map_width + 3) for line in body], _owners(frame, rows))
    body = [((" ", "text"), *line) for line in body]
    body.append(((" ", "text"), *key(frame, inner + 1)))
    return framed(body, width, height, _title(frame, width - 6))


def _title(frame: Frame, room: int) -> Line:
    """Return the title, with the step that the map is of: it is not drawn in every frame."""
    info = frame.state.info
    if info is None or info.num_blocks is None:
        return (("KV map", "title"),)
    size = size_of_pool(info)
    evictions = frame.rates.evictions_per_s
    lost = "" if evictions is None else f"  evict {evictions:.0f}/s"
    step = f"  as of step {frame.step:,}" if frame.step is not None and frame.view.live else ""
    few = size.partition(" ×")[0].partition(" =")[0]
    forms = (f"  {size}{lost}{step}", f"  {few}{lost}{step}", f"  {few}{step}", step)
    said = next((form for form in forms if len(form) + 6 <= room), "")
    return (("KV map", "title"), (said, "muted"))


def size_of_pool(info: EngineInfo) -> str:
    """Return the number of KV blocks, their size in tokens, and the dtype if not the model's."""
    words = [f"{info.num_blocks or 0:,} blocks"]
    if info.kv_groups is not None:
        words += [] if info.kv_tokens is None else [f"= room for {info.kv_tokens:,} tok"]
    elif info.block_size is not None:
        words.append(f"× {info.block_size} tok")
    if info.kv_cache_dtype not in (None, "auto", info.dtype):
        words.append(f"in {_SHORT_DTYPES.get(info.kv_cache_dtype, info.kv_cache_dtype)}")
    return " ".join(words)


def key(frame: Frame, width: int) -> Line:
    """Return the line below the map: shares of block states that fit, and what the glyphs mean."""
    kv = frame.state.kv
    figures = ""
    if kv is not None:
        total = max(1, kv.used + kv.cached + kv.empty)
        figures = f"{kv.used / total:.0%} used  {kv.cached / total:.0%} cached   "
    names = sum(len(_NAMES[state]) + 2 for state in (KV_SHARED, KV_USED, KV_CACHED, KV_EMPTY))
    while figures and len(figures) + names - 1 > width:
        figures = figures.rstrip().rpartition("  ")[0] + "  " if "  " in figures.strip() else ""
    runs: list[Run] = [(figures, "text")]
    for state in (KV_SHARED, KV_USED, KV_CACHED, KV_EMPTY):
        runs += [(KV_GLYPHS[state], KV_STYLES[state]), (f"{_NAMES[state]} ", "muted")]
    return tuple(runs)


def state_map(frame: Frame, width: int, rows: int) -> list[Line]:
    owner, refs = frame.state.block_owner, frame.state.block_refs
    if owner is None or refs is None or not len(owner):
        text = "the engine does not report its blocks"
        return [((text[:width], "muted"),), *((),) * (rows - 1)]
    states = block_states(owner, refs)
    num_cells = width * rows
    cells = states if len(states) <= num_cells else merged(states, num_cells)
    return [state_runs(cells[y * width : (y + 1) * width]) for y in range(rows)]


def block_states(owner: "array[int]", refs: "array[int]") -> bytes:
    """Return the state of each KV block; of very many blocks, only of evenly spaced ones."""
    stride = -(-len(owner) // _MAX_SAMPLED)
    if stride > 1:
        owner, refs = owner[::stride], refs[::stride]
    return bytes(
        [
            KV_EMPTY
            if who == EMPTY
            else KV_CACHED
            if who == CACHED
            else KV_SHARED
            if count > 1
            else KV_USED
            for who, count in zip(owner, refs, strict=True)
        ]
    )


def merged(states: bytes, num_cells: int) -> bytes:
    """Return the most frequent state of each group of neighbours; shared before used, and so on."""
    most = _of_few if len(states) <= _FEW * num_cells else _of_many
    return bytes([most(states[group]) for group in _groups(len(states), num_cells)])


@lru_cache(maxsize=4)
def _groups(num_states: int, num_cells: int) -> list[slice]:
    ends = [num_states * cell // max(1, num_cells) for cell in range(num_cells + 1)]
    return list(starmap(slice, pairwise(ends)))


def _most(states: bytes) -> int:
    return max(range(KV_SHARED, -1, -1), key=states.count)


_of_many = lru_cache(maxsize=8192)(_most)
# A table lookup takes a third of the time, and there are few different small groups.
_of_few = {
    bytes(states): _most(bytes(states))
    for size in range(_FEW + 1)
    for states in product(range(KV_SHARED + 1), repeat=size)
}.__getitem__


_TO_GLYPHS = dict(enumerate(KV_GLYPHS))
_STYLE_OF = dict(zip(KV_GLYPHS, KV_STYLES, strict=True))
_SAME = re.compile(r"((.)\2*)")


def state_runs(cells: bytes) -> Line:
    text = cells.decode("latin-1").translate(_TO_GLYPHS)
    return tuple([(run, _STYLE_OF[glyph]) for run, glyph in _SAME.findall(text)])


def _owners(frame: Frame, rows: int) -> list[Line]:
    """Return lines that name the requests with most KV blocks.

    Then the share of the pool that each group uses; with one group, the share of slots not filled.
    """
    state = frame.state
    holders = sorted(
        (view for view in state.requests.values() if view.num_blocks),
        key=lambda view: -view.num_blocks,
    )
    if not holders and state.kv is None:
        return [()] * rows
    unfilled = fmt.percent(unfilled_share(frame))
    last: list[Line] = [
        ((f"{clean(group.kind, 17):<18}", "text"), (f"{share:>4.0%}", "muted"))
        for group, _, share in groups_of(frame)
    ] or [(("unfilled ", "muted"), (unfilled, "text"), (" of slots", "muted"))]
    lines: list[Line] = [(("holds most", "muted"),)]
    for view in holders[: max(0, rows - 1 - len(last))]:
        name = clean(request_name(view.request_id), 10)
        lines.append(((f"{name:<10}", "text"), (f"{view.num_blocks:>6} blocks", "muted")))
    lines += [()] * (rows - len(last) - len(lines))
    return [*lines, *last][:rows]


def groups_of(frame: Frame) -> list[tuple[KVGroup, GroupCounts, float]]:
    """Return the groups of KV blocks, with their counts and the share of the pool that they use.

    Empty if all blocks are of one group.
    """
    info, kv, counts = frame.state.info, frame.state.kv, frame.state.kv_groups
    if info is None or kv is None:
        return []
    total = max(1, kv.used + kv.cached + kv.empty)
    groups = zip(info.kv_groups or (), counts or (), strict=False)
    return [(group, each, each.used / total) for group, each in groups]


def unfilled_share(frame: Frame) -> float | None:
    """Return the share of token slots in held blocks that no token fills; None if unknown."""
    info = frame.state.info
    holders = [view for view in frame.state.requests.values() if view.num_blocks]
    if info is None or not info.block_size or not holders or info.kv_groups is not None:
        return None
    held = sum(view.num_blocks for view in holders) * info.block_size
    filled = sum(view.num_computed_tokens for view in holders)
    return max(0.0, 1 - filled / held)


def group_letter(group: int, owner: int = 0) -> str:
    """Return a block's letter on the map by group: a capital if it is used, small if cached."""
    letter = string.ascii_uppercase[min(group, 25)]
    return KV_GLYPHS[KV_EMPTY] if owner == EMPTY else letter.lower() if owner == CACHED else letter


def group_style(group: int) -> str:
    return _GROUP_STYLES[group % len(_GROUP_STYLES)]
