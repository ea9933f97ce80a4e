"""Data-parallel ranks of vLLM: one endpoint each, found and changed as one group."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.vllm.attachment import attach
from stepscope.engine.client.client import CommandRefused, ControlClient, NoAnswer
from stepscope.engine.client.group import set_on_all
from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.transport.endpoints import ranks_of, siblings_of
from stepscope.recordings.file.reader import Recording
from stepscope.tui.cli.engines.set import set_knobs
from stepscope.tui.session.engine_link import Answer, EngineLink
from stepscope.tui.session.live_source import addresses
from tests.adapters.played_vllm import PlayedScheduler
from tests.support.waiting import wait_for

BUDGET = "max_num_batched_tokens"


@pytest.fixture
def size() -> int:
    """How many ranks each of the two believes that there are."""
    return 2


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[list[Attachment]]:
    """Two ranks that run as `vllm-0`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as stack:
        found = []
        for rank in range(2):
            scheduler = PlayedScheduler("0.32.0", "chunked")
            parallel = {"data_parallel_size": size, "data_parallel_index": rank}
            vars(scheduler.vllm_config.parallel_config).update(parallel)
            found.append(stack.enter_context(closing(attach(scheduler, "vllm-0"))))
        yield found


@pytest.fixture
def clients(ranks: list[Attachment]) -> Iterator[list[ControlClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ControlClient(rank)) for rank in ranks_of("vllm-0")]


def budgets(ranks: list[Attachment]) -> list[KnobValue]:
    return [rank.knobs.values[BUDGET] for rank in ranks]


@pytest.mark.parametrize(
    ("size", "first", "numbers"), [(2, "vllm-0.dp0", [0, 1]), (1, "vllm-0", [None, None])]
)
def test_the_name_of_a_group_selects_all_its_ranks(
    ranks: list[Attachment], first: str, numbers: list[int | None]
) -> None:
    assert [rank.name for rank in ranks_of("vllm-0")] == [first, "vllm-0.dp1"]
    assert [rank.name for rank in ranks_of("vllm-0.dp1")] == ["vllm-0.dp1"]
    assert [rank.name for rank in ranks_of("another")] == ["another"]
    assert addresses("vllm-0") == ranks_of("vllm-0")
    assert [rank.core.info.data_parallel_rank for rank in ranks] == numbers


def test_a_knob_change_of_a_group_reaches_every_rank_and_each_audits_its_step(
    ranks: list[Attachment], capsys: pytest.CaptureFixture[str]
) -> None:
    set_knobs(["vllm-0", f"{BUDGET}=32"])
    assert budgets(ranks) == [32, 32]
    said = capsys.readouterr().out
    for rank in ranks:
        (entry,) = rank.core.audit.last()
        assert (entry.effective_step, entry.new) == (0, {BUDGET: 32})
        assert f"{rank.core.info.name}: holds from step 0" in said


@pytest.mark.parametrize("error", [CommandRefused("conflict", "too late"), NoAnswer("in 3 s")])
def test_if_a_rank_fails_after_others_changed_all_get_their_old_values_back(
    ranks: list[Attachment],
    clients: list[ControlClient],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    set_on_last = clients[1].set_knobs
    is_only_late = isinstance(error, NoAnswer)  # the rank makes the change all the same

    def fail(*args: Any, dry_run: bool = False, **settings: Any) -> Ack:
        ack = set_on_last(*args, dry_run=dry_run or not is_only_late, **settings)
        if not dry_run:
            raise error
        return ack

    monkeypatch.setattr(clients[1], "set_knobs", fail)
    with pytest.raises(type(error)):
        set_on_all(clients, {BUDGET: 32}, "Ada")
    for rank in ranks if is_only_late else ranks[:1]:
        wait_for(lambda rank=rank: len(rank.core.audit.last()) == 2, "the old values are restored")
        assert [entry.new for entry in rank.core.audit.last()] == [{BUDGET: 32}, {BUDGET: 64}]
    assert budgets(ranks) == [64, 64]


@pytest.fixture
def link() -> Iterator[EngineLink]:
    """The link of a dashboard that shows the second rank."""
    (rank,) = ranks_of("vllm-0.dp1")
    with closing(EngineLink(lambda: ControlClient(rank), lambda: siblings_of(rank))) as link:
        yield link


def answer_of(link: EngineLink, value: int) -> Answer:
    link.ask("budget", SetKnobs(changes={BUDGET: value}, who="Ada", expected_version=0))
    answers: list[Answer] = []
    wait_for(lambda: bool(answers.extend(link.answers()) or answers), "an answer")
    return answers[0]


def test_a_change_in_the_dashboard_reaches_all(ranks: list[Attachment], link: EngineLink) -> None:
    assert answer_of(link, 32).reply.detail == "vllm-0.dp0 from step 0"
    assert budgets(ranks) == [32, 32]


def test_a_change_that_one_refuses_reaches_none(ranks: list[Attachment], link: EngineLink) -> None:
    last = ranks[1].knobs
    specs, last.specs = last.specs, tuple(spec for spec in last.specs if spec.name != BUDGET)
    refused = answer_of(link, 32).error or ""
    assert "vllm-0.dp1: " in refused
    assert "no engine of the group is changed" in refused
    assert budgets(ranks) == [64, 64]
    last.specs = specs
    with ControlClient(ranks_of("vllm-0.dp1")[0]) as other:
        other.set_knobs({BUDGET: 48}, "Bob")
    assert "another client changed knobs meanwhile (Bob" in (answer_of(link, 32).error or "")
    assert budgets(ranks) == [64, 48]
    assert ranks[0].core.audit.last() == []


@pytest.mark.usefixtures("ranks")
def test_recording_a_group_writes_one_file_for_each_rank(stepscope: Any, tmp_path: Path) -> None:
    done = stepscope("record", "vllm-0", "-o", str(tmp_path / "run.mcap"), "--seconds", "0.5")
    assert done.exit_code == 0, done.stderr
    for rank in range(2):
        with Recording(tmp_path / f"run.dp{rank}.mcap") as recording:
            assert recording.info.data_parallel_rank == rank
