"""Plans a step's attention on a GPU: tile sizes, launches, and how far contexts are split.

The rules are fixed, so nothing is tuned at start, and nothing here needs Triton. They follow from
the resources of a multiprocessor:
- Decodes are bound by memory. They use the fewest rows that a tensor core supports, and as many
  tiles of keys and values in flight as two programs have room for.
- Prefill is bound by the tensor cores. It uses 64 rows for each group of four warps, the size of
  Hopper's `wgmma`.
"""

from typing import NamedTuple

import numpy as np
import torch

from stepscope.kernels.paged_attention import IntArray, PagedBatch

# A context that is split, for the steps that warm up.
LONG_CONTEXT = 16384
# Numbers of parts that are considered.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Most bytes of partial results in one launch; a larger one has enough work without splitting.
MAX_PARTIAL_BYTES = 128 << 20
# Rows of a tensor core's smallest product.
MIN_ROWS = 16
# Rows that one `wgmma` multiplies.
WGMMA_ROWS = 64
# Two programs of decode share a multiprocessor.
DECODE_PROGRAMS = 2
# Shared memory that a program uses beside its tiles.
SHARED_RESERVE = 8 << 10


class Device(NamedTuple):
    num_sms: int
    shared_bytes: int  # shared memory that one program may use
    is_interpreted: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Return the properties of a GPU; for a CPU (Triton's interpreter), of a small GPU."""
        if device.type != "cuda":
            return cls(num_sms=4, shared_bytes=227 << 10, is_interpreted=True)
        properties = torch.cuda.get_device_properties(device)
        # Names of torch 2.11 and 2.13; 48 KiB is what every CUDA device has.
        shared = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
        return cls(num_sms=properties.multi_processor_count, shared_bytes=int(shared))


class Tile(NamedTuple):
    """Rows and keys that a program computes at a time, and its launch options."""

    rows: int  # queries times heads of a group
    keys: int  # processed at a time
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """One launch of `_attend`: for requests with one query (`decode`), or for those with more."""

    decode: bool
    tile: Tile
    num_blocks: int  # blocks of queries
    num_splits: int
    first_block: int = 0  # those before it belong to requests that the launch skips


def plan_launches(
    batch: PagedBatch,
    sliding_window: int | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    device: Device,
) -> list[Launch]:
    """Plan the launches of a step: one for decodes and one for chunks, each with its own tile."""
    group = num_heads // num_kv_heads
    num_queries = np.diff(batch.query_starts)
    launches = []
    is_decode = num_queries == 1
    if is_decode.any():
        tile = decode_tile(group, head_dim, itemsize, device)
        ends = batch.context_lens[is_decode]
        splits = num_splits(
            _num_tiles(ends, 1, sliding_window, tile.keys),
            num_kv_heads,
            DECODE_PROGRAMS * device.num_sms,
            len(ends) * num_heads,
        )
        launches.append(Launch(True, tile, len(num_queries), splits))
    is_chunk = num_queries > 1
    if is_chunk.any():
        counts = num_queries[is_chunk]
        tile = prefill_tile(group, int(counts.max()), head_dim, itemsize, device)
        at_once = tile.rows // group
        # The last key of each block of queries, all blocks of all chunks one after the other.
        blocks = -(-counts // at_once)
        index = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        seen = np.minimum((index + 1) * at_once, np.repeat(counts, blocks))
        ends = np.repeat(batch.context_lens[is_chunk] - counts, blocks) + seen
        splits = num_splits(
            _num_tiles(ends, at_once, sliding_window, tile.keys),
            num_kv_heads,
            device.num_sms,
            int(batch.query_starts[-1]) * num_heads,
        )
        first, last = np.flatnonzero(is_chunk)[[0, -1]]
        first_block = int(batch.query_starts[first]) // at_once + int(first)
        end_block = int(batch.query_starts[last + 1]) // at_once + int(last) + 1
        launches.append(Launch(False, tile, end_block - first_block, splits, first_block))
    part_bytes = int(batch.query_starts[-1]) * num_heads * head_dim * 4
    most = max(1, MAX_PARTIAL_BYTES // max(1, part_bytes))
    return [each._replace(num_splits=min(each.num_splits, most)) for each in launches]


def _num_tiles(
    ends: IntArray, num_queries: int, sliding_window: int | None, tile_keys: int
) -> IntArray:
    """Number of key tiles each block of queries attends to; `ends`: keys up to its last query."""
    visible = ends
    if sliding_window is not None:
        visible = np.minimum(ends, sliding_window + num_queries - 1)
    return -(-visible // tile_keys)


# Costs of a split, in the time of one tile: of launching the merge, of the rows that it merges at a
# time, of reading one more part of each, and of a program without work. From one H200, in whole
# numbers: a tile takes 1 to 2 us.
MERGE, MERGED_AT_ONCE, PARTS_AT_ONCE, IDLE = 3.0, 500, 16, 0.5
# A further split must save this share of the time.
LEAST_GAIN = 0.05


def num_splits(num_tiles: IntArray, num_kv_heads: int, num_slots: int, num_merged: int) -> int:
    """Return among how many programs the keys of each query block are split.

    The smallest number with about the shortest estimated time. So one long context among short ones
    is split, but contexts of equal length only as far as there are programs to run at a time.

    Args:
        num_tiles: number of key tiles of each query block.
        num_slots: programs that run at a time.
        num_merged: rows to merge after a split.
    """
    num_programs = len(num_tiles) * num_kv_heads
    even = int(num_tiles.sum()) * num_kv_heads / num_slots
    longest = int(num_tiles.max())

    def estimate(splits: int) -> float:
        time = max(-(-longest // splits), even)
        if splits == 1:
            return time
        merge = MERGE + num_merged / MERGED_AT_ONCE + splits / PARTS_AT_ONCE
        return time + merge + IDLE * num_programs * splits / num_slots

    times = {each: estimate(each) for each in SPLITS if each <= max(1, longest)}
    enough = min(times.values()) / (1 - LEAST_GAIN)
    return next(each for each, time in times.items() if time <= enough)


def decode_tile(group: int, head_dim: int, itemsize: int, device: Device) -> Tile:
    """Return the tile for decodes; its rows are the query heads that share a KV head."""
    rows = max(MIN_ROWS, _power_of_2(group))
    if rows >= WGMMA_ROWS:
        return _prefill_tile(rows, head_dim, itemsize, device)
    row_bytes = _row_bytes(head_dim, itemsize)
    keys = _keys(row_bytes, itemsize)
    left = device.shared_bytes // DECODE_PROGRAMS - SHARED_RESERVE - rows * row_bytes
    return Tile(rows, keys, 4, _num_stages(left // (2 * keys * row_bytes), most=3))


def prefill_tile(
    group: int, most_queries: int, head_dim: int, itemsize: int, device: Device
) -> Tile:
    """Return the tile for chunks, the longest of which has `most_queries` queries."""
    if itemsize > 2 or group * most_queries <= 2 * MIN_ROWS:
        rows = 2 * MIN_ROWS
    elif _row_bytes(head_dim, itemsize) > 256:
        rows = WGMMA_ROWS  # more would not fit into a program's registers
    else:
        rows = 2 * WGMMA_ROWS
    return _prefill_tile(max(rows, _power_of_2(group)), head_dim, itemsize, device)


def _prefill_tile(rows: int, head_dim: int, itemsize: int, device: Device) -> Tile:
    row_bytes = _row_bytes(head_dim, itemsize)
    keys = _keys(row_bytes, itemsize)
    left = device.shared_bytes - SHARED_RESERVE - rows * row_bytes
    # A product that is still running keeps one more tile of keys and of values.
    num_held = left // (2 * keys * row_bytes) - 1
    num_warps = 8 if itemsize > 2 else 4 * max(1, rows // WGMMA_ROWS)
    return Tile(rows, keys, num_warps, _num_stages(num_held, most=2))


def _keys(row_bytes: int, itemsize: int) -> int:
    if itemsize > 2:
        return 16  # products in plain fp32 use registers
    return 64 if row_bytes <= 256 else 32


def _num_stages(num_held: int, *, most: int) -> int:
    """Return the number of pipeline stages with which Triton keeps `num_held` tiles in flight.

    At most `most` tiles. A tile takes two loads, one after the other: its block's number from the
    block table, then its content. So the first tile in flight needs three stages, and each further
    one two more.
    """
    return 1 + 2 * min(most, max(1, num_held))


def _row_bytes(head_dim: int, itemsize: int) -> int:
    return max(MIN_ROWS, _power_of_2(head_dim)) * itemsize


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def warm_up_steps(max_model_len: int) -> list[tuple[int, int]]:
    """Return steps of one request that need every kernel: (tokens before, tokens in it)."""
    long = max(0, min(LONG_CONTEXT, max_model_len) - 3 * MIN_ROWS)
    counts = (1, 2, 3 * MIN_ROWS)  # for the tile of decodes, and the small and large tile of chunks
    return [
        (before, count)
        for before in dict.fromkeys((0, long))
        for count in dict.fromkeys(min(each, max_model_len) for each in counts)
    ]
