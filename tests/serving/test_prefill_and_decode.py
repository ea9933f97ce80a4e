"""Prefill and decode apart: two engines of one model serve as one does, and lose no request.

The engines are processes with a tiny model in float32, whose tokens do not depend on the batch.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.handover.shared_memory import PREFIX
from stepscope.engine.http.settings import HttpSettings
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol import commands, wire
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError, Knobs
from stepscope.engine.protocol.replies import Error, Output, Reply, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.check.verify import verify
from stepscope.recordings.live.recorder import Recorder
from stepscope.tui.cli.engines.serve import announcement
from tests.support.engines.warm_command import WarmCommand
from tests.support.sessions.following import joined
from tests.support.sessions.received import every_message
from tests.support.waiting import wait_for

START_S = 90.0
AnyKind = TypeVar("AnyKind", bound=Reply)
FIXED = (
    "model", "endpoint", "name", "dtype", "kv_memory", "threads", "transfer_memory",
)  # fmt: skip


class Pair:
    """A prefill and a decode engine. A dead one is started again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._model = model
        self._processes: dict[str, WarmCommand] = {}

    def config(self, name: str, **changes: Any) -> EngineConfig:
        return EngineConfig(
            model=str(self._model),
            endpoint=self.endpoint(name),
            name=name,
            dtype="float32",
            kv_memory="4MB",
            threads=1,
            **{"transfer_memory": "300KB", **changes},
        )

    def endpoint(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def ensure(self) -> "Pair":
        for name, options in (
            ("decode", ("--role", "decode")),
            ("prefill", ("--role", "prefill", "--decode-to", self.endpoint("decode"))),
        ):
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                self.start(name, *options)
                if name == "decode" and "prefill" in self._processes:
                    wait_for(lambda: self.info().decode_engine is not None, "met again")
        return self

    def start(self, name: str, *options: str) -> None:
        config = msgspec.structs.asdict(self.config(name))
        fixed = {each: config[each] for each in FIXED}
        flags = [f"--{each.replace('_', '-')}={value}" for each, value in fixed.items()]
        self._processes[name] = WarmCommand(
            *("serve", *flags, "--max-num-batched-tokens", "64", *options),
            environment={"XDG_CONFIG_HOME": str(self.folder)},
            stderr=self.folder / f"{name}.stderr",
        )
        wait_for(Path(self.endpoint(name)).exists, "it starts", START_S)
        with ControlClient(self.endpoint(name), timeout_s=START_S) as client:
            client.info(again_s=0.2)

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def exit_code(self, name: str) -> int:
        """The exit code of a process that is ending."""
        return self._processes[name].wait(timeout=30)

    def info(self, name: str = "prefill") -> wire.EngineInfo:
        with ControlClient(self.endpoint(name)) as client:
            return client.info(again_s=1.0)

    def num_requests(self, name: str) -> int:
        with ControlClient(self.endpoint(name)) as client:
            return len(client.snapshot().requests)

    def shared_file(self) -> Path:
        """The file that the prefill engine shares keys and values in."""
        opened = Path(f"/proc/{self._processes['prefill'].pid}/fd").iterdir()
        [file] = {each.readlink() for each in opened if each.readlink().name.startswith(PREFIX)}
        return file

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            assert process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Iterator[Pair]:
    pair = Pair(tiny_checkpoint("llama"), tmp_path_factory.mktemp("pair"))
    knobs = Knobs(max_num_batched_tokens=64)
    with open_engine(pair.config("one"), knobs, progress=lambda what, share: None) as (core, _):
        thread = threading.Thread(target=core.run)
        thread.start()
        yield pair
        core.inbox.put(Call(commands.Shutdown(), SilentClient()))
        thread.join()
    pair.close()


@pytest.fixture
def pair(engines: Pair) -> Pair:
    return engines.ensure()


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    num_logprobs: int
    reason: str | None
    stop: str | int | None


def ask(number: int, max_tokens: int, **sampling: object) -> commands.Submit:
    """A request with a unique prompt of 8 to 200 tokens."""
    return commands.Submit(
        client_id=f"client-{number}",
        prompt=f"{number} " + "a stream of tokens "[: 6 + number % 13] * (1 + number % 10),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),  # type: ignore[arg-type]
        stream=number % 4 != 3,
    )


