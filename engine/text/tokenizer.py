"""`Tokenizer`: text to token ids and back.

Some templates read a message's content as a string, some as a list of parts, some as either. One
that gets the other form leaves the text out, or prints the list, without an error. So marks are
rendered first in place of the texts: they show what reaches the prompt.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import msgspec

from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob
from stepscope.engine.text.text_stream import REPLACEMENT, TextStream

# Longest part of a chat template's own error message that is passed on.
LONGEST_REASON = 300


def render(
    template: Callable[[list[dict[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the prompt of a conversation.

    `messages`: turns with `role` and `content`: a text, or the texts of its parts.

    Raises ConfigError: the template refuses the conversation, or leaves out the text of a message
    that is not the model's own (`bad_messages`).
    """
    roles = [message["role"] for message in messages]
    as_sent = [isinstance(message["content"], list) for message in messages]
    texts = [
        message["content"] if is_list else [message["content"]]
        for message, is_list in zip(messages, as_sent, strict=True)
    ]
    marks = [
        [f"mark{number}x{at}end" if text.strip() else text for at, text in enumerate(parts)]
        for number, parts in enumerate(texts)
    ]

    def rendered(forms: Sequence[bool], texts: Sequence[list[str]]) -> str:
        contents = (
            [{"type": "text", "text": text} for text in parts] if is_list else "\n".join(parts)
            for parts, is_list in zip(texts, forms, strict=True)
        )
        turns = zip(roles, contents, strict=True)
        try:
            return template([{"role": role, "content": content} for role, content in turns])
        except Exception as error:
            # Put on one line, because a template may raise any message.
            detail = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            message = f"messages: the model's chat template does not take them: {detail}"
            raise ConfigError("bad_messages", message) from error

    tried: list[tuple[list[int], Sequence[bool]]] = []  # messages left out, by form
    refusals: list[ConfigError] = []
    others = [role != "system" for role in roles]
    for forms in (as_sent, [False] * len(texts), [True] * len(texts), others):
        try:
            prompt = rendered(forms, marks).casefold()
        except ConfigError as error:
            refusals.append(error)
            continue
        shown = [all(_is_read(mark, prompt) for mark in parts) for parts in marks]
        tried.append(([number for number, each in enumerate(shown) if not each], forms))
        if all(shown):
            break
    if not tried:
        raise refusals[0]
    left_out, chosen = min(tried, key=lambda each: len(each[0]))
    for number in left_out:
        # A template may leave out what the model itself said earlier.
        if roles[number] != "assistant":
            raise ConfigError(
                "bad_messages",
                f"messages: the model's chat template leaves out the text of messages[{number}] "
                f"(role {roles[number][:40]!r}); send a conversation without it, or a prompt",
            )
    return rendered(chosen, texts)


def _is_read(mark: str, prompt: str) -> bool:
    """Whether the template wrote a text as it is, and not in a list of parts that it printed."""
    printed = f"'text': '{mark}", f'"text": "{mark}'
    return not mark.strip() or (mark in prompt and not any(each in prompt for each in printed))


