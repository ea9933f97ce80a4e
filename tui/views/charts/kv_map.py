"""The KV map: the state of every KV block, in the order of block ids."""

import re
import string
from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

from stepscope.engine.protocol.wire import (
    CACHED,
    EMPTY,
    EngineInfo,
    GroupCounts,
    KVGroup,
    RequestView,
)
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run, first_fitting, framed, titled
from stepscope.tui.views.theme import KV_CACHED, KV_EMPTY, KV_GLYPHS, KV_SHARED, KV_STYLES, KV_USED

_GROUP_STYLES = ("kv_used", "decode", "prefill", "kv_shared")
_NAMES = ("free", "cached", "used", "shared")
_SHORT_DTYPES = {"float8_e4m3fn": "FP8", "bfloat16": "BF16"}
MAX_SAMPLED = 16_384  # most blocks to look at; of more, evenly spaced ones
_Blocks = TypeVar("_Blocks", "array[int]", bytearray)
_SAME = re.compile(r"((.)\2*)")
_STYLE_OF = dict(zip(KV_GLYPHS, KV_STYLES, strict=True))


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    body = [*state_map(frame, width - 4, height - 3), key(frame, width - 3)]
    title = _title(frame, width - 6)
    return framed([((" ", "text"), *line) for line in body], width, height, title)


def _title(frame: Frame, room: int) -> Line:
    """Return the title, with the step that the map is of: it is not drawn in every frame."""
    info, evictions = frame.state.info, frame.recent.evictions_per_s
    if info is None or info.num_blocks is None:
        return titled("KV map")
    lost = "" if evictions is None else f"  evict {evictions:.0f}/s"
    step = f"  as of step {frame.step:,}" if frame.step is not None and frame.view.live else ""
    few = f"  {info.num_blocks:,} blocks"
    abouts = (f"  {size_of_pool(info)}{lost}{step}", f"{few}{lost}{step}", f"{few}{step}", step)
    return first_fitting([titled("KV map", about) for about in abouts], room)


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
    """Return the line below the map: shares of block states if they fit, and their glyphs."""
    kv, names = frame.state.kv, list[Run]()
    for state in (KV_SHARED, KV_USED, KV_CACHED, KV_EMPTY):
        names += [(KV_GLYPHS[state], KV_STYLES[state]), (f"{_NAMES[state]} ", "muted")]
    if kv is None:
        return tuple(names)
    total = max(1, kv.num_blocks)
    used, cached = f"{kv.used / total:.0%} used  ", f"{kv.cached / total:.0%} cached   "
    return first_fitting([((said, "text"), *names) for said in (used + cached, used, "")], width)


def state_map(frame: Frame, width: int, rows: int) -> list[Line]:
    """Return a glyph for each KV block, merged so that all fit."""
    blocks = frame.state.blocks
    if blocks is None or not len(blocks.owner):
        text = "the engine does not report its blocks"
        return [((text[:width], "muted"),), *((),) * (rows - 1)]
    states = [
        KV_EMPTY if who == EMPTY else KV_CACHED if who == CACHED else KV_USED + (count > 1)
        for who, count in zip(sampled(blocks.owner), sampled(blocks.refs), strict=True)
    ]
    return map_of("".join([KV_GLYPHS[state] for state in states]), width, rows, _STYLE_OF)


def sampled(blocks: _Blocks) -> _Blocks:
    stride = -(-len(blocks) // MAX_SAMPLED)
    return blocks[::stride] if stride > 1 else blocks


def map_of(names: str, width: int, rows: int, styles: Mapping[str, str]) -> list[Line]:
    """Return a map of one character for each block, merged so that all fit."""
    cells = merged(names, width * rows)
    lines = (cells[y * width : (y + 1) * width] for y in range(rows))
    return [tuple((run, styles.get(one, "muted")) for run, one in _SAME.findall(x)) for x in lines]


def merged(names: str, num_cells: int) -> str:
    """Return the most frequent character of each group of neighbours; shared before used."""
    if len(names) <= num_cells:
        return names
    ends = [len(names) * cell // max(1, num_cells) for cell in range(num_cells + 1)]
    return "".join([_most(names[ends[n] : ends[n + 1]]) for n in range(num_cells)])


@lru_cache(maxsize=8192)
def _most(names: str) -> str:
    return max(set(names), key=lambda name: (names.count(name), KV_GLYPHS.find(name), name))


def holders_of(frame: Frame) -> list[RequestView]:
    views = (view for view in frame.state.requests.values() if view.num_blocks)
    return sorted(views, key=lambda view: (-view.num_blocks, view.request_id))


def groups_of(frame: Frame) -> list[tuple[KVGroup, GroupCounts, float]]:
    """Return the groups of KV blocks, with their counts and the share of the pool that they use.

    Empty if all blocks are of one group.
    """
    info, kv, counts = frame.state.info, frame.state.kv, frame.state.kv_groups
    if info is None or kv is None:
        return []
    total = max(1, kv.num_blocks)
    groups = zip(info.kv_groups or (), counts or (), strict=False)
    return [(group, each, each.used / total) for group, each in groups]


def unfilled_share(frame: Frame) -> float | None:
    """Return the share of token slots in held blocks that no token fills; None if unknown."""
    info, holders = frame.state.info, holders_of(frame)
    if info is None or not info.block_size or not holders or info.kv_groups is not None:
        return None
    held = sum(view.num_blocks for view in holders) * info.block_size
    return max(0.0, 1 - sum(view.num_computed_tokens for view in holders) / held)


def group_letter(group: int, owner: int = 0) -> str:
    """Return a block's letter on the map by group: a capital if it is used, small if cached."""
    letter = string.ascii_uppercase[min(group, 25)]
    return KV_GLYPHS[KV_EMPTY] if owner == EMPTY else letter.lower() if owner == CACHED else letter


def group_style(group: int) -> str:
    return _GROUP_STYLES[group % len(_GROUP_STYLES)]
