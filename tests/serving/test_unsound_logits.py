"""A request whose logits are not finite ends with an error; the engine and all others go on."""

from dataclasses import replace

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import UNSOUND_LOGITS, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Aborted, StepRecord, decode
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from tests.support.engines.live_engine import LiveEngine

BAD = 66  # prompts that begin with it have no finite logits from their third token on


@pytest.fixture
def engine(live_engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> LiveEngine:
    runner = live_engine.core.runner
    execute = runner.execute

    def with_nan(step: ScheduledStep) -> StepResult:
        result = execute(step)
        unsound = tuple(
            index
            for index, row in enumerate(step.rows)
            if row.samples and row.request.prompt_token_ids[0] == BAD
            and row.request.num_output_tokens >= 2
        )  # fmt: skip
        return replace(result, unsound_rows=unsound)

    monkeypatch.setattr(runner, "execute", with_nan)
    return live_engine


def answers(client: ControlClient, prompts: list[list[int]]) -> list[list[Output]]:
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    sent = {
        client.send(Submit(client_id="c", prompt_token_ids=each, sampling=sampling)): []
        for each in prompts
    }
    while not all(found and found[-1].finish_reason for found in sent.values()):
        command_id, reply = client.receive(10.0)
        if isinstance(reply, Output):
            sent[command_id].append(reply)
    return list(sent.values())


def test_only_the_request_without_finite_logits_ends_and_says_why(engine: LiveEngine) -> None:
    prompts = [[7] * 40, [BAD] * 40, [9] * 40]
    with ControlClient(engine.endpoint) as client:
        first, bad, last = answers(client, prompts)
        again = answers(client, [prompts[1], prompts[0]])  # the engine lives
    for found in (first, last):
        assert found[-1].finish_reason == "length"
        assert sum(len(each.token_ids) for each in found) == 30
    for found in (bad, again[0]):
        assert (found[-1].finish_reason, found[-1].why) == ("abort", UNSOUND_LOGITS)
        assert sum(len(each.token_ids) for each in found) == 2
    assert again[0][-1].num_cached_tokens == 0  # its blocks may hold NaN: no prompt hits them
    assert again[1][-1].num_cached_tokens > 0
    records = [
        message
        for frame in engine.publisher.replay(0, 4096).frames
        if isinstance(message := decode(frame.payload), StepRecord)
    ]
    ended = [e for each in records for e in each.events if isinstance(e, Aborted)]
    assert [each.reason for each in ended] == [UNSOUND_LOGITS] * 2