# A token that stands for one byte, of tokenizers that write unknown characters as bytes.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# The visible character that byte-level BPE writes for each byte (Radford et al., 2019). Printable
# Latin-1 bytes stand for themselves; all others map to U+0100 and up, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_SYMBOL = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + number): byte for number, byte in enumerate(_OTHERS)},
}

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
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Any = backend
        # Returns the text of tokens, without special tokens and ids that have no token. Uses the
        # Rust tokenizer itself if there is one: it takes a tenth of the wrapper's time.
        self.decode: Callable[[Sequence[int]], str] = (
            self._decode_slowly if backend is None else self._decode_fast
        )
        self._special = frozenset(
            getattr(tokenizer, "all_special_ids", ())
            if backend is None
            else (i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        )
        decoder = getattr(backend, "decoder", None)
        self._falls_back = decoder is not None and b"ByteFallback" in decoder.__getstate__()
        # The fast call of the Rust tokenizer, without offsets and masks, which are not used here.
        self._encode_batch: Callable[..., list[Any]] | None = getattr(
            backend, "encode_batch_fast", None
        )
        # No text of more characters than so many for each token is taken; None: unknown.
        self._longest_token = None if backend is None else max(map(len, backend.get_vocab()))
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

        Raises ConfigError: the text is longer than `most` of the longest tokens together
        (`prompt_too_long`), so it is not even tokenised.
        """
        return self._encode(text, most, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None
    ) -> list[int]:
        """Return token ids of a conversation in the model's chat template, ready for the answer.

        The template came with the checkpoint and is not trusted: the transformers library renders
        it in Jinja's immutable sandbox, where it sees only the conversation and the special tokens.
        The sandbox bounds what a template can access, not how long it takes. The template includes
        the special tokens at the beginning, so the tokenizer adds none.

        Raises ConfigError: there is no chat template (`no_chat_template`), it refuses the
        conversation or leaves a part of it out (`bad_messages`), or the text is longer than `most`
        of the longest tokens.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            message = "messages: this model has no chat template; send a prompt"
            raise ConfigError("no_chat_template", message)
        template = partial(
            self._tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False
        )
        return self._encode(render(template, messages), most, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a longer text; for a special token, its name.

        Some tokenizers drop the space before a token at the beginning of a text. So the token is
        decoded twice in a row, and the second half is its text. A part of a character shows as
        replacement characters.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            once, twice = (self._decode_slowly([token_id] * n, skip=False) for n in (1, 2))
            text = twice[len(once) :] if twice.startswith(once) else once
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that is a part of a character; None if unknown."""
        named = getattr(self._tokenizer, "convert_ids_to_tokens", str)
        name = (named if self._backend is None else self._backend.id_to_token)(token_id)
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        if BYTE_OF_SYMBOL.keys() >= set(name):
            return bytes(BYTE_OF_SYMBOL[char] for char in name)
        return None

    def text_stream(self) -> "TextStream":
        return TextStream(self.decode, self._special)

    @cached_property
    def chars_per_token(self) -> float:
        """Mean number of characters per token in English prose."""
        num_special = len(self.encode(""))
        return len(PROSE) / max(1, len(self.encode(PROSE)) - num_special)

    def _encode(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        if most is not None and len(text) > most * (self._longest_token or len(text)):
            raise ConfigError(
                "prompt_too_long",
                f"this model's maximum context length is {most + 1} tokens, prompt and output "
                f"together (max_model_len); a prompt of {len(text):,} characters has more",
            )
        if self._encode_batch is None:
            how = {} if add_special_tokens else {"add_special_tokens": False}
            return list(self._tokenizer.encode(text, **how))
        (encoded,) = self._encode_batch([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoded.ids
        return token_ids

    def _decode_fast(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(token_ids)
        if not self._falls_back or REPLACEMENT not in text:
            return text
        # The decoder replaces a whole run of bytes that is not valid, also its beginning, which was
        # perhaps sent already. So give it those bytes only that are in whole characters.
        ids = [each for each in token_ids if each not in self._special]
        names = [name for name in map(self._backend.id_to_token, ids) if name is not None]
        tokens: list[str] = []
        for is_bytes, run in groupby(names, lambda name: bool(_BYTE_TOKEN.fullmatch(name))):
            if not is_bytes:
                tokens += run
                continue
            for char in bytes(int(name[3:5], 16) for name in run).decode(errors="replace"):
                utf8 = char.encode()
                tokens += [char] if char == REPLACEMENT else [f"<0x{byte:02X}>" for byte in utf8]
        decoded: str = self._backend.decoder.decode(tokens)
        return decoded

    def _decode_slowly(self, token_ids: Sequence[int], *, skip: bool = True) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return text


class OutputText:
    """Makes the text of the outputs of one `Submit`, on the control thread, if the client wants it.

    So no step waits for it, except for requests with stop strings: their text was already made by
    the engine's thread (`StopText`) and is passed on as it is.
    """

    def __init__(self, tokenizer: Tokenizer | None, submit: Submit) -> None:
        self._tokenizer = tokenizer if submit.with_text else None
        self._include_stop = submit.sampling.include_stop
        self._stream: TextStream | None = None  # made for the first token

    def complete(self, output: Output) -> Output:
        """Return `output` with its text, and with the texts of the tokens in its logprobs."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return output if output.text is None else msgspec.structs.replace(output, text=None)
        if output.text is not None and output.logprobs is None:
            return output
        if self._stream is None:
            self._stream = tokenizer.text_stream()
        stream, token_ids, logprobs = self._stream, output.token_ids, output.logprobs
        if output.text is None and output.finish_reason == "stop" and not self._include_stop:
            token_ids = token_ids[:-1]  # the token that ended the request is not in its text
        if logprobs is None:
            text = stream.push(token_ids)
        else:
            pieces = [stream.push_token(token_id) for token_id in token_ids]
            text = "".join(piece for piece, _ in pieces)
            begins = [*(begin for _, begin in pieces), stream.num_chars]
            logprobs = [
                _spelled(position, begin, tokenizer)
                for position, begin in zip(logprobs, begins, strict=False)
            ]
        if output.finish_reason is not None:
            text += stream.finish()
        if output.text is not None:
            text = output.text
        return msgspec.structs.replace(output, text=text, logprobs=logprobs)


def _spelled(position: PositionLogprobs, begin: int, tokenizer: Tokenizer) -> PositionLogprobs:
    def named(token: TokenLogprob) -> TokenLogprob:
        text = tokenizer.token_text(token.token_id)
        utf8 = tokenizer.token_bytes(token.token_id) if REPLACEMENT in text else None
        return TokenLogprob(token.token_id, token.logprob, text, utf8)

    return PositionLogprobs(
        named(position.chosen), position.rank, [named(token) for token in position.top], begin
    )
