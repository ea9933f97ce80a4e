"""The one sentence on an engine: sessions made so that it must, and must not, be said."""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.recordings import samples
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.verdict import Verdict, verdict_of
from stepscope.recordings.state.latency import SLO
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of

Messages: TypeAlias = list[tuple[int, wire.Telemetry]]
Session: TypeAlias = Callable[[], Messages]
USUAL = SLO(500, 50)
FAST = CostModel(floor_ms=12.0, token_us=25.0, context_ns=4.0)
QUIET = SimulatedWorkload(rate=1.0, document_share=0.0, output_tokens=200)
CROWD = SimulatedWorkload(rate=40.0, document_share=0.1, document_tokens=2600, output_tokens=140)


def simulated(
    num_steps: int, workload: SimulatedWorkload, num_blocks: int = 2048, **knobs: object
) -> Messages:
    values = Knobs(**({"max_num_batched_tokens": 512, "max_num_seqs": 32} | knobs))
    return simulate(3, num_steps, knobs=values, workload=workload, cost=FAST, num_blocks=num_blocks)


def judged(messages: Iterable[tuple[int, wire.Telemetry]], slo: SLO = USUAL) -> Verdict:
    return verdict_of(history_of(messages, slo))


def of_sample(name: str, slo: SLO) -> History:
    with Recording(samples.shipped()[name]) as recording:
        return history_of([(f.sequence, f.payload) for f, _ in recording.frames()], slo)


def healthy() -> Messages:
    return simulated(400, QUIET)


def queue() -> Messages:
    return simulated(400, CROWD, max_num_seqs=4)


def out_of_blocks() -> Messages:
    workload = SimulatedWorkload(rate=9.0, document_share=0.12, document_tokens=2600)
    return simulated(700, workload, num_blocks=512, max_num_batched_tokens=1024)


def more(
    messages: Messages, make: Callable[[wire.StepRecord, int], list[wire.Telemetry]]
) -> Messages:
    """The session, and further messages made from its last step and that step's time."""
    steps = [each for each in messages if isinstance(each[1], wire.StepRecord)]
    sequence, last = steps[-1]
    kept = [each for each in messages if each[0] <= sequence]
    return [*kept, *enumerate(make(last, last.tokens_ns), sequence + 1)]


def status(state: str, step: wire.StepRecord, time_ns: int) -> wire.EngineStatus:
    counts = {name: getattr(step, name) for name in ("step", "num_running", "num_waiting", "kv")}
    return wire.EngineStatus(state=state, time_ns=time_ns, **counts)


def paused() -> Messages:
    def make(step: wire.StepRecord, now_ns: int) -> list[wire.Telemetry]:
        asked = {"number": 1, "command": "Pause", "who": "ops@host", "effective_step": 1}
        times_ns = (now_ns + 1_000_000, now_ns + 12_001_000_000)
        states = [status("paused", step, time_ns) for time_ns in times_ns]
        return [wire.Audited(time_ns=now_ns, **asked), *states]

    return more(healthy(), make)


def idle() -> Messages:
    def make(step: wire.StepRecord, now_ns: int) -> list[wire.Telemetry]:
        return [msgspec.structs.replace(status("idle", step, now_ns), num_running=0)]

    return more(healthy(), make)


def in_flight() -> Messages:
    def make(step: wire.StepRecord, now_ns: int) -> list[wire.Telemetry]:
        times = {"time_ns": now_ns + 7_300_000_000, "since_ns": now_ns}
        work = {"num_prefill_tokens": 0, "num_decodes": 63, "num_decode_tokens": 63, "prefills": []}
        return [wire.StepInFlight(step=step.step + 1, token_budget=512, **times, **work)]

    return more(healthy(), make)


def test_a_freeze_is_told_with_the_prompt_that_made_it() -> None:
    verdict = verdict_of(of_sample("freeze", SLO(3000, 150)))
    assert verdict.text == (
        "12 streams stood still 0.8 s at step 302 behind the 4,096-token prompt of r16; "
        "7 stalls in 8 s, the last at step 420"
    )
    assert (verdict.tone, verdict.look) == ("breach", "worst")


