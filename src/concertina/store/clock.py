"""The one clock that leases on this machine run by. It never jumps, and it goes on while the machine sleeps.

The wall clock can be set back, which would make a lease live twice. `time.monotonic` stands still while a machine is
suspended, so a leader would wake up believing in a lease that ran out hours ago. The time since boot does neither, and
all processes of a machine agree on it.
"""

import time
from pathlib import Path


def since_boot() -> float:
    """Seconds since this machine was started, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Which boot `since_boot` counts from: times of two boots can not be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
