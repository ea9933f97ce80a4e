"""`Asker`: which client gave a command, and under what name the audit trail lists it."""

from typing import NamedTuple

LOCAL = "local"  # the key of a client with the engine's own account
_KEY = "key"


class Asker(NamedTuple):
    """The client that gives a command: the name it gives itself, and the key it proved to hold."""

    who: str
    key: str | None = None

    @property
    def proved(self) -> str:
        """Name of the proved key, as "key NAME"; empty without a key.

        Also empty for the key `LOCAL`, which proves only that the client runs in the engine's
        account. No client can give itself such a name: `claimed` puts it in quotes.
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
