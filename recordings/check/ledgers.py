"""Checks what an engine counts against the rows, events and block moves that it published.

`BlockLedger`: KV block counts against block moves.

Every block is either referenced by requests, cached, or empty. These three counts must add up to
the number of blocks. The references must equal the blocks that requests hold.

The batch rows of a request tell how many blocks it holds. A request admitted without a row (a
member of a static batch whose prompt begins in a later step) holds an unknown number until its
first row. Until then, the references must only be at least the blocks of all other requests.

`TokenLedger`: checks a request's rows against each other, and against its output at the end.

A row begins where the one before it ended. The tokens that a request computed, and one more, are
its prompt and its output: so output is what was accepted, however many drafts a step checked.
"""

from collections import Counter

from stepscope.engine.protocol import wire
from stepscope.recordings.state.blocks import BlockMap


class TokenLedger:
    """How far each request is computed. Each problem is one line of text."""

    def __init__(self) -> None:
        self._num_prompt: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # position after the last row; missing if unknown
        self.num_checked = 0  # requests whose output was compared

    def forget(self) -> None:
        self._num_prompt.clear()
        self._ends.clear()

    def open(self, snapshot: wire.Snapshot) -> None:
        """Take over the prompts of requests that arrived before."""
        for view in snapshot.requests:
            if view.max_tokens and not view.is_partial:
                self._num_prompt.setdefault(view.request_id, view.num_prompt_tokens)

    def apply(self, message: wire.StepRecord | wire.EngineStatus) -> list[str]:
        problems = []
        for event in message.events:
            if isinstance(event, wire.Arrived) and event.max_tokens:  # else it has no output
                self._num_prompt[event.request_id] = event.num_prompt_tokens
            elif isinstance(event, wire.Admitted | wire.Preempted):
                self._ends.pop(event.request_id, None)
        for row in _rows_of(message) or ():
            ended = self._ends.get(row.request_id, row.start)
            self._ends[row.request_id] = row.start + row.num_tokens
            if ended != row.start:
                problems.append(
                    f"request {row.request_id} goes on at token {row.start:,}; its rows ended at "
                    f"{ended:,}"
                )
        for event in message.events:
            if isinstance(event, wire.Finished):
                end = self._ends.pop(event.request_id, None)
                num_prompt = self._num_prompt.pop(event.request_id, None)
                if end is None or num_prompt is None or event.handed_to is not None:
                    continue
                self.num_checked += 1
                if (num_output := end + 1 - num_prompt) != event.num_output_tokens:
                    problems.append(
                        f"request {event.request_id} ended with {event.num_output_tokens:,} output "
                        f"tokens; by its rows {num_output:,}"
                    )
        return problems


