"""Names are the same to the command line, which works on the store, and to REST."""

import pytest
from pydantic import ValidationError

from concertina.cluster.records import User
from concertina.core.errors import UsageError
from concertina.core.names import NAME_WORDS
from concertina.server.auth import add_user
from concertina.server.models import UserAsk
from concertina.store.memory import MemoryStore


@pytest.mark.parametrize("name", ["ada", "a.b-c_D9", "9", "a" * 63])
def test_a_good_name_is_good_everywhere(name: str) -> None:
    assert UserAsk(name=name).name == name
    with MemoryStore() as store:
        assert add_user(store, User(name=name, token=""))


@pytest.mark.parametrize("name", ["", "..", ".ada", "a..b", "a/b", "-a", "ada\n", "ad\u00e4", "a" * 64])
def test_a_bad_name_is_refused_everywhere_in_the_same_words(name: str) -> None:
    with pytest.raises(ValidationError):
        UserAsk(name=name)
    with MemoryStore() as store, pytest.raises(UsageError, match=f"needed {NAME_WORDS}, 63 characters at most"):
        add_user(store, User(name=name, token=""))
