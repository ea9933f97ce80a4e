"""`Asker`: who gave a command, and what the audit trail calls them."""

from typing import NamedTuple

LOCAL = "local"  # the key of a client with the engine's own account
_KEY = "key"


class Asker(NamedTuple):
    """Who gives a command: the name the client gives itself, and the key it proved to hold."""

    who: str
    key: str | None = None

    @property
    def proved(self) -> str:
        """Name of the proved key, as "key NAME"; empty without one.

        Also empty for `LOCAL`, which proves only that the client runs in the engine's account.
        No client can claim such a name: see `claimed`.
        """
        return "" if self.key in (None, LOCAL) else f"{_KEY} {self.key}"

    @property
    def claimed(self) -> str:
        """The name the client gives itself, in quotes if it could pass for a proved name."""
        words = self.who.split()
        if not words:
            return "unknown"
        looks_proved = words[0].casefold() == _KEY or not self.who.isascii()
        return f'"{self.who}"' if looks_proved else self.who

    @property
    def name(self) -> str:
        """The name to show: the proved key if there is one, else the claimed name."""
        return self.proved or self.claimed
