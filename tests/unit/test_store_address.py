"""Addresses of stores, and one clear sentence for bad ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from concertina.core.errors import StoreAddressError
from concertina.store import open_store
from concertina.store.address import EtcdAddress, MemoryAddress, SqliteAddress, parse_address
from concertina.store.memory import MemoryStore


@pytest.mark.parametrize(
    ("address", "meaning"),
    [
        ("memory:", MemoryAddress()),
        ("sqlite:jobs.db", SqliteAddress(Path("jobs.db"))),
        ("sqlite:/var/lib/a b.db", SqliteAddress(Path("/var/lib/a b.db"))),
        ("etcd://a:1,b:2/team/x", EtcdAddress(("a:1", "b:2"), "team/x")),
        ("etcd://10.0.0.1/x/", EtcdAddress(("10.0.0.1:2379",), "x")),
        ("etcd://[::1]:2379,[fe80::1]/x", EtcdAddress(("[::1]:2379", "[fe80::1]:2379"), "x")),
    ],
)
def test_an_address_names_a_store(address: str, meaning: object) -> None:
    assert parse_address(address) == meaning


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("", "needed memory:, sqlite:PATH or etcd://HOST:PORT,HOST:PORT/PREFIX"),
        ("jobs.db", "needed memory:, sqlite:PATH"),
        ("memory", "needed memory:"),
        ("memory:x", "needed memory:"),
        ("redis://h:1/x", "needed memory:"),
        ("sqlite:", "needed a file after 'sqlite:'"),
        ("sqlite:///jobs.db", "needed a file after 'sqlite:'"),
        ("sqlite::memory:", "needed a file after 'sqlite:'"),
        ("etcd:a:1/x", "needed etcd://HOST:PORT,HOST:PORT/PREFIX with a prefix"),
        ("etcd://a:1", "with a prefix for our keys"),
        ("etcd://a:1/", "with a prefix for our keys"),
        ("etcd:///x", "'' is no member"),
        ("etcd://a:1,,b:2/x", "'' is no member"),
        ("etcd://a:0/x", "'a:0' is no member"),
        ("etcd://a:65536/x", "port from 1 to 65535"),
        ("etcd://a:b/x", "'a:b' is no member"),
        ("etcd://me:secret@a:1/x", "names and passwords are not supported"),
        ("etcd://a:1,a:1/x", "names a member twice"),
    ],
)
def test_a_bad_address_gets_one_sentence(address: str, needed: str) -> None:
    with pytest.raises(StoreAddressError) as caught:
        open_store(address)
    assert needed in str(caught.value)
    assert repr(address) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_memory_store_is_its_own() -> None:
    with open_store("memory:") as one, open_store("memory:") as other:
        assert isinstance(one, MemoryStore)
        one.put("a", b"1")
        assert other.get("a") is None


def test_a_training_process_needs_nothing_for_its_store() -> None:
    code = "import sys, concertina.store.memory, concertina.store.sqlite; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & {"grpc", "aetcd", "google", "torch", "numpy"}


def test_etcd_without_its_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("concertina.store.etcd")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(StoreAddressError, match=r"needs the package .*pip install 'concertina\[etcd\]'"):
        open_store("etcd://127.0.0.1:1/x")
