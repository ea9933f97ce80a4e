"""`MetricsAddress`: where a server's metrics are, from a URL or a Prometheus `file_sd` file."""

import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stepscope.engine.protocol.settings.config_error import WrongValue

# TensorRT-LLM serves JSON at `/metrics`, and the Prometheus format at the second path.
_PATHS = ("/metrics", "/prometheus/metrics")
_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """A server that exports metrics. With an empty `path`, the default paths are tried."""

    server: str  # scheme://HOST:PORT
    path: str = ""

    @property
    def name(self) -> str:
        """The address without its scheme, for lists."""
        return self.server.partition("://")[2] + self.path

    @property
    def control(self) -> str:
        """The address as typed on a command line."""
        return self.server + self.path

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs to try for the metrics, the likeliest first."""
        return tuple(self.server + path for path in ((self.path,) if self.path else _PATHS))

    @classmethod
    def parse(cls, text: str) -> "MetricsAddress":
        """Parse http://HOST:PORT, with a path if the metrics are not at a default path.

        Raises:
            WrongValue: `text` is not such an address.
        """
        try:
            parts = urlsplit(text.strip())
            is_good = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good or parts.username is not None or parts.query or parts.fragment:
            raise WrongValue("bad_endpoint", f"{text!r} is not http://HOST:PORT or https://HOST")
        return cls(f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/"))


def is_metrics_url(text: str) -> bool:
    """Whether `text` is the address of a metrics server: it starts with http:// or https://."""
    return text.strip().startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


def in_file(path: Path) -> list[MetricsAddress]:
    """Return the addresses listed in a Prometheus `file_sd` file.

    Its form is `[{"targets": ["HOST:PORT"], "labels": {...}}]`. Only the labels `__scheme__` and
    `__metrics_path__` are used.

    Raises:
        WrongValue: the file cannot be read, names no target, or does not have this form.
    """
    try:
        groups = json.loads(path.read_bytes())
        found = [
            MetricsAddress.parse(
                f"{labels.get('__scheme__', 'http')}://{target}{labels.get('__metrics_path__', '')}"
            )
            for group in groups
            for labels in (group.get("labels", {}),)
            for target in group["targets"]
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = error if isinstance(error, WrongValue | OSError) else "not of that form"
        raise WrongValue(
            "bad_endpoint",
            f'{path} is no list of targets ([{{"targets": ["HOST:PORT"]}}]): {why}',
        ) from error
    if not found:
        raise WrongValue("bad_endpoint", f"{path} names no target")
    return list(dict.fromkeys(found))
