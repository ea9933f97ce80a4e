"""The participants of a run and their notes: `Engine` and `Client`."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from proxy import Proxy


class Wrong(Exception):  # noqa: N818
    """A fault that the run has found."""


@dataclass
class Engine:
    """One generation of the engine."""

    name: str
    truth: Path
    process: "subprocess.Popen[bytes]"
    sent: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # topic, step, checksum

    @property
    def last_sequence(self) -> int:
        with self.truth.open("rb") as file:
            file.seek(max(0, self.truth.stat().st_size - 200))
            lines = file.read().split(b"\n")
        return int(lines[-2].split()[0]) if len(lines) > 1 else -1

    def read_truth(self) -> None:
        for line in self.truth.read_text().splitlines():
            words = line.split()
            if len(words) == 4:  # the last one may be cut
                self.sent[int(words[0])] = (words[1], int(words[2]), int(words[3]))


@dataclass
class Client:
    """A subscriber or recorder, and its proxy."""

    name: str
    proxy: Proxy
    log: Path
    process: "subprocess.Popen[bytes]"

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def has_got(self, sequence: int) -> bool:
        tail = self.log_lines()[-3000:]
        return any(line.startswith(f"got {sequence} ") for line in tail)
