"""KV blocks handed from one engine to another: either every byte is loaded or none."""

from collections.abc import Iterator

import msgspec
import pytest
import torch

from stepscope.engine.execution.kv_frames import KVFrames
from stepscope.engine.handover.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
    folder,
    sweep,
)
from stepscope.engine.protocol.knobs import ConfigError

BLOCK_SIZE = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def caches(dtype: torch.dtype, num_blocks: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """Keys of three layers, then their values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, BLOCK_SIZE, 2, 8)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(6)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture
def sender() -> Iterator[SharedMemorySender]:
    made = SharedMemorySender(KVFrames(caches(torch.float32), "layout"), num_frames=6)
    yield made
    made.close()


def receiver_of(target: list[torch.Tensor], layout: str = "layout") -> SharedMemoryReceiver:
    return SharedMemoryReceiver(KVFrames(target, layout), BLOCK_SIZE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_blocks_arrive_unchanged_through_shared_memory(dtype: torch.dtype) -> None:
    source, target = caches(dtype), caches(dtype, num_blocks=5, seed=1)
    before = [each.clone() for each in target]
    sender = SharedMemorySender(KVFrames(source, "layout"), num_frames=4)
    try:
        ticket = sender.put([6, 0, 3])
        assert receiver_of(target).load(ticket, [4, 1, 2], num_present=1)
    finally:
        sender.close()
    for old, new, given in zip(before, target, source, strict=True):
        assert same(new[[1, 2]], given[[0, 3]])
        assert same(new[[0, 3, 4]], old[[0, 3, 4]])  # the first block was there already


def test_freed_or_overwritten_shared_blocks_are_not_loaded(sender: SharedMemorySender) -> None:
    target = caches(torch.float32, seed=1)
    receiver = receiver_of(target)
    first = sender.put([0, 1, 2, 3])
    assert sender.put([4, 5, 6]) is None  # no room
    sender.free(first)
    assert not receiver.load(first, [0, 1, 2, 3], 0)
    second = sender.put([4, 5, 6, 7])
    assert not receiver.load(first, [0, 1, 2, 3], 0)
    assert receiver.load(second, [0, 1, 2, 3], 0)


def test_a_hand_over_ticket_of_another_model_or_length_is_refused(
    sender: SharedMemorySender,
) -> None:
    ticket = sender.put([0, 1])
    receiver = receiver_of(caches(torch.float32))
    receiver.check(ticket, num_tokens=8)
    with pytest.raises(ConfigError, match="9 tokens lie in 3 blocks, not in 2"):
        receiver.check(ticket, num_tokens=9)
    with pytest.raises(ConfigError, match="serves another model"):
        receiver_of(caches(torch.float32), "another").check(ticket, num_tokens=8)


def test_a_hand_over_ticket_for_a_missing_file_or_frame_loads_nothing(
    sender: SharedMemorySender,
) -> None:
    ticket = sender.put([0])
    receiver = receiver_of(caches(torch.float32))
    for wrong in ({"file": f"stepscope-kv-{'0' * 32}"}, {"frames": [6]}, {"stamp": 99}):
        assert not receiver.load(msgspec.structs.replace(ticket, **wrong), [0], 0)


def test_only_shared_memory_files_of_dead_engines_are_removed(sender: SharedMemorySender) -> None:
    ticket = sender.put([0])
    left = folder() / f"stepscope-kv-{'f' * 32}"
    left.write_bytes(b"of an engine that was killed")
    sweep()
    assert not left.exists()
    assert (folder() / ticket.file).exists()


def test_without_shared_memory_the_error_says_what_to_do() -> None:
    frames = KVFrames(caches(torch.float32), "layout")
    frames.frame_bytes = 1 << 50
    before = set(folder().glob("stepscope-kv-*"))
    with pytest.raises(ConfigError, match=r"has no room for .* lower transfer_memory"):
        SharedMemorySender(frames, num_frames=4)
    mine = {path for path in folder().glob("stepscope-kv-*") if path.stat().st_size == 0}
    assert mine <= before