def test_a_freeze_that_is_not_the_worst_in_memory_leads_to_its_own_step() -> None:
    history = of_sample("vllm", SLO(500, 50))
    assert history.rewind(362)
    verdict = verdict_of(history)
    longest = history.windows.stalls().longest[0].step
    assert "at step 265" in verdict.text
    assert (longest, verdict.look) == (2, "goto")


def test_it_is_not_healthy_where_few_tokens_were_late_but_most_requests_had_one() -> None:
    history = of_sample("speculation", USUAL)
    assert (history.windows.latency().itl.within_slo or 0) > 0.97
    verdict = verdict_of(history)
    assert verdict.text == "38% of requests kept every service level"
    assert (verdict.tone, verdict.look) == ("caution", "screen_latency")


@pytest.mark.parametrize(
    ("session", "said", "tone", "look"),
    [
        (healthy, r"healthy: \d+ running, 100.0% of tokens in time", "good", ""),
        (idle, "idle: there is no request", "muted", ""),
        (paused, r"paused by ops@host for 12 s", "caution", "pause_engine"),
        (in_flight, r"step \d+ has run for 7\.3 s: 63 decodes", "caution", "screen_step"),
    ],
)
def test_an_engines_state_is_a_sentence(session: Session, said: str, tone: str, look: str) -> None:
    verdict = judged(session())
    assert re.fullmatch(said, verdict.text), verdict
    assert (verdict.tone, verdict.look) == (tone, look)


@pytest.mark.parametrize(
    ("session", "slo", "said", "look"),
    [
        (queue, USUAL, r"the queue grows: .* wait, .* did .* ago; bound by max_num_seqs in \d+% .*",
         "screen_step"),
        (out_of_blocks, SLO(9e9, 9e9), r"\d+ preemptions in 10 s: .* run out", "screen_kv"),
        (healthy, SLO(500, 9), r"\d+% of gaps between tokens take over 9 ms", "screen_latency"),
        (healthy, SLO(1, 50), r"\d+% of first tokens take over 1 ms", "screen_latency"),
    ],
)  # fmt: skip
def test_what_holds_an_engine_back_is_said_with_the_key_to_its_evidence(
    session: Session, slo: SLO, said: str, look: str
) -> None:
    verdict = judged(session(), slo)
    assert re.fullmatch(said, verdict.text), verdict
    assert (verdict.tone in ("breach", "caution"), verdict.look) == (True, look)


def test_a_stall_is_no_news_ten_seconds_later() -> None:
    def later(step: wire.StepRecord, now_ns: int) -> list[wire.Telemetry]:
        return [status("running", step, now_ns + 11_000_000_000)]

    assert "stood still" not in judged(more(healthy(), later), SLO(3000, 9)).text


def test_without_a_step_nothing_is_called_healthy() -> None:
    first = [each for each in healthy() if not isinstance(each[1], wire.StepRecord)][:1]
    assert judged(first).tone == "muted"


def test_a_queue_is_not_said_to_grow_in_the_first_seconds_of_an_engine() -> None:
    messages = queue()
    steps = [n for n, (_, message) in enumerate(messages) if isinstance(message, wire.StepRecord)]
    assert "grows" not in judged(messages[: steps[60]], SLO(9e9, 9e9)).text


def test_a_queue_that_ebbs_away_does_not_grow() -> None:
    messages = queue()
    last_step = max(message.step for _, message in messages if hasattr(message, "tokens_ns"))

    def ebbed(message: wire.Telemetry) -> wire.Telemetry:
        if not isinstance(message, wire.StepRecord) or message.step < last_step - 5:
            return message
        return msgspec.structs.replace(message, num_waiting=6, waiting_reasons={"seats": 6})

    assert "grows" in judged(messages, SLO(9e9, 9e9)).text
    assert "grows" not in judged([(n, ebbed(m)) for n, m in messages], SLO(9e9, 9e9)).text