class BlockLedger:
    """The block counts that an engine should publish. Each problem is one line of text."""

    def __init__(self) -> None:
        self._blocks: BlockMap | None = None
        self._num: Counter[int] = Counter()  # of blocks: in use (0), `CACHED`, `EMPTY`
        self._num_refs = 0
        self._held: dict[int, int] = {}
        self._uncounted: set[int] = set()  # requests that hold an unknown number of blocks

    @property
    def is_open(self) -> bool:
        return self._blocks is not None

    def close(self) -> None:
        """Stop checking after missed messages, until the next `open`."""
        self._blocks = None

    def open_empty(self, first: wire.StepRecord | wire.EngineStatus) -> None:
        """Start checking with empty blocks before the first message, if it has block counts."""
        if (kv := first.kv) is not None:
            self._begin(BlockMap.empty(kv.num_blocks, has_groups=first.kv_groups is not None))
            self._held, self._uncounted = {}, set()

    def open(self, snapshot: wire.Snapshot) -> None:
        runs, groups = snapshot.blocks, snapshot.block_groups
        self._begin(None if runs is None else BlockMap.from_runs(runs, groups))
        self._held, self._uncounted = _holders(snapshot)

    def compare(self, snapshot: wire.Snapshot) -> list[str]:
        if self._blocks is None or snapshot.blocks is None:
            return []
        problems = _group_problems(snapshot.kv, snapshot.kv_groups)
        if BlockMap.from_runs(snapshot.blocks, snapshot.block_groups) != self._blocks:
            problems.append("its block map does not match the block moves before it")
        found, mine = _holders(snapshot)[0], self._held
        held = {each: count for each, count in found.items() if each not in self._uncounted}
        if held != mine:
            odd = sorted(set(held.items()) ^ set(mine.items()))[0][0]
            problems.append(
                f"request {odd} holds {held.get(odd, 0)} blocks in it, {mine.get(odd, 0)} by the "
                "steps before it"
            )
        return problems

    def apply(self, message: wire.StepRecord | wire.EngineStatus) -> list[str]:
        """Apply the block moves and events of a message, then check its counts against them."""
        if self._blocks is None:
            return []
        problems = self._apply_moves(self._blocks, message.moves)
        if message.move_groups is not None:
            self._blocks.apply(message.moves, message.move_groups)
        batch = _rows_of(message)
        rows = {row.request_id: row.num_blocks for row in batch or ()}
        # Without rows, any request may have got more blocks.
        for request_id in list(self._held) if batch is None else rows:
            self._hold(request_id, rows.get(request_id))
        for event in message.events:
            if isinstance(event, wire.Admitted):
                self._hold(event.request_id, rows.get(event.request_id))
            elif isinstance(event, wire.Finished | wire.Preempted | wire.Aborted):
                self._hold(event.request_id, 0)
        kv = message.kv
        problems += _group_problems(kv, message.kv_groups)
        if kv is not None:
            mine = [self._num[each] for each in (0, wire.CACHED, wire.EMPTY)]
            theirs, num_blocks = [kv.used, kv.cached, kv.empty], len(self._blocks.owner)
            if mine != theirs:
                told, counted = (", ".join(map(str, each)) for each in (theirs, mine))
                problems.append(f"used, cached and empty blocks are {told}; by the moves {counted}")
            elif sum(theirs) != num_blocks:
                problems.append(f"{sum(theirs)} blocks in all, the pool has {num_blocks}")
        # Rows do not tell of the blocks that wait for a connector.
        is_counted = not self._uncounted and message.kv_transfers is None
        num_refs, num_held = self._num_refs, sum(self._held.values())
        if num_refs < num_held or (num_refs > num_held and is_counted):
            problems.append(f"{num_refs} references to blocks, requests hold {num_held}")
        return problems

    def _begin(self, blocks: BlockMap | None) -> None:
        self._blocks = blocks
        if blocks is not None:
            self._num = Counter(min(owner, 0) for owner in blocks.owner)
            self._num_refs = sum(blocks.refs)

    def _apply_moves(self, blocks: BlockMap, moves: list[wire.BlockMove]) -> list[str]:
        problems = []
        for block_id, owner, num_refs in ((m.block_id, m.owner, m.ref_count) for m in moves):
            if not 0 <= block_id < len(blocks.owner):
                problems.append(f"block {block_id} moved, the pool has {len(blocks.owner)}")
                continue
            if owner < wire.EMPTY or (num_refs > 0) != (owner >= 0):
                problems.append(f"block {block_id} has owner {owner} and {num_refs} references")
            self._num[min(blocks.owner[block_id], 0)] -= 1
            self._num[min(owner, 0)] += 1
            self._num_refs += num_refs - blocks.refs[block_id]
            blocks.owner[block_id], blocks.refs[block_id] = owner, num_refs
        return problems

    def _hold(self, request_id: int, num_blocks: int | None) -> None:
        """Set how many blocks a request holds; None: an unknown number."""
        self._held.pop(request_id, None)
        self._uncounted.discard(request_id)
        if num_blocks is None:
            self._uncounted.add(request_id)
        elif num_blocks:
            self._held[request_id] = num_blocks


def _rows_of(message: wire.StepRecord | wire.EngineStatus) -> list[wire.BatchRow] | None:
    """The batch of a step; None if the engine publishes no rows."""
    return message.batch if isinstance(message, wire.StepRecord) else []


def _group_problems(kv: wire.KVCounts | None, groups: list[wire.GroupCounts] | None) -> list[str]:
    """The used and the cached blocks of all groups must be those of the pool."""
    if kv is None or groups is None:
        return []
    sums = sum(each.used for each in groups), sum(each.cached for each in groups)
    if sums == (kv.used, kv.cached):
        return []
    return [f"{kv.used} used and {kv.cached} cached blocks; by groups {sums[0]} and {sums[1]}"]


def _holders(snapshot: wire.Snapshot) -> tuple[dict[int, int], set[int]]:
    """How many blocks each running request holds, and those that hold an unknown number."""
    running = [view for view in snapshot.requests if view.status == "running"]
    held = {view.request_id: view.num_blocks for view in running if view.num_blocks}
    return held, {view.request_id for view in running if not view.num_blocks}
