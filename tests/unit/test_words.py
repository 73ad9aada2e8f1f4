"""Words between master and members cross networks: signed, and nothing but ours is listened to."""

import json

import pytest

from concertina.master.words import FROM_MASTER, FROM_MEMBER, decode, seal, unseal

FRAME = {"from": "worker-3", "number": 1, "body": {"op": "ready"}, "taken": 0}


def test_what_was_signed_with_the_key_is_understood() -> None:
    assert decode(seal(FRAME, "secret", FROM_MEMBER), "secret") == FRAME


def test_the_key_does_not_travel() -> None:
    assert b"a-long-secret" not in seal(FRAME, "a-long-secret", FROM_MEMBER)


@pytest.mark.parametrize("at", [0, 31, 32, 40, -1])
def test_one_changed_byte_makes_it_nobodys(at: int) -> None:
    data = bytearray(seal(FRAME, "secret", FROM_MEMBER))
    data[at] ^= 1
    assert decode(bytes(data), "secret") is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 31,
        json.dumps({**FRAME, "key": "secret"}).encode(),
        seal(FRAME, "guess", FROM_MEMBER),
        seal(FRAME, "secret", FROM_MASTER),
        seal({**FRAME, "from": 3}, "secret", FROM_MEMBER),
        seal({**FRAME, "from": "worker-x"}, "secret", FROM_MEMBER),
        seal({"number": 1}, "secret", FROM_MEMBER),
    ],
)
def test_anything_else_is_ignored(data: bytes) -> None:
    assert decode(data, "secret") is None


def test_a_list_is_no_frame() -> None:
    assert unseal(seal([1, 2], "secret", FROM_MASTER), "secret", FROM_MASTER) is None  # type: ignore[arg-type]
