"""Where what must survive a process is kept: memory for tests, SQLite on one machine, etcd on several."""

from concertina.store.address import open_store
from concertina.store.election import Leadership
from concertina.store.protocol import ABSENT, Change, Entry, Guard, Lease, Listing, Store, Watch

__all__ = ["open_store", "Store", "Watch", "Leadership", "ABSENT", "Change", "Entry", "Guard", "Lease", "Listing"]
