"""An attached vLLM's prompts are judged as those of our own engine.

Our scheduler plays vLLM's: each of its steps is also told to the adapter, as vLLM would tell it.
"""

import random
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.adapters.attached.settlement import Settlement
from stepscope.engine.adapters.attached.tracked import Taken, TrackedRequest, UnfinishedStep
from stepscope.engine.adapters.vllm.kv_blocks import JudgedBlocks, PublishedBlocks
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Admitted, Phase, Preempted, PrefixMisses, RowFlag
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler

BLOCK = 4
LIMITS = Limits(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=40)


class Source:
    """A request as vLLM shows it."""

    def __init__(self, request: Request, kv: KVCacheManager) -> None:
        self._request, self._kv = request, kv
        self.request_id = request.client_id
        self.max_tokens, self.priority = request.sampling.max_tokens, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)  # its numbers of tokens

    @property
    def block_hashes(self) -> list[bytes]:
        indices = range(self.num_tokens // BLOCK)
        return [bytes(self._kv.digest(self._request, index)) for index in indices]


class TwoEngines:
    """One workload in our engine, and told to vLLM's adapter."""

    def __init__(self, num_blocks: int) -> None:
        self.kv = KVCacheManager(num_blocks, BLOCK)
        self.kv.judge_prompts(lambda: 0)
        knobs = Knobs(max_num_batched_tokens=16, max_num_seqs=4, order="arrival")
        self.scheduler = Scheduler(self.kv, knobs, LIMITS)
        blocks = [SimpleNamespace(block_hash=None)] * (num_blocks + 1)
        pool = PublishedBlocks(SimpleNamespace(num_gpu_blocks=num_blocks + 1, blocks=blocks))
        self._judged = judged = JudgedBlocks(num_blocks, BLOCK)
        self._settlement = Settlement(pool, caches_prefixes=True, judged=judged)
        self.tracked: dict[int, TrackedRequest] = {}
        self.ours: dict[int, PrefixMisses] = {}
        self.theirs: dict[int, PrefixMisses] = {}

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(number, prompt, sampling, 0, client_id=f"r{number}")
        self.scheduler.add(request)
        self.tracked[number] = TrackedRequest(number, Source(request, self.kv), 0, 0)

    def abort(self, number: int) -> None:
        if self.scheduler.abort(number, "gone") is not None:
            self._end(number)
            self._settlement.drain()

    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        self._judged.forget_all()

    def step(self, token: int) -> None:
        scheduler, tracked = self.scheduler, self.tracked
        tables = {each: len(r.block_table) for each, r in scheduler.requests.items()}
        rows = scheduler.schedule()
        step = UnfinishedStep(None, 0, 0, 16, 4)
        step.num_prefill_tokens = scheduler.num_prefill_tokens
        events = scheduler.drain_events()
        preempted = [each.request_id for each in events if isinstance(each, Preempted)]
        step.preempt([tracked[each] for each in preempted])
        tables.update(dict.fromkeys(preempted, 0))
        admitted = {each.request_id: each for each in events if isinstance(each, Admitted)}
        for row in rows:
            number, table = row.request.request_id, row.request.block_table
            num_hit = 0
            if number in admitted:
                num_hit = admitted[number].num_cached_tokens // BLOCK
                step.admitted.append((tracked[number], admitted[number].num_cached_tokens))
            new = table[tables[number] :]
            if new:
                step.taken.append(Taken(tracked[number], new, num_hit))
            fields = None
            if row.phase is not Phase.DECODE:
                flags = int(RowFlag.LAST_CHUNK) if row.samples else 0
                fields = number, int(row.phase), row.start, row.num_tokens, 0, 0, flags
            step.rows.append((tracked[number], Phase.DECODE, row.start, fields))
        finished = scheduler.update(rows, [token if row.samples else None for row in rows])
        told = self._settlement.settle(step, {tracked[each.request_id] for each in finished})
        for each in finished:
            self._end(each.request_id)
        self._settlement.drain()
        for ours in admitted.values():
            if ours.misses is not None:
                self.ours[ours.request_id] = ours.misses
        for theirs in told:
            if isinstance(theirs, Admitted) and theirs.misses is not None:
                self.theirs[theirs.request_id] = theirs.misses

    def _end(self, number: int) -> None:
        self.tracked[number].ended = True
        self._settlement.release(self.tracked[number])


# In 100 and 485 a resumed request has to compute its newest token alone.
@pytest.mark.parametrize("seed", [*range(30), 100, 485])
def test_both_engines_say_the_same_of_each_prompt(seed: int) -> None:
    chance = random.Random(seed)
    both = TwoEngines(chance.randint(12, 24))
    prompts: list[list[int]] = []
    for number in range(60):
        start = chance.choice(prompts)[: chance.randint(0, 24)] if prompts else []
        rest = [chance.randint(0, 2) for _ in range(chance.randint(1, 28 - len(start)))]
        prompts.append(start + rest if chance.random() < 0.7 or not start else start)
        both.add(number, prompts[-1], chance.randint(1, 10))
        if chance.random() < 0.1:
            both.abort(chance.choice(list(both.scheduler.requests)))
        if chance.random() < 0.02:
            both.reset()
        for _ in range(chance.randint(0, 6)):
            both.step(100 + number)
    while both.scheduler.has_work():
        both.step(9)
    assert len(both.ours) > 30
    assert sum(each.num_evicted > 0 for each in both.ours.values()) > 2
    assert sum(each.num_diverged > 0 for each in both.ours.values()) > 2
    # Our engine keeps no time here, the adapter does.
    names = "num_evicted num_diverged num_more_hits_1_5x num_more_hits_2x diverged_from evicted_by"
    said = attrgetter(*names.split())
    ours, theirs = ({n: said(each) for n, each in of.items()} for of in (both.ours, both.theirs))
    assert theirs == ours
