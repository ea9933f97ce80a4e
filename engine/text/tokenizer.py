"""`Tokenizer`: text to token ids and back, and `TextStream`, which decodes as tokens arrive."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.text.token_bound import TokenBound

# What bytes that are not (yet) valid UTF-8 decode to.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A longer run of replacements is no character in the making.
LONGEST_RUN = 8
# Bytes that an unfinished character can have: three of four.
UNFINISHED = 3
# Characters of a chat template's own error message that are passed on.
LONGEST_REASON = 300
# Tokens a window may grow to, and how many of them are kept then.
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
    """A Hugging Face tokenizer behind the few calls the engine makes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # The Rust tokenizer itself, where there is one: a tenth of the wrapper's time per token.
        self._decode: Callable[[Sequence[int]], str] = (
            backend.decode if backend is not None else self._decode_slowly
        )
        # Likewise without offsets and masks, which are not used here.
        self._encode_batch: Callable[..., list[Any]] | None = getattr(
            backend, "encode_batch_fast", None
        )
        self._bound = None if backend is None else TokenBound(backend)
        self._token_texts: dict[int, str] = {}  # at most the vocabulary
        # The first call may drop truncation and padding that the file asks for. Done here, no later
        # call changes the tokenizer, and several threads can use it at once.
        self._tokenizer.encode("")

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids, with the special tokens the model expects around a prompt.

        Raises:
            ConfigError: the text surely has more than `most` tokens (`prompt_too_long`).
        """
        return self._encode(text, most, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], most: int | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the answer begins.

        The template came with the checkpoint and is not trusted: the library renders it in Jinja's
        immutable sandbox, where it sees the conversation and the special tokens and nothing else.
        The sandbox bounds what a template can reach, not how long it takes. The special tokens that
        begin a prompt are part of the template, so the tokenizer adds none.

        Args:
            messages: turns with `role` and `content`.

        Raises:
            ConfigError: there is no chat template (`no_chat_template`), it does not take the
                conversation (`bad_messages`), or that surely has more than `most` tokens.
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
            # One line: templates write their complaints as they like.
            detail = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            raise ConfigError(
                "bad_messages", f"messages: the model's chat template does not take them: {detail}"
            ) from error
        return self._encode(text, most, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Ids the tokenizer does not know decode to nothing."""
        return self._decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token as it reads inside a text; special tokens by their names.

        Some tokenizers drop the space before a token that begins a text, so it is read off from the
        token written twice. Part of a character shows as replacement characters.
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
        """Characters of English prose that make one token."""
        num_special = len(self.encode(""))
        return len(PROSE) / max(1, len(self.encode(PROSE)) - num_special)

    def _encode(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        # A text may be all tokens of one character.
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
    """Text of one request, piece by piece: the pieces joined are the text of all tokens.

    A character is given out once it is whole. Decoding looks at a short window of tokens, because
    some tokenizers write a token differently at the start of a text than inside it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0  # first tokens of the window, all of whose text is given out
        self._num_given = 0  # characters of the window's text that are given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids`, the next tokens, make certain; may be empty."""
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
        """What was held back: an unfinished character shows as replacement characters."""
        piece = self._decode(self._window)[self._num_given :]
        self._window.clear()
        self._num_context = self._num_given = 0
        return piece

    def _drop(self, num_tokens: int, num_held: int) -> None:
        """Forget the oldest tokens of the window; the last `num_held` characters stay due."""
        del self._window[:num_tokens]
        self._num_context = len(self._window)
        self._num_given = max(0, len(self._decode(self._window)) - num_held)
