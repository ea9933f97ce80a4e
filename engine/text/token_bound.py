"""`TokenBound`: at least how many tokens a text has, found without tokenising it.

No token is longer than the longest of the vocabulary, so a text of n characters has at least
n / longest tokens: if the tokenizer drops no characters and puts none together first. What is known
to do neither, or how far, is listed here; for any other tokenizer nothing is claimed (0).
"""

import json
import string
from collections.abc import Iterator
from typing import Any

# A canonical decomposition has up to four code points (Unicode 17), so composing makes of n code
# points at least n / 4. Of those four at most one is ASCII, so ASCII never becomes fewer.
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
    """Of one tokenizer.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """

    def __init__(self, backend: Any) -> None:
        self._longest = 0  # characters of a token; 0: nothing is known
        self._most_letters = 1  # ASCII letters and digits of a token
        self._composes = False
        self._keeps_spaces = True
        parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
        is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not all(map(self._knows, parts)) or not _covers(backend, vocabulary, is_byte_level):
            return
        for added in backend.get_added_tokens_decoder().values():
            if added.lstrip or added.rstrip:  # takes any number of spaces with it
                self._keeps_spaces = False
        self._longest = max(map(len, vocabulary), default=0)
        self._most_letters = max([1, *(_num_letters(_ascii(token)) for token in vocabulary)])

    def at_least(self, text: str) -> int:
        """Tokens that a text has at least, without special ones around it."""
        if not self._longest:
            return 0
        if not self._keeps_spaces:
            text = "".join(text.split())
        ascii_text = _ascii(text)
        num_kept, num_letters = len(text), _num_letters(ascii_text)
        if self._composes:
            num_kept = max(len(ascii_text), -(-num_kept // LONGEST_DECOMPOSITION))
            # Each mark may make one letter before it a letter that is not ASCII.
            num_letters = max(0, num_letters - (len(text) - len(ascii_text)))
        return max(-(-num_kept // self._longest), -(-num_letters // self._most_letters))

    def _knows(self, part: dict[str, Any]) -> bool:
        """Whether it is clear what a normalizer or pre-tokenizer does to a text's length."""
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
    """A normalizer's or pre-tokenizer's description; of a sequence, of each in it."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        for each in part.get("normalizers", part.get("pretokenizers", ())):
            yield from _flat(each)
    else:
        yield part


def _is_about_spaces(part: dict[str, Any]) -> bool:
    """Whether it replaces or splits at spaces and nothing else."""
    if part["type"] not in ("Replace", "Split") or part.get("invert"):
        return False
    pattern = part["pattern"]
    if (text := pattern.get("String")) is not None:
        return bool(text) and not text.strip()
    return pattern.get("Regex") in _SPACE_PATTERNS


def _keeps_length(part: dict[str, Any]) -> bool:
    """Of what is about spaces, whether there are as many characters after it."""
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Replace" and (text := part["pattern"].get("String")) is not None:
        return len(part["content"]) >= len(text)
    return False


def _covers(backend: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Whether every character ends up in a token of its own text, and none in an unknown one."""
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
