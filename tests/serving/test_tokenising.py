"""Long prompts: refused by length if they cannot fit, and else delaying no other prompt."""

import threading
from collections.abc import Iterator

import pytest

from stepscope.engine.control.intake import LONG_TEXT, MAX_LONG, Intake, Submissions
from stepscope.engine.control.outgoing import Outgoing, RemoteClient
from stepscope.engine.loop.inbox import Call, Inbox
from stepscope.engine.models.made_checkpoints import byte_tokenizer
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.text.tokenizer import Tokenizer
from tests.support.waiting import wait_for


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    tokenizer._encode_batch = None
    tokenizer._tokenizer = None  # it would fail
    longest = len("<|endoftext|>")
    with pytest.raises(ConfigError, match="maximum context length is 1024 tokens") as refused:
        Intake(tokenizer, 10_000, 1024).prepare(Submit(prompt="x" * (1023 * longest + 1)))
    assert refused.value.code == "prompt_too_long"


def test_a_text_that_fits_is_never_refused_for_its_length() -> None:
    intake = Intake(Tokenizer(byte_tokenizer()), 10_000, 1024)
    prompt = "<|endoftext|>" * 1023
    sampling = SamplingParams(max_tokens=1)
    assert len(intake.prepare(Submit(prompt=prompt, sampling=sampling))) == 1023


class Waiting:
    """A tokeniser that waits for the test, and clients that keep their replies."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.replies: list[Outgoing] = []
        self.inbox = Inbox()
        self.prompts = Submissions(self.inbox, self, lambda: 0, lambda *_: None)  # type: ignore[arg-type]

    def take(self, name: str, identity: bytes = b"client") -> None:
        client = RemoteClient(self.replies.append, identity, name.encode(), identity)
        self.prompts.accept(Submit(client_id=name, prompt="x" * (LONG_TEXT + 1)), client)

    def call(self, command: Submit, client: RemoteClient, *_: object) -> Call:
        self.begun.append(command.client_id)
        self.go_on.wait(20)
        return Call(command, client, [1])

    def queued(self) -> list[str]:
        """Names of the prompts that have come to the engine's inbox."""
        return [self.inbox.get_nowait().command.client_id for _ in range(self.inbox.qsize())]


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.go_on.set()
    made.prompts.close()


def test_an_abandoned_prompt_is_not_tokenised(waiting: Waiting) -> None:
    for name in ("first", "second"):
        waiting.take(name, identity=b"other")
    wait_for(lambda: sorted(waiting.begun) == ["first", "second"], "both threads are busy")
    waiting.take("gone", identity=b"gone")
    waiting.take("wanted")
    waiting.prompts.forget(b"gone")
    waiting.prompts.forget(b"other")  # a started prompt is discarded at its end
    waiting.go_on.set()
    wait_for(lambda: waiting.inbox.qsize() == 1, "what is wanted is done")
    assert waiting.queued() == ["wanted"]
    assert sorted(waiting.begun) == ["first", "second", "wanted"]


def test_long_prompts_that_wait_are_bounded(waiting: Waiting) -> None:
    for number in range(MAX_LONG):
        waiting.take(str(number))
    with pytest.raises(ConfigError, match="long prompts already wait") as refused:
        waiting.take("one more", identity=b"second")
    assert refused.value.code == "queue_full"
    waiting.go_on.set()
    wait_for(lambda: waiting.inbox.qsize() == MAX_LONG, "all are done")
    waiting.take("one more", identity=b"second")
