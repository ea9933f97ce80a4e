"""`ConfigError`: why a setting cannot be."""


class ConfigError(ValueError):
    """A setting that cannot be. `code` is for programs, the message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WrongValue(ConfigError):  # noqa: N818 - reads as what happened
    """What no machine would take: it is not of the form that the setting has."""
