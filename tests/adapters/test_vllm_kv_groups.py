"""KV blocks of models with several kinds of layers: vLLM frees some while their request runs."""

import itertools
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.check.verify import verify
from stepscope.recordings.state.session import SessionState
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import kv_page
from stepscope.tui.views.view import View
from tests.adapters.conftest import Attach
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.test_vllm_schedules import Played, explained
from tests.support.screens.screen_text import line_texts
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.seek_sessions import record

# The group of each block table of vLLM.
TABLES = {"windows": [0, 1, 1], "hybrid": [0, 1, 2], "windows_ahead": [0, 1], "connector": [0, 1]}
WAITS = ("loading", "sending")  # for a connector


class Grouped(Played):
    """A recorded schedule with stepscope attached, and what vLLM's own managers held meanwhile."""

    def __init__(self, attach: Attach, case: str, version: str = "0.33.0") -> None:
        self.truth: list[dict[str, Counter[Any]]] = []  # after each update of a step with tokens
        state: dict[str, Any] = {}
        updates = itertools.count()

        def note(scheduler: PlayedScheduler, line: dict[str, Any]) -> None:
            state.update(line)
            if line["call"] == "update" and scheduler.outputs[next(updates)].num_scheduled_tokens:
                found = {"waits": Counter({name: state.get(name, 0) for name in WAITS})}
                for name in ("used", "cached"):
                    found[name] = Counter()
                    for group, count in zip(TABLES[case], state[name], strict=True):
                        found[name][group] += count
                self.truth.append(found)

        super().__init__(attach, version, case, each=note, with_snapshot=True)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("case", ["windows", "hybrid", "connector"])
def test_blocks_of_each_group_are_those_of_vllms_managers(
    attach: Attach, case: str, version: str
) -> None:
    played = Grouped(attach, case, version)
    assert len(played.steps) == len(played.truth)
    for step, truth in zip(played.steps, played.truth, strict=True):
        for group, counts in enumerate(step.kv_groups):
            assert counts.used == truth["used"][group], step.step
            assert counts.cached == truth["cached"][group], step.step
        assert step.kv.used == sum(truth["used"].values())
        assert step.kv.cached == sum(truth["cached"].values())


def test_a_load_that_came_before_a_step_is_not_blamed_on_it(attach: Attach) -> None:
    found = explained(Grouped(attach, "connector").messages).late
    pieces = [piece for late in found for piece in late.pieces]
    assert any((each.cause, each.detail) == ("queued", "remote_kv") for each in pieces)
    assert not any(each.cause == "transfer" for each in pieces)


def test_blocks_that_wait_for_a_connector_are_told_with_the_time_since_when(attach: Attach) -> None:
    played = Grouped(attach, "connector")
    since: dict[str, set[int | None]] = {name: set() for name in WAITS}
    for step, truth in zip(played.steps, played.truth, strict=True):
        told = step.kv_transfers or wire.KVTransfers()
        assert (told.num_loading, told.num_sending) == tuple(truth["waits"][n] for n in WAITS)
        since["loading"].add(told.loading_since_ns)
        since["sending"].add(told.sending_since_ns)
    assert {len(times) for times in since.values()} == {3}  # two requests after each other, or none
    assert played.steps[-1].kv_transfers is None


@pytest.mark.parametrize("case", sorted(TABLES))
def test_the_map_by_group_is_the_same_by_moves_and_by_snapshot(attach: Attach, case: str) -> None:
    played = Grouped(attach, case)
    state: Any = SessionState()
    for _, message in played.messages:
        state.apply(message)
        if not isinstance(message, wire.StepRecord):
            continue
        owners = zip(state.block_groups, state.block_owner, strict=True)
        used = Counter(group for group, owner in owners if owner >= 0)
        told = message.kv_groups or ()
        assert [each.used for each in told] == [used[group] for group in range(len(told))]
    late = SessionState.from_snapshot(played.snapshot)
    assert late.blocks == state.blocks
    assert late.kv_groups == state.kv_groups
    assert [each.used for each in state.kv_groups or ()] == [0] * len(late.kv_groups or ())
    assert set(late.block_owner or ()) - {wire.EMPTY}  # some are cached


