"""The settings of the HTTP server, and the addresses to which it may be bound."""

import ipaddress
from typing import Annotated, NamedTuple

from msgspec import Struct

from stepscope.engine.protocol.knobs import ConfigError, WrongValue, doc


class HttpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the HTTP server. They do not change while it runs."""

    bind: Annotated[
        str, doc("serve the OpenAI API here: HOST:PORT or a port of 127.0.0.1 (0: any free one)")
    ] = ""
    api_key: Annotated[
        str, doc("clients must send it; STEPSCOPE_HTTP_API_KEY keeps it out of lists of processes")
    ] = ""
    served_model_name: Annotated[str, doc("the model's name for clients (default: as given)")] = ""
    max_concurrent_requests: Annotated[
        int, doc("HTTP requests at a time; one more gets 429 and Retry-After", ge=1)
    ] = 1024
    max_connections: Annotated[int, doc("HTTP connections that may be open", ge=1)] = 4096


class Address(NamedTuple):
    """A host and port to listen on."""

    host: str
    port: int  # 0: any free one

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def text(self) -> str:
        """HOST:PORT as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse HOST:PORT, [IPv6]:PORT, :PORT or PORT (of 127.0.0.1). Raises WrongValue."""
    host, _, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and int(port) < 65536
    if not is_port or (":" in bare and bare == host):
        raise WrongValue("bad_address", f"{text!r} is not HOST:PORT with a port of 0..65535")
    return Address(bare or "127.0.0.1", int(port))


def check_private(address: Address, api_key: str) -> None:
    """Raise ConfigError if other machines could reach the address without an API key."""
    if not address.is_loopback and not api_key:
        raise ConfigError(
            "public_bind",
            f"{address.text} can be reached from other machines: set an API key "
            "(STEPSCOPE_HTTP_API_KEY or --api-key), or bind 127.0.0.1",
        )
