"""What a broken or malicious client might send: frames of the control socket.

Everything is drawn from one `random.Random`, so that a seed gives the same messages again.
"""

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from stepscope.engine.protocol import commands
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec

SEEDS: tuple[commands.Command, ...] = (
    commands.GetInfo(),
    commands.GetSnapshot(),
    commands.GetKeptSnapshot(past_s=60.0),
    commands.ReplayFrom(sequence=3, limit=10),
    commands.GetAudit(after=1),
    commands.SetKnobs(
        changes={"max_num_seqs": 3, "order": "arrival"}, who="fuzz", expected_version=1
    ),
    commands.Pause(who="fuzz", once="abc", engine_id="e", seen=3),
    commands.Resume(),
    commands.StepOnce(n=7),
    commands.Submit(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4, stop=("x",))),
    commands.Submit(messages=[commands.ChatMessage(role="user", content="hello")], client_id="c"),
    commands.Abort(request_id=3),
    commands.ResetPrefixCache(),
    commands.SetWorkload(workload=WorkloadSpec(rate=2.0)),
    commands.Drain(),
    commands.Shutdown(),
)
_HARMLESS = (
    commands.GetInfo,
    commands.GetSnapshot,
    commands.GetKeptSnapshot,
    commands.ReplayFrom,
    commands.GetAudit,
)
_NASTY_NUMBERS = (0, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"))
_LENGTHS = (0, 1, 7, 9, 16, 255, 256, 4096)


def is_command(payload: bytes) -> bool:
    """Whether an engine would accept it as a command that may change something."""
    try:
        return not isinstance(commands.decode_command(payload), _HARMLESS)
    except msgspec.DecodeError:
        return False


class Malformer:
    """Draws frames. `kinds` names the ways, for the statistics."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._payloads = [commands.encode(command) for command in SEEDS]
        self.kinds: dict[str, Callable[[], bytes]] = {
            "random": self._random_bytes,
            "flipped": self._flipped,
            "truncated": self._truncated,
            "extended": self._extended,
            "spliced": self._spliced,
            "lengths": self._wrong_length,
            "nested": self._nested,
            "mistyped": self._mistyped,
            "unknown": self._unknown_field,
            "huge": self._huge,
        }

    def frames(self) -> tuple[str, list[bytes]]:
        """How they were made, and frames that no engine may accept as a command."""
        while True:
            kind = self._random.choice(list(self.kinds))
            if kind == "huge" and self._random.random() > 0.02:
                continue  # megabytes, so only now and then
            payload = self.kinds[kind]()
            if is_command(payload):
                continue
            if self._random.random() < 0.15:
                return "frames", self._wrong_frames(payload)
            return kind, [self._random.randbytes(8), payload]

    # Payloads

    def _seed_payload(self) -> bytes:
        return self._random.choice(self._payloads)

    def _random_bytes(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 5, 50, 500, 5000)))

    def _flipped(self) -> bytes:
        payload = bytearray(self._seed_payload())
        for _ in range(self._random.randint(1, 4)):
            payload[self._random.randrange(len(payload))] ^= 1 << self._random.randrange(8)
        return bytes(payload)

    def _truncated(self) -> bytes:
        payload = self._seed_payload()
        return payload[: self._random.randrange(len(payload))]

    def _extended(self) -> bytes:
        return self._seed_payload() + self._random.randbytes(self._random.randint(1, 40))

    def _spliced(self) -> bytes:
        a, b = self._seed_payload(), self._seed_payload()
        return a[: self._random.randrange(len(a) + 1)] + b[self._random.randrange(len(b)) :]

    def _wrong_length(self) -> bytes:
        """A map, array, string or number that claims to be longer than what follows."""
        payload = bytearray(self._seed_payload())
        head = self._random.choice((0xDF, 0xDD, 0xDB, 0xC6, 0xC9, 0xDE, 0xDC, 0xD9))
        place = self._random.randrange(len(payload))
        size = self._random.choice((2**32 - 1, 2**31, 65_536, 255))
        payload[place : place + 1] = bytes([head]) + struct.pack(">I", size)
        return bytes(payload)

    def _nested(self) -> bytes:
        depth = self._random.choice((10, 900, 5_000, 100_000))
        opening = self._random.choice((b"\x91", b"\x81\xa1x"))
        return opening * depth + b"\xc0"

    def _mistyped(self) -> bytes:
        document = self._document()
        keys = [key for key in document if key != "type"] or ["type"]
        document[self._random.choice(keys)] = self._anything(3)
        return msgspec.msgpack.encode(document)

    def _unknown_field(self) -> bytes:
        document = self._document()
        document[self._random.choice(("mood", "", "Type", "x" * 300))] = self._anything(2)
        return msgspec.msgpack.encode(document)

    def _huge(self) -> bytes:
        limit = commands.MAX_COMMAND_BYTES
        size = self._random.choice((limit - 100, limit + 1, limit + limit // 2))
        return msgspec.msgpack.encode({"type": "Submit", "prompt": "x", "client_id": "y" * size})

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.msgpack.decode(self._seed_payload())
        return document

    def _anything(self, depth: int) -> Any:
        draw = self._random.random()
        if depth and draw < 0.2:
            return [self._anything(depth - 1) for _ in range(self._random.randint(0, 4))]
        if depth and draw < 0.4:
            return {str(n): self._anything(depth - 1) for n in range(self._random.randint(0, 4))}
        if draw < 0.6:
            return self._random.choice(_NASTY_NUMBERS)
        if draw < 0.75:
            return self._random.choice((None, True, False, "", "x" * 10_000, "\x00", "é" * 99))
        return self._random.randbytes(self._random.choice(_LENGTHS))

    def _wrong_frames(self, payload: bytes) -> list[bytes]:
        identifier = self._random.randbytes(8)
        return self._random.choice(
            (
                [b""],
                [identifier],
                [identifier[: self._random.randrange(8)], payload],
                [identifier * 40, payload],
                [identifier, payload, payload],
                [identifier, b"", payload],
                [b"", b"", b"", b""],
                [identifier] * 200,
            )
        )
