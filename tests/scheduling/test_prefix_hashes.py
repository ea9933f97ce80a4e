"""Prefix hashes show which contexts begin alike, and reveal nothing else."""

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Finished
from stepscope.engine.scheduling.kv_cache import KVCacheManager, PrefixHashes
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler

BLOCK = 4
LIMITS = Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def _scheduler(salt: bytes = b"salt") -> Scheduler:
    scheduler = Scheduler(KVCacheManager(64, BLOCK), Knobs(max_num_batched_tokens=64), LIMITS)
    scheduler.prefix_hashes = PrefixHashes(scheduler.kv, salt)
    return scheduler


def _request(number: int, prompt: list[int], max_tokens: int = 1) -> Request:
    return Request(number, prompt, SamplingParams(max_tokens=max_tokens), arrival_ns=0)


def _hashes(scheduler: Scheduler, prompt: list[int]) -> list[int]:
    assert scheduler.prefix_hashes is not None
    return scheduler.prefix_hashes.of_prompt(_request(0, prompt))


def test_prompts_have_equal_hashes_up_to_their_first_different_block() -> None:
    scheduler = _scheduler()
    first = _hashes(scheduler, [*range(12), 1])
    second = _hashes(scheduler, [*range(8), 0, 0, 0, 0, 2])
    assert len(first) == len(second) == 3  # full blocks only
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_equal_blocks_after_different_prefixes_have_different_hashes() -> None:
    scheduler = _scheduler()
    assert _hashes(scheduler, [1] * 4 + [7] * 4)[1] != _hashes(scheduler, [2] * 4 + [7] * 4)[1]


def test_two_engines_give_the_same_prompt_different_hashes() -> None:
    prompt = list(range(8))
    assert set(_hashes(_scheduler(b"one"), prompt)).isdisjoint(_hashes(_scheduler(b"two"), prompt))


def test_a_follow_up_prompt_continues_the_hashes_of_the_previous_answer() -> None:
    scheduler = _scheduler()
    request = _request(0, list(range(6)), max_tokens=7)
    scheduler.add(request)
    while scheduler.has_work():
        rows = scheduler.schedule()
        scheduler.update(rows, [9 if row[4] else None for row in rows])
    ended = [each for each in scheduler.drain_events() if isinstance(each, Finished)]
    assert ended[0].prefix_hashes is not None
    known = _hashes(scheduler, list(range(6))) + ended[0].prefix_hashes
    follow_up = [*range(6), *[9] * 7, 50, 51, 52]
    assert _hashes(scheduler, follow_up)[: len(known)] == known
    assert len(known) == 3
