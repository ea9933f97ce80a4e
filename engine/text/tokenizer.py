"""`Tokenizer`: text to token ids and back; `TextStream`: decodes tokens as they arrive."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.text.token_bound import TokenBound

# Stands in decoded text for bytes that are not (yet) valid UTF-8.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A longer run of replacements is not an unfinished character.
LONGEST_RUN = 8
# Most bytes of an unfinished character: three of four.
UNFINISHED = 3
# Longest part of a chat template's own error message that is passed on.
LONGEST_REASON = 300
# Tokens that a window may grow to, and tokens that are kept of a larger one.
LONGEST_WINDOW = 32
KEPT_WINDOW = 16

PROSE = (
    "The harbour was quiet that morning, and the only boats that moved were the small ones which "
    "carried letters and bread to the ships at anchor. An old woman sat by the wall with a basket "
    "of apples, talking to nobody in particular about the winter of 1963, when the whole bay froze "
    'and people walked across it to the island. "You could hear the ice," she said. "It sang at '
    'night, like wires in the wind." Nobody believed her, of course; but the harbour master, who '
    "had been a boy then, looked up from his newspaper and nodded once, slowly, as if he had been "
    "asked a question that he had been waiting many years to answer."
)


class Tokenizer:
    """Wraps a Hugging Face tokenizer in the few methods that the engine calls."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # Use the Rust tokenizer itself if there is one: it takes a tenth of the wrapper's time.
        self._decode: Callable[[Sequence[int]], str] = (
            backend.decode if backend is not None else self._decode_slowly
        )
        # The fast call of the Rust tokenizer, without offsets and masks, which are not used here.
        self._encode_batch: Callable[..., list[Any]] | None = getattr(
            backend, "encode_batch_fast", None
        )
        self._bound = None if backend is None else TokenBound(backend)
        self._token_texts: dict[int, str] = {}  # at most the vocabulary
        # The first call may drop truncation and padding that the file asks for. After this one, no
        # call changes the tokenizer, so several threads can use it at once.
        self._tokenizer.encode("")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, or a turn of a conversation; None if it names none."""
        return getattr(self._tokenizer, "eos_token_id", None)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return token ids, with the special tokens that the model expects around a prompt.

        Args:
            most: refuse a text that certainly has more tokens, before tokenising it; None: no
                limit.

        Raises:
            ConfigError: the text has certainly more than `most` tokens (`prompt_too_long`).
        """
        return self._encode(text, most, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], most: int | None = None
    ) -> list[int]:
        """Return token ids of a conversation in the model's chat template, ready for the answer.

        The template came with the checkpoint and is not trusted: the transformers library renders
        it in Jinja's immutable sandbox, where it sees only the conversation and the special tokens.
        The sandbox bounds what a template can access, not how long it takes. The template includes
        the special tokens at the beginning, so the tokenizer adds none.

        Args:
            messages: turns with `role` and `content`.
            most: as in `encode`.

        Raises:
            ConfigError: there is no chat template (`no_chat_template`), it refuses the conversation
                (`bad_messages`), or the text has certainly more than `most` tokens.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "no_chat_template", "messages: this model has no chat template; send a prompt"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            # Put on one line, because a template may raise any message.
            detail = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            raise ConfigError(
                "bad_messages", f"messages: the model's chat template does not take them: {detail}"
            ) from error
        return self._encode(text, most, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens and without ids that have no token."""
        return self._decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a longer text; for a special token, its name.

        Some tokenizers drop the space before a token at the beginning of a text. So the token is
        decoded twice in a row, and the second half is its text. A part of a character shows as
        replacement characters.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            once = self._decode_all([token_id])
            twice = self._decode_all([token_id, token_id])
            text = twice[len(once) :] if twice.startswith(once) else once
            self._token_texts[token_id] = text
        return text

    def text_stream(self) -> "TextStream":
        return TextStream(self._decode)

    @cached_property
    def chars_per_token(self) -> float:
        """Mean number of characters per token in English prose."""
        num_special = len(self.encode(""))
        return len(PROSE) / max(1, len(self.encode(PROSE)) - num_special)

    def _encode(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        # The bound is at most the number of characters, so a shorter text needs no check.
        if most is not None and self._bound is not None and len(text) > most:
            at_least = self._bound.at_least(text)
            if at_least > most:
                raise ConfigError(
                    "prompt_too_long",
                    f"the prompt has at least {at_least} tokens; max_model_len leaves room for "
                    f"{most} and one of output",
                )
        if self._encode_batch is None:
            how = {} if add_special_tokens else {"add_special_tokens": False}
            return list(self._tokenizer.encode(text, **how))
        (encoded,) = self._encode_batch([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoded.ids
        return token_ids

    def _decode_slowly(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """Decodes the tokens of one request as they arrive.

    The texts that it returns, joined, are the text of all tokens. A character is returned once it
    is complete. Decoding uses a short window of tokens, because some tokenizers decode a token
    differently at the start of a text than inside it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0  # first tokens of the window whose text was returned completely
        self._num_given = 0  # characters of the window's text that were returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens, and return the text that is now certain; may be empty."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        if len(text) - len(certain) > LONGEST_RUN:
            certain = text[:-UNFINISHED]
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        num_held = len(text) - self._num_given
        if text and num_held == 0:
            self._drop(self._num_context, num_held)
        elif len(self._window) > LONGEST_WINDOW:
            self._drop(len(self._window) - KEPT_WINDOW, num_held)
        return piece

    def finish(self) -> str:
        """Return the text that was held back; an unfinished character as replacement characters."""
        piece = self._decode(self._window)[self._num_given :]
        self._window.clear()
        self._num_context = self._num_given = 0
        return piece

    def _drop(self, num_tokens: int, num_held: int) -> None:
        """Drop the oldest `num_tokens` of the window, whose text was returned.

        The last `num_held` characters of the window's text remain to be returned.
        """
        del self._window[:num_tokens]
        self._num_context = len(self._window)
        self._num_given = max(0, len(self._decode(self._window)) - num_held)
