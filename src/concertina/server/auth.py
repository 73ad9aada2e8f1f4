"""Who is asking. On a loopback address everybody who can connect is the local user; elsewhere tokens decide.

A token is 32 random bytes; the store keeps its SHA-256 only. Such a token has nothing to guess at, so one round of a
fast hash is enough; comparing takes the same time whatever differs.
"""

import getpass
import hashlib
import hmac
import ipaddress
import secrets
from dataclasses import dataclass, replace

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import User
from concertina.core.errors import UsageError
from concertina.core.names import MOST_NAME, NAME_WORDS, is_name
from concertina.server.errors import ApiError
from concertina.store.protocol import ABSENT, Store

PREFIX = "ct_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who is asking, and what they may have."""

    name: str
    admin: bool = False
    user: User | None = None  # whose limits hold; None: no limits

    def may_see(self, owner: str) -> bool:
        return self.admin or owner == self.name


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def local_user() -> str:
    """The name under which jobs run that are submitted without a token."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container without a user database
        return "local"
    return name if is_name(name) else "local"


class Doorkeeper:
    """Finds out who is asking."""

    def __init__(self, mirror: Mirror, *, token_needed: bool, local_name: str) -> None:
        self._mirror, self.token_needed = mirror, token_needed
        self._local = Caller(name=local_name, admin=True)

    def caller(self, headers: dict[bytes, bytes]) -> Caller:
        """Raises ApiError 401 when a token is needed and missing, or wrong."""
        token = bearer_of(headers)
        if token is not None:
            return self.by_token(token)
        if self.token_needed:
            raise ApiError(
                401,
                "token_needed",
                "this address needs a token and none came",
                "send 'Authorization: Bearer TOKEN', or set CONCERTINA_TOKEN for the command line",
            )
        return self._local

    def _find(self, token: str) -> User | None:
        digest, found = digest_of(token), None
        for user in self._mirror.users():  # all of them, so that the time says nothing
            if user.token and hmac.compare_digest(user.token.encode(), digest.encode()):
                found = user
        return found

    def still_knows(self, caller: Caller) -> bool:
        """Whether the token with which this caller came is still good."""
        if caller.user is None:
            return True
        user = self._mirror.users_by_name.get(caller.name)
        return user is not None and user.token == caller.user.token

    def by_token(self, token: str) -> Caller:
        found = self._find(token)
        if found is None:
            raise ApiError(401, "wrong_token", "this token is not known", "ask whoever runs the cluster for a new one")
        return Caller(name=found.name, admin=found.admin, user=found)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def bearer_of(headers: dict[bytes, bytes]) -> str | None:
    value = headers.get(b"authorization")
    if value is None:
        return None
    scheme, _, token = value.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise ApiError(
            401, "wrong_token", "the Authorization header is not 'Bearer TOKEN'", "send it in this form, or none"
        )
    return token.strip()


# -- making and ending users; the command line does it on the store itself ------------------------------------------


def add_user(store: Store, user: User) -> str:
    """Makes a user, or gives an old one a new token and new limits. The token is kept nowhere: show it."""
    if not is_name(user.name):
        raise UsageError(f"user {user.name!r}: needed {NAME_WORDS}, {MOST_NAME} characters at most")
    token = PREFIX + secrets.token_urlsafe(32)
    store.put(keys.USERS + user.name, dump(replace(user, token=digest_of(token))))
    return token


def renew_user(
    store: Store,
    name: str,
    *,
    admin: bool | None = None,
    max_jobs: int | None = None,
    max_slots: int | None = None,
    max_gpu_hours: float | None = None,
) -> tuple[User, str]:
    """The same; of an old user, what is None stays as it was."""
    old = find_user(store, name) or User(name=name, token="")
    user = replace(
        old,
        admin=old.admin if admin is None else admin,
        max_jobs=old.max_jobs if max_jobs is None else max_jobs,
        max_slots=old.max_slots if max_slots is None else max_slots,
        max_gpu_hours=old.max_gpu_hours if max_gpu_hours is None else max_gpu_hours,
    )
    return user, add_user(store, user)


def first_admin(store: Store, name: str) -> str | None:
    """A token for an admin if there is no user at all, so that a cluster can not lock everybody out."""
    if store.list_prefix(keys.USERS).entries:
        return None
    token = PREFIX + secrets.token_urlsafe(32)
    user = User(name=name, token=digest_of(token), admin=True)
    made = store.compare_and_set(keys.USERS + name, dump(user), expected=ABSENT)
    return token if made is not None else None


def remove_user(store: Store, name: str) -> bool:
    """Their token is void at once; their jobs stay."""
    return store.delete(keys.USERS + name)


def find_user(store: Store, name: str) -> User | None:
    entry = store.get(keys.USERS + name)
    return None if entry is None else load(User, entry.value)
