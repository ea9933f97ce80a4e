"""`Intake`: checks and tokenises a `Submit` command before it becomes a `Request`.

Runs outside the engine's thread, because tokenising a long prompt takes longer than a step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from stepscope.engine.loop.inbox import Call, Client
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.text.stop_strings import StopText
from stepscope.engine.text.text_stream import TextStream


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


class Intake:
    """Checks and tokenises prompts for one model.

    `codec`: the model's tokenizer. None if prompts must be token ids.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        vocab_size: int,
        max_model_len: int,
        *,
        with_tokens: bool = False,
    ) -> None:
        self._codec = codec
        self._with_tokens = with_tokens
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

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
        if (largest := max(token_ids)) >= self._vocab_size:
            raise ConfigError("bad_prompt", self._outside(largest))
        if command.handed_over is not UNSET:
            output = command.handed_over.output_token_ids
            if (largest := max(output)) >= self._vocab_size:
                raise ConfigError("bad_output", self._outside(largest))
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
        most = self._max_model_len - len(token_ids)
        if command.fit_max_tokens and sampling.max_tokens > most:
            sampling = msgspec.structs.replace(sampling, max_tokens=most)
            command = msgspec.structs.replace(command, sampling=sampling)
        if self._with_tokens and self._codec is not None:
            stream = self._codec.text_stream()
            prompt_text = stream.push(token_ids) + stream.finish()
        stop_text = self.stop_text(sampling)
        return Call(
            command, client, token_ids, stop_text, prompt_text, arrival_ns=clock(), lane=lane
        )

    def stop_text(self, sampling: SamplingParams) -> StopText | None:
        """Return the stop-string matcher of a prepared request. None without stop strings."""
        if not sampling.stop:
            return None
        assert self._codec is not None, "prepare refuses stop strings without a tokenizer"
        return StopText(self._codec.text_stream(), sampling.stop, sampling.include_stop)

    def _token_ids(self, command: Submit) -> list[int]:
        sources = (command.prompt, command.prompt_token_ids, command.messages)
        if sum(source is not None for source in sources) != 1:
            raise ConfigError(
                "bad_prompt", "give exactly one of prompt, prompt_token_ids and messages"
            )
        # Refuse prompts that are too long before tokenising them or checking each token id.
        most = self._max_model_len - 1 if command.max_prompt_tokens is None else None
        if command.prompt_token_ids is not None:
            if most is not None and len(command.prompt_token_ids) > most:
                self._check_length(len(command.prompt_token_ids), 1)
            return list(command.prompt_token_ids)
        if self._codec is None:
            raise ConfigError("bad_prompt", "this engine has no tokenizer: send prompt_token_ids")
        if command.prompt is not None:
            return self._codec.encode(command.prompt, most)
        if not command.messages:
            raise ConfigError("bad_messages", "messages: the conversation is empty")
        turns = [{"role": turn.role, "content": turn.content} for turn in command.messages]
        return self._codec.encode_chat(turns, most)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        largest = max(sampling.stop_token_ids, default=0)
        if largest >= self._vocab_size:
            raise ConfigError("bad_sampling", f"stop_token_ids: {self._outside(largest)}")
        if sampling.min_tokens > sampling.max_tokens:
            what = f"{sampling.min_tokens} is above max_tokens={sampling.max_tokens}"
            raise ConfigError("bad_sampling", f"min_tokens: {what}")
        if sampling.stop and self._codec is None:
            what = "stop: this engine has no tokenizer; use stop_token_ids"
            raise ConfigError("bad_sampling", what)

    def _outside(self, token_id: int) -> str:
        return f"token id {token_id} is outside the vocabulary of {self._vocab_size} tokens"

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        # litellm and others know a prompt that is too long by these words.
        longest = self._max_model_len
        said = (
            f"this model's maximum context length is {longest} tokens, prompt and output together "
            f"(max_model_len); the prompt has {num_prompt_tokens}"
        )
        left = longest - num_prompt_tokens
        if left > 0:
            said += f", so at most {left} of output can be asked for, got max_tokens={max_tokens}"
        if max_tokens > left:
            raise ConfigError("prompt_too_long", said)
