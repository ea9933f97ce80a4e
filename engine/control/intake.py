"""What clients want of the engine, on its way into the inbox.

`Intake` checks and tokenises prompts, outside the engine's thread: tokenising a long one takes
longer than a step. `Submissions` tokenises short prompts at once. Long ones take up to seconds, so
two other threads tokenise them: the control thread has to send all replies meanwhile. `Changes`
passes on the commands that change the engine.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from stepscope.engine.control.outgoing import RemoteClient
from stepscope.engine.loop.dispatch import error_reply
from stepscope.engine.loop.inbox import Call, Client, Inbox, Refusal
from stepscope.engine.protocol.commands import Change, Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.text.text_stream import StopText, TextStream
from stepscope.engine.transport.connections import Connections


def num_chars(command: Submit) -> int:
    """Return the number of characters of the command's text that must be tokenised."""
    texts = (text for turn in command.messages or () for text in turn.texts)
    return len(command.prompt or "") + sum(map(len, texts))


class TextCodec(Protocol):
    """The methods of a `tokenizer.Tokenizer` that an intake calls."""

    def encode(self, text: str, most: int | None = None) -> list[int]: ...
    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None
    ) -> list[int]: ...
    def text_stream(self) -> TextStream: ...


@dataclass(eq=False)
class Intake:
    """Checks and tokenises prompts for one model."""

    codec: TextCodec | None  # the model's tokenizer; None if prompts must be token ids
    vocab_size: int
    max_model_len: int
    with_tokens: bool = False  # whether telemetry has the text of prompts

    def prepare(self, command: Submit) -> list[int]:
        """Return the token ids of the prompt.

        Raises ConfigError: not exactly one of text, token ids and conversation; an empty or too
        long prompt; a token id outside the vocabulary; or a conversation that the chat template
        rejects. The message names the field.
        """
        token_ids = self._token_ids(command)
        if command.max_prompt_tokens is not None:
            token_ids = token_ids[: command.max_prompt_tokens]
        if not token_ids:
            raise ConfigError("bad_prompt", "the prompt is empty")
        self._check_token_ids("bad_prompt", token_ids)
        if command.handed_over is not UNSET:
            output = command.handed_over.output_token_ids
            self._check_token_ids("bad_output", output)
            if len(output) >= command.sampling.max_tokens:
                raise ConfigError("bad_output", "the request has all its tokens already")
        self._check_sampling(command.sampling)
        at_least = 1 if command.fit_max_tokens else command.sampling.max_tokens
        self._check_length(len(token_ids), max(at_least, command.sampling.min_tokens))
        return token_ids

    def call(
        self, command: Submit, client: Client, clock: Callable[[], int], lane: bytes = b""
    ) -> Call:
        """Return the prepared request as an item of the inbox. Raises ConfigError as `prepare`.

        `max_tokens` is lowered to what fits after the prompt, if the command allows it.
        """
        token_ids, sampling, prompt_text = self.prepare(command), command.sampling, None
        most = self.max_model_len - len(token_ids)
        if command.fit_max_tokens and sampling.max_tokens > most:
            sampling = msgspec.structs.replace(sampling, max_tokens=most)
            command = msgspec.structs.replace(command, sampling=sampling)
        if self.with_tokens and self.codec is not None:
            stream = self.codec.text_stream()
            prompt_text = stream.push(token_ids) + stream.finish()
        stop_text = None
        if sampling.stop:
            assert self.codec is not None, "prepare refuses stop strings without a tokenizer"
            stop_text = StopText(self.codec.text_stream(), sampling.stop, sampling.include_stop)
        return Call(
            command, client, token_ids, stop_text, prompt_text, arrival_ns=clock(), lane=lane
        )

    def _token_ids(self, command: Submit) -> list[int]:
        sources = (command.prompt, command.prompt_token_ids, command.messages)
        if sum(source is not None for source in sources) != 1:
            raise ConfigError(
                "bad_prompt", "give exactly one of prompt, prompt_token_ids and messages"
            )
        # Refuse prompts that are too long before tokenising them or checking each token id.
        most = self.max_model_len - 1 if command.max_prompt_tokens is None else None
        if command.prompt_token_ids is not None:
            if most is not None and len(command.prompt_token_ids) > most:
                self._check_length(len(command.prompt_token_ids), 1)
            return list(command.prompt_token_ids)
        if self.codec is None:
            raise ConfigError("bad_prompt", "this engine has no tokenizer: send prompt_token_ids")
        if command.prompt is not None:
            return self.codec.encode(command.prompt, most)
        if not command.messages:
            raise ConfigError("bad_messages", "messages: the conversation is empty")
        turns = [{"role": turn.role, "content": turn.content} for turn in command.messages]
        return self.codec.encode_chat(turns, most)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_token_ids("bad_sampling", sampling.stop_token_ids, "stop_token_ids: ")
        if sampling.min_tokens > sampling.max_tokens:
            what = f"{sampling.min_tokens} is above max_tokens={sampling.max_tokens}"
            raise ConfigError("bad_sampling", f"min_tokens: {what}")
        if sampling.stop and self.codec is None:
            what = "stop: this engine has no tokenizer; use stop_token_ids"
            raise ConfigError("bad_sampling", what)

    def _check_token_ids(self, code: str, token_ids: Sequence[int], field: str = "") -> None:
        if (largest := max(token_ids, default=0)) >= self.vocab_size:
            what = f"token id {largest} is outside the vocabulary of {self.vocab_size} tokens"
            raise ConfigError(code, field + what)

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        # litellm and others know a prompt that is too long by these words.
        longest = self.max_model_len
        said = (
            f"this model's maximum context length is {longest} tokens, prompt and output together "
            f"(max_model_len); the prompt has {num_prompt_tokens}"
        )
        left = longest - num_prompt_tokens
        if left > 0:
            said += f", so at most {left} of output can be asked for, got max_tokens={max_tokens}"
        if max_tokens > left:
            raise ConfigError("prompt_too_long", said)


