"""Requests across a prefill and a decode engine, as the fleet screen draws them."""

from types import SimpleNamespace
from typing import Any

import msgspec

from stepscope.engine.protocol.wire import EngineInfo, RequestOrigin, RequestView
from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.fleets.imbalance import findings
from stepscope.recordings.fleets.whole_lives import KEPT_NS, WholeLife, WholeLives
from stepscope.recordings.state.session import SessionState
from stepscope.tui.views.pages import fleet_page

S = 1_000_000_000


def engine(name: str, role: str | None, **figures: float) -> EngineFigures:
    info = EngineInfo(
        engine_id=name, name=name, software_version="0", model="m", monotonic_ns=0, wall_ns=0,
        role=role,
    )  # fmt: skip
    return EngineFigures(name, "live", info=info, **figures)  # type: ignore[arg-type]


def attached(name: str) -> EngineFigures:
    found = engine(name, None)
    return found._replace(info=msgspec.structs.replace(found.info, engine="vllm"))


def state(time_ns: int, *views: RequestView) -> SessionState:
    made = SessionState()
    made.time_ns = time_ns
    made.table.views = {view.request_id: view for view in views}
    return made


def view(request_id: int, status: str, **fields: object) -> RequestView:
    return RequestView(
        request_id=request_id, client_id=f"chat-{request_id}", status=status,  # type: ignore[arg-type]
        arrival_ns=10 * S, num_prompt_tokens=8, max_tokens=9, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


ENGINES = [engine("p", "prefill"), engine("d", "decode")]
ORIGIN = RequestOrigin("p", 3, 1, 12 * S, 12 * S, 13 * S, 14 * S)


def text_of(life: WholeLife, now_s: float) -> str:
    """The lane over the last ten seconds, one character a second."""
    [line] = fleet_page.life_lanes([life], round(now_s * S), 125, 1)
    return "".join(text for text, _ in line)[-100:][9::10]


def test_a_request_is_one_lane_through_prefill_and_decode_engine() -> None:
    lives = WholeLives()
    waiting = view(3, "waiting")
    [life] = lives.look(ENGINES, [state(11 * S, waiting), state(11 * S)])
    assert text_of(life, 11) == " " * 9 + "·"
    gone = view(3, "finished", handed_to="d", finish_ns=13 * S, first_token_ns=12 * S)
    here = view(7, "running", origin=ORIGIN)
    [life] = lives.look(ENGINES, [state(15 * S, gone), state(16 * S, here)])
    assert (life.decode, life.decode_id, life.end_ns) == ("d", 7, None)
    assert text_of(life, 19) == " ·▓·→━━━━━"
    done = view(7, "finished", origin=ORIGIN, finish_ns=17 * S)
    [life] = lives.look(ENGINES, [state(17 * S, gone), state(17 * S, done)])
    assert text_of(life, 19).rstrip() == " ·▓·→━━●"
    drawn = [fleet_page.life_lanes([life], 19 * S + each, 125, 1) for each in (0, S // 11)]
    assert drawn[0] == drawn[1]  # until a cell has passed


def test_the_lane_of_a_request_keeps_its_wait_in_the_queue_of_the_decode_engine() -> None:
    lives = WholeLives()
    gone = view(3, "finished", handed_to="d", finish_ns=13 * S, first_token_ns=12 * S)
    lives.look(ENGINES, [state(16 * S, gone), state(16 * S, view(7, "waiting", origin=ORIGIN))])
    here = view(7, "running", origin=ORIGIN)
    [life] = lives.look(ENGINES, [state(19 * S, gone), state(19 * S, here)])
    assert text_of(life, 19) == " ▓▓·→··━━━"[:10]


def test_without_a_decode_engine_the_prefill_engine_decodes() -> None:
    views = view(3, "running", first_token_ns=12 * S, num_output_tokens=5)
    [life] = WholeLives().look(ENGINES, [state(19 * S, views), state(12 * S)])
    assert text_of(life, 19) == " ▓▓━━━━━━━"


def test_ended_requests_keep_their_lane_for_a_while_if_the_engine_role_is_known() -> None:
    lives = WholeLives()
    done = view(3, "finished", finish_ns=12 * S, first_token_ns=11 * S)
    assert len(lives.look(ENGINES, [state(12 * S, done), state(12 * S)])) == 1
    assert len(lives.look(ENGINES, [state(12 * S + KEPT_NS // 2), state(12 * S)])) == 1
    assert not lives.look(ENGINES, [state(12 * S + KEPT_NS), state(12 * S)])
    assert not lives.look([engine("a", None)], [state(12 * S, done)])


def test_a_request_that_no_engine_reports_any_more_has_ended() -> None:
    lives = WholeLives()
    here = view(7, "running", origin=ORIGIN)
    lives.look(ENGINES, [state(15 * S), state(15 * S, here)])
    [life] = lives.look(ENGINES, [state(16 * S), state(16 * S)])  # both engines were restarted
    assert life.end_ns == 16 * S


def test_prefill_and_decode_engines_are_not_compared_with_each_other() -> None:
    apart = [engine("p", "prefill", kv_used=0.1), engine("d", "decode", kv_used=0.9)]
    assert not findings(apart)
    alike = [engine("d0", "decode", kv_used=0.1), engine("d1", "decode", kv_used=0.9)]
    assert [finding.engine for finding in findings([apart[0], *alike])] == [2]


def test_a_request_that_a_proxy_sends_to_two_attached_engines_is_one_lane() -> None:
    engines = [attached("a"), attached("b")]  # each may do both
    lives = WholeLives()
    begun = view(3, "running", elsewhere="")
    assert len(lives.look(engines, [state(11 * S, begun), state(11 * S)])) == 1
    ended = {"finish_reason": "length", "finish_ns": 13 * S, "first_token_ns": 13 * S}
    done = view(3, "finished", elsewhere="", **ended)
    [life] = lives.look(engines, [state(14 * S, done), state(14 * S)])
    assert text_of(life, 15) == "     ▓▓▓→→"  # the proxy has not asked the other one yet
    loading = view(7, "waiting", elsewhere="chat-3", held="remote_kv")
    loading.client_id, loading.arrival_ns = "chat-7", 14 * S
    [life] = lives.look(engines, [state(16 * S, done), state(16 * S, loading)])
    assert (life.prefill, life.decode, life.decode_id, life.end_ns) == ("a", "b", 7, None)
    running = view(7, "running", elsewhere="chat-3")
    [life] = lives.look(engines, [state(17 * S, done), state(17 * S, running)])
    assert text_of(life, 19) == " ▓▓▓→→→━━━"
    gone = view(7, "finished", elsewhere="chat-3", finish_ns=18 * S)
    [life] = lives.look(engines, [state(18 * S), state(18 * S, gone)])  # a has forgotten it
    assert life.end_ns == 18 * S
    alone = view(8, "running")  # a request of one engine has no lane
    assert lives.look(engines, [state(100 * S, alone), state(100 * S)]) == ()


def test_lanes_of_several_pairs_of_engines_name_theirs() -> None:
    lives = [WholeLife(f"p{i}", i, "chat", 0, decode=f"d{i}", decode_id=7) for i in range(2)]
    text = ["".join(text for text, _ in line) for line in fleet_page.life_lanes(lives, 1, 60, 9)]
    assert [line.split()[:2] for line in text] == [["r0→r7", "p0→d0"], ["r1→r7", "p1→d1"]]
    [line] = fleet_page.life_lanes(lives[:1], 1, 60, 9)
    assert "".join(text for text, _ in line).split()[:2] == ["r0→r7", "chat"]


def test_the_panel_of_lanes_says_what_its_glyphs_are_and_counts_the_seconds() -> None:
    picture = SimpleNamespace(lives=[WholeLife("p", 3, "chat", 0)] * 9, lives_ns=2 * S)
    page: Any = SimpleNamespace(picture=picture)
    lines = ["".join(text for text, _ in line) for line in fleet_page._lives(page, 80, 6)]
    assert {len(line) for line in lines} == {80}
    assert lines[0].endswith("▓ prefill  · waits  → handed over  ━ decode  ● end ╮")
    assert [line.count("r3 chat") for line in lines] == [0, 1, 1, 1, 0, 0]
    assert lines[4].endswith("┴-2 s─────┴-1 s─────│")
