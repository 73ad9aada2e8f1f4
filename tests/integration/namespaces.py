"""Several hosts on one machine: network namespaces with an address each, joined by a bridge, whose links can be cut.

Needs root and iproute2 (Debian: `apt-get install iproute2`). This machine itself has an address on the bridge, too.
"""

import itertools
import os
import shutil
import string
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

COMMAND_SECONDS = 20.0
_letters = itertools.cycle(string.ascii_lowercase)


@dataclass(frozen=True)
class Namespace:
    """One host."""

    name: str
    address: str
    link: str  # this machine's end of its link

    @property
    def prefix(self) -> list[str]:
        """A command that is put before this runs on this host."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Silently: nobody is told, nothing arrives any more."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def isolate(self, on: bool = True) -> None:
        """As silently, between this host and others that are isolated, and only there."""
        ip("link", "set", self.link, "type", "bridge_slave", "isolated", "on" if on else "off")


@dataclass(frozen=True)
class Network:
    address: str  # of this machine
    hosts: tuple[Namespace, ...]


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


@contextmanager
def network(hosts: int = 3) -> Iterator[Network]:
    """Made for one test and removed after it; skips where that is not possible."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = f"{os.getpid() % 100000}{next(_letters)}"  # the kernel takes its time to forget the last ones
    subnet = f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
    with ExitStack() as stack:
        try:
            found = _make(stack, tag, subnet, hosts)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield found


def _make(stack: ExitStack, tag: str, subnet: str, hosts: int) -> Network:
    bridge = f"ctbr{tag}"
    ip("link", "add", bridge, "type", "bridge")
    stack.callback(ip, "link", "del", bridge)
    ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
    ip("link", "set", bridge, "up")
    made = []
    for k in range(hosts):
        host = Namespace(f"cthost{tag}-{k}", f"{subnet}.{k + 1}", f"ctv{tag}-{k}")
        ip("netns", "add", host.name)
        stack.callback(ip, "netns", "del", host.name)
        ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        stack.callback(ip, "link", "del", host.link)  # with its namespace it would go too, but only some time later
        ip("link", "set", host.link, "master", bridge, "up")
        ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        ip("-n", host.name, "link", "set", "eth0", "up")
        ip("-n", host.name, "link", "set", "lo", "up")
        made.append(host)
    return Network(f"{subnet}.254", tuple(made))