LONG_TEXT = 16_384  # characters; tokenising this many takes some 10 ms
MAX_LONG = 64  # long prompts that wait or are being tokenised
NUM_THREADS = 2  # that tokenise long prompts
_TURN_CHARS = 64  # a turn of a conversation counts as its text and this many characters


@dataclass(eq=False)
class Submissions:
    """Accepts prompts (`Submit` commands) of all clients. Use it on the control thread."""

    inbox: Inbox
    intake: Intake
    clock: Callable[[], int]
    # Called with the client and the number of characters that were tokenised on the control
    # thread, for the client's rate limit.
    charge_text: Callable[[bytes, int], None]

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenising")
        self._num_long = 0
        self._wanted: dict[bytes, set[bytes]] = {}  # commands with a long prompt, by identity
        self._lock = threading.Lock()  # of the two before it

    def close(self) -> None:
        """Drop all prompts that wait to be tokenised, and end the threads."""
        with self._lock:
            self._wanted.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def accept(self, command: Submit, client: RemoteClient) -> None:
        """Accept a prompt. Raises ConfigError if it is invalid, or too many long ones wait."""
        size = num_chars(command) + _TURN_CHARS * len(command.messages or ())
        if size <= LONG_TEXT:
            self.charge_text(client.account, size)
            self.inbox.put(self._prepared(command, client))
            return
        with self._lock:
            if self._num_long >= MAX_LONG:
                message = f"{MAX_LONG} long prompts already wait to be tokenised; try again later"
                raise ConfigError("queue_full", message)
            self._num_long += 1
            self._wanted.setdefault(client.identity, set()).add(client.command_id)
        self._threads.submit(self._tokenise, command, client)

    def forget(self, identity: bytes) -> None:
        """Drop the waiting prompts of a client that is gone; one in work is dropped at its end."""
        with self._lock:
            self._wanted.pop(identity, None)

    def _prepared(self, command: Submit, client: RemoteClient) -> Call:
        try:
            return self.intake.call(command, client, self.clock, client.account)
        except ConfigError as error:
            self.inbox.put(Refusal(command.client_id, str(error), lane=client.account))
            raise

    def _tokenise(self, command: Submit, client: RemoteClient) -> None:
        """Tokenise a long prompt, unless nobody wants it any more."""
        made: Call | Error | None = None
        if client.command_id in self._wanted.get(client.identity, ()):
            try:
                made = self._prepared(command, client)
            except Exception as error:  # noqa: BLE001 - it is logged
                made = error_reply(error, "the tokenising of a long prompt")
        with self._lock:
            self._num_long -= 1
            wanted = self._wanted.get(client.identity, set())
            is_wanted = client.command_id in wanted
            wanted.discard(client.command_id)
            if is_wanted and isinstance(made, Call):
                self.inbox.put(made)
            elif is_wanted and isinstance(made, Error):
                client.reply(made)


MAX_ANSWERS = 16_384  # lasts for minutes, even if one client sends changes without pause
MAX_WAITING = 64  # senders of one repeated command that has no answer yet


@dataclass(slots=True)
class _KeptAnswer:
    digest: bytes  # of the command, kept in its place
    reply: AnyReply | None = None
    waiting: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, command id


@dataclass(eq=False)
class Changes:
    """Passes commands that change the engine on to its thread. Use it on the control thread.

    A client that lost its connection before the answer arrived sends the command again. It is still
    applied only once: the answer to each change is kept, and the sender of a repeated command gets
    it, as soon as there is one.
    """

    inbox: Inbox
    connections: Connections
    send: Callable[[bytes, bytes, AnyReply], None]
    # By client and the command's name; the oldest are dropped.
    _answers: OrderedDict[tuple[bytes, bytes], _KeptAnswer] = field(default_factory=OrderedDict)

    def apply(self, client: RemoteClient, command: Change, payload: bytes) -> None:
        """Handle a change. Raises ConfigError if its name belongs to another command."""
        # A name is valid for all connections of a key. Without keys, all clients are one user.
        # A command without a name is identified by its connection, id and content.
        identity, command_id = client.identity, client.command_id
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        once = identity, command_id + digest
        if command.once:
            once = self.connections.key(identity), command.once.encode()
        kept = self._answers.get(once)
        if kept is None:
            self._answers[once] = _KeptAnswer(digest)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
            client.once = once
            asker = self.connections.asker(identity, command.who)
            self.inbox.put(Call(command, client, asker=asker, lane=client.account))
        elif kept.digest != digest:
            raise ConfigError(
                "once_reused", f"another command was sent as {command.once!r}; choose a new name"
            )
        elif kept.reply is not None:
            self.send(identity, command_id, kept.reply)
        elif len(kept.waiting) < MAX_WAITING:
            kept.waiting.append((identity, command_id))

    def answered(self, once: tuple[bytes, bytes], reply: AnyReply) -> None:
        """Keep the engine's answer to a change, and answer the repeated commands."""
        kept = self._answers.get(once)
        if kept is None or kept.reply is not None:
            return
        kept.reply = reply
        waiting, kept.waiting = kept.waiting, []
        for identity, command_id in waiting:
            self.send(identity, command_id, reply)
