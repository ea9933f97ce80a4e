"""`MadeUpCodec`: turns prompts into token ids for a simulated engine, which has no tokenizer."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.engine.simulation.simulated import VOCAB_SIZE
from stepscope.engine.text.text_stream import TextStream

CHARS_PER_TOKEN = 4


class MadeUpCodec:
    """A `TextCodec` with one token for four characters; equal prefixes have equal tokens."""

    def encode(self, text: str, most: int | None = None) -> list[int]:
        pieces = (text[i : i + CHARS_PER_TOKEN] for i in range(0, len(text), CHARS_PER_TOKEN))
        return [zlib.crc32(piece.encode()) % VOCAB_SIZE for piece in pieces]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None
    ) -> list[int]:
        contents = (turn["content"] for turn in messages)
        texts = (each if isinstance(each, str) else "\n".join(each) for each in contents)
        return self.encode("\n".join(texts), most)

    def text_stream(self) -> TextStream:
        return TextStream(lambda token_ids: "".join(f" {each}" for each in token_ids))
