"""`KnobLease`: restores the old values of knobs when the client that set them falls silent."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stepscope.engine.protocol.commands import Asker, SetKnobs
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.protocol.wire import KnobValue, LeasedKnobs


@dataclass(eq=False)
class KnobLease:
    """The lease of some knobs, held by one client at a time. Belongs to the engine's thread.

    `clock`: nanoseconds of real time, even if the engine's time is simulated: the client that
    renews the lease lives in real time.
    """

    clock: Callable[[], int] = time.monotonic_ns
    _due_ns: int | None = None  # None: no knob is leased
    _asker: Asker = field(default_factory=lambda: Asker(""))
    _before: dict[str, KnobValue] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether the lease has run out without a renewal."""
        return self._due_ns is not None and self.clock() >= self._due_ns

    def note(self, command: SetKnobs, asker: Asker, knobs: Mapping[str, KnobValue]) -> str:
        """Begin, renew or end the lease, for a change of knobs that is about to be made.

        A change without a lease is meant to last, so it ends the lease of the knobs that it
        changes.

        Returns the name of the other client whose lease of these knobs ends; empty without one.

        Raises ConfigError: another client has the lease.
        """
        if command.lease_s is None:
            taken = [name for name in command.changes if self._before.pop(name, None) is not None]
            if not self._before:
                self._due_ns = None
            return self._asker.name if taken and asker != self._asker else ""
        if self._due_ns is not None and asker != self._asker:
            raise ConfigError(
                "leased",
                f"{self._asker.name} has leased {', '.join(self._before)}: stop that client first",
            )
        self._asker = asker
        for name in command.changes:
            self._before.setdefault(name, knobs[name])
        self._due_ns = self.clock() + round(command.lease_s * 1e9)
        return ""

    def end_if_due(self) -> tuple[Asker, dict[str, KnobValue]] | None:
        """End the lease if it has run out: return who held it, and the values from before."""
        if not self.is_due:
            return None
        ended = self._asker, self._before
        self._due_ns, self._before = None, {}
        return ended

    def published(self) -> LeasedKnobs | None:
        """Return the lease as telemetry shows it; None if no knob is leased."""
        if self._due_ns is None:
            return None
        return LeasedKnobs(who=self._asker.name, before=dict(self._before))
