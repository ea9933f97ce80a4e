"""Downloads text over HTTP. Time and size are bounded, so that no server blocks or floods us."""

import http.client
import time
import urllib.error
import urllib.request

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

    Raises:
        FetchError: no answer in time, an HTTP error, or more than `MAX_BYTES`.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            body = bytearray()
            while chunk := response.read1(_CHUNK):
                body += chunk
                if len(body) > MAX_BYTES:
                    raise FetchError(f"more than {MAX_BYTES >> 20} MiB at {url}")
                if time.monotonic() > deadline_s:
                    raise NoResponseError(f"{url} took longer than {timeout_s:g} s")
    except urllib.error.HTTPError as error:
        error.close()
        kind = NoResponseError if error.code >= 500 else FetchError
        raise kind(f"HTTP {error.code} at {url}") from error
    except TimeoutError as error:
        raise NoResponseError(f"{url} took longer than {timeout_s:g} s") from error
    except urllib.error.URLError as error:
        is_late = isinstance(error.reason, TimeoutError)
        why = f"took longer than {timeout_s:g} s" if is_late else "does not answer"
        raise NoResponseError(
            f"{url} {why}{'' if is_late else f': {_plain(error.reason)}'}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoResponseError(f"{url} broke off: {_plain(error)}") from error
    return body.decode("utf-8", "replace")


def _plain(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)