def test_layers_that_hold_the_same_of_a_context_are_one_group(attach: Attach) -> None:
    assert Grouped(attach, "windows").infos[0].kv_groups == (
        wire.KVGroup("full attention", 2, 16),
        wire.KVGroup("sliding window", 4, 16, 40, 2),
    )
    groups = Grouped(attach, "hybrid").infos[0].kv_groups or ()
    kinds = [(group.kind, group.window) for group in groups]
    assert kinds == [("full attention", None), ("chunked attention", 64), ("Mamba", None)]


def test_with_one_group_no_message_tells_of_groups(attach: Attach) -> None:
    for _, message in Played(attach, "0.32.0", "prefix").messages:
        for name in ("kv_groups", "move_groups", "block_groups", "kv_transfers", "kv_tokens"):
            assert getattr(message, name, None) is None


def test_verify_names_groups_that_do_not_add_up_to_the_pool(attach: Attach, tmp_path: Path) -> None:
    played = Grouped(attach, "windows")
    for message in played.steps:
        if message.step == 30:
            message.kv_groups[0] = wire.GroupCounts(1, 0)
    report = verify(record(tmp_path / "wrong.mcap", played.messages), lambda share: None)
    [problem] = report.blocks.problems
    assert problem.startswith("step 30: ")
    assert "by groups" in problem


def test_the_kv_page_shows_each_group_and_maps_blocks_by_it(attach: Attach) -> None:
    history = history_of(Grouped(attach, "hybrid").messages)
    view = View(page="kv", cursor=30)
    titles = []
    for _ in range(3):
        frame = FrameBuilder(history, clock=lambda: 0.0).build(view, 80, 0, 8)
        body = line_texts(kv_page.draw(frame, 200, 50))
        titles.append(body[0].split("  ")[0].partition("KV map ")[2])
        view.next_order(has_groups=frame.state.block_groups is not None)
    assert titles == ["by state", "by owner", "by group"]
    counts = frame.state.kv_groups or ()
    for letter, kind, each in zip(
        "ABC", ("full attention", "chunked attention", "Mamba"), counts, strict=True
    ):
        said = rf"{letter} {kind} +{each.used} +\d+% \+{each.cached} cached"
        assert re.search(said, "\n".join(body)), kind
    end = next(i for i, each in enumerate(body) if "small:" in each)
    cells = "".join(line[2:150] for line in body[1:end])
    assert [cells.count(letter) for letter in "ABC"] == [each.used for each in counts]
    assert [cells.count(letter) for letter in "abc"] == [each.cached for each in counts]
    assert re.search(r"fragmentation +—", "\n".join(body))  # unknown of several groups' blocks


def test_without_a_block_map_kv_usage_and_prefix_hits_are_vllms_own(attach: Attach) -> None:
    told = []

    def use(scheduler: PlayedScheduler, line: dict[str, Any]) -> None:
        usage = 1 - scheduler.num_free / scheduler.head["num_blocks"]
        scheduler.kv_cache_manager.usage = usage
        if line["call"] == "schedule" and scheduler.outputs[-1].num_scheduled_tokens:
            told.append(usage)

    def hide(scheduler: PlayedScheduler) -> None:
        scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=[None, None])

    played = Played(attach, "0.32.0", "prefix", prepare=hide, each=use)
    steps = played.steps
    assert all(step.kv is None and not step.moves for step in steps)
    assert [step.totals and step.totals.kv_used for step in steps] == told
    figures = history_of(played.messages).windows.figures(None, None)
    num_hit = sum(each.num_cached_tokens for each in played.of(wire.Admitted))
    adds = [line for line in played.scheduler.calls if line["call"] == "add"]
    assert num_hit > 0
    assert figures["prefix_hit_rate"] == num_hit / sum(line["prompt"] for line in adds)
    assert figures["kv_peak"] == round(max(told), 6)
    assert played.statuses[-1].totals.kv_used == played.scheduler.kv_cache_manager.usage
