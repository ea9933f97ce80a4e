"""`ConfigError`: raised when a setting is refused; says why."""


class ConfigError(ValueError):
    """Raised when a setting is refused.

    `code` is for programs, the message tells people what to do.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WrongValue(ConfigError):  # noqa: N818 - reads as what happened
    """Raised for a value in the wrong form for its setting; it would be wrong on every machine."""
