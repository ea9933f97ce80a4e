"""What a broken or malicious client might send: frames of the control socket, or bytes below it.

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

_HARMLESS = (
    *(commands.GetInfo, commands.GetSnapshot, commands.GetKeptSnapshot),
    *(commands.ReplayFrom, commands.GetAudit),
)
_SHORT = SamplingParams(max_tokens=4, stop=("x",))
_CHANGES = {"max_num_seqs": 3, "order": "arrival"}
SEEDS: tuple[commands.Command, ...] = (
    commands.GetInfo(),
    commands.GetSnapshot(),
    commands.GetKeptSnapshot(past_s=60.0),
    commands.ReplayFrom(sequence=3, limit=10),
    commands.GetAudit(after=1),
    commands.SetKnobs(changes=_CHANGES, who="fuzz", expected_version=1),
    commands.Pause(who="fuzz", once="abc", engine_id="e", seen=3),
    commands.Resume(),
    commands.StepOnce(n=7),
    commands.Submit(prompt_token_ids=[1, 2, 3], sampling=_SHORT),
    commands.Submit(messages=[commands.ChatMessage(role="user", content="hello")], client_id="c"),
    commands.Abort(request_id=3),
    commands.ResetPrefixCache(),
    commands.SetWorkload(workload=WorkloadSpec(rate=2.0)),
    commands.Drain(),
    commands.Shutdown(),
)
_NASTY_NUMBERS = (0, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"))
_NASTY_VALUES = (None, True, False, "", "x" * 10_000, "\x00", "é" * 99)
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
        self._rng = random.Random(seed)
        self._payloads = [commands.encode(command) for command in SEEDS]
        self.kinds: dict[str, Callable[[], bytes]] = {
            "random": lambda: self._bytes((0, 1, 2, 5, 50, 500, 5000)),
            "flipped": self._flipped,
            "truncated": lambda: self._begin(self._seed()),
            "extended": lambda: self._seed() + self._bytes(range(1, 41)),
            "spliced": self._spliced,
            "lengths": self._wrong_length,
            "nested": self._nested,
            "mistyped": self._mistyped,
            "unknown": lambda: self._with_field(self._rng.choice(("mood", "", "Type", "x" * 300))),
            "huge": self._huge,
        }

    def frames(self) -> tuple[str, list[bytes]]:
        """How they were made, and frames that no engine may accept as a command."""
        while True:
            kind = self._rng.choice(list(self.kinds))
            if kind == "huge" and self._rng.random() > 0.02:
                continue  # megabytes, so only now and then
            payload = self.kinds[kind]()
            if is_command(payload):
                continue
            if self._rng.random() < 0.15:
                return "frames", self._wrong_frames(payload)
            return kind, [self._rng.randbytes(8), payload]

    # Payloads

    def _seed(self) -> bytes:
        return self._rng.choice(self._payloads)

    def _bytes(self, lengths: Any) -> bytes:
        return self._rng.randbytes(self._rng.choice(lengths))

    def _begin(self, payload: bytes) -> bytes:
        return payload[: self._rng.randrange(len(payload))]

    def _flipped(self) -> bytes:
        payload = bytearray(self._seed())
        for _ in range(self._rng.randint(1, 4)):
            payload[self._rng.randrange(len(payload))] ^= 1 << self._rng.randrange(8)
        return bytes(payload)

    def _spliced(self) -> bytes:
        begin, end = self._begin(self._seed() + b"\0"), self._seed()
        return begin + end[self._rng.randrange(len(end)) :]

    def _wrong_length(self) -> bytes:
        """A map, array, string or number that claims to be longer than what follows."""
        payload = bytearray(self._seed())
        head = self._rng.choice((0xDF, 0xDD, 0xDB, 0xC6, 0xC9, 0xDE, 0xDC, 0xD9))
        place = self._rng.randrange(len(payload))
        size = self._rng.choice((2**32 - 1, 2**31, 65_536, 255))
        payload[place : place + 1] = bytes([head]) + struct.pack(">I", size)
        return bytes(payload)

    def _nested(self) -> bytes:
        depth = self._rng.choice((10, 900, 5_000, 100_000))
        return self._rng.choice((b"\x91", b"\x81\xa1x")) * depth + b"\xc0"

    def _mistyped(self) -> bytes:
        keys = [key for key in msgspec.msgpack.decode(self._seed()) if key != "type"] or ["type"]
        return self._with_field(self._rng.choice(keys))

    def _with_field(self, name: str) -> bytes:
        document = msgspec.msgpack.decode(self._seed())
        return msgspec.msgpack.encode({**document, name: self._anything(3)})

    def _huge(self) -> bytes:
        limit = commands.MAX_COMMAND_BYTES
        size = self._rng.choice((limit - 100, limit + 1, limit + limit // 2))
        return msgspec.msgpack.encode({"type": "Submit", "prompt": "x", "client_id": "y" * size})

    def _anything(self, depth: int) -> Any:
        draw = self._rng.random()
        if depth and draw < 0.2:
            return [self._anything(depth - 1) for _ in range(self._rng.randint(0, 4))]
        if depth and draw < 0.4:
            return {str(n): self._anything(depth - 1) for n in range(self._rng.randint(0, 4))}
        if draw < 0.75:
            return self._rng.choice(_NASTY_NUMBERS if draw < 0.6 else _NASTY_VALUES)
        return self._bytes(_LENGTHS)

    def _wrong_frames(self, payload: bytes) -> list[bytes]:
        name = self._rng.randbytes(8)
        return self._rng.choice(
            (
                *([b""], [name], [b"", b"", b"", b""], [name] * 200),
                *([self._begin(name), payload], [name * 40, payload]),
                *([name, payload, payload], [name, b"", payload]),
            )
        )

    # The transport: ZMTP 3.1 (rfc.zeromq.org/spec/37), without a security mechanism

    def transport(self) -> bytes:
        """A connection's bytes: a greeting, a handshake and frames, all more or less wrong."""
        pick = self._rng.random()
        if pick < 0.1:
            return self._bytes((1, 11, 64, 1_000, 100_000))
        greeting = bytearray(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48))
        if pick < 0.3:
            greeting[self._rng.randrange(64)] ^= 1 << self._rng.randrange(8)
            return bytes(greeting) + self._rng.randbytes(200)
        kind = self._rng.choice((b"DEALER", b"SUB", b"REQ", b"ROUTER", b"nonsense", b""))
        sent = bytes(greeting) + self._ready(kind)
        for _ in range(self._rng.randint(0, 30)):
            sent += self._zmtp_frame()
        if pick < 0.6:
            place = self._rng.randrange(64, len(sent))
            sent = sent[:place] + self._rng.randbytes(3) + sent[place + 3 :]
        return sent[: self._rng.randrange(64, len(sent) + 1)] if pick < 0.8 else sent

    def _ready(self, kind: bytes) -> bytes:
        body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        if self._rng.random() < 0.3:
            name = self._rng.choice((b"User-Id", b"Identity", b"X" * 255))
            value = self._bytes((0, 5, 255, 300))
            body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        return _framed(4, body)

    def _zmtp_frame(self) -> bytes:
        body = self._rng.choice(
            (
                *(b"\x04PING" + self._rng.randbytes(18), b"\x04PONG", b"\x05ERROR\xff"),
                *(b"\x09SUBSCRIBE" + self._rng.randbytes(20), b"\x06CANCEL", self._bytes(_LENGTHS)),
            )
        )
        flags = self._rng.choice((0, 1, 2, 4, 6, 0xFF))
        if self._rng.random() < 0.2:
            return bytes([2]) + struct.pack(">Q", self._rng.choice((2**63, 2**40, 2**33))) + body
        return _framed(flags, body)


def _framed(flags: int, body: bytes) -> bytes:
    """With a length of one byte, or of eight."""
    if len(body) < 256:
        return bytes([flags & ~2, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body
