"""Long prompts: refused by length if certainly too long, and else delaying no other prompt."""

import random
import threading
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from stepscope.engine.client.client import ControlClient
from stepscope.engine.control.intake import Intake
from stepscope.engine.control.remote_client import RemoteClient
from stepscope.engine.control.submissions import (
    LONG_TEXT,
    LONGEST_TEXTS,
    MAX_CLIENT_BYTES,
    LongPrompts,
)
from stepscope.engine.models.demo import byte_tokenizer
from stepscope.engine.protocol.commands import Submit, Withdraw
from stepscope.engine.protocol.replies import Ack, Error, Submitted
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.text.token_bound import TokenBound
from stepscope.engine.text.tokenizer import PROSE, Tokenizer
from tests.support.waiting import wait_for

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
COMPOSED = [
    "é",
    "ᾂ",
    "각",
    "Ω",
    "ﬁ",
    "㎢",
    "Ａ",
    "e\u0301",
    "\u1100\u1161\u11a8",
    "\u212a",
    "\u212b",
]
SAMPLES = [
    PROSE,
    "a" * 40,
    " " * 40,
    "\n" * 9,
    "--------",
    "abcabcabc",
    *COMPOSED,
    "<|end|>",
    "世界",
]


def trained(
    normalizer: Any = None, *, added: tuple[AddedToken, ...] = (), before: tuple[Any, ...] = ()
) -> RustTokenizer:
    """A trained byte-level BPE with long tokens."""
    tokenizer = RustTokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *before,
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [sample * 3 for sample in SAMPLES] + [unicodedata.normalize("NFD", "ᾂ각é") * 9]
    tokenizer.train_from_iterator(texts * 5, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), *added])
    return tokenizer


