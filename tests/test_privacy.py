"""What was asked and answered goes to the client and nowhere else: the bytes are searched."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from stepscope.engine.client import ControlClient
from stepscope.engine.commands import Error, Output, ReplayFrom, SamplingParams, Submit
from stepscope.engine.endpoints import Endpoint
from stepscope.engine.simulated import SimulatedRunner
from stepscope.engine.step import ScheduledStep, StepResult
from stepscope.recordings.history import History
from stepscope.recordings.mcap_chunk import read_chunk
from stepscope.recordings.reader import Recording
from stepscope.recordings.recorder import Recorder
from stepscope.recordings.subscriber import Subscriber

# No eight characters of these may be in a help text.
PROMPT = "Patient in room seven wants her biopsy looked at by somebody else."
ANSWER = "Tell nobody: vault password correct horse battery staple, door twelve."
STOP = "end of confidential part"
PROMPT_IDS = [3001 + 7 * place for place in range(60)]
NUM_PIECE_CHARS = 8
NUM_PIECE_IDS = 3
WAIT_S = 30.0


@pytest.fixture
def talking_engine(live_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One token a byte; whatever it is asked, it answers `ANSWER`."""
    silent = SimulatedRunner.execute

    def execute(runner: SimulatedRunner, step: ScheduledStep) -> StepResult:
        result = silent(runner, step)
        token_ids: list[int | None] = []
        for row in step.rows:
            place = row.request.num_tokens - row.request.num_prompt_tokens
            token_ids.append(ord(ANSWER[place % len(ANSWER)]) if row.samples else None)
        return StepResult(token_ids, launch_ns=result.launch_ns, tokens_ns=result.tokens_ns)

    monkeypatch.setattr(SimulatedRunner, "execute", execute)
    return live_engine


def pieces() -> list[bytes]:
    """What must be nowhere: any few characters in a row, any few token ids however written."""
    found = []
    for text in (PROMPT, ANSWER, STOP):
        raw = text.encode()
        # A token is a byte, and msgpack writes small numbers as one byte each: this is both.
        found += [raw[n : n + NUM_PIECE_CHARS] for n in range(len(raw) - NUM_PIECE_CHARS + 1)]
    for ids in (PROMPT_IDS, list(ANSWER.encode())):
        for n in range(len(ids) - NUM_PIECE_IDS + 1):
            piece = ids[n : n + NUM_PIECE_IDS]
            found.append(msgspec.msgpack.encode(piece)[1:])
            found.append(b", ".join(str(each).encode() for each in piece))
            found.append(b",".join(str(each).encode() for each in piece))
            found += [
                b"".join(each.to_bytes(size, order) for each in piece)
                for size in (2, 4, 8)
                for order in ("little", "big")
            ]
    # Three letters in a row occur by chance.
    return [piece for piece in found if len(piece) >= 5]


def leaks(content: bytes) -> list[bytes]:
    return [piece for piece in pieces() if piece in content]


class Tap:
    """Every frame of the telemetry socket, as it comes."""

    def __init__(self, address: str) -> None:
        self.frames: list[bytes] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 20)
        self._socket.connect(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.frames += self._socket.recv_multipart()
            except zmq.Again:
                continue

    def close(self) -> bytes:
        self._stop.set()
        self._thread.join()
        self._socket.close(linger=0)
        return b"\n".join(self.frames)


def ask(client: ControlClient, command: Submit) -> str:
    wanted = client.send(command)
    text = ""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        received = client.receive(1.0)
        if received is None or received[0] != wanted:
            continue
        reply = received[1]
        assert not isinstance(reply, Error), reply
        if isinstance(reply, Output):
            text += bytes(reply.token_ids).decode()
            if reply.finish_reason is not None:
                return text
    raise AssertionError("no answer")


def serve(endpoint: Endpoint, source: Subscriber) -> bytes:
    """Have the prompts answered; gives what else the control socket tells."""
    sampling = SamplingParams(max_tokens=len(ANSWER), ignore_eos=True, stop=(STOP,))
    with ControlClient(endpoint) as client:
        assert client.info().with_tokens is False
        for prompt in (
            Submit(prompt=PROMPT, sampling=sampling, client_id="clinic"),
            Submit(prompt=PROMPT, sampling=sampling),  # a prefix hit
            Submit(prompt_token_ids=PROMPT_IDS, sampling=sampling),
        ):
            assert ask(client, prompt) == ANSWER  # it was served, to who asked
        deadline_s = time.monotonic() + WAIT_S
        while len(source.history.events(kinds=frozenset({"finish"}))) < 3:
            time.sleep(0.05)
            assert time.monotonic() < deadline_s
        return msgspec.msgpack.encode([client.snapshot(), client.ask(ReplayFrom(sequence=0))])


def test_no_text_and_no_token_ids_are_in_telemetry_replies_or_a_recording(
    talking_engine: Any, tmp_path: Path
) -> None:
    endpoint = talking_engine.endpoint
    source = Subscriber(endpoint, History())
    path = tmp_path / "session.mcap"
    recorder = Recorder(source, path)
    tap = Tap(endpoint.telemetry)
    source.start()
    try:
        others = serve(endpoint, source)
        deadline_s = time.monotonic() + WAIT_S
        while recorder.num_steps < len(ANSWER) and time.monotonic() < deadline_s:
            time.sleep(0.05)
    finally:
        recorder.stop()
        source.stop()
        told = tap.close()
    assert b"clinic" in told  # the tap hears what is told
    assert b"clinic" in others
    assert leaks(told) == []
    assert leaks(others) == []
    content = path.read_bytes()
    with Recording(path) as recording:
        assert recording.metadata["with_tokens"] == "false"
        assert recording.info.with_tokens is False
        for place in recording.index.chunks:
            with open(path, "rb") as stream:
                content += read_chunk(stream, place).records
        payloads = b"\n".join(frame.payload for frame, _ in recording.frames())
    assert b"clinic" in content
    assert leaks(content) == []
    assert leaks(payloads) == []


def test_the_search_finds_what_it_looks_for() -> None:
    for leak in (
        PROMPT.encode()[10:30],
        msgspec.json.encode({"text": ANSWER}),
        msgspec.msgpack.encode(PROMPT_IDS),
        msgspec.json.encode(PROMPT_IDS),
        str(PROMPT_IDS[5:9]).encode(),
        msgspec.msgpack.encode(list(ANSWER.encode())),
    ):
        assert leaks(b"noise" + leak + b"noise")
