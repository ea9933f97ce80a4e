"""Text does not depend on how tokens are divided among steps, whatever the decoder."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from stepscope.engine.models.gguf_checkpoint import write_tokenizer
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.text.text_stream import StopText
from stepscope.engine.text.tokenizer import BYTE_OF_SYMBOL, OutputText, Tokenizer

SYMBOLS = list(BYTE_OF_SYMBOL)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁the", "▁", "▁▁", "s", "▁é", "日", "�", "don", "'", "t", ".", "<", "##ing", "cat</w>"]
SPECIAL, ADDED = "<|end|>", "<think>"


def symbols(text: bytes) -> str:
    return "".join(SYMBOLS[[*BYTE_OF_SYMBOL.values()].index(byte)] for byte in text)


def wrapped(vocabulary: Sequence[str], decoder: Any) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.decoder = decoder
    rust.add_special_tokens([AddedToken(SPECIAL, special=True)])
    rust.add_tokens([AddedToken(ADDED, special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


SPACES = decoders.Replace("▁", " ")
FALLBACK, FUSE = decoders.ByteFallback(), decoders.Fuse()
LONGER = [symbols(text) for text in (b" the", "é".encode(), "日本".encode(), b" \xf0\x9f")]
DECODERS: dict[str, tuple[list[str], Any]] = {
    "byte level": ([*BYTE_OF_SYMBOL, *LONGER], decoders.ByteLevel()),
    "byte fallback": (BYTES, decoders.Sequence([FALLBACK, FUSE])),
    "Llama 2": (
        BYTES + WORDS,
        decoders.Sequence([SPACES, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
    ),
    "Gemma": (BYTES + WORDS, decoders.Sequence([SPACES, FALLBACK, FUSE])),
    "metaspace, bytes": (
        BYTES + WORDS,
        decoders.Sequence([decoders.Metaspace("▁", prepend_scheme="always"), FALLBACK, FUSE]),
    ),
    "metaspace": (WORDS, decoders.Metaspace("▁", prepend_scheme="first")),
    "wordpiece": (WORDS, decoders.WordPiece("##", cleanup=True)),
    "suffix": (WORDS, decoders.BPEDecoder(suffix="</w>")),
    "strip": (WORDS, decoders.Sequence([SPACES, FUSE, decoders.Strip(" ", 2, 0)])),
    "replacements": (WORDS, decoders.Sequence([SPACES, decoders.Replace("t", "tt"), FUSE])),
}


@cache
def built(kind: str) -> Tokenizer:
    return wrapped(*DECODERS[kind])


class Bytes:
    """A pure Python tokenizer, as those of tiktoken: each token is some bytes; 300 is special."""

    all_special_ids = (300,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return bytes(each for each in token_ids if each < 256).decode(errors="replace")


def divided(tokenizer: Tokenizer, token_ids: Sequence[int], sizes: Sequence[int]) -> str:
    stream, at, text = tokenizer.text_stream(), 0, ""
    for size in [*sizes, len(token_ids)]:
        text += stream.push(token_ids[at : at + size])
        at += size
    rest = stream.finish()
    assert stream.num_chars == len(text + rest)
    return text + rest


# Runs of valid characters, single bytes, and any token, in ids of each kind of tokenizer.
PARTS = st.one_of(
    st.sampled_from(["é", "日本語", "😊", "a", " ", "\ufffd", "🧑‍🚀"]).map(str.encode),
    st.sampled_from([b"\xff", b"\xf0", b"\x9f\x98", b"\x80", b"\xe6\x97", b"\xc3"]),
    st.integers(0, 2**16),
)
SIZES = st.lists(st.sampled_from([1, 1, 2, 5, 17]), max_size=60)


def ids_of(kind: str, parts: Sequence[bytes | int]) -> list[int]:
    size = len(set(DECODERS[kind][0])) + 3  # the last id has no token
    has_bytes = DECODERS[kind][0][0] in ("!", BYTES[0])
    start = SYMBOLS if kind == "byte level" else None
    found: list[int] = []
    for part in parts:
        if isinstance(part, int):
            found.append(part % size)
        elif has_bytes:
            found += [
                byte if start is None else [*BYTE_OF_SYMBOL.values()].index(byte) for byte in part
            ]
    return found


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=30)
@given(parts=st.lists(PARTS, max_size=60), sizes=SIZES)
def test_pushes_of_any_size_give_the_same_text(
    kind: str, parts: list[bytes | int], sizes: list[int]
) -> None:
    tokenizer = built(kind)
    token_ids = ids_of(kind, parts)
    whole = divided(tokenizer, token_ids, [])
    assert whole == tokenizer.decode(token_ids)
    assert divided(tokenizer, token_ids, sizes) == whole
    assert divided(tokenizer, token_ids, [1] * len(token_ids)) == whole
    backend = tokenizer._backend
    if "\ufffd" not in (theirs := backend.decode(token_ids)):
        assert whole == theirs


@settings(max_examples=30)
@given(parts=st.lists(st.one_of(PARTS.filter(lambda each: isinstance(each, bytes)), st.just(300))))
def test_a_tokenizer_without_a_decoder_of_its_own_gives_the_text_of_its_bytes(
    parts: list[Any],
) -> None:
    token_ids = [each for part in parts for each in ([part] if part == 300 else part)]
    text = bytes(each for each in token_ids if each < 256).decode(errors="replace")
    assert divided(Tokenizer(Bytes()), token_ids, []) == text
    assert divided(Tokenizer(Bytes()), token_ids, [1] * len(token_ids)) == text


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "Llama 2", "Gemma"])
@settings(max_examples=25)
@given(text=st.text(st.sampled_from("aé日😊"), max_size=30), cut=st.integers(0, 3), sizes=SIZES)
def test_a_text_that_ends_inside_a_character_keeps_all_characters_before_it(
    kind: str, text: str, cut: int, sizes: list[int]
) -> None:
    data = text.encode()[: len(text.encode()) - cut]
    token_ids = ids_of(kind, [data])
    right = data.decode(errors="replace")
    assert divided(built(kind), token_ids, sizes) == right
    assert divided(built(kind), token_ids, []) == right


def test_a_special_token_takes_no_space_from_the_word_after_it() -> None:
    tokenizer = built("Llama 2")
    backend = tokenizer._backend
    the, special = backend.token_to_id("▁the"), backend.token_to_id(SPECIAL)
    for num in (1, 3, 50):
        token_ids = [the, *[special] * num, the]
        assert divided(tokenizer, token_ids, [1] * len(token_ids)) == "the the"


def test_the_tokenizer_of_a_gguf_file_streams_like_any_other(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    tokens = [*SYMBOLS, SPECIAL, ADDED]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": [], "eos_token_id": 256}
    types = [1] * 256 + [3, 4]
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    write_tokenizer({**named, "tokenizer.ggml.token_type": types}, tmp_path)
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    token_ids = [*ids_of("byte level", ["日本".encode(), b"\xff"]), 256, 257]
    for sizes in ([], [1] * 9, [2, 5]):
        assert divided(tokenizer, token_ids, sizes) == "日本\ufffd<think>"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_is_found_where_characters_end_inside_steps(
    kind: str, include_stop: bool
) -> None:
    stop = StopText(built(kind).text_stream(), ["本語"], include_stop)
    text = ""
    for token_id in ids_of(kind, ["日本日本語です".encode()]):
        if stop.stop is None:
            stop.push(token_id, armed=True)
            text += stop.take()
    assert stop.stop == "本語"
    assert text == ("日本日本語" if include_stop else "日本日")


def position(token_id: int) -> PositionLogprobs:
    token = TokenLogprob(token_id, -1.0)
    return PositionLogprobs(token, 1, [token])


def logprobs_of(
    tokenizer: Tokenizer, token_ids: list[int], sizes: Sequence[int], **more: Any
) -> list[PositionLogprobs]:
    texts = OutputText(tokenizer, Submit(prompt="x", sampling=SamplingParams(max_tokens=9)))
    found: list[PositionLogprobs] = []
    rest = token_ids
    for size in [*sizes, len(token_ids)]:
        ids, rest = rest[:size], rest[size:]
        ended = {} if rest else {"finish_reason": "length"} | more
        output = Output(request_id=1, token_ids=ids, logprobs=[*map(position, ids)], **ended)
        found += texts.complete(output).logprobs or []
        if not rest:
            break
    return found


OFFSETS = [
    # tokens, and the place in the text where each begins, counted by hand
    ([b"a", b"\xf0", b"\x9f", b"\x98", b"\x8a", b"b"], [0, 1, 1, 1, 1, 2]),
    ([b"a", None, b"b", None, None, b"c"], [0, 1, 1, 2, 2, 2]),
    ([b"\xff", b"\xff", b"a"], [0, 1, 2]),
    ([b"\xf0", b"\x9f", b"a", b"\xe6"], [0, 0, 1, 2]),
    ([b"\xef", b"\xbf", b"\xbd", b"\xc3", b"\xa9", b"x"], [0, 0, 0, 1, 1, 2]),
    ([b"\x80"] * 50 + [b"a"], list(range(51))),
]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("sizes", [[], [1] * 60, [2, 3, 1]])
@pytest.mark.parametrize(("tokens", "offsets"), OFFSETS)
def test_each_token_begins_where_its_first_byte_shows_in_the_text(
    kind: str, sizes: list[int], tokens: list[bytes | None], offsets: list[int]
) -> None:
    tokenizer = built(kind)
    special = tokenizer._backend.token_to_id(SPECIAL)
    ids = [special if each is None else ids_of(kind, [each])[0] for each in tokens]
    found = logprobs_of(tokenizer, ids, sizes)
    assert [each.text_offset for each in found] == offsets
    for each, token in zip(found, tokens, strict=True):
        right = SPECIAL.encode() if token is None else token
        for named in (each.chosen, each.top[0]):
            utf8 = named.text.encode() if named.utf8 is None else named.utf8
            assert utf8 == right
    # The same where the engine's thread made the text, because of stop strings.
    found = logprobs_of(tokenizer, ids, sizes, text="")
    assert [each.text_offset for each in found] == offsets


def test_a_token_after_a_word_without_its_first_space_begins_after_that_word() -> None:
    tokenizer = built("Llama 2")
    ids = [tokenizer._backend.token_to_id(token) for token in ("▁the", "s", "▁the", SPECIAL)]
    assert [tokenizer.token_text(each) for each in ids[:2]] == [" the", "s"]
    found = logprobs_of(tokenizer, ids, [1, 1, 1], finish_reason="stop")
    assert [each.text_offset for each in found] == [0, 3, 4, 8]