def answers(
    endpoint: str,
    asked: list[commands.Submit],
    meanwhile: Callable[[int], None] = lambda num_tokens: None,
) -> list[Answer]:
    """The answers to requests that are sent all at once.

    Args:
        meanwhile: called with the tokens that have come so far.
    """
    with ControlClient(endpoint, timeout_s=20.0) as client:
        places = {client.send(each): place for place, each in enumerate(asked)}
        found = [Answer([], "", 0, None, None)] * len(asked)
        deadline_s = time.monotonic() + 60
        while any(each.reason is None for each in found):
            assert time.monotonic() < deadline_s, found
            command_id, reply = client.receive(0.2) or (-1, None)
            if command_id not in places:
                continue
            assert not isinstance(reply, Error), reply
            if isinstance(reply, Output):
                place = places[command_id]
                before = found[place]
                found[place] = Answer(
                    [*before.token_ids, *reply.token_ids],
                    before.text + (reply.text or ""),
                    before.num_logprobs + len(reply.logprobs or ()),
                    reply.finish_reason,
                    reply.stop,
                )
                meanwhile(sum(len(each.token_ids) for each in found))
    return found


def messages(endpoint: str, since: int = 0) -> list[wire.TelemetryMessage]:
    """All messages that an engine has published."""
    with ControlClient(endpoint) as client:
        client.snapshot()  # what happened before it is published
        return every_message(client, since)


def events_of(endpoint: str) -> list[wire.RequestEvent]:
    return [
        event
        for message in messages(endpoint)
        if isinstance(message, wire.StepRecord | wire.EngineStatus)
        for event in message.events
    ]


def reply_of(client: ControlClient, kind: type[AnyKind]) -> AnyKind:
    """The next reply of this kind; others are skipped."""
    while True:
        received = client.receive(20.0)
        assert received is not None, f"no {kind.__name__} came"
        if isinstance(received[1], kind):
            return received[1]


@contextmanager
def standing_still(pair: Pair, name: str) -> Iterator[ControlClient]:
    """Stop an engine meanwhile, so that it ends nothing, however late this process looks."""
    with ControlClient(pair.endpoint(name)) as client:
        client.ask(commands.Pause(who="test"))
        try:
            yield client
        finally:
            client.ask(commands.Resume(who="test"))


MIXED = [
    *(ask(number, 1 + 7 * (number % 5)) for number in range(8)),
    ask(8, 40, temperature=0.9, seed=8),
    ask(9, 40, temperature=0.9, seed=7),
    ask(10, 24, logprobs=2),
    ask(11, 24, temperature=0.8, seed=3, repetition_penalty=1.2, min_tokens=3),
    ask(12, 60, temperature=1.0, seed=5, stop=list("aeioust")),
    ask(13, 60, temperature=1.0, seed=6, stop_token_ids=[*range(0, 250, 8)]),
]


def test_a_prefill_and_a_decode_engine_answer_like_a_single_engine(pair: Pair) -> None:
    expected = answers(pair.endpoint("one"), MIXED)
    assert {each.reason for each in expected} == {"stop", "length"}
    assert answers(pair.endpoint("prefill"), MIXED) == expected
    assert answers(pair.endpoint("prefill"), MIXED) == expected  # with prefixes that are cached


def test_prefill_and_decode_engine_each_publish_their_part_of_a_request(pair: Pair) -> None:
    begun = len(events_of(pair.endpoint("decode")))
    asked = [ask(20 + number, 12) for number in range(5)]
    answers(pair.endpoint("prefill"), asked)
    names = {each.client_id for each in asked}
    here = {
        event.request_id: event
        for event in events_of(pair.endpoint("prefill"))
        if isinstance(event, wire.Arrived) and event.client_id in names
    }
    there = events_of(pair.endpoint("decode"))[begun:]
    arrived = [event for event in there if isinstance(event, wire.Arrived)]
    assert {each.origin.request_id for each in arrived if each.origin} == set(here)
    for each in arrived:
        origin = each.origin
        assert origin.engine == "prefill"
        assert each.time_ns == here[origin.request_id or 0].time_ns
        assert each.time_ns < origin.first_token_ns <= origin.sent_ns <= origin.received_ns
    assert not any(isinstance(event, wire.FirstToken) for event in there)
    assert sorted(e.num_output_tokens for e in there if isinstance(e, wire.Finished)) == [12] * 5
    left = [e for e in events_of(pair.endpoint("prefill")) if isinstance(e, wire.Finished)]
    assert {e.handed_to for e in left if e.request_id in here} == {"decode"}


