"""Which store an address names. Reading an address is pure; only `open_store` opens anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from concertina.core.errors import StoreAddressError
from concertina.store.protocol import Store

FORMS = "memory:, sqlite:PATH or etcd://HOST:PORT,HOST:PORT/PREFIX"
UNSYNCED = "sqlite-unsynced"  # for what is worth nothing without the processes of this machine
ETCD_PORT = 2379
_ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """In this process and nowhere else."""


@dataclass(frozen=True, slots=True)
class SqliteAddress:
    """A file, for the processes of one machine."""

    path: Path
    synced: bool = True  # what was acknowledged survives a power failure, not only the process


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Members of one etcd cluster as host:port, and the prefix that all our keys have there."""

    endpoints: tuple[str, ...]
    prefix: str


def parse_address(address: str) -> MemoryAddress | SqliteAddress | EtcdAddress:
    """Raises StoreAddressError with one sentence when it can not be understood."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme == "memory" and not rest:
        return MemoryAddress()
    if colon and scheme in ("sqlite", UNSYNCED):
        return SqliteAddress(_path(address, rest), synced=scheme == "sqlite")
    if colon and scheme == "etcd":
        return _etcd(address, rest)
    raise StoreAddressError(f"store address {address!r}: needed {FORMS}")


def _path(address: str, rest: str) -> Path:
    if not rest or rest.startswith("//") or "\0" in rest or rest == ":memory:":
        raise StoreAddressError(
            f"store address {address!r}: needed a file after 'sqlite:', as in sqlite:jobs.db or sqlite:/var/jobs.db"
        )
    return Path(rest)


def _etcd(address: str, rest: str) -> EtcdAddress:
    hosts, _, prefix = rest.removeprefix("//").partition("/")
    prefix = prefix.strip("/")
    if not rest.startswith("//") or not prefix or not prefix.isprintable():
        raise StoreAddressError(
            f"store address {address!r}: needed etcd://HOST:PORT,HOST:PORT/PREFIX with a prefix for our keys, "
            "as in etcd://10.0.0.1:2379,10.0.0.2:2379/concertina"
        )
    endpoints = tuple(_endpoint(address, host) for host in hosts.split(","))
    if len(set(endpoints)) != len(endpoints):
        raise StoreAddressError(f"store address {address!r} names a member twice: name each once")
    return EtcdAddress(endpoints, prefix)


def _endpoint(address: str, host: str) -> str:
    found = _ENDPOINT.fullmatch(host)
    port = int(found["port"] or ETCD_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise StoreAddressError(
            f"store address {address!r}: {host!r} is no member, needed HOST:PORT with a port from 1 to 65535 "
            "(names and passwords are not supported)"
        )
    return f"{found['host']}:{port}"


def open_store(address: str, *, timeout_s: float = 10.0) -> Store:
    """The store at an address. No call on it waits longer than `timeout_s` for an answer."""
    where = parse_address(address)
    if isinstance(where, MemoryAddress):
        from concertina.store.memory import MemoryStore

        return MemoryStore()
    if isinstance(where, SqliteAddress):
        from concertina.store.sqlite import SqliteStore

        return SqliteStore.open(where.path, timeout_s=timeout_s, synced=where.synced)
    try:
        from concertina.store.etcd import EtcdStore
    except ModuleNotFoundError as missing:
        raise StoreAddressError(
            f"store address {address!r} needs the package {missing.name!r}, which is not installed: "
            "pip install 'concertina[etcd]', or use sqlite:PATH on one machine"
        ) from missing
    return EtcdStore.open(where.endpoints, where.prefix, timeout_s=timeout_s)
