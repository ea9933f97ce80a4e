"""The block accounting that the scheduler, the runner and the KV map rely on."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import CACHED, EMPTY, BlockMove, BlockRun, Finished
from stepscope.engine.scheduling import block_pool
from stepscope.engine.scheduling.block_pool import BlockPool
from stepscope.engine.scheduling.kv_cache import KVCacheManager, PrefixHashes
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from tests.support.engines.kv_integrity import check_integrity

BLOCK_SIZE = 4
needs_compiled = pytest.mark.skipif(block_pool.compiled is None, reason="it could not be compiled")


def make_request(number: int, prompt: list[int]) -> Request:
    return Request(number, prompt, SamplingParams(max_tokens=8), arrival_ns=number)


def manager(num_blocks: int = 10) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE)


def compute(kv: KVCacheManager, request: Request) -> list[int]:
    """Admit a request, compute its whole prompt, and return the prefix that was hit."""
    hit = kv.lookup(request)
    kv.admit(request, hit, request.num_tokens)
    kv.register(request, request.num_tokens)
    return hit


def test_prefix_hashes_are_computed_only_as_far_as_needed() -> None:
    kv = manager()
    request = make_request(1, list(range(33)))
    kv.lookup(request)
    assert len(request.block_hashes) == 1  # the first block is a miss: the others cannot be hits
    compute(kv, request)
    assert len(request.block_hashes) == 8
    again = make_request(2, list(range(33)))
    kv.lookup(again)
    assert again.block_hashes == request.block_hashes


def test_a_shared_block_is_owned_by_its_latest_holder_until_that_request_ends() -> None:
    kv = manager()
    prompt = list(range(9))
    first, second, third = (make_request(number, prompt) for number in (1, 2, 3))
    for request in (first, second, third):
        compute(kv, request)
    assert kv.runs()[0] == BlockRun(2, 3, 3)
    kv.free(third)
    check_integrity(kv)
    assert kv.runs()[0] == BlockRun(2, 2, 2)
    kv.free(first)
    assert kv.runs()[0] == BlockRun(2, 2, 1)
    kv.free(second)
    assert kv.runs()[0] == BlockRun(2, CACHED, 0)
    check_integrity(kv)


def test_empty_blocks_are_reused_before_cached_ones_and_latest_freed_first() -> None:
    kv = manager(num_blocks=4)
    cached, empty = make_request(1, list(range(5))), make_request(2, [9, 9, 9])
    compute(kv, cached)  # blocks 0 (full) and 1
    compute(kv, empty)  # block 2
    kv.free(cached)
    kv.free(empty)
    compute(kv, other := make_request(3, [8] * 11))
    assert other.block_table == [2, 1, 3]
    assert kv.counts().cached == 1
    assert kv.lookup(cached) == [0]


def test_when_one_of_two_blocks_with_equal_tokens_is_evicted_the_other_stays_cached() -> None:
    kv = manager(num_blocks=6)
    first, second = make_request(1, [5] * 5), make_request(2, [5] * 5)
    for request in (first, second):  # both computed before either was registered
        kv.admit(request, [], request.num_tokens)
    for request in (first, second):
        kv.register(request, request.num_tokens)
    assert kv.lookup(make_request(3, [5] * 5)) == [0]
    kv.free(first)
    compute(kv, make_request(4, [6] * 16))  # overwrites what the first one left
    check_integrity(kv)
    assert kv.lookup(make_request(5, [5] * 5)) == [2]


def test_block_moves_hold_the_last_state_of_each_changed_block_once() -> None:
    kv = manager(num_blocks=3)
    compute(kv, request := make_request(7, [1] * 5))
    kv.free(request)
    assert kv.drain_moves() == [BlockMove(0, CACHED, 0), BlockMove(1, EMPTY, 0)]
    assert kv.drain_moves() == []


def test_a_prefix_cache_reset_keeps_blocks_of_running_requests_but_no_hits() -> None:
    kv = manager()
    running, gone = make_request(1, [1] * 9), make_request(2, [2] * 9)
    for request in (running, gone):
        compute(kv, request)
    kv.free(gone)
    kv.drain_moves()
    assert kv.reset_prefix_cache() == 4
    assert {move.owner for move in kv.drain_moves()} == {EMPTY}
    assert kv.lookup(make_request(3, [1] * 9)) == kv.lookup(make_request(4, [2] * 9)) == []
    assert running.block_table == [0, 1, 2]
    kv.free(running)
    assert kv.counts().cached == 0
    check_integrity(kv)


def test_with_prefix_caching_off_nothing_is_looked_up_and_nothing_registered() -> None:
    kv = manager()
    prompt = [1] * 9
    compute(kv, known := make_request(1, prompt))
    kv.enable_prefix_caching = False
    assert kv.lookup(make_request(2, prompt)) == []
    compute(kv, unknown := make_request(3, [2] * 9))
    kv.free(known)
    kv.free(unknown)
    assert kv.counts().cached == 2
    kv.enable_prefix_caching = True
    assert kv.lookup(make_request(4, prompt)) == [0, 1]
    assert kv.lookup(make_request(5, [2] * 9)) == []
    # What was filled meanwhile is registered by the next step of a request that still runs.
    kv.enable_prefix_caching = False
    compute(kv, running := make_request(6, [3] * 9))
    kv.enable_prefix_caching = True
    kv.register(running, 9)
    assert len(kv.lookup(make_request(7, [3] * 9))) == 2
    check_integrity(kv)


def test_wrong_block_tables_and_counts_are_reported() -> None:
    kv = manager()
    compute(kv, first := make_request(1, [1] * 5))
    compute(kv, make_request(2, [2] * 5))
    first.num_computed_tokens = 9
    with pytest.raises(AssertionError, match="9 tokens computed, 2 blocks held"):
        check_integrity(kv)
    first.num_computed_tokens, first.block_table[0] = 5, 2
    with pytest.raises(AssertionError, match="block 0: 0 holders, 1 counted"):
        check_integrity(kv)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 are free"):
        BlockPool(2).take(3, owner=1)


# Block moves of a step


def told(raw: msgspec.Raw | None) -> list[BlockMove]:
    return [] if raw is None else msgspec.msgpack.decode(raw, type=list[BlockMove])


class Ways:
    """The same cache with block moves as objects, as msgpack from Python, and compiled."""

    def __init__(self) -> None:
        self.caches = [manager(num_blocks=14) for _ in range(3)]
        self.requests: list[list[Request]] = []  # of each cache, the requests that hold blocks
        self.num_admitted = 0

    def admit(self, prompt: list[int]) -> None:
        self.num_admitted += 1
        requests = [make_request(self.num_admitted, prompt) for _ in self.caches]
        kv, request = self.caches[0], requests[0]
        if kv.num_blocks_taken(len(prompt), kv.lookup(request)) <= kv.num_free_blocks:
            for each, kv in zip(requests, self.caches, strict=True):
                compute(kv, each)
            self.requests.append(requests)

    def free(self, place: int) -> None:
        if self.requests:
            requests = self.requests.pop(place % len(self.requests))
            for request, kv in zip(requests, self.caches, strict=True):
                kv.free(request)

    def drain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        as_objects, plain, compiled = self.caches
        expected = as_objects.counts(), as_objects.drain_moves()
        with monkeypatch.context() as patch:
            patch.setattr(block_pool, "compiled", None)
            drained = [plain.drain()]
            assert plain.runs() == as_objects.runs()
        drained.append(compiled.drain())
        for counts, moves in drained:
            assert (counts, told(moves)) == expected
            assert (moves is None) == (not expected[1])
        payloads = {bytes(moves) for _, moves in drained if moves is not None}
        assert len(payloads) <= 1
        assert as_objects.runs() == plain.runs() == compiled.runs()


@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(1, 2), min_size=1, max_size=12),  # a prompt
            st.integers(0, 9),  # the request that ends
            st.none(),  # the end of a step
        ),
        max_size=40,
    )
)
def test_block_moves_are_encoded_equally_compiled_or_not(
    actions: list[list[int] | int | None],
) -> None:
    ways = Ways()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for action in [*actions, None]:
            if isinstance(action, list):
                ways.admit(action)
            elif action is None:
                ways.drain(monkeypatch)
            else:
                ways.free(action)
    for kv in ways.caches:
        check_integrity(kv)


@needs_compiled
@pytest.mark.parametrize("number", [0, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**32, 2**39 - 1])
def test_compiled_block_moves_encode_each_number_in_its_shortest_form(number: int) -> None:
    told = bytearray(16)
    payload = block_pool.compiled({1: None, 0: None}, told, [3, 1], [5, number], [None, None])
    moves = [BlockMove(1, number, 1), BlockMove(0, 5, 3)]
    assert payload == msgspec.msgpack.encode(moves)
    assert memoryview(told).cast("q").tolist() == [5 << 24 | 3, number << 24 | 1]


@needs_compiled
@pytest.mark.parametrize(
    ("place", "wrong", "error"),
    [
        (0, [0], TypeError),  # which blocks changed
        (0, {"0": None}, ValueError),
        (0, {1: None}, ValueError),
        (0, {-1: None}, ValueError),
        (1, bytes(8), TypeError),  # what was told; it cannot be changed
        (1, bytearray(4), TypeError),
        (1, bytearray(16), TypeError),
        (2, (1,), TypeError),  # holders of each block
        (2, [], TypeError),
        (2, [0.5], ValueError),
        (2, [-1], ValueError),
        (2, [2**24], ValueError),
        (3, [None], ValueError),  # the owner of each
        (3, [2**39], ValueError),
        (3, [2**80], OverflowError),
    ],
)
def test_contradictory_arguments_of_the_move_encoder_raise_an_error(
    place: int, wrong: Any, error: type[Exception]
) -> None:
    arguments: list[Any] = [{0: None}, bytearray(8), [1], [7], [None]]
    with pytest.raises(TypeError):
        block_pool.compiled(*arguments[:4])  # type: ignore[call-arg]
    arguments[place] = wrong
    with pytest.raises(error):
        block_pool.compiled(*arguments)
    assert len(arguments[0]) == 1  # nothing was forgotten
    for told in (bytes(8), bytearray(9), [0], None):
        with pytest.raises(TypeError, match="64 bits for each block"):
            block_pool._wire_rows.ends_of_runs(told)


# Prefix hashes


LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def _scheduler(salt: bytes = b"salt") -> Scheduler:
    scheduler = Scheduler(manager(64), Knobs(max_num_batched_tokens=64), LIMITS)
    scheduler.prefix_hashes = PrefixHashes(scheduler.kv, salt)
    return scheduler


def _hashes(scheduler: Scheduler, prompt: list[int]) -> list[int]:
    return scheduler.prefix_hashes.of_prompt(make_request(0, prompt))


def test_prompts_have_equal_hashes_up_to_their_first_different_block() -> None:
    scheduler = _scheduler()
    first = _hashes(scheduler, [*range(12), 1])
    second = _hashes(scheduler, [*range(8), 0, 0, 0, 0, 2])
    assert len(first) == len(second) == 3  # full blocks only
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    # Equal blocks after different prefixes.
    assert _hashes(scheduler, [1] * 4 + [7] * 4)[1] != _hashes(scheduler, [2] * 4 + [7] * 4)[1]


def test_two_engines_give_the_same_prompt_different_hashes() -> None:
    prompt = list(range(8))
    assert set(_hashes(_scheduler(b"one"), prompt)).isdisjoint(_hashes(_scheduler(b"two"), prompt))


def test_a_follow_up_prompt_continues_the_hashes_of_the_previous_answer() -> None:
    scheduler = _scheduler()
    request = make_request(0, list(range(6)))
    scheduler.add(request)
    while scheduler.has_work():
        rows = scheduler.schedule()
        scheduler.update(rows, [9 if row[4] else None for row in rows])
    ended = [each for each in scheduler.drain_events() if isinstance(each, Finished)]
    known = _hashes(scheduler, list(range(6))) + ended[0].prefix_hashes
    follow_up = [*range(6), *[9] * 8, 50, 51, 52]
    assert _hashes(scheduler, follow_up)[: len(known)] == known
    assert len(known) == 3
