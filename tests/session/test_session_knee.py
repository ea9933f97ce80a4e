"""The knee of a session is that of the machine which computed it, or it is unknown."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.engine.simulation.step_time import StepShape, StepTime
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.samples import shipped
from stepscope.recordings.session.knee import Knee
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of

FLAT_S = 0.008


@dataclass
class KneeCost:
    """Steps of a machine with a known knee. Contexts cost time, and every 40th step is held up."""

    knee: int
    adds_up: bool = False  # memory and compute take turns, as on a CPU
    noise: float = 0.1
    number: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def step_time(self, shape: StepShape) -> StepTime:
        computing = shape.num_tokens / self.knee
        seconds = FLAT_S * (1 + computing if self.adds_up else max(1.0, computing))
        # The keys of 10,000 tokens take a third of the weights' time, those of a prompt less.
        seconds += FLAT_S / 30_000 * shape.num_context_tokens
        seconds += FLAT_S / self.knee / 20_000 * shape.num_prefill_pairs
        self.number += 1
        seconds *= self.chance.lognormvariate(0, self.noise) * (1 + 4 * (self.number % 40 == 0))
        return StepTime(seconds, 0.0005)


def found(told: list[tuple[int, Telemetry]]) -> Knee | None:
    return history_of(told).windows.knee()


def run(cost: KneeCost, budget: int, num_steps: int = 1500, **work: Any) -> Knee | None:
    workload = SimulatedWorkload(rate=6.0, **work)
    knobs = Knobs(max_num_batched_tokens=budget, max_num_seqs=64)
    return found(simulate(2, num_steps, knobs=knobs, workload=workload, cost=cost, num_blocks=8192))


@pytest.mark.parametrize(
    ("knee", "budget", "adds_up", "work"),
    [
        (64, 512, True, {}),
        (256, 2048, False, {}),
        (256, 2048, True, {}),
        (256, 1024, False, {"document_share": 0.5, "document_tokens": 5000}),
        (500, 4096, False, {"document_share": 0.3}),
    ],
)
def test_the_knee_of_a_noisy_session_is_that_of_its_machine(
    knee: int, budget: int, adds_up: bool, work: dict[str, Any]
) -> None:
    got = run(KneeCost(knee, adds_up), budget, **work)
    assert 0.7 < got.tokens / knee < 1.4
    assert got.flat_ms == pytest.approx(FLAT_S * 1e3, rel=0.25)


@pytest.mark.parametrize(
    ("cost", "budget", "num_steps"),
    [
        (KneeCost(256), 2048, 20),  # too few steps
        (KneeCost(256), 256, 1500),  # no step is far beyond the knee
        (KneeCost(4), 256, 1500),  # none is far below it
    ],
)
def test_one_side_of_the_knee_does_not_show_it(cost: KneeCost, budget: int, num_steps: int) -> None:
    assert run(cost, budget, num_steps) is None


def test_of_steps_whose_work_is_not_told_no_knee_is_found() -> None:
    told = simulate(2, 800, cost=KneeCost(100), knobs=Knobs(max_num_batched_tokens=1024))
    assert found(told) is not None
    bare = [
        (number, msgspec.structs.replace(each, batch=None, kv=None))
        if isinstance(each, StepRecord)
        else (number, each)
        for number, each in told
    ]
    assert found(bare) is None


@pytest.mark.parametrize(
    ("name", "knee"),
    # One machine made the first two: decodes of a stream take 2.2 ms, 400 tokens some 60 ms. The
    # others have too few sizes.
    [
        ("freeze", (10, 35)),
        ("chunked", (10, 35)),
        ("h200", None),
        ("vllm", None),
        ("speculation", None),
    ],
)
def test_the_samples_show_their_knee_or_none(name: str, knee: tuple[int, int] | None) -> None:
    with Recording(shipped()[name]) as recording:
        got = found(list(enumerate(each.message for each in messages(recording))))
    if knee is None:
        assert got is None
    else:
        assert knee[0] < got.tokens < knee[1]
