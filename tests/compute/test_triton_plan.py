"""The layout of attention on a GPU: work is split if that helps, and tiles fit the device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.kernels.paged_attention import PagedBatch
from stepscope.kernels.triton.plan import (
    MAX_PARTIAL_BYTES,
    SPLITS,
    Device,
    Launch,
    decode_tile,
    plan_launches,
    prefill_tile,
)

H200 = Device(num_sms=132, shared_bytes=227 << 10)
L4 = Device(num_sms=58, shared_bytes=99 << 10)


def plan(
    lengths: list[tuple[int, int]],
    *,
    window: int | None = None,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    device: Device = H200,
) -> list[Launch]:
    """`lengths` is (tokens before the step, tokens in it) for each request."""
    counts = np.array([new for _, new in lengths])
    batch = PagedBatch(
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=np.array([before + new for before, new in lengths]),
        block_tables=np.zeros((len(lengths), 1), dtype=np.int64),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_size=16,
        device=torch.device("cpu"),
    )
    return plan_launches(
        batch,
        window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        itemsize=2,
        device=device,
    )


@pytest.mark.parametrize(
    ("lengths", "window", "least", "most"),
    [
        ([(16384, 1)], None, -(-H200.num_sms // 8), SPLITS[-1]),  # over the whole GPU
        ([(16384, 1)], 512, 1, 8),
        ([(16384, 1)], 128, 1, 1),
        ([(200, 1)], None, 1, 1),  # it is not worth it
        ([(4096, 1)] * 64, None, 1, 1),
        ([(4096, 1)] * 256, None, 1, 1),
        # Nor in graphs, planned for the longest contexts: short ones would be split, too.
        ([(20479, 1)] * 32, None, 1, 1),
        ([(20479, 1)] * 64, None, 1, 1),
        # A threshold on the batch size would not split it, and the step would wait for one program.
        ([(100, 1)] * 63 + [(16384, 1)], None, 9, SPLITS[-1]),
        ([(0, 512)], None, 1, 1),
        ([(14336, 512)], None, 1, 1),  # 128 programs keep 132 multiprocessors busy
        ([(14336, 64)], None, 5, SPLITS[-1]),
    ],
)
def test_a_context_is_split_if_that_saves_more_than_the_merge_costs(
    lengths: list[tuple[int, int]], window: int | None, least: int, most: int
) -> None:
    (launch,) = plan(lengths, window=window)
    assert least <= launch.num_splits <= most


def test_decodes_and_chunks_of_a_mixed_step_are_laid_out_apart() -> None:
    decode, prefill = plan([(8000, 1), (0, 2048), (8000, 1)])
    assert decode.decode
    assert not prefill.decode
    assert decode.tile.rows < prefill.tile.rows
    assert decode.num_splits > 1
    assert prefill.num_splits == 1  # 64 blocks of queries times 8 heads are enough


def test_partial_results_of_split_contexts_have_bounded_memory() -> None:
    (launch,) = plan([(100_000, 512)])
    assert launch.num_splits * 512 * 32 * 128 * 4 <= MAX_PARTIAL_BYTES


pairs = st.tuples(st.integers(0, 5000), st.one_of(st.integers(0, 3), st.integers(0, 600)))


@settings(max_examples=60)
@given(
    st.lists(pairs, min_size=1, max_size=40),
    st.sampled_from([None, 1, 100, 4096]),
    st.sampled_from([(1, 1), (6, 2), (7, 1), (32, 8), (64, 1)]),
    st.sampled_from([H200, L4]),
)
def test_in_any_step_every_query_is_covered_by_a_triton_program(
    lengths: list[tuple[int, int]], window: int | None, heads: tuple[int, int], device: Device
) -> None:
    num_heads, num_kv_heads = heads
    launches = plan(
        lengths, window=window, num_heads=num_heads, num_kv_heads=num_kv_heads, device=device
    )
    counts = np.array([new for _, new in lengths])
    assert [launch.decode for launch in launches] == [True] * bool((counts == 1).any()) + [
        False
    ] * bool((counts > 1).any())
    starts = np.concatenate([[0], np.cumsum(counts)])
    group = num_heads // num_kv_heads
    for launch in launches:
        assert 1 <= launch.num_splits <= SPLITS[-1]
        assert launch.tile.rows >= group
        if launch.decode:
            assert launch.num_blocks == len(lengths)
            continue
        # Where the kernel looks for the blocks of each request.
        queries = launch.tile.rows // group
        first = starts // queries + np.arange(len(starts))
        assert (np.diff(first) * queries >= counts).all()
        chunks = np.flatnonzero(counts > 1)
        assert launch.first_block == first[chunks[0]]
        assert launch.first_block + launch.num_blocks == first[chunks[-1] + 1]


@pytest.mark.parametrize("device", [H200, L4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("group", [1, 5, 8, 64])
def test_attention_tiles_fit_into_shared_memory(
    device: Device, head_dim: int, itemsize: int, group: int
) -> None:
    """Queries, and keys and values for each tile in flight: two more stages for each further one.

    In half precision: products in fp32 do not go through shared memory as a whole.
    """
    for tile in (
        decode_tile(group, head_dim, itemsize, device),
        prefill_tile(group, 2, head_dim, itemsize, device),
        prefill_tile(group, 2000, head_dim, itemsize, device),
    ):
        row_bytes = (1 << (head_dim - 1).bit_length()) * itemsize
        num_held = (tile.num_stages - 1) // 2
        assert num_held >= 1
        assert (tile.rows + num_held * 2 * tile.keys) * row_bytes <= device.shared_bytes
        assert tile.rows % 16 == 0
        assert tile.num_warps in (4, 8)
