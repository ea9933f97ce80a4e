"""`verify` finds the inconsistencies of a session and their place, and none in a sound one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Batching, Knobs
from stepscope.recordings.check.verify import VerifyReport, verify
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.crowded import crowded
from tests.support.sessions.seek_sessions import record

Call = Callable[..., Any]

Messages = list[tuple[int, wire.Telemetry]]
CHANGES = {300: {"enable_prefix_caching": False}, 500: {"enable_prefix_caching": True}}
MESSAGES = crowded(13, 700, rate=20.0, changes=CHANGES)


def verified(path: Path, messages: Messages) -> VerifyReport:
    return verify(record(path, messages), lambda share: None)


def changed(step: int, change: Callable[[wire.StepRecord], wire.Telemetry]) -> Messages:
    return [
        (number, change(m) if isinstance(m, wire.StepRecord) and m.step == step else m)
        for number, m in MESSAGES
    ]


def ends(record: wire.StepRecord) -> list[wire.Finished]:
    """The ends of requests that decoded in this step."""
    names = {row.request_id for row in record.batch or () if row.phase == wire.Phase.DECODE}
    return [e for e in record.events if isinstance(e, wire.Finished) and e.request_id in names]


def wrong(report: VerifyReport) -> dict[str, list[str]]:
    return {check.name: check.problems for check in report.checks if not check.is_good}


def test_verify_finds_nothing_wrong_in_a_sound_session_and_checks_all_of_it(tmp_path: Path) -> None:
    events = [event for _, m in MESSAGES for event in getattr(m, "events", ())]
    assert any(isinstance(event, wire.Preempted) for event in events)
    report = verified(tmp_path / "good.mcap", MESSAGES)
    assert wrong(report) == {}
    assert (report.num_steps, report.first_step, report.last_step) == (700, 0, 699)
    assert report.blocks.num_checked == 700
    assert report.keyframes.num_checked > 2
    assert report.num_lost_messages == 0


def test_verify_counts_a_gap_and_finds_no_further_problem_after_it(tmp_path: Path) -> None:
    whole: Messages = [(n, m) for n, m in MESSAGES if not 100 <= n < 130]
    report = verified(tmp_path / "gap.mcap", whole)
    assert list(wrong(report)) == ["sequence"]
    assert report.num_lost_messages == 30
    assert "30 messages after step" in report.sequence.problems[0]


def test_rejected_drafts_counted_as_output_are_found(tmp_path: Path) -> None:
    def counted(record: wire.StepRecord) -> wire.StepRecord:
        rows = [msgspec.structs.replace(row, num_tokens=row.num_tokens + 3) for row in record.batch]
        return msgspec.structs.replace(record, batch=rows)

    last = next(m for _, m in reversed(MESSAGES) if isinstance(m, wire.StepRecord) and ends(m))
    problems = wrong(verified(tmp_path / "drafts.mcap", changed(last.step, counted)))
    assert list(problems) == ["token accounting"]
    end, step = ends(last)[0], last.step
    said = f"step {step}: request {end.request_id} ended with {end.num_output_tokens} output tokens"
    assert problems["token accounting"][0].startswith(said)
    before = changed(step - 1, counted)
    problems = wrong(verified(tmp_path / "hole.mcap", before))
    assert "goes on at token" in problems["token accounting"][0]


def first_step(has: Callable[[wire.StepRecord], object]) -> int:
    return next(m.step for _, m in MESSAGES if isinstance(m, wire.StepRecord) and has(m))


def kv_changed(record: wire.StepRecord, **by: int) -> wire.StepRecord:
    kv = msgspec.structs.replace(record.kv, **{k: getattr(record.kv, k) + n for k, n in by.items()})
    return msgspec.structs.replace(record, kv=kv)


def shared_more(record: wire.StepRecord) -> wire.StepRecord:
    moves = [*record.moves]
    place, move = next((at, move) for at, move in enumerate(moves) if move.ref_count > 0)
    moves[place] = wire.BlockMove(move.block_id, move.owner, move.ref_count + 1)
    return msgspec.structs.replace(record, moves=moves)


def replaced(**values: Any) -> Callable[[wire.StepRecord], wire.StepRecord]:
    return lambda record: msgspec.structs.replace(record, **values)


OUTSIDE = wire.BlockMove(9999, 3, 1)
TAMPERED: dict[str, tuple[int | Callable[[wire.StepRecord], object], Any, str, str]] = {
    "a block too many": (
        400, lambda m: kv_changed(m, used=1), "block accounting", "; by the moves",
    ),
    "cached taken for empty": (
        400, lambda m: kv_changed(m, cached=1, empty=-1), "block accounting",
        "used, cached and empty blocks are",
    ),
    "a move not published": (
        lambda m: len(m.moves) > 3, lambda m: replaced(moves=m.moves[1:])(m),
        "block accounting", "",
    ),
    "references without a request": (
        lambda m: any(move.ref_count for move in m.moves), shared_more, "block accounting",
        "references to blocks, requests hold",
    ),
    "a block outside the pool": (
        50, lambda m: replaced(moves=[*m.moves, OUTSIDE])(m), "block accounting",
        "block 9999 moved, the pool has 160",
    ),
    "times that run backwards": (
        200, lambda m: replaced(tokens_ns=m.schedule_start_ns - 1, launch_ns=None)(m), "times",
        "its times are not in order",
    ),
    "a prompt in a step that left prompts out": (
        lambda m: m.num_prefill_tokens > 1, replaced(held_prefills=True), "token accounting",
        "computed a prompt though it left prompts out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_what_contradicts_the_rest_of_a_session_is_found(tmp_path: Path, what: str) -> None:
    at, change, check, said = TAMPERED[what]
    step = at if isinstance(at, int) else first_step(at)
    problems = wrong(verified(tmp_path / "tampered.mcap", changed(step, change)))
    assert list(problems) == [check]
    assert all(problem.startswith(f"step {step}") for problem in problems[check])
    assert said in problems[check][0]


def test_prompts_left_out_and_steps_in_another_order(tmp_path: Path) -> None:
    free = changed(first_step(lambda m: not m.num_prefill_tokens), replaced(held_prefills=True))
    assert wrong(verified(tmp_path / "free.mcap", free)) == {}
    again = changed(200, replaced(step=150))
    assert "step order" in wrong(verified(tmp_path / "order.mcap", again))


def test_verify_reports_in_text_or_json_and_ends_with_1(tmp_path: Path, stepscope: Call) -> None:
    good = record(tmp_path / "good.mcap", MESSAGES)
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(good.read_bytes()[:-20_000])

    def run(*arguments: str) -> tuple[int, str]:
        done = stepscope(*arguments)
        return done.exit_code, done.stdout

    code, said = run("verify", str(good))
    assert code == 0
    assert "700 steps (0 to 699)" in said
    assert said.endswith("all is well\n")
    no_steps = [each for each in MESSAGES if not isinstance(each[1], wire.StepRecord)]
    empty = record(tmp_path / "empty.mcap", no_steps[:2])
    code, said = run("verify", str(empty))
    assert code == 0
    assert said.endswith("nothing is wrong, but it holds no steps\n")
    code, said = run("verify", str(cut))
    assert code == 1
    assert "it was not closed" in said
    assert said.endswith("something is wrong\n")
    code, said = run("verify", str(cut), "--json")
    assert code == 1
    document = json.loads(said)
    assert document["ok"] is False
    failed = [check["name"] for check in document["checks"] if not check["ok"]]
    assert failed == ["file", "checksums"]
    code, said = run("verify", "--repair", str(cut))
    assert code == 0
    assert "kept: " in said
    assert "lost: whatever came after step" in said
    code, _ = run("verify", str(tmp_path / "cut-repaired.mcap"))
    assert code == 0
    code, said = run("verify", "--repair", str(good))
    assert (code, said) == (0, f"{good} is whole: nothing to repair\n")


MODES = get_args(Batching)


def in_mode(seed: int, batching: str, changes: dict[int, str], num_steps: int = 400) -> Messages:
    return simulate(
        seed=seed, num_steps=num_steps, num_blocks=160, max_model_len=2048,
        workload=SimulatedWorkload(rate=20.0, document_share=0.1, chat_tokens=150),
        knobs=Knobs(batching=batching, max_num_batched_tokens=128, max_num_seqs=16, reserve="none"),
        changes={step: {"batching": mode} for step, mode in changes.items()},
    )  # fmt: skip


def admitted_without_a_row(messages: Messages) -> list[wire.StepRecord]:
    return [
        m
        for _, m in messages
        if isinstance(m, wire.StepRecord)
        and {e.request_id for e in m.events if isinstance(e, wire.Admitted)}
        - {row.request_id for row in m.batch or ()}
    ]


@pytest.mark.parametrize("mode", MODES)
def test_verify_accepts_a_sound_session_in_each_batching_mode(tmp_path: Path, mode: str) -> None:
    messages = in_mode(3, mode, {})
    assert bool(admitted_without_a_row(messages)) == (mode == "static")
    report = verified(tmp_path / "mode.mcap", messages)
    assert wrong(report) == {}
    assert report.blocks.num_checked == 400


def test_verify_accepts_a_sound_session_through_every_change_of_mode(tmp_path: Path) -> None:
    pairs = [mode for a in MODES for b in MODES if a != b for mode in (a, b)]
    switches = {60 * (number + 1): mode for number, mode in enumerate(pairs)}
    messages = in_mode(1, "chunked", switches, num_steps=60 * (len(pairs) + 2))
    assert admitted_without_a_row(messages)
    assert wrong(verified(tmp_path / "switches.mcap", messages)) == {}


def test_a_gap_among_static_batches_is_the_only_problem_reported(tmp_path: Path) -> None:
    messages = in_mode(3, "static", {})
    step = admitted_without_a_row(messages)[1].step
    first = next(n for n, m in messages if isinstance(m, wire.StepRecord) and m.step == step)
    for lost in (range(first, first + 1), range(first + 1, first + 2)):
        whole: Messages = [(n, m) for n, m in messages if n not in lost]
        assert list(wrong(verified(tmp_path / f"{lost.start}.mcap", whole))) == ["sequence"]


def test_a_wrong_reference_count_in_a_static_batch_is_found(tmp_path: Path) -> None:
    messages = in_mode(3, "static", {})
    record = admitted_without_a_row(messages)[1]
    place = next(i for i, move in enumerate(record.moves) if move.ref_count > 0)
    for change in (1, -1):
        moves = list(record.moves)
        move = moves[place]
        moves[place] = wire.BlockMove(move.block_id, move.owner, move.ref_count + change)
        if not moves[place].ref_count:
            moves[place] = wire.BlockMove(move.block_id, -1, 0)
        other = msgspec.structs.replace(record, moves=moves)
        tampered = [(n, other if m == record else m) for n, m in messages]
        assert "block accounting" in wrong(verified(tmp_path / f"{change}.mcap", tampered))


def test_verify_accepts_names_of_shipped_samples_and_of_unfinished_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepscope: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.mcap.part").write_text("step,")
    for arguments, code, said in (
        (("freeze",), 0, "all is well\n"),
        (("--repair", "freeze"), 0, "is whole: nothing to repair\n"),
        (("nothing-of-that-name",), 1, "shipped samples: freeze, chunked"),
        (("broken.mcap",), 1, "is not a stepscope recording"),
    ):
        done = stepscope("verify", *arguments)
        assert done.exit_code == code
        assert said in done.stdout + done.stderr
