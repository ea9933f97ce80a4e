"""Prompts and answers go to the client and nowhere else; the tests search all bytes for them."""

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import ReplayFrom, Submit
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import StepRecord
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.simulation.simulated import SimulatedRunner
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.check.verify import verify
from stepscope.recordings.export.export import export
from stepscope.recordings.file.mcap.chunk import read_chunk
from stepscope.recordings.file.messages import stored_index
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.transcripts import KnownText, Said
from stepscope.tui.cli.recordings import export as export_command
from stepscope.tui.cli.recordings import verify as verify_command
from stepscope.tui.settings.cli_errors import CommandFailed
from stepscope.tui.views.pages import request_page
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import wait_for

# No eight characters of these may be in a help text.
PROMPT = "Patient in room seven wants her biopsy looked at by somebody else."
ANSWER = "Tell nobody: vault password correct horse battery staple, door twelve."
STOP = "end of confidential part"
PROMPT_IDS = [3001 + 7 * place for place in range(60)]
NUM_PIECE_CHARS = 8
NUM_PIECE_IDS = 3
WAIT_S = 30.0


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with one token a byte that answer every prompt with `ANSWER`."""
    silent = SimulatedRunner.execute

    def execute(runner: SimulatedRunner, step: ScheduledStep) -> StepResult:
        result = silent(runner, step)
        token_ids: list[int | None] = []
        for row in step.rows:
            place = row.request.num_tokens - row.request.num_prompt_tokens
            token_ids.append(ord(ANSWER[place % len(ANSWER)]) if row.samples else None)
        return StepResult(token_ids, launch_ns=result.launch_ns, tokens_ns=result.tokens_ns)

    monkeypatch.setattr(SimulatedRunner, "execute", execute)


def pieces() -> list[bytes]:
    """What must not occur: any few consecutive characters or token ids, in any encoding."""
    found = []
    for text in (PROMPT, ANSWER, STOP):
        raw = text.encode()
        # A token is a byte, and msgpack writes small numbers as one byte each: this is both.
        found += [raw[n : n + NUM_PIECE_CHARS] for n in range(len(raw) - NUM_PIECE_CHARS + 1)]
    for ids in (PROMPT_IDS, list(ANSWER.encode())):
        for n in range(len(ids) - NUM_PIECE_IDS + 1):
            piece = ids[n : n + NUM_PIECE_IDS]
            found.append(msgspec.msgpack.encode(piece)[1:])
            found += [comma.join(str(each).encode() for each in piece) for comma in (b", ", b",")]
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
    """Collects every frame of the telemetry socket."""

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


def serve(endpoint: Endpoint, source: Subscriber, *, with_tokens: bool) -> bytes:
    """Have the prompts answered; return all other replies of the control socket."""
    sampling = SamplingParams(max_tokens=len(ANSWER), ignore_eos=True, stop=(STOP,))
    with ControlClient(endpoint) as client:
        assert client.info().with_tokens is with_tokens
        for prompt in (
            Submit(prompt=PROMPT, sampling=sampling, client_id="clinic"),
            Submit(prompt=PROMPT, sampling=sampling),  # a prefix hit
            Submit(prompt_token_ids=PROMPT_IDS, sampling=sampling),
        ):
            assert ask(client, prompt) == ANSWER  # the client that asked has got it
        wait_for(lambda: len(source.history.events(kinds=frozenset({"finish"}))) >= 3)
        replies = client.snapshot(), client.kept_snapshot(60.0), client.ask(ReplayFrom(sequence=0))
        return msgspec.msgpack.encode(replies)


class Session(NamedTuple):
    """The messages of a session, and its recording."""

    telemetry: bytes
    replies: bytes
    path: Path
    source: Subscriber


def session(engine: Any, folder: Path, *, with_tokens: bool) -> Session:
    endpoint = engine.endpoint
    source = Subscriber(endpoint, History())
    path = folder / "session.mcap"
    recorder = Recorder(source, path)
    tap = Tap(endpoint.telemetry)
    source.start()
    wait_for(lambda: source.status == "live")
    try:
        replies = serve(endpoint, source, with_tokens=with_tokens)
        wait_for(lambda: recorder.num_steps >= len(ANSWER))
    finally:
        recorder.stop()
        source.stop()
        telemetry = tap.close()
    return Session(telemetry, replies, path, source)


def file_content(path: Path) -> bytes:
    """All bytes of a recording: raw, decompressed, and as received."""
    content = path.read_bytes()
    with Recording(path) as recording:
        for place in recording.index.chunks:
            with open(path, "rb") as stream:
                content += read_chunk(stream, place)[0]
        content += b"\n".join(frame.payload for frame, _ in recording.frames())
    return content


@pytest.mark.usefixtures("talking")
def test_no_text_is_in_telemetry_replies_or_a_recording(live_engine: Any, tmp_path: Path) -> None:
    told = session(live_engine, tmp_path, with_tokens=False)
    assert b"clinic" in told.telemetry  # the tap hears what is told
    assert b"clinic" in told.replies
    assert leaks(told.telemetry) == []
    assert leaks(told.replies) == []
    with Recording(told.path) as recording:
        assert recording.metadata["with_tokens"] == "false"
        assert recording.info.with_tokens is False
    content = file_content(told.path)
    assert b"clinic" in content
    assert leaks(content) == []
    view = next(iter(told.source.history.state.requests.values()))
    life = told.source.history.lives.life(view)
    assert life.text is None


@pytest.mark.usefixtures("talking")
def test_a_recording_with_tokens_says_so_and_can_be_stripped(
    telling_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = session(telling_engine, tmp_path, with_tokens=True)
    content = file_content(told.path)
    for where in (told.telemetry, told.replies, content):
        assert PROMPT.encode() in where
        assert msgspec.msgpack.encode(PROMPT_IDS)[1:] in where
    with Recording(told.path) as recording:
        assert recording.metadata["with_tokens"] == "true"
        assert recording.info.with_tokens is True
        steps = [wire.decode(f.payload) for f, _ in recording.frames() if f.topic == b"step"]
    said: dict[int, str] = {}
    for step in steps:
        for row, token_id, text in zip(step.batch, step.token_ids, step.texts, strict=True):
            assert (token_id is None) == (text is None)
            said[row.request_id] = said.get(row.request_id, "") + (text or "")
    assert set(said.values()) == {ANSWER}
    # The request page shows prompt and answer up to any step.
    history = told.source.history
    views = {view.request_id: view for view in history.state.requests.values()}
    for request_id, prompt in ((0, PROMPT), (1, PROMPT), (2, None)):
        life = history.lives.life(views[request_id])
        assert prompt in (None, life.text.prompt_text)
        assert life.text.output_text(float("inf")) == ANSWER
        assert life.text.output_text(life.text.said[4].step) == ANSWER[:5]
    assert verify(told.path, lambda share: None).is_good
    assert verify_command.verify_file(str(told.path), False) == 0
    assert "holds prompts and outputs" in capsys.readouterr().out
    # Exports have none unless asked; no format but jsonl ever has.
    # parquet and perfetto are of the same moments, in other packages' encodings
    for target in ("jsonl", "mooncake", "csv"):
        output = tmp_path / target
        with Recording(told.path) as recording:
            export(recording, output, target, StepRange(), "requests", lambda share: None)
        assert leaks(output.read_bytes()) == []
    output = tmp_path / "asked"
    with Recording(told.path) as recording:
        export(recording, output, "jsonl", StepRange(), "steps", print, with_tokens=True)
    assert PROMPT.encode() in output.read_bytes()
    verify_command.rewrite_file(str(told.path), None, strip_tokens=True)
    bare = told.path.with_name("session-stripped.mcap")
    assert leaks(file_content(bare)) == []
    report = verify(bare, lambda share: None)
    assert [check.name for check in report.checks if not check.is_good] == []
    assert report.num_steps == len(steps)
    with Recording(bare) as recording:
        assert recording.metadata["with_tokens"] == "false"
        assert recording.info.with_tokens is False
        assert stored_index(recording, 0) is not None
    again = str(tmp_path / "asked again")
    with pytest.raises(CommandFailed, match="they were removed from it"):
        export_command.export_file(str(bare), "jsonl", output=again, with_tokens=True)


@pytest.mark.usefixtures("talking")
def test_a_late_subscriber_gets_the_text_of_running_requests(telling_engine: Any) -> None:
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    with ControlClient(telling_engine.endpoint) as client:
        client.send(Submit(prompt=PROMPT, sampling=sampling))
        while client.snapshot().step < 40:
            time.sleep(0.02)
        late = Subscriber(telling_engine.endpoint)
        late.start()
        wait_for(lambda: late.history.num_steps >= 10)
        late.stop()
    (view,) = late.history.state.requests.values()
    life = late.history.lives.life(view)
    assert life.text.prompt_text == PROMPT
    text = life.text.output_text(float("inf"))
    assert len(text) == view.num_output_tokens > 40
    assert text == (ANSWER * 20)[: len(text)]


def test_the_text_of_a_request_is_drawn_up_to_the_cursor_and_safe_for_a_terminal() -> None:
    texts = ["Tell ", "no\x1b[2J", "body"]
    said = tuple(Said(step, (step,), text) for step, text in enumerate(texts))
    told = KnownText((1, 2), "What?\tNow", said)

    def drawn(told: KnownText, last: float, height: int = 6) -> str:
        lines = request_page.draw_text(told, last, 40, height)
        assert len(lines) == height
        texts = ["".join(text for text, _ in line) for line in lines]
        assert {len(text) for text in texts} == {40}
        return "\n".join(texts)

    assert "◂ What??Now" in drawn(told, 9)
    assert "▸ Tell no?[2Jbody" in drawn(told, 9)
    assert "body" not in drawn(told, 1)
    assert "▸" not in drawn(told, -1).split("\n", 1)[1]
    # Without a tokenizer there are numbers; of what is long, the end is shown.
    assert "▸ 7 8" in drawn(KnownText((5, 6), None, (Said(1, (7, 8), None),)), 9)
    long = KnownText((1,), "x" * 500, (Said(1, (2,), "y" * 500 + "END"),))
    assert "END" in drawn(long, 9)
    assert "…" in drawn(long, 9)
    assert "arrived too early" in drawn(KnownText(None, None, said), 9)
    assert request_page.height_of_text(None, 40) == request_page.height_of_text(told, 12) == 0


@pytest.mark.parametrize(
    "told", [{"token_ids": [7]}, {"drafts": [wire.DraftRow(0, 3, 2, token_ids=[7, 8])]}]
)
def test_verify_finds_tokens_in_a_file_that_claims_to_have_none(
    told: dict[str, Any], tmp_path: Path
) -> None:
    messages = dict(simulate(seed=2, num_steps=30))
    steps = {each.step: at for at, each in messages.items() if isinstance(each, StepRecord)}
    messages[steps[20]] = msgspec.structs.replace(messages[steps[20]], **told)
    report = verify(record(tmp_path / "liar.mcap", messages.items()), lambda share: None)
    assert [check.name for check in report.checks if not check.is_good] == ["privacy"]
    assert "--strip-tokens" in report.privacy.problems[0]


def test_the_leak_check_finds_tokens_in_every_encoding() -> None:
    for leak in (
        PROMPT.encode()[10:30],
        msgspec.json.encode({"text": ANSWER}),
        msgspec.msgpack.encode(PROMPT_IDS),
        msgspec.json.encode(PROMPT_IDS),
        str(PROMPT_IDS[5:9]).encode(),
        msgspec.msgpack.encode(list(ANSWER.encode())),
    ):
        assert leaks(b"noise" + leak + b"noise")