def test_a_late_second_token_names_the_hand_over_as_cause(pair: Pair) -> None:
    with ControlClient(pair.endpoint("prefill")) as other:
        with standing_still(pair, "decode") as client:
            since = client.snapshot().sequence + 1
            other.send(ask(32, 4))
            reply_of(other, Output)
            time.sleep(0.1)
        while reply_of(other, Output).finish_reason is None:
            pass
    explainer = Explainer(itl_bound_ns=1, ttft_bound_ns=1)
    told = messages(pair.endpoint("decode"), since)
    for message in told:
        explainer.take(message)
    [late] = [each for each in explainer.late if each.token_idx == 1]
    assert late.kind == "ITL"
    assert sum(piece.ns for piece in late.pieces) == late.gap_ns > 100_000_000
    assert {"transfer", "paused"} <= {piece.cause for piece in late.pieces}


def test_a_hand_over_waits_while_the_decode_engine_is_full(pair: Pair) -> None:
    asked = [ask(40 + number, 30) for number in range(12)]
    with ControlClient(pair.endpoint("prefill")) as client:
        since = client.snapshot().sequence + 1

    def has_waited() -> bool:
        told = messages(pair.endpoint("prefill"), since)
        return any(
            "decode_engine" in (each.waiting_reasons or {})
            if isinstance(each, wire.StepRecord)
            else isinstance(each, wire.EngineStatus) and each.num_waiting > 0 == each.num_running
            for each in told
        )

    with ThreadPoolExecutor(1) as pool, standing_still(pair, "decode") as decode:
        decode.set_knobs({"max_num_seqs": 1}, "test")
        answering = pool.submit(answers, pair.endpoint("prefill"), asked)
        wait_for(has_waited, "the prefill engine waits for room")
        decode.ask(commands.Resume(who="test"))
        found = answering.result()
        decode.set_knobs({"max_num_seqs": 256}, "test")
    assert found == answers(pair.endpoint("one"), asked)
    assert pair.num_requests("prefill") == pair.num_requests("decode") == 0


def long_ones(first: int) -> list[commands.Submit]:
    return [ask(first + number, 150, temperature=0.7, seed=number) for number in range(6)]


def once(do: Callable[[], None], at: int) -> Callable[[int], None]:
    done: list[int] = []

    def meanwhile(num_tokens: int) -> None:
        if num_tokens >= at and not done:
            done.append(num_tokens)
            do()

    return meanwhile


def test_requests_of_a_killed_decode_engine_continue_in_the_prefill_engine(pair: Pair) -> None:
    asked = long_ones(60)
    expected = answers(pair.endpoint("one"), asked)
    kill = once(lambda: pair.kill("decode"), at=100)
    explainer = Explainer(itl_bound_ns=50_000_000, ttft_bound_ns=1_000_000_000)
    with ControlClient(pair.endpoint("prefill")) as client:
        explainer.take(snapshot := client.snapshot())
    assert answers(pair.endpoint("prefill"), asked, kill) == expected
    for message in messages(pair.endpoint("prefill"), snapshot.sequence + 1):
        explainer.take(message)
    latest = max(explainer.late, key=lambda late: late.gap_ns)
    assert "the decode engine was gone" in latest.explanation
    assert pair.info().decode_engine is None
    assert answers(pair.endpoint("prefill"), MIXED) == answers(pair.endpoint("one"), MIXED)
    pair.ensure()  # another decode engine takes its place
    assert pair.info().decode_engine == "decode"
    assert answers(pair.endpoint("prefill"), asked) == expected
    assert any(isinstance(event, wire.Arrived) for event in events_of(pair.endpoint("decode")))


def test_requests_of_a_silent_decode_engine_return_to_the_prefill_engine(pair: Pair) -> None:
    asked = long_ones(80)
    expected = answers(pair.endpoint("one"), asked)
    freeze = once(lambda: pair.send("decode", signal.SIGSTOP), at=100)
    try:
        assert answers(pair.endpoint("prefill"), asked, freeze) == expected
    finally:
        pair.send("decode", signal.SIGCONT)
    wait_for(lambda: pair.info().decode_engine == "decode", "met again")
    wait_for(lambda: pair.num_requests("decode") == 0, "what it had has ended")
    # It has loaded no block that was overwritten meanwhile.
    assert answers(pair.endpoint("prefill"), asked) == expected


