"""Knobs of an attached SGLang: changed on all tensor-parallel ranks at once, and put back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.sglang.attachment import around_change
from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.protocol.wire import KnobValue, StepRecord
from tests.adapters.conftest import AttachSglang, published
from tests.adapters.sglang_objects import (
    SetInternalStateReq,
    SetInternalStateReqOutput,
    TokenizedGenerateReqInput,
)
from tests.adapters.sglang_stand_in import SEATS, Scheduler, turn
from tests.support.waiting import wait_for

BUDGET = "max_num_batched_tokens"
_T = TypeVar("_T")


class Group:
    """Two tensor-parallel ranks that know stepscope's requests; it is attached to the first."""

    def __init__(self, attach: AttachSglang, **first: Any) -> None:
        self.ranks = [Scheduler(tp_rank=rank, tp_size=2, chunk=64) for rank in range(2)]
        vars(self.ranks[0]).update(first)
        for rank in self.ranks:
            # The method that SGLang's dispatcher calls, with the plugin's hook applied.
            hooked = partial(around_change, Scheduler.set_internal_state, rank)
            rank._handlers[SetInternalStateReq] = hooked
        attached: list[Any] = [attach(rank) for rank in self.ranks]
        assert attached[1] is None
        self.attachment: Attachment = attached[0]
        self.seen: list[list[int | None]] = []  # chunk sizes after each turn of `during`

    def chunks(self) -> list[int | None]:
        return [rank.chunked_prefill_size for rank in self.ranks]

    def seats(self) -> list[int]:
        return [getattr(rank.parallel, SEATS) for rank in self.ranks]

    def during(self, ask: Callable[[ControlClient], _T]) -> _T:
        """The answer that a client gets while the ranks prefill one prompt after the other."""

        def work() -> _T:
            with ControlClient(self.attachment.core.info.control_endpoint) as client:
                return ask(client)

        with ThreadPoolExecutor() as pool:
            answer = pool.submit(work)
            while not answer.done():
                number = len(self.seen)
                came = TokenizedGenerateReqInput(f"load-{number}", [number] * 150, 2)
                turn(self.ranks, *([] if self.ranks[0].has_work else [came]))
                self.seen.append(self.chunks())
        return answer.result()

    def set(self, **changes: KnobValue) -> Any:
        return self.during(lambda client: client.set_knobs(changes, "Ada"))


def test_a_change_reaches_every_rank_before_the_same_batch(attach_sglang: AttachSglang) -> None:
    group = Group(attach_sglang)
    turn(group.ranks, TokenizedGenerateReqInput("first", [1] * 50))
    answer = group.set(**{BUDGET: 16}, max_num_seqs=2)
    num_before = len(group.ranks[0].scheduled)
    turn(group.ranks, *[TokenizedGenerateReqInput(f"r{i}", [i] * 19, 12) for i in range(6)])
    while group.ranks[0].has_work:
        turn(group.ranks)
    assert (group.chunks(), group.seats()) == ([16, 16], [2, 2])
    assert group.ranks[0].scheduled == group.ranks[1].scheduled
    assert max(len(batch) for batch in group.ranks[0].scheduled[num_before:]) == 2
    steps = [m for _, m in published(group.attachment) if isinstance(m, StepRecord)]
    budgets = {step.step: step.token_budget for step in steps if step.token_budget}
    assert {n: 16 if n >= answer.effective_step else 64 for n in budgets} == budgets
    assert set(budgets.values()) == {16, 64}
    assert group.ranks[0].answers == group.ranks[1].answers == []


def test_a_knob_value_above_its_start_value_is_refused(attach_sglang: AttachSglang) -> None:
    group = Group(attach_sglang)
    for changes, said in (
        ({BUDGET: 65}, "between 4 and 64"),
        ({"max_num_seqs": 9}, "between 1 and 8"),
        ({"policy": "lpm"}, "policy is fixed when SGLang starts"),
    ):
        with pytest.raises(CommandRefused, match=said):
            group.set(**changes)
    turn(group.ranks)
    assert (group.chunks(), group.seats()) == ([64, 64], [8, 8])


def test_without_chunked_prefill_the_budget_is_fixed(attach_sglang: AttachSglang) -> None:
    group = Group(attach_sglang, chunked_prefill_size=None)
    with pytest.raises(CommandRefused, match=f"{BUDGET} is fixed .* changed: max_num_seqs"):
        group.set(**{BUDGET: 16})


def test_when_a_lease_ends_every_rank_gets_its_old_values_back(attach_sglang: AttachSglang) -> None:
    group = Group(attach_sglang)
    group.during(lambda client: client.set_knobs({BUDGET: 16}, "Ada", lease_s=0.2))
    assert [16, 16] in group.seen
    wait_for(lambda: turn(group.ranks) or group.chunks() == [64, 64], "the first chunk size")


def test_sglangs_own_state_changes_are_still_made_and_answered(attach_sglang: AttachSglang) -> None:
    group = Group(attach_sglang)
    turn(group.ranks, SetInternalStateReq({SEATS: 3}), SetInternalStateReq({"unknown": 1}))
    assert group.seats() == [3, 3]
    expected = [SetInternalStateReqOutput(True), SetInternalStateReqOutput(False)]
    assert group.ranks[1].answers == expected


@pytest.mark.parametrize("where", ["server_args", "recv_skipper"])
def test_no_knob_changes_that_might_miss_a_rank(attach_sglang: AttachSglang, where: str) -> None:
    first = Scheduler(tp_size=2)  # on several nodes, or with a receive interval
    setattr(first, where, SimpleNamespace(model_path="played", device="cuda", nnodes=2))
    assert list(attach_sglang(first).core.info.knobs) == []


def test_an_error_restores_the_start_values_on_every_rank(
    attach_sglang: AttachSglang, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(attach_sglang)
    group.set(**{BUDGET: 16}, max_num_seqs=2)
    assert (group.chunks(), group.seats()) == ([16, 16], [2, 2])
    group.attachment.fail(RuntimeError("injected"))
    turn(group.ranks)
    assert (group.chunks(), group.seats()) == ([64, 64], [8, 8])
    assert "_poll_timeout_aborts" not in vars(group.ranks[0])
    assert caplog.text.count("stepscope has detached itself, SGLang goes on") == 1
