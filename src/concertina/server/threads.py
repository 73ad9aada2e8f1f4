"""Threads for what blocks, all there from the beginning: what can not be had is known before anybody asks."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

START_SECONDS = 10.0


def start_threads(count: int, name: str) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)
    together = threading.Barrier(count)  # each waits for the others, so that none does two tasks
    wait([pool.submit(together.wait, START_SECONDS) for _ in range(count)], START_SECONDS)
    return pool
