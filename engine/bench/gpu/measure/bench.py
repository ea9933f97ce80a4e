"""`Bench`: what every part is given: the device, the sizes, the time left, and ways to report."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from stepscope.engine.bench.gpu.measure.timing import Stopwatch
from stepscope.engine.bench.gpu.parts import Begun, Doing, Ended, Found, Message, Sizes
from stepscope.engine.bench.gpu.results import BenchPoint, Fact, Facts
from stepscope.engine.execution.machine.devices import give_back_memory


class NotMeasuredError(Exception):
    """A part, or what is left of it, cannot be measured. The message says why."""


class Bench:
    """Reports what the parts measure in this worker process, and limits their time.

    Args:
        report: sends a message to the parent process at once.
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
        """Report one part, which the `with` block measures.

        An error ends the part, and is reported.
        """
        start_s = time.monotonic()
        self._part, self._deadline_s, self._settings = letter, start_s + seconds, {}
        self._report(Begun(letter, model))
        why = None
        try:
            yield
        except NotMeasuredError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - drivers and libraries may raise anything
            why = reason(error)
        give_back_memory(self.device)
        self._report(Ended(time.monotonic() - start_s, why, dict(self._settings)))

    def setting(self, **settings: Fact) -> None:
        """Add settings to the report of this part, such as the data type or the token budget."""
        self._settings.update(settings)

    def doing(self, detail: str) -> None:
        self._report(Doing(self._part, detail))

    @property
    def left_s(self) -> float:
        """Seconds until the part's time is up."""
        return self._deadline_s - time.monotonic()

    def check_time(self) -> None:
        """Raise NotMeasuredError if the part's time is up."""
        if self.left_s <= 0:
            raise NotMeasuredError("time ran out before the remaining points (see --time-limit)")

    def found(self, what: str, samples: Sequence[float], **facts: Fact) -> None:
        self._report(Found(BenchPoint(what=what, samples=list(samples), facts=facts)))

    def missing(self, what: str, why: str, **facts: Fact) -> None:
        """Report that a point (one measurement of the part) is missing, and why."""
        self._report(Found(BenchPoint(what=what, facts=facts, why=why)))

    @contextlib.contextmanager
    def attempt(self, what: str, **facts: Fact) -> Iterator[None]:
        """Run the `with` block, which measures one point.

        An error is reported, and the part continues.

        Raises:
            NotMeasuredError: the part's time is up. The block does not run then.
        """
        self.check_time()
        self.doing(what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - drivers and libraries may raise anything
            self.missing(what, reason(error), **facts)
        give_back_memory(self.device)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    lines = str(error).strip().splitlines()
    first = lines[0].strip()[:300] if lines else ""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {first}"
    return first or type(error).__name__
