"""What is said of prompts that miss the prefix cache is what a count by hand finds.

The count keeps the tokens themselves, and lists where the engine has hashes and ordered tables.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Admitted, PrefixMisses
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from tests.support.engines.kv_integrity import check_integrity

BLOCK = 4
LIMITS = Limits(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=40)
Prefix = tuple[int, ...]


class ByHand(KVCacheManager):
    """A KV cache that follows what its blocks hold, and judges each prompt again by definition."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK)
        self.now = 0
        self.judged: list[PrefixMisses] = []
        self._held: dict[int, Prefix] = {}
        self._known: dict[Prefix, tuple[int, int]] = {}  # computed by whom, when
        self._gone: dict[Prefix, tuple[int, int]] = {}  # evicted by whom, when
        self._ghosts: list[Prefix] = []  # the latest use last
        self._next: dict[Prefix, Prefix] = {}
        self.judge_prompts(lambda: self.now)
        self._take = self._pool.take
        self._pool.take = self._taken  # type: ignore[method-assign]

    def admit(self, request: Request, hit: list[int], num_tokens: int) -> PrefixMisses | None:
        expected = self._by_definition(request, len(hit))
        found = super().admit(request, hit, num_tokens)
        if request.comes_back:
            assert found is None
        else:
            assert found == expected
            self.judged.append(found)
        return found

    def register(self, request: Request, num_tokens: int) -> None:
        before = request.num_hashed_blocks
        super().register(request, num_tokens)
        for index in range(before, request.num_hashed_blocks):
            prefix = _prefix(request, index)
            if prefix not in self._held.values():
                self._known[prefix] = request.request_id, self.now
                if prefix in self._ghosts:
                    self._ghosts.remove(prefix)
            self._held[request.block_table[index]] = prefix
            if index and (before_it := _prefix(request, index - 1)) in self._known:
                self._next[before_it] = prefix

    def reset_prefix_cache(self) -> int:
        for each in (self._held, self._known, self._gone, self._ghosts, self._next):
            each.clear()  # type: ignore[attr-defined]
        return super().reset_prefix_cache()

    def _taken(self, count: int, owner: int) -> list[int]:
        blocks = self._take(count, owner)
        for block in blocks:
            prefix = self._held.pop(block, None)
            if prefix is not None and prefix not in self._held.values():
                self._gone[prefix] = owner, self.now
                self._ghosts.append(prefix)
                for forgotten in self._ghosts[: -2 * self.num_blocks]:
                    del self._known[forgotten]
                    self._next.pop(forgotten, None)
                del self._ghosts[: -2 * self.num_blocks]
        return blocks

    def _by_definition(self, request: Request, num_hit: int) -> PrefixMisses | None:
        if request.comes_back:
            return None
        prompt, ghosts = request.num_prompt_tokens, self._ghosts
        lookups = [_prefix(request, index) for index in range((prompt - 1) // BLOCK)]
        missed = lookups[num_hit:]
        cached = set(self._held.values())
        if not missed or missed[0] in cached:
            missed = []
        evicted = _first(missed, cached | set(ghosts))
        more = [
            _first(missed, cached | set(ghosts[-room:])) * BLOCK
            for room in (self.num_blocks // 2, self.num_blocks)
        ]
        at, by, since, of = num_hit + evicted, None, None, None
        if evicted:
            by, since = self._gone[missed[0]]
        num_diverged, known = 0, cached | set(ghosts)
        if 0 < at < prompt // BLOCK and _prefix(request, at) not in known:
            other = self._next.get(_prefix(request, at - 1))
            if other in known:
                num_diverged, of = prompt - at * BLOCK, self._known[other][0]
        life = None if since is None else since - self._known[missed[0]][1]
        if evicted:
            touched = [each for each in missed[:evicted] if each in ghosts]
            self._ghosts = [each for each in ghosts if each not in touched] + touched[::-1]
        return PrefixMisses(evicted * BLOCK, num_diverged, *more, of, by, since, life)


def _prefix(request: Request, index: int) -> Prefix:
    return tuple(request.token_ids[: (index + 1) * BLOCK])


def _first(prefixes: Sequence[Prefix], among: set[Prefix]) -> int:
    return next((i for i, each in enumerate(prefixes) if each not in among), len(prefixes))


def _prompts(chance: random.Random, number: int) -> list[list[int]]:
    """Prompts that begin alike, go on differently, and come again."""
    prompts: list[list[int]] = []
    for _ in range(number):
        start = chance.choice(prompts)[: chance.randint(0, 24)] if prompts else []
        rest = [chance.randint(0, 2) for _ in range(chance.randint(1, 28 - len(start)))]
        prompts.append(
            chance.choice(prompts) if chance.random() < 0.3 and prompts else start + rest
        )
    return prompts


def _step(scheduler: Scheduler, kv: ByHand, chance: random.Random) -> None:
    kv.now += 1
    rows = scheduler.schedule()
    scheduler.update(rows, [chance.randint(0, 2) if row.samples else None for row in rows])


@pytest.mark.parametrize("seed", range(40))
def test_each_prompt_is_judged_as_by_hand_under_preemptions_aborts_and_resets(seed: int) -> None:
    chance = random.Random(seed)
    kv = ByHand(chance.randint(10, 24))
    scheduler = Scheduler(kv, Knobs(max_num_batched_tokens=16, max_num_seqs=4), LIMITS)
    for number, prompt in enumerate(_prompts(chance, 60)):
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=chance.randint(1, 10)), 0))
        if chance.random() < 0.1:
            scheduler.abort(chance.choice(list(scheduler.requests)), "gone")
        if chance.random() < 0.02:
            kv.reset_prefix_cache()
        for _ in range(chance.randint(0, 6)):
            _step(scheduler, kv, chance)
    while scheduler.has_work():
        _step(scheduler, kv, chance)
        check_integrity(kv)
    kinds = Counter()  # type: Counter[str]
    for misses in kv.judged:
        kinds["evicted"] += misses.num_evicted > 0
        kinds["diverged"] += misses.num_diverged > 0
    assert min(kinds["evicted"], kinds["diverged"]) > 3


@pytest.mark.parametrize("seed", range(20))
def test_a_larger_pool_really_hits_what_is_said_of_it(seed: int) -> None:
    chance = random.Random(seed)
    # A cached prompt that ends with a block would get a second block with the same content.
    prompts = [each for each in _prompts(chance, 120) if len(each) % BLOCK]
    hits = {factor: _hits_one_by_one(round(16 * factor), prompts) for factor in (1, 1.5, 2)}
    said = [misses for _, misses in hits[1]]
    assert sum(misses.num_more_hits_1_5x for misses in said) > 0
    for place, misses in enumerate(said):
        now = hits[1][place][0]
        assert hits[1.5][place][0] == now + misses.num_more_hits_1_5x
        assert hits[2][place][0] == now + misses.num_more_hits_2x


def _hits_one_by_one(num_blocks: int, prompts: list[list[int]]) -> list[tuple[int, PrefixMisses]]:
    kv = KVCacheManager(num_blocks, BLOCK)
    kv.judge_prompts(lambda: 0)
    scheduler = Scheduler(kv, Knobs(max_num_batched_tokens=16, max_num_seqs=4), LIMITS)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=3), 0))
        while scheduler.has_work():
            rows = scheduler.schedule()
            scheduler.update(rows, [10 + number if row.samples else None for row in rows])
    found = [each for each in scheduler.drain_events() if isinstance(each, Admitted)]
    assert all(each.misses is not None for each in found)
    return [(each.num_cached_tokens, each.misses) for each in found if each.misses is not None]
