"""Downloads text over HTTP. Time and size are bounded, so that no server blocks or floods us.

`MetricsAddress`: where a server's metrics are, from a URL or a Prometheus `file_sd` file.

Reads the metrics of a server, trying each possible path.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stepscope.engine.adapters.metrics.reading import Reading, read
from stepscope.engine.protocol.knobs import WrongValue

# TensorRT-LLM serves JSON at `/metrics`, and the Prometheus format at the second path.
_PATHS = ("/metrics", "/prometheus/metrics")
_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """A server that exports metrics. With an empty `path`, the default paths are tried.

    `name`: the address without its scheme, for lists; `control`: as typed on a command line.
    """

    server: str  # scheme://HOST:PORT
    path: str = ""

    @property
    def name(self) -> str:
        return self.server.partition("://")[2] + self.path

    @property
    def control(self) -> str:
        return self.server + self.path

    @classmethod
    def parse(cls, text: str) -> "MetricsAddress":
        """Parse http://HOST:PORT, with a path if the metrics are not at a default path.

        Raises WrongValue: `text` is not such an address.
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
    `__metrics_path__` are used. Raises WrongValue: it cannot be read, or does not have this form.
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
            "bad_endpoint", f'{path} is no list of targets ([{{"targets": ["HOST:PORT"]}}]): {why}'
        ) from error
    if not found:
        raise WrongValue("bad_endpoint", f"{path} names no target")
    return list(dict.fromkeys(found))


MAX_BYTES = 8 * 1024 * 1024
TIMEOUT_S = 2.0
_CHUNK = 64 * 1024


class FetchError(Exception):
    """The download failed. The message says why."""


class NoResponseError(FetchError):
    """The server did not answer, broke off, or cannot serve yet (HTTP 503 and the like)."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a server may not send our request to another address."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def fetch(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the body of a response as text.

    Raises FetchError: no answer in time, an HTTP error, or more than `MAX_BYTES`.
    """
    deadline_s, late = time.monotonic() + timeout_s, f"{url} took longer than {timeout_s:g} s"
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            body = bytearray()
            while chunk := response.read1(_CHUNK):
                body += chunk
                if len(body) > MAX_BYTES:
                    raise FetchError(f"more than {MAX_BYTES >> 20} MiB at {url}")
                if time.monotonic() > deadline_s:
                    raise NoResponseError(late)
    except urllib.error.HTTPError as error:
        error.close()
        kind = NoResponseError if error.code >= 500 else FetchError
        raise kind(f"HTTP {error.code} at {url}") from error
    except (OSError, http.client.HTTPException) as error:
        why: object = error
        what = "broke off"
        if isinstance(error, urllib.error.URLError):
            why, what = error.reason, "does not answer"
        if isinstance(why, TimeoutError):
            raise NoResponseError(late) from error
        said = getattr(why, "strerror", None) or str(why) or type(why).__name__
        raise NoResponseError(f"{url} {what}: {said}") from error
    return body.decode("utf-8", "replace")


def reading_of(address: MetricsAddress, timeout_s: float = TIMEOUT_S) -> Reading:
    """Return the current values of a server's metrics.

    Raises FetchError: it does not answer in time, or exports no metric of a known engine.
    """
    errors: list[FetchError] = []
    for path in (address.path,) if address.path else _PATHS:
        url = address.server + path
        try:
            if (reading := read(fetch(url, timeout_s))) is not None:
                return reading
        except FetchError as error:
            errors.append(error)
        else:
            said = f"{url} exports no metric of vLLM, SGLang, TensorRT-LLM or stepscope"
            errors.insert(0, FetchError(said))
    raise errors[0]
