"""Where a cluster keeps its state, and where its server is: flag before environment before file before default."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

from concertina.core.errors import UsageError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8400
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
URL, TOKEN, STATE = "CONCERTINA_URL", "CONCERTINA_TOKEN", "CONCERTINA_STATE"
SERVER_FILE = "server.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """What a running server says about itself in its state folder."""

    url: str
    pid: int

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def state_dir(given: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the cluster's state."""
    if given is not None:
        return given.expanduser().absolute()
    if environ.get(STATE):
        return Path(environ[STATE]).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "concertina"


def read_server(state: Path) -> ServerRecord | None:
    try:
        plain = json.loads((state / SERVER_FILE).read_bytes())
        return ServerRecord(url=str(plain["url"]), pid=int(plain["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_server(state: Path, record: ServerRecord) -> None:
    """Whole or not there: a client may read it at any moment."""
    fresh = state / f"{SERVER_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps({"url": record.url, "pid": record.pid}))
    fresh.replace(state / SERVER_FILE)


def remove_server(state: Path) -> None:
    """Only our own: another server may have come in our place."""
    found = read_server(state)
    if found is not None and found.pid == os.getpid():
        (state / SERVER_FILE).unlink(missing_ok=True)


def server_url(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The cluster to talk to."""
    url = given or environ.get(URL)
    if not url:
        found = read_server(state_dir(environ=environ))
        url = found.url if found is not None else DEFAULT_URL
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"the address {url!r} of the cluster needs to begin with http:// or https://")
    return url.rstrip("/")


def local_zone(environ: Mapping[str, str] = os.environ) -> tzinfo:
    """With its summer time, where the machine knows it; otherwise the offset of today."""
    try:
        if environ.get("TZ"):
            return ZoneInfo(environ["TZ"].lstrip(":"))
        with open("/etc/localtime", "rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError, KeyError):
        zone = datetime.now().astimezone().tzinfo
        assert zone is not None
        return zone


def local_now() -> datetime:
    return datetime.now(local_zone())
