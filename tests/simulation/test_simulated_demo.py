"""The live simulated engine behind the dashboard of `stepscope demo --simulate`."""

import threading
from pathlib import Path

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.process.simulated import serve_simulated
from stepscope.engine.protocol.commands import GetSnapshot, SetKnobs, Shutdown, Submit
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo, Snapshot
from stepscope.engine.simulation.simulated import START_NS
from stepscope.engine.simulation.step_time import CostModel
from stepscope.engine.simulation.virtual.requests import MadeUpCodec
from stepscope.engine.simulation.virtual.session import SimulatedSetup
from stepscope.engine.transport.endpoints import Endpoint

SETUP = SimulatedSetup(
    model=CostModel(),
    simulated="a test",
    model_name="none",
    device="virtual",
    knobs=Knobs(),
    limits=Limits(max_num_batched_tokens=4096, max_num_seqs=256, max_model_len=2048),
    num_blocks=400,
    block_size=16,
)


def test_a_simulated_engine_accepts_every_knob_and_runs_in_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.engine.process.simulated.stop_signals", _no_signals)
    endpoint = Endpoint.parse(f"ipc://{tmp_path}/engine")
    is_ready = threading.Event()

    def ready(info: EngineInfo) -> None:
        is_ready.set()

    arguments = (SETUP, endpoint, 100.0, 0, ready)
    engine = threading.Thread(target=serve_simulated, args=arguments)
    engine.start()
    assert is_ready.wait(30)
    with ControlClient(endpoint) as client:
        assert client.info().simulated == "a test"
        done = client.ask(SetKnobs(changes={"max_num_batched_tokens": 64}, who="test"))
        assert isinstance(done, Ack)
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        submit = Submit(prompt="word " * 400, sampling=sampling, stream=False, with_text=False)
        output = client.ask(submit)
        while not getattr(output, "finish_reason", None):
            received = client.receive(30)
            assert received is not None
            output = received[1]
        snapshot = client.ask(GetSnapshot())
        assert isinstance(snapshot, Snapshot)
        # 500 tokens at 64 a step, then 19 tokens: 27 steps of the cost model.
        assert snapshot.step == 26
        assert snapshot.time_ns - START_NS >= 27 * 8_000_000
        client.ask(Shutdown(who="test"))
    engine.join(30)
    assert not engine.is_alive()


class _no_signals:  # noqa: N801 - stands for a function
    """Signals belong to the main thread."""

    def __init__(self, core: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_texts_with_equal_prefixes_have_equal_first_tokens() -> None:
    first, second = (MadeUpCodec().encode("You are helpful. " + text) for text in ("Hi", "Bye"))
    assert first[:4] == second[:4]
    assert first != second
