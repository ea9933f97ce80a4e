"""`HeldTable`: measured figures beside their limits, and which of them exceed those.

Not a test: others use this machine too.
"""

from dataclasses import dataclass, field


@dataclass
class HeldTable:
    """Prints a row as soon as it is measured."""

    num_held: int = 0
    not_held: list[str] = field(default_factory=list)

    def row(self, what: str, measured: str, value: float | None = None, aim: str = "") -> None:
        """A figure and its aim.

        Args:
            measured: in words.
            value: of what has an aim.
            aim: a number, and its unit.
        """
        is_held = None
        if value is not None and aim:
            is_held = self.judge(what, [(value, float(aim.split()[0].replace(",", "")))])
        print(f"{what:<44} {measured:>28}  {aim:>9}  {word(is_held)}", flush=True)

    def judge(self, what: str, pairs: list[tuple[float, float | None]]) -> bool:
        """Whether all of these values are within their limits; the result is counted."""
        is_held = all(value <= most for value, most in pairs if most is not None)
        if is_held:
            self.num_held += 1
        else:
            self.not_held.append(what)
        return is_held

    def end(self) -> None:
        print(f"\n{self.num_held} held, {len(self.not_held)} not held")
        for what in self.not_held:
            print(f"  not held: {what}")


def word(is_held: bool | None) -> str:
    return "" if is_held is None else "held" if is_held else "NOT HELD"
