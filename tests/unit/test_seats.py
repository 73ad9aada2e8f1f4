"""On which host the next worker goes."""

from concertina.core.seats import Host, choose

A, B, C = Host("a", "10.0.0.1", 2), Host("b", "10.0.0.2", 2), Host("c", "10.0.0.3", 1)


def test_a_job_stays_together_as_long_as_there_is_room() -> None:
    seated: dict[int, str] = {}
    for worker in range(5):
        host = choose([A, B, C], seated)
        assert host is not None
        seated[worker] = host.name
    assert list(seated.values()) == ["b", "b", "a", "a", "c"]
    assert choose([A, B, C], seated) is None


def test_workers_on_a_host_that_is_gone_take_no_room_elsewhere() -> None:
    assert choose([A], {0: "b", 1: "b", 2: "a"}) == A


def test_a_host_that_returns_has_room_again() -> None:
    assert choose([A, B], {0: "a", 1: "a"}) == B


def test_without_hosts_there_is_no_place() -> None:
    assert choose([], {}) is None
