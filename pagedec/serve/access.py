"""Who asks: clients, and the tokens by which they are known."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pagedec.errors import InvalidArgument, Shown, within
from pagedec.fields import Flag, Integer, Text, Texts, check_fields, check_names, field_names, option
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.stamps import Reread
from pagedec.serve.statuses import Refusal

SHORTEST_TOKEN = 16
"""Characters: of a token that may not be guessed."""
LOOK_SECONDS = 1.0
"""How often the file is looked at."""
LOG = logging.getLogger("pagedec.access")


class Quota(NamedTuple):
    """How much a client may have, None: nobody has said; and the name of what says so."""

    most: int | None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Somebody who asks, and what he may: None is as the server's own limits say."""

    name: str = option("", Text("the client's name"))
    tokens: tuple[str, ...] = option((), Texts(f"any of these is his; each of at least {SHORTEST_TOKEN} characters"))
    cache_salt: str | None = option(
        None, Text("his prefixes are shared with none of another salt; none: his name", optional=True)
    )
    max_requests: int | None = option(None, Integer("requests at the same time", low=1, optional=True))
    max_branches: int | None = option(None, Integer("open branches of his sessions", low=1, optional=True))
    max_tokens: int | None = option(None, Integer("tokens that his running requests may come to", low=1, optional=True))
    max_session_tokens: int | None = option(None, Integer("tokens that his sessions may hold", low=1, optional=True))
    is_admin: bool = option(False, Flag("he may use AdminService"))

    def __post_init__(self) -> None:
        check_fields(self)

    def quota(self, what: Literal["requests", "branches", "tokens", "session_tokens"], config: ServerConfig) -> Quota:
        """How much of something he may have: as his own limit says, or else the server's."""
        own: int | None = getattr(self, f"max_{what}")
        if own is not None:
            return Quota(own, f"api_keys.{self.name}.max_{what}")
        name = f"max_client_{what}"
        return Quota(getattr(config, name), name)

    def salted(self, salt: str) -> str:
        """A request's salt, which no other client can have. Of what was sent it has a digest: a session keeps it."""
        own = self.cache_salt if self.cache_salt is not None else (self.name if self.tokens else "")
        given = hashlib.blake2b(salt.encode(), digest_size=16).hexdigest() if salt else ""
        return f"{own}\0{given}" if own else given


class Keys:
    """Clients by their tokens, from a TOML file: a table for each client, by his name."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `InvalidArgument` for a file that is not as it should be."""
        self._path, self._clock = Path(path), clock
        self._looked = clock()
        self._file = Reread(self._path)
        self._clients = read_clients(self._path)

    def client(self, metadata: Mapping[str, Any]) -> Client:
        """Whose token comes with a call. All tokens are compared, each in constant time. Raises `Refusal`."""
        self._look()
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refusal("UNAUTHENTICATED", "TOKEN_MISSING", 'the metadata must have "authorization: Bearer TOKEN"')
        given, found = _digest(token.strip()), None
        for digest, client in self._clients:
            if hmac.compare_digest(digest, given):
                found = client
        if found is None:
            raise Refusal("UNAUTHENTICATED", "TOKEN_UNKNOWN", "the token is nobody's")
        return found

    def _look(self) -> None:
        """Read the file anew if it has changed. One that cannot be read changes nothing."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        clients = self._file.changed(
            lambda: read_clients(self._path),
            lambda error: LOG.error("api_keys: the tokens of before stay in force: %s", error),
        )
        if clients is not None:
            self._clients = clients
            LOG.info("api_keys: %d tokens were read from %s", len(clients), self._path)


def read_clients(path: Path) -> list[tuple[bytes, Client]]:
    """Every token's digest with its client. Raises `InvalidArgument`, which shows no token."""
    found: dict[bytes, Client] = {}
    for name, table in _tables(path).items():
        if not name or "/" in name or not name.isprintable():  # up to / or \0 it is whose a request's name or salt is
            limit = f"must name each client by a text that is not empty, has no / and can be printed, in {path}"
            raise InvalidArgument("api_keys", name, limit)
        with within(f"api_keys.{name}."):
            client = _client(name, table, path)
        for text in client.tokens:
            if found.setdefault(_digest(text), client) is not client:
                raise InvalidArgument(f"api_keys.{name}.tokens", Shown("a token"), "must be of one client only")
    return [(digest, dataclasses.replace(client, tokens=("given",))) for digest, client in found.items()]


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidArgument("api_keys", str(path), f"cannot be read: {error.strerror}") from error
    except ValueError:
        raise InvalidArgument("api_keys", str(path), "is not TOML") from None
    except RecursionError:
        raise InvalidArgument("api_keys", str(path), "is nested too deeply to be read") from None


def _client(name: str, table: Any, path: Path) -> Client:
    if not isinstance(table, dict):
        raise InvalidArgument("table", Shown("not a table"), f"must hold a client's tokens and limits in {path}")
    known = [field for field in field_names(Client) if field != "name"]
    check_names("a client", table, known, dict.fromkeys(table, Shown("given")))
    texts = table.get("tokens")
    if not isinstance(texts, list) or not texts or not all(map(_is_token, texts)):
        limit = (
            f"must be a list of at least one token, each of at least {SHORTEST_TOKEN} characters, "
            "with no space around it, and none that is not printable ASCII"
        )
        raise InvalidArgument("tokens", Shown("given"), limit)
    try:
        return Client(**{**table, "name": name})
    except InvalidArgument as error:  # a token in the place of another value, perhaps
        value = error.value if isinstance(error.value, (int, float)) else Shown("given")
        raise InvalidArgument(error.field, value, error.limit) from None


def _is_token(text: object) -> bool:
    """What can be sent in a header, which has no space around it."""
    if not isinstance(text, str) or len(text) < SHORTEST_TOKEN or text != text.strip():
        return False
    return text.isascii() and text.isprintable()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
