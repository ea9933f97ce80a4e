"""What a `Submit` must satisfy before it may become a `Request`.

Runs outside the engine's thread (tokenising a long prompt takes longer than a step).
"""

from typing import Protocol

from stepscope.engine.commands import Submit
from stepscope.engine.config import ConfigError


class Encoder(Protocol):
    """Text to token ids."""

    def encode(self, text: str) -> list[int]: ...


class Intake:
    """Checks a prompt against one model.

    Args:
        encoder: tokenizer of the model, None when prompts must come as token ids.
        vocab_size: token ids are below it.
        max_model_len: most tokens of a request, prompt and output.
    """

    def __init__(self, encoder: Encoder | None, vocab_size: int, max_model_len: int) -> None:
        self._encoder = encoder
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def prepare(self, command: Submit) -> list[int]:
        """Token ids of the prompt.

        Raises:
            ConfigError: not exactly one of text and token ids, an empty or too long prompt, or a
                token id that the model does not have.
        """
        if (command.prompt is None) == (command.prompt_token_ids is None):
            raise ConfigError("bad_prompt", "give either prompt or prompt_token_ids")
        if command.prompt_token_ids is not None:
            token_ids = list(command.prompt_token_ids)
        elif self._encoder is None:
            raise ConfigError("bad_prompt", "this engine has no tokenizer: send prompt_token_ids")
        else:
            assert command.prompt is not None
            token_ids = self._encoder.encode(command.prompt)
        if command.max_prompt_tokens is not None:
            token_ids = token_ids[: command.max_prompt_tokens]
        if not token_ids:
            raise ConfigError("bad_prompt", "the prompt is empty")
        if (largest := max(token_ids)) >= self._vocab_size:
            raise ConfigError(
                "bad_prompt",
                f"token id {largest} is outside the vocabulary of {self._vocab_size} tokens",
            )
        self._check_length(len(token_ids), command.sampling.max_tokens)
        return token_ids

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        if num_prompt_tokens >= self._max_model_len:
            raise ConfigError(
                "prompt_too_long",
                f"the prompt has {num_prompt_tokens} tokens, max_model_len is "
                f"{self._max_model_len} for prompt and output together",
            )
        if num_prompt_tokens + max_tokens > self._max_model_len:
            raise ConfigError(
                "prompt_too_long",
                f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens} exceed "
                f"max_model_len={self._max_model_len}; at most "
                f"{self._max_model_len - num_prompt_tokens} can be asked for",
            )
