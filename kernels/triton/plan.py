"""How a step's attention is laid out on a GPU: tiles, launches, and how far contexts are split.

Fixed rules, so nothing is tuned at start, and nothing here needs Triton. The rules follow from what
a multiprocessor has. Decoding is bound by memory: the fewest rows a tensor core takes, and as many
tiles of keys and values in flight as two programs have room for. Prefill is bound by the tensor
cores: 64 rows for each group of four warps, which is what Hopper's `wgmma` multiplies.
"""

from typing import NamedTuple

import numpy as np
import torch

from stepscope.kernels.paged_attention import IntArray, PagedBatch

# Keys that are worth a program of their own.
MIN_SPLIT_KEYS = 256
MAX_SPLITS = 128
# Partial results of one launch; beyond it, there is enough work without splitting.
MAX_PARTIAL_BYTES = 128 << 20
# Rows of the smallest product of a tensor core.
MIN_ROWS = 16
# Rows that one `wgmma` multiplies.
WGMMA_ROWS = 64
# Two programs of decode share a multiprocessor.
DECODE_PROGRAMS = 2
# What a program uses of shared memory beside its tiles.
SHARED_RESERVE = 8 << 10


class Device(NamedTuple):
    """What the rules need to know of where the kernels run."""

    num_sms: int
    shared_bytes: int  # that one program may use
    is_interpreted: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """The device itself, or, where Triton interprets its kernels, a small one of its kind."""
        if device.type != "cuda":
            return cls(num_sms=4, shared_bytes=227 << 10, is_interpreted=True)
        properties = torch.cuda.get_device_properties(device)
        # Names of torch 2.11 and 2.13; 48 KiB is what every CUDA device has.
        shared = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
        return cls(num_sms=properties.multi_processor_count, shared_bytes=int(shared))


class Tile(NamedTuple):
    """Rows are queries times heads of a group; keys are taken this many at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """One launch of `_attend`: the requests with one query, or those with more."""

    decode: bool
    tile: Tile
    num_blocks: int  # of queries
    num_splits: int


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
    """Decodes and chunks each get the tile that suits them, and are split by their own work."""
    group = num_heads // num_kv_heads
    num_queries = np.diff(batch.query_starts)
    launches = []
    is_decode = num_queries == 1
    if is_decode.any():
        tile = decode_tile(group, head_dim, itemsize, device)
        ends = batch.context_lens[is_decode]
        splits = num_splits(
            _num_tiles(ends, 1, sliding_window, tile.keys), num_kv_heads, device.num_sms, tile.keys
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
            tile.keys,
        )
        num_blocks = int(batch.query_starts[-1]) // at_once + len(num_queries)
        launches.append(Launch(False, tile, num_blocks, splits))
    part_bytes = int(batch.query_starts[-1]) * num_heads * head_dim * 4
    most = max(1, MAX_PARTIAL_BYTES // max(1, part_bytes))
    return [each._replace(num_splits=min(each.num_splits, most)) for each in launches]


def _num_tiles(
    ends: IntArray, num_queries: int, sliding_window: int | None, tile_keys: int
) -> IntArray:
    """Tiles of keys up to `ends` that `num_queries` queries before each can see, at the most."""
    visible = ends
    if sliding_window is not None:
        visible = np.minimum(ends, sliding_window + num_queries - 1)
    return -(-visible // tile_keys)


def num_splits(num_tiles: IntArray, num_kv_heads: int, num_sms: int, tile_keys: int) -> int:
    """Programs to share each row of work among; `num_tiles` has the key tiles of every row.

    A program gets what two programs on every multiprocessor would get each if all work were shared
    evenly, and no less than `MIN_SPLIT_KEYS`: one long context among short ones is split, many of
    equal length are not.
    """
    even_share = -(-int(num_tiles.sum()) * num_kv_heads // (2 * num_sms))
    share = max(even_share, MIN_SPLIT_KEYS // tile_keys, 1)
    return max(1, min(-(-int(num_tiles.max()) // share), MAX_SPLITS))


def decode_tile(group: int, head_dim: int, itemsize: int, device: Device) -> Tile:
    """For one query of each head of a group."""
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
    """For chunks of which the longest has `most_queries` queries."""
    if itemsize > 2 or group * most_queries <= 2 * MIN_ROWS:
        rows = 2 * MIN_ROWS
    elif _row_bytes(head_dim, itemsize) > 256:
        rows = WGMMA_ROWS  # a program's registers end here
    else:
        rows = 2 * WGMMA_ROWS
    return _prefill_tile(max(rows, _power_of_2(group)), head_dim, itemsize, device)


def _prefill_tile(rows: int, head_dim: int, itemsize: int, device: Device) -> Tile:
    row_bytes = _row_bytes(head_dim, itemsize)
    keys = _keys(row_bytes, itemsize)
    left = device.shared_bytes - SHARED_RESERVE - rows * row_bytes
    # A product that is still running holds on to one more tile of keys and of values.
    num_held = left // (2 * keys * row_bytes) - 1
    num_warps = 8 if itemsize > 2 else 4 * max(1, rows // WGMMA_ROWS)
    return Tile(rows, keys, num_warps, _num_stages(num_held, most=2))


def _keys(row_bytes: int, itemsize: int) -> int:
    if itemsize > 2:
        return 16  # products in plain fp32 live in registers
    return 64 if row_bytes <= 256 else 32


def _num_stages(num_held: int, *, most: int) -> int:
    """Stages for which Triton keeps up to `num_held` tiles in flight.

    Where a tile lies is read from the block table first, so each one is two loads, one after the
    other: one tile in flight takes three stages, each further one two more.
    """
    return 1 + 2 * min(most, max(1, num_held))


def _row_bytes(head_dim: int, itemsize: int) -> int:
    return max(MIN_ROWS, _power_of_2(head_dim)) * itemsize


def _power_of_2(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << (number - 1).bit_length()


def warm_up_steps(max_model_len: int) -> list[tuple[int, int]]:
    """(tokens before, tokens in it) of steps of one request that need every kernel there is.

    Each is compiled once for a model; in the step of a request that would take seconds.
    """
    long = max(0, min(3 * MIN_SPLIT_KEYS, max_model_len) - 3 * MIN_ROWS)
    counts = (1, 2, 3 * MIN_ROWS)  # the tile of decodes, the smaller and the larger of chunks
    return [
        (before, count)
        for before in dict.fromkeys((0, long))
        for count in dict.fromkeys(min(each, max_model_len) for each in counts)
    ]
