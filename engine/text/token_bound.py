"""`TokenBound`: a lower bound for the number of tokens in a text, found without tokenising it.

No token is longer than the longest in the vocabulary. So a text of n characters has at least
n / longest tokens, unless the tokenizer first drops or combines characters. The lists below name
the normalizers and pre-tokenizers that do neither, or only within a known bound. With any other
one the bound is 0.
"""

import json
import string
from collections.abc import Iterator
from typing import Any

# A canonical decomposition has up to four code points (Unicode 17), so n code points compose to at
# least n / 4. At most one of those four is ASCII, so there are at least as many characters after
# composition as there were ASCII characters before it.
LONGEST_DECOMPOSITION = 4

_COMPOSING = {"NFC", "NFKC"}
_KEEPING = {
    *("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"),
    *("Digits", "Metaspace", "UnicodeScripts"),
}
_DROPPING_SPACES = {"Strip", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_SPACE_PATTERNS = (r"\s", r"\s+")
_LETTERS = (string.ascii_letters + string.digits).encode()
_OTHERS = bytes(sorted(set(range(256)) - set(_LETTERS)))


class TokenBound:
    def __init__(self, backend: Any) -> None:
        self._longest = 0  # characters of the longest token; 0: unknown
        self._most_letters = 1  # ASCII letters and digits in a token, at most
        self._composes = False
        self._keeps_spaces = True
        parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
        is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not all(map(self._knows, parts)) or not _covers(backend, vocabulary, is_byte_level):
            return
        for added in backend.get_added_tokens_decoder().values():
            if added.lstrip or added.rstrip:  # it swallows any number of spaces around it
                self._keeps_spaces = False
        self._longest = max(map(len, vocabulary), default=0)
        self._most_letters = max([1, *(_num_letters(_ascii(token)) for token in vocabulary)])

    def at_least(self, text: str) -> int:
        """Return a lower bound for the tokens in a text, without special tokens around it."""
        if not self._longest:
            return 0
        if not self._keeps_spaces:
            text = "".join(text.split())
        ascii_text = _ascii(text)
        num_kept, num_letters = len(text), _num_letters(ascii_text)
        if self._composes:
            num_kept = max(len(ascii_text), -(-num_kept // LONGEST_DECOMPOSITION))
            # Each non-ASCII mark may turn one letter before it into a non-ASCII letter.
            num_letters = max(0, num_letters - (len(text) - len(ascii_text)))
        return max(-(-num_kept // self._longest), -(-num_letters // self._most_letters))

    def _knows(self, part: dict[str, Any]) -> bool:
        """Whether the effect of a normalizer or pre-tokenizer on the length of a text is known."""
        kind = part["type"]
        if kind in _COMPOSING:
            self._composes = True
        elif kind in _DROPPING_SPACES or _is_about_spaces(part):
            self._keeps_spaces = self._keeps_spaces and _keeps_length(part)
        elif kind in ("Split", "Punctuation"):
            return bool(part["behavior"] != "Removed")
        else:
            return kind in _KEEPING
        return True


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a description of a normalizer or pre-tokenizer; for a sequence, of each member."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        for each in part.get("normalizers", part.get("pretokenizers", ())):
            yield from _flat(each)
    else:
        yield part


def _is_about_spaces(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer replaces or splits at spaces and at nothing else."""
    if part["type"] not in ("Replace", "Split") or part.get("invert"):
        return False
    pattern = part["pattern"]
    if (text := pattern.get("String")) is not None:
        return bool(text) and not text.strip()
    return pattern.get("Regex") in _SPACE_PATTERNS


def _keeps_length(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer for spaces never makes a text shorter."""
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Replace" and (text := part["pattern"].get("String")) is not None:
        return len(part["content"]) >= len(text)
    return False


def _covers(backend: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Whether the vocabulary covers every character, so that no text becomes an unknown token."""
    from tokenizers import models, pre_tokenizers

    if not isinstance(backend.model, models.BPE):
        return False
    if is_byte_level:
        return all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    return bool(backend.model.byte_fallback) and all(
        f"<0x{byte:02X}>" in vocabulary for byte in range(256)
    )


def _ascii(text: str) -> bytes:
    return text.encode("ascii", "ignore")


def _num_letters(ascii_text: bytes) -> int:
    return len(ascii_text.translate(None, _OTHERS))
