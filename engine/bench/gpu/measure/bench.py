"""`Bench`: what a part is given: the device, the sizes, how much time is left, where results go."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from stepscope.engine.bench.gpu.measure.timing import Stopwatch
from stepscope.engine.bench.gpu.parts import Begun, Doing, Ended, Found, Message, Sizes
from stepscope.engine.bench.gpu.results import BenchPoint, Fact, Facts
from stepscope.engine.execution.machine.devices import give_back_memory


class NotMeasuredError(Exception):
    """A part, or what is left of it, cannot be measured; the message says why."""


class Bench:
    """One process's way to say what it measures.

    Args:
        report: takes every message, at once.
    """

    def __init__(
        self, device: torch.device, sizes: Sizes, report: Callable[[Message], None]
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.stopwatch = Stopwatch(device, sizes.num_samples)
        self._report = report
        self._part = ""
        self._deadline_s = float("inf")
        self._settings: Facts = {}

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @contextlib.contextmanager
    def part(self, letter: str, model: str | None, seconds: float) -> Iterator[None]:
        """Measure one part: its body runs in here. An error ends the part, and is reported."""
        start_s = time.monotonic()
        self._part, self._deadline_s, self._settings = letter, start_s + seconds, {}
        self._report(Begun(letter, model))
        why = None
        try:
            yield
        except NotMeasuredError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a driver or a library runs into
            why = reason(error)
        give_back_memory(self.device)
        self._report(Ended(time.monotonic() - start_s, why, dict(self._settings)))

    def setting(self, **settings: Fact) -> None:
        """How the part was measured."""
        self._settings.update(settings)

    def doing(self, detail: str) -> None:
        self._report(Doing(self._part, detail))

    @property
    def left_s(self) -> float:
        """Seconds that the part still has."""
        return self._deadline_s - time.monotonic()

    def check_time(self) -> None:
        """Raises NotMeasuredError when the part's time is up."""
        if self.left_s <= 0:
            raise NotMeasuredError("its time was up before the rest (see --time-limit)")

    def found(self, what: str, samples: Sequence[float], **facts: Fact) -> None:
        self._report(Found(BenchPoint(what=what, samples=list(samples), facts=facts)))

    def missing(self, what: str, why: str, **facts: Fact) -> None:
        """A point that could not be measured."""
        self._report(Found(BenchPoint(what=what, facts=facts, why=why)))

    @contextlib.contextmanager
    def attempt(self, what: str, **facts: Fact) -> Iterator[None]:
        """One point: what goes wrong is noted as its reason, and the next one can be tried.

        Raises:
            NotMeasuredError: the part's time is up; nothing is tried then.
        """
        self.check_time()
        self.doing(what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a driver or a library runs into
            self.missing(what, reason(error), **facts)
        give_back_memory(self.device)


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    first = lines[0].strip()[:300] if lines else ""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {first}"
    return first or type(error).__name__
