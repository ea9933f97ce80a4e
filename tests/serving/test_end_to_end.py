"""An operator's session with a real engine process, client and dashboard in a pseudo-terminal."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import ReplayFrom, Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobsChanged, StepRecord, TelemetryMessage
from tests.support.engines.warm_command import WarmCommand
from tests.support.waiting import wait_for

STEPSCOPE = [sys.executable, "-m", "stepscope.tui.cli"]
START_S = 90.0


@pytest.fixture(scope="module")
def endpoint(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Iterator[str]:
    """The endpoint of `stepscope serve` with a tiny Qwen3, as a process."""
    folder = tmp_path_factory.mktemp("engine")
    endpoint = f"{folder}/engine"
    model = tiny_checkpoint("qwen3", max_position_embeddings=4096)
    errors = folder / "stderr"
    process = WarmCommand(
        *("serve", "--model", str(model), "--endpoint", endpoint, "--kv-memory", "16MB"),
        *("--threads", "1", "--max-num-batched-tokens", "512"),
        environment={"XDG_CONFIG_HOME": str(folder)},
        stderr=errors,
    )
    wait_for(Path(endpoint).exists, "the engine starts", START_S)
    with ControlClient(endpoint, timeout_s=START_S) as client:
        client.info(again_s=0.5)
    yield endpoint
    process.terminate()
    assert process.wait(timeout=30) == 0, errors.read_text()


class Chats:
    """A client that keeps eight requests running: each is replaced after its last token."""

    def __init__(self, endpoint: str) -> None:
        self.num_finished = 0
        self.wrong: list[object] = []
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Chats":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with ControlClient(self._endpoint) as client:
            for number in range(8):
                self._ask(client, number)
            while not self._stopping.is_set():
                _, reply = client.receive(0.1) or (0, None)
                if isinstance(reply, Output) and reply.finish_reason == "length":
                    self.num_finished += 1
                    self._ask(client, self.num_finished)
                elif isinstance(reply, Output) and reply.finish_reason is not None:
                    self.wrong.append(reply)

    def _ask(self, client: ControlClient, number: int) -> None:
        # Long prompts, so that a small budget shows; each one different, so that none is cached.
        prompt = f"{number} " + "a stream of tokens " * 40
        sampling = SamplingParams(max_tokens=100, ignore_eos=True)
        client.send(Submit(prompt=prompt, sampling=sampling))


class Published:
    """The messages that an engine publishes from now on. Each is asked for once."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._next_sequence = client.snapshot().sequence + 1
        self._messages: list[TelemetryMessage] = []

    def read(self) -> list[TelemetryMessage]:
        """All of them so far."""
        last_sequence = self._client.snapshot().sequence
        while self._next_sequence <= last_sequence:
            replayed = self._client.ask(ReplayFrom(sequence=self._next_sequence))
            self._messages += [wire.decode(frame.payload) for frame in replayed.frames]
            self._next_sequence = replayed.frames[-1].sequence + 1
        return self._messages


def steps_of(messages: list[TelemetryMessage]) -> list[StepRecord]:
    return [message for message in messages if isinstance(message, StepRecord)]


def num_tokens(step: StepRecord) -> int:
    return step.num_prefill_tokens + step.num_decode_tokens


def is_full(step: StepRecord) -> bool:
    return num_tokens(step) == step.token_budget == 48


def test_a_budget_typed_into_the_dashboard_takes_effect_at_the_step_shown(
    terminal: Callable[..., object], endpoint: str, tmp_path: Path
) -> None:
    with Chats(endpoint) as chats, ControlClient(endpoint, timeout_s=10.0) as client:
        published = Published(client)
        screen = terminal(*STEPSCOPE, "top", endpoint, cwd=str(tmp_path))
        screen.wait_for(r"LIVE.*step [\d,]+", START_S)
        screen.wait_for(r"BUDGET +\d+/512")
        screen.wait_for(r"RUN [1-9]")

        screen.send("B48\r")  # in one burst, as a slow connection delivers it
        screen.wait_for(r"BUDGET +\d+/48\b")
        screen.wait_for("◆")
        # The next prompt fills a step.
        wait_for(lambda: any(map(is_full, steps_of(published.read()))), "the new budget binds")
        messages = published.read()
        (change,) = [m for m in messages if isinstance(m, KnobsChanged)]
        assert change.old == {"max_num_batched_tokens": 512}
        assert change.new == {"max_num_batched_tokens": 48}
        steps = steps_of(messages)
        at_change = next(s for s in steps if s.step == change.effective_step)
        assert at_change.num_running > 0, "nothing was running when the budget changed"
        for step in steps:
            is_after = step.step >= change.effective_step
            assert step.token_budget == (48 if is_after else 512)
            assert num_tokens(step) <= step.token_budget

        finished = chats.num_finished
        wait_for(lambda: chats.num_finished >= finished + 4, "requests finish")
        screen.send("q")
        assert screen.wait_for_exit() == 0
        client.set_knobs(change.old, who="test")
    assert chats.wrong == []


def test_a_dashboard_whose_terminal_vanishes_leaves_the_engine_serving(
    terminal: Callable[..., object], endpoint: str, tmp_path: Path
) -> None:
    with Chats(endpoint) as chats:
        screen = terminal(*STEPSCOPE, "top", endpoint, cwd=str(tmp_path))
        screen.wait_for(r"LIVE.*step [\d,]+", START_S)
        screen.close()
        finished = chats.num_finished
        wait_for(lambda: chats.num_finished >= finished + 4, "the engine serves")
    assert chats.wrong == []