def byte_fallback() -> RustTokenizer:
    """A tokenizer with marks for spaces and bytes for unknown characters, as in Llama 2."""
    pieces = ["<unk>", "▁the", "▁cat", "s", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = RustTokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


KINDS: dict[str, Callable[[], RustTokenizer]] = {
    "plain": trained,
    "NFC": lambda: trained(normalizers.NFC()),
    "NFKC": lambda: trained(normalizers.NFKC()),
    "NFD": lambda: trained(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "strip": lambda: trained(normalizers.Strip()),
    "lstrip": lambda: trained(added=(AddedToken("<m>", lstrip=True, rstrip=True),)),
    "spaces dropped": lambda: trained(before=(pre_tokenizers.WhitespaceSplit(),)),
    "split": lambda: trained(before=(pre_tokenizers.Split(Regex(r"\s+"), "removed"),)),
    "demo": lambda: byte_tokenizer().backend_tokenizer,
    "byte fallback": byte_fallback,
    "regex": lambda: trained(normalizers.Replace(Regex("a+"), "")),
    "accents": lambda: trained(
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
}
_built: dict[str, tuple[RustTokenizer, TokenBound]] = {}


def built(kind: str) -> tuple[RustTokenizer, TokenBound]:
    if kind not in _built:
        tokenizer = KINDS[kind]()
        _built[kind] = (tokenizer, TokenBound(tokenizer))
    return _built[kind]


pieces = st.sampled_from([*SAMPLES, "<m>", "<|end|>", "\u0301", "  ", "\x1c", "\u2003", "z", "7"])
texts = st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=40).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_the_lower_bound_says(kind: str, text: str) -> None:
    tokenizer, bound = built(kind)
    assert bound.at_least(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("regex", "accents")])
@pytest.mark.parametrize("sample", ["abc ", "a", "the quick brown fox "])
def test_the_lower_bound_on_tokens_is_useful_for_usual_tokenizers(kind: str, sample: str) -> None:
    _, bound = built(kind)
    assert bound.at_least(sample * 10_000) > len(sample) * 10_000 // 200


@pytest.mark.parametrize("kind", ["regex", "accents"])
def test_a_tokenizer_that_may_drop_characters_has_no_lower_bound(kind: str) -> None:
    assert built(kind)[1].at_least("a" * 10_000) == 0


def test_a_text_that_fits_is_never_refused_for_its_length() -> None:
    tokenizer, _ = built("NFC")
    wrapped = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    chance = random.Random(7)
    for _ in range(100):
        text = "".join(chance.choices([*SAMPLES, " " * 200], k=50))
        token_ids = wrapped.encode(text)
        assert wrapped.encode(text, len(token_ids)) == token_ids
        intake = Intake(wrapped, 10_000, len(token_ids) + 16)
        assert intake.prepare(Submit(prompt=text)) == token_ids


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    class Never:
        def encode(self, text: str) -> list[int]:
            assert text == ""
            return []

    wrapped = Tokenizer(Never())
    wrapped._bound = built("NFC")[1]
    with pytest.raises(ConfigError, match="at least") as refused:
        Intake(wrapped, 10_000, 1024).prepare(Submit(prompt="word " * 1_000_000))
    assert refused.value.code == "prompt_too_long"


class Waiting:
    """A tokeniser that waits for the test, and clients that keep their replies."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[bytes] = []
        self.done: list[bytes] = []
        self.prompts = LongPrompts(self._prepare)

    def take(self, name: str, num_chars: int, identity: bytes = b"client") -> None:
        client = RemoteClient(lambda outgoing: None, identity, name.encode())
        self.prompts.add(Submit(prompt="x" * num_chars), client, num_chars)

    def _prepare(self, command: Submit, client: RemoteClient) -> Callable[[], None]:
        self.begun.append(client.command_id)
        self.go_on.wait(20)
        return lambda: self.done.append(client.command_id)


@pytest.fixture
def waiting() -> Any:
    made = Waiting()
    yield made
    made.go_on.set()
    made.prompts.close()


def test_a_shorter_prompt_does_not_wait_for_longer_ones(waiting: Waiting) -> None:
    waiting.take("first", 50_000)
    wait_for(lambda: waiting.begun == [b"first"], "it is begun")
    waiting.take("long", 200_000)
    waiting.take("short", 20_000)
    waiting.take("short too", 20_000)
    waiting.take("longest", LONGEST_TEXTS)
    wait_for(lambda: b"longest" in waiting.begun, "the longest has a thread of its own")
    waiting.go_on.set()
    wait_for(lambda: len(waiting.done) == 5, "all are done")
    order = [name for name in waiting.begun if name != b"longest"]
    assert order == [b"first", b"short", b"short too", b"long"]


def test_an_abandoned_prompt_is_not_tokenised(waiting: Waiting) -> None:
    waiting.take("first", 20_000, b"other")
    wait_for(lambda: waiting.begun == [b"first"], "it is begun")
    waiting.take("withdrawn", 20_000)
    waiting.take("gone", 20_000, b"gone")
    waiting.take("wanted", 30_000)
    assert waiting.prompts.withdraw(b"client", b"withdrawn") is not None
    assert waiting.prompts.withdraw(b"client", b"withdrawn") is None
    assert waiting.prompts.withdraw(b"other", b"wanted") is None  # another client's
    waiting.prompts.forget(b"gone")
    waiting.prompts.forget(b"other")  # a started prompt is discarded at its end
    waiting.go_on.set()
    wait_for(lambda: waiting.done == [b"wanted"], "what is wanted is done")
    assert waiting.begun == [b"first", b"wanted"]


def test_queued_prompts_are_bounded_in_bytes_per_client_and_in_total(waiting: Waiting) -> None:
    size = MAX_CLIENT_BYTES // 4 - 1_000
    for name in "abcd":
        waiting.take(name, size)
    with pytest.raises(ConfigError, match="your long prompts") as refused:
        waiting.take("e", size)
    assert refused.value.code == "queue_full"
    for name in "abcd":
        waiting.take(name, size, b"second")
    with pytest.raises(ConfigError, match="of long prompts"):
        waiting.take("a", size, b"third")
    waiting.prompts.forget(b"second")
    waiting.take("a", size, b"third")


def test_a_prompt_withdrawn_before_tokenising_is_answered_and_becomes_no_request(
    live_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    prepare = Intake.prepare

    def slow(self: Intake, command: Submit) -> list[int]:
        go_on.wait(20)
        return prepare(self, command)

    monkeypatch.setattr(Intake, "prepare", slow)
    long = Submit(prompt="x" * (LONG_TEXT + 1), max_prompt_tokens=20)
    with ControlClient(live_engine.endpoint) as client:
        submitted = client.send(long)
        withdrawn = client.send(long)
        asked = client.send(Withdraw(command_id=withdrawn))
        answers = dict(client.receive(5.0) for _ in range(2))
        assert isinstance(answers[asked], Ack)
        assert answers[asked].detail == "withdrawn"
        error = answers[withdrawn]
        assert isinstance(error, Error)
        assert error.code == "withdrawn"
        go_on.set()
        number, reply = client.receive(5.0)
        assert number == submitted
        assert isinstance(reply, Submitted)
        ack = client.ask(Withdraw(command_id=submitted))
        assert isinstance(ack, Ack)