def test_a_killed_prefill_engine_ends_its_requests_and_a_restart_removes_its_file(
    pair: Pair,
) -> None:
    with standing_still(pair, "decode"), ControlClient(pair.endpoint("prefill")) as client:
        for each in long_ones(90):
            client.send(each)
        wait_for(lambda: pair.num_requests("decode") > 0, "handed over")
        file = pair.shared_file()
        pair.kill("prefill")
        wait_for(lambda: pair.num_requests("decode") == 0, "what it had has ended")
    assert file.exists()
    pair.ensure()
    assert not file.exists()


def test_a_client_can_abort_its_request_in_either_engine(pair: Pair) -> None:
    prefill_endpoint = pair.endpoint("prefill")
    with standing_still(pair, "decode") as decode:
        with ControlClient(prefill_endpoint) as client:
            client.send(ask(101, 400))
            abort = commands.Abort(request_id=reply_of(client, Submitted).request_id, who="test")
            wait_for(lambda: pair.num_requests("decode") > 0, "handed over")
            decode.ask(commands.StepOnce(n=3, who="test"))
            client.ask(abort)
            while (reason := reply_of(client, Output).finish_reason) is None:
                pass
            assert reason == "abort"
            wait_for(lambda: pair.num_requests("decode") == 0, "it has ended there")
            with pytest.raises(CommandRefused, match="has ended already"):
                client.ask(abort)
            client.send(ask(102, 400))
            wait_for(lambda: pair.num_requests("decode") > 0, "handed over")
        wait_for(lambda: pair.num_requests("decode") == 0, "its client was gone")


def test_each_role_is_named_and_unsuitable_configurations_and_requests_are_refused(
    pair: Pair, stepscope: Callable[..., Any]
) -> None:
    for name, role in (("prefill", "prefill, then decode"), ("decode", "decode")):
        assert f"role       {role}\n" in stepscope("snapshot", pair.endpoint(name)).stdout
    [line] = announcement("127.0.0.1:8000", HttpSettings(), takes_prompts=False)
    assert line.endswith("prompts go to the prefill engine")
    with (
        ControlClient(pair.endpoint("decode")) as client,
        pytest.raises(CommandRefused, match="send them to its prefill engine"),
    ):
        client.ask(ask(110, 4))
    there = pair.endpoint("decode")
    for changes, said in (
        ({"role": "prefill"}, "--decode-to NAME or ADDRESS"),
        ({"decode_to": "x"}, "decode_to needs role=prefill"),
        ({"role": "prefill", "decode_to": pair.endpoint("one")}, "is no decode engine"),
        ({"role": "prefill", "decode_to": pair.endpoint("none")}, "Start the decode engine first"),
        ({"role": "prefill", "decode_to": there, "block_size": 8}, "give both engines the same"),
        ({"role": "prefill", "decode_to": there, "transfer_memory": "1KB"}, "does not hold one"),
    ):
        config = pair.config("wrong", **changes)
        opened = open_engine(config, Knobs(), progress=lambda what, share: None)
        with pytest.raises(ConfigError, match=said), opened:
            pass


def test_recordings_of_prefill_and_decode_engine_pass_verify(pair: Pair, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.mcap" for name in ("prefill", "decode")]
    sources = [joined(Endpoint.parse(pair.endpoint(file.stem))) for file in files]
    recorders = [Recorder(source, file) for source, file in zip(sources, files, strict=True)]
    answers(pair.endpoint("prefill"), MIXED)
    for file, source in zip(files, sources, strict=True):
        with ControlClient(pair.endpoint(file.stem)) as client:
            step = client.snapshot().step
        wait_for(lambda source=source, step=step: (source.history.last_step or 0) >= step, "all")
    for recorder in recorders:
        recorder.stop()
        assert recorder.error is None
    for file, source in zip(files, sources, strict=True):
        source.stop()
        report = verify(file, lambda share: None)
        assert report.is_good, [check.problems for check in report.checks]
        assert report.num_steps


def test_a_decode_engine_that_shuts_down_returns_its_requests(pair: Pair) -> None:
    asked = long_ones(70)
    expected = answers(pair.endpoint("one"), asked)
    stop = once(lambda: pair.send("decode", signal.SIGTERM), at=100)
    assert answers(pair.endpoint("prefill"), asked, stop) == expected
    assert pair.exit_code("decode") == 0
