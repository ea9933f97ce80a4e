"""`Asker`: who gave a command, and what the audit trail calls them."""

from typing import NamedTuple

LOCAL = "local"  # the key of a client with the engine's own account
_KEY = "key"


class Asker(NamedTuple):
    """Who gives a command: the name they go by, and the key they proved to hold, if any."""

    who: str
    key: str | None = None

    @property
    def proved(self) -> str:
        """Name of the key they hold; empty for the local one, which says only whose account it is.

        No client can call itself so: see `claimed`.
        """
        return "" if self.key in (None, LOCAL) else f"{_KEY} {self.key}"

    @property
    def claimed(self) -> str:
        """What they call themselves, in quotes where it could be taken for what a key proved."""
        words = self.who.split()
        if not words:
            return "unknown"
        looks_proved = words[0].casefold() == _KEY or not self.who.isascii()
        return f'"{self.who}"' if looks_proved else self.who

    @property
    def name(self) -> str:
        """What to call them: a key is more certain than the name that a client gives itself."""
        return self.proved or self.claimed
