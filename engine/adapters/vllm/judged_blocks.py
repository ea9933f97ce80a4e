"""`JudgedBlocks`: what vLLM's KV blocks hold, told to the judge that our own engine has, too."""

from collections.abc import Collection, Sequence
from typing import cast

from stepscope.engine.adapters.attached.rows import gives_token, num_tokens_of
from stepscope.engine.adapters.attached.tracked import Row, TrackedRequest, UnfinishedStep
from stepscope.engine.adapters.vllm.versions import VllmRequest
from stepscope.engine.protocol.wire import PrefixMisses
from stepscope.engine.scheduling.prefix_judge import PrefixJudge


class JudgedBlocks:
    """Follows the contents of blocks. Use it only inside `with attachment.notes.done()`.

    vLLM offers a full block for hits when it schedules the step that fills it. Blocks of output are
    noted when their request receives the next one, or loses them: nobody can evict them before.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._judge = PrefixJudge(num_blocks, block_size)
        self._contents: list[bytes | None] = [None] * num_blocks
        self._num_noted: dict[TrackedRequest, int] = {}  # full blocks of those that hold some
        self._blocks: dict[TrackedRequest, list[int]] = {}  # of those, in order
        self._decoding: set[TrackedRequest] = set()

    def settled(
        self, step: UnfinishedStep, ended_now: Collection[TrackedRequest]
    ) -> dict[TrackedRequest, PrefixMisses | None]:
        """Note what an ended step has done; return why prompts that it admitted missed the cache.

        Requests that ended before this step did are only noted as holders. The value is None if the
        request comes back.
        """
        misses: dict[TrackedRequest, PrefixMisses | None] = {}
        rows, cached = dict[TrackedRequest, Row](), dict(step.admitted)
        if step.num_prefill_tokens or cached:
            rows = {row[0]: row for row in step.rows if not row[0].ended or row[0] in ended_now}
        for tracked in step.preempted:
            if not tracked.ended or tracked in ended_now:
                self.released(tracked)
        receiving = {each.request for each in step.taken}
        for tracked, row in rows.items():
            if tracked not in receiving:
                self._computed(tracked, row)
        for tracked, blocks, num_hit, _ in step.taken:
            if tracked in cached and (not tracked.ended or tracked in ended_now):
                misses[tracked] = self._admitted(tracked, cached[tracked])
            self._took(tracked, blocks, num_hit)
            if tracked in rows:
                self._computed(tracked, rows[tracked])
        return misses

    def released(self, tracked: TrackedRequest) -> None:
        """Note that a request loses its blocks. Call it before they are taken from it."""
        if tracked in self._decoding:
            self._decoding.remove(tracked)
            self._note(tracked, tracked.engine_request.num_tokens - 1)  # the newest is not computed
        self._num_noted.pop(tracked, None)
        self._blocks.pop(tracked, None)

    def forget_all(self) -> None:
        """Note that vLLM has reset its prefix cache."""
        self._judge.forget_all()
        self._contents = [None] * len(self._contents)

    def _admitted(self, tracked: TrackedRequest, num_cached: int) -> PrefixMisses | None:
        num_hit = self._num_noted[tracked] = num_cached // self._block_size
        self._blocks[tracked] = []
        hashes, num_prompt = _hashes_of(tracked), tracked.engine_request.num_prompt_tokens
        if tracked.num_preemptions or len(hashes) < num_prompt // self._block_size:
            return None
        return self._judge.admitted(num_prompt, num_hit, hashes.__getitem__)

    def _took(self, tracked: TrackedRequest, blocks: Sequence[int], num_hit: int) -> None:
        contents, hashes = self._contents, _hashes_of(tracked)
        if tracked in self._decoding:  # it has filled all that it had, but for rejected drafts
            self._note(tracked, tracked.engine_request.num_tokens - 1)
        for i, block in enumerate(blocks):
            held, now = contents[block], hashes[i] if i < num_hit else None
            if held == now:
                continue
            if held is not None:
                self._judge.evicted(held, tracked.request_id)
            contents[block] = now
            if now is not None:  # output of a request that still runs
                self._judge.computed(now, hashes[i - 1] if i else None, tracked.request_id)
        if (own := self._blocks.get(tracked)) is not None:  # else it has ended
            own += blocks

    def _computed(self, tracked: TrackedRequest, row: Row) -> None:
        self._note(tracked, row[2] + num_tokens_of(row))
        if gives_token(row):
            self._decoding.add(tracked)

    def _note(self, tracked: TrackedRequest, num_tokens: int) -> None:
        hashes, blocks = _hashes_of(tracked), self._blocks.get(tracked, [])
        end = min(num_tokens // self._block_size, len(hashes), len(blocks))
        for i in range(self._num_noted.get(tracked, 0), end):
            if self._contents[blocks[i]] is None:
                self._contents[blocks[i]] = hashes[i]
                before = hashes[i - 1] if i else None
                self._judge.computed(hashes[i], before, tracked.request_id)
        self._num_noted[tracked] = max(end, self._num_noted.get(tracked, 0))


def _hashes_of(tracked: TrackedRequest) -> Sequence[bytes]:
    return cast(VllmRequest, tracked.engine_request).block_hashes
