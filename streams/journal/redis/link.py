"""Connections to the store: which server it is now, and what its errors mean.

A `Link` is one connection to the server that takes writes: the one of the URL, the primary that
the Sentinels name, or the node of a cluster that has the slot of the journal. All keys of a journal
lie in one slot, so one server has all of them. A link that is lost is made anew by the next call.

coredis is used from its connections upwards: no command is ever repeated by it, each has a timeout,
and the committer has a connection of its own.
"""

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import trio
from anyio import BrokenResourceError, ClosedResourceError
from anyio.abc import SocketAttribute
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from coredis.connection import (
    BaseConnection,
    TCPConnection,
    TCPLocation,
    UnixDomainSocketConnection,
    UnixDomainSocketLocation,
)
from coredis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ProtocolError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
    UnknownCommandError,
    WrongTypeError,
)

from streams.errors import Full, JournalError, JournalUnusable, StoreAway, StoreDown, Unavailable
from streams.forks import withhold
from streams.journal.redis import library
from streams.journal.redis.addresses import ENCODED, Address, Host
from streams.journal.redis.damage import Complaints, text_of
from streams.limits import MIB

RECEIVE_BYTES: Final = MIB  # of one piece: four stored runs, which are read ahead
CALL_S: Final = 5.0  # a call takes so long at most, unless the journal is opened with another time
CONNECT_S: Final = 2.0  # to connect to one server
# After a failed attempt to connect, calls fail at once for this time: callers may try again as soon
# as they like, and a store that is away gets few attempts.
CONNECT_PAUSE_S: Final = 0.1
MOVES_MAX: Final = 3  # how often a call follows a slot to another node

_AGAIN: Final = re.compile(
    r"^(MASTERDOWN|NOREPLICAS|MISCONF|BUSY|UNKILLABLE|NOTREADY|CLUSTERDOWN|LOADING|TRYAGAIN)"
)
_DAMAGED: Final = "DAMAGED "  # an error of our functions, which names the key
_WHERE: Final = " script: "  # and before the function, which tells an operator nothing
_SILENT: Final = "it did not answer in time"
_REFUSED: Final = "connection refused"
_NO_FUNCTION: Final = re.compile(r"function not found", re.IGNORECASE)

Command = Sequence[Any]

# The errors of coredis for a connection that is lost, or was invalidated meanwhile. A timeout is an
# OSError.
LOST: Final = (RedisError, OSError, BrokenResourceError, ClosedResourceError)


class Moved(Exception):
    """Another server has the keys now."""

    def __init__(self, host: Host | None) -> None:
        super().__init__(host)
        self.host = host


class NoFunction(Exception):
    """The server does not have our functions (yet, or any more)."""


class Refused(StoreAway):
    """The store refuses a command of a journal that is open, until its user or a key is mended."""


def meaning(error: BaseException, address: Address) -> Exception:
    """The meaning of an error of a call: a `JournalError`, `Moved` or `NoFunction`."""
    text = str(error).partition(_WHERE)[0] or type(error).__name__
    match error:
        case AskError():  # and MOVED
            return Moved((error.host, error.port))
        case ReadOnlyError():
            return Moved(None)
        case AuthorizationError():
            return _not_allowed(text, address)
        case AuthenticationError():
            return JournalUnusable(f"{address} {_login(address)}.")
        case BusyLoadingError() | ClusterDownError():
            return StoreDown(f"{address} is not ready: {text}")
        case TryAgainError():
            return StoreAway(f"{address} is not ready: {text}")
        case UnknownCommandError() | ProtocolError():
            return JournalUnusable(
                f"{address} is too old or lacks commands ({text}): a journal needs Redis 7.0 or "
                "Valkey 7.2, or newer."
            )
        case ResponseError():
            return _other_meaning(text, address)
        case _:
            return StoreAway(f"{address} does not answer: {text}")


def _other_meaning(text: str, address: Address) -> Exception:
    """The meaning of an error that has no class of its own, or comes out of a function."""
    if "OOM" in text:
        # Without the address, since clients are told this.
        return Full("the store has reached its maxmemory: raise it, or free some of it")
    if _NO_FUNCTION.search(text):
        return NoFunction()
    if "READONLY" in text:
        return Moved(None)
    if "cluster support disabled" in text:
        return JournalUnusable(f"{address} is no cluster: write redis://HOST:PORT/0.")
    if "NOPERM" in text or "ACL failure" in text:
        return _not_allowed(text, address)
    if text.startswith(_DAMAGED):
        return _damaged(text.removeprefix(_DAMAGED), address)
    if _AGAIN.match(text):
        return StoreAway(f"{address} is not ready: {text}")
    return JournalUnusable(f"{address} answers: {text}")


def _login(address: Address) -> str:
    """A sentence for an operator whose password is refused."""
    scheme = address.url.partition("://")[0]
    if address.kind == "sentinel":
        place = (
            f"{scheme}://user:password@host/SERVICE for the store, and behind that "
            "?sentinel_password= (and &sentinel_user=) for its Sentinels"
        )
    else:
        place = f"{scheme}://user:password@{'/path' if address.kind == 'unix' else 'host'}"
    if not address.password:
        return f"wants a password: write {place}"
    whose = f"the user {address.user}" if address.user else 'the user "default"'
    return f"refuses the password of {whose}: check both in {place}, with {ENCODED}"


def _reason(error: BaseException) -> str:
    """Why a connection could not be made: the first cause that says it."""
    found: BaseException | None = error
    texts: list[str] = []
    while found is not None:
        if isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
            continue
        if isinstance(found, ConnectionRefusedError):
            return _REFUSED
        if isinstance(found, TimeoutError | trio.TooSlowError):
            return _SILENT
        texts.append(str(found))
        found = found.__cause__ or found.__context__
    return next(filter(None, texts), "it ended the connection at once")


def _not_allowed(text: str, address: Address) -> JournalUnusable:
    keys = f"{{{address.prefix}}}:*"
    return JournalUnusable(
        f"The user of {address} may not do this ({text}): give it ~{keys} &{keys} and the commands "
        "that docs/operate/replicas.md lists."
    )


def _damaged(text: str, address: Address) -> JournalUnusable:
    return JournalUnusable(
        f"Keys of {address} with the prefix {address.prefix!r} are those of another program "
        f"({text}): delete what it has written, or choose another prefix, with ?prefix=."
    )


class Servers:
    """Finds the server that takes writes, and connects to it."""

    def __init__(self, address: Address, nursery: trio.Nursery, call_s: float) -> None:
        self.address = address
        self.call_s = call_s
        self._nursery = nursery
        self._tls = address.tls()
        self._moved_to: Host | None = None
        self._failure = Unavailable()  # of the last attempt to connect
        self._next_at = -math.inf  # when the next one may be made
        self._connected_at = -math.inf
        self.key = f"{{{address.prefix}}}:journal"
        self.complaints = Complaints()
        self.is_open = False  # the journal is in use, so that what can be mended is waited for

    def refused(self, error: JournalUnusable) -> JournalError:
        """The error of a call that the store refuses. It ends a server that starts, and no other:
        one that runs says once what is wrong, and waits.
        """
        if not self.is_open:
            return error
        event = "the store refuses a command: this replica waits until that is mended"
        self.complaints.warn(event, str(error), why=str(error))
        return Refused(str(error))

    def connected(self) -> None:
        """A link has a connection, so the others may try at once."""
        self._connected_at = trio.current_time()
        self._next_at = -math.inf

    def failed(self, error: Unavailable, began_at: float) -> None:
        """An attempt to connect has failed: see `CONNECT_PAUSE_S`."""
        if self._connected_at < began_at:
            self._failure, self._next_at = error, trio.current_time() + CONNECT_PAUSE_S

    def check_pause(self) -> None:
        """Raise `Unavailable` if it is too early for another attempt to connect."""
        if trio.current_time() < self._next_at:
            raise type(self._failure)(str(self._failure))

    def moved(self, host: Host | None) -> None:
        """The keys are elsewhere: at `host`, or where the next look finds them."""
        self._moved_to = host

    async def connect(self) -> BaseConnection:
        """A new connection to the server that takes writes.

        Raises `Unavailable` or `JournalUnusable`.
        """
        address = self.address
        if address.kind == "unix":
            location = UnixDomainSocketLocation(address.path)
            return await self._start(
                UnixDomainSocketConnection(location, **self._settings()), address.path
            )
        if address.kind == "single":
            return await self._connect_to(address.hosts[0])
        if address.kind == "sentinel":
            return await self._by_sentinels()
        return await self._by_cluster()

    def _settings(self) -> dict[str, Any]:
        address = self.address
        return {
            "stream_timeout": self.call_s,
            "connect_timeout": CONNECT_S,
            "username": address.user,
            "password": address.password,
            "client_name": "mcp-streams",
            "db": address.db,
        }

    async def _connect_to(self, host: Host, **other: Any) -> BaseConnection:
        settings = self._settings() | {"ssl_context": self._tls} | other
        connection = TCPConnection(TCPLocation(*host), socket_keepalive=True, **settings)
        return await self._start(connection, f"{host[0]}:{host[1]}")

    async def _start(self, connection: BaseConnection, where: str) -> BaseConnection:
        try:
            with trio.fail_after(CONNECT_S + self.call_s):
                await self._nursery.start(_run, connection)
        except (RedisError, OSError, trio.TooSlowError, AssertionError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, RedisError | OSError) else error
            meant = meaning(cause, self.address)
            if isinstance(meant, JournalUnusable):
                raise self.refused(meant) from error
            why = _reason(cause)
            if self._tls is not None and why is _SILENT:
                why += ": is it a port for TLS?"
            away = StoreDown if why is _REFUSED or isinstance(meant, StoreDown) else StoreAway
            raise away(f"{self.address}: no connection to {where} ({why})") from error
        if (stream := connection.stream) is not None:  # else it is lost already
            withhold(stream.extra(SocketAttribute.raw_socket))  # nosec B610 # no SQL
            # 64 KiB at a time would be a turn of the loop for each quarter of a stored run.
            stream.receive = partial(stream.receive, RECEIVE_BYTES)
        return connection

    async def _by_sentinels(self) -> BaseConnection:
        address = self.address
        troubles: list[Unavailable] = []
        login = {"username": address.sentinel_user, "password": address.sentinel_password}
        for host in address.hosts:
            try:
                sentinel = await self._connect_to(host, db=0, client_name=None, **login)
                try:
                    found: Any = await self._ask(
                        sentinel, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", address.service
                    )
                finally:
                    sentinel.invalidate()
                if found is None:
                    what = f"{host[0]} knows no service {address.service!r}"
                    troubles.append(StoreAway(what))
                    continue
                primary = await self._connect_to((found[0].decode(), int(found[1])))
                role: Any = await self._ask(primary, b"ROLE")
            except Unavailable as error:
                troubles.append(error)
                continue
            if role[0] == b"master":
                return primary
            primary.invalidate()
            what = f"{found[0].decode()}:{int(found[1])} is no primary any more"
            troubles.append(StoreDown(what))
        raise self._away("no Sentinel leads to a primary ({})", troubles)

    async def _by_cluster(self) -> BaseConnection:
        if self._moved_to is not None:
            host, self._moved_to = self._moved_to, None
            return await self._connect_to(host)
        troubles: list[Unavailable] = []
        for seed in self.address.hosts:
            try:
                connection = await self._connect_to(seed)
                slot: Any = await self._ask(connection, b"CLUSTER", b"KEYSLOT", self.key)
                slots: Any = await self._ask(connection, b"CLUSTER", b"SLOTS")
                for first, last, primary, *_ in slots:
                    if first <= slot <= last:
                        host = ((primary[0] or b"").decode() or seed[0], int(primary[1]))
                        if host == seed:
                            return connection
                        connection.invalidate()
                        return await self._connect_to(host)
                connection.invalidate()
                troubles.append(StoreDown(f"no node has the slot {slot}"))
            except Unavailable as error:
                troubles.append(error)
        raise self._away("{}", troubles)

    def _away(self, text: str, troubles: Sequence[Unavailable]) -> StoreAway:
        """The error of all servers: `text` with the trouble of each, told behind the URL."""
        url = f"{self.address}: "
        told = "; ".join(str(each).removeprefix(url) for each in troubles)
        is_down = any(isinstance(each, StoreDown) for each in troubles)
        return (StoreDown if is_down else StoreAway)(url + text.format(told))

    async def _ask(self, connection: BaseConnection, *command: Any) -> Any:
        try:
            return await connection.create_request(*command, timeout=self.call_s)
        except LOST as error:
            connection.invalidate()
            meant = meaning(error, self.address)
            if isinstance(meant, JournalUnusable):
                raise self.refused(meant) from error
            raise meant if isinstance(meant, JournalError) else StoreAway(str(error)) from error
        except BaseException:  # cancelled: the connection would have no owner
            connection.invalidate()
            raise


def _close_buffers(connection: BaseConnection) -> None:
    """Close what a connection has opened in itself: it does so only once it is made."""
    for each in vars(connection).values():
        if isinstance(each, MemoryObjectSendStream | MemoryObjectReceiveStream):
            each.close()


async def _run(
    connection: BaseConnection, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a connection until it ends. An error that ends it later is one of the calls over it."""
    was_started = False

    class Status:
        def started(self, value: None = None) -> None:
            nonlocal was_started
            was_started = True
            task_status.started()

    try:
        await connection.run(task_status=Status())
    except Exception:
        if not was_started:
            raise
    finally:
        _close_buffers(connection)  # also where it was cancelled while it was being made


class Asked:
    """A command that was sent, whose answer may be awaited later or never."""

    def __init__(self, connection: BaseConnection, request: Awaitable[Any], address: Address):
        self._connection = connection
        self._request = request
        self._address = address

    async def answer(self) -> Any:
        """The answer; None if it is an error, or the connection was lost meanwhile.

        Raises `Unavailable` if none has come in the time for a call.
        """
        found = await self._request
        if isinstance(found, TimeoutError):
            self._connection.invalidate()
            raise meaning(found, self._address) from found
        return None if isinstance(found, BaseException) else found


class Link:
    """One connection, made anew when it is lost. Several tasks may call over it at a time."""

    def __init__(
        self, servers: Servers, greet: Callable[["Link"], Awaitable[None]] | None = None
    ) -> None:
        """`greet` is awaited after each connect, and may call over the link."""
        self.servers = servers
        self._connection: BaseConnection | None = None
        self._greet = greet
        self._connecting = trio.Lock()

    async def connection(self) -> BaseConnection:
        """The connection, new if need be."""
        if self._connection is not None and self._connection.usable:
            return self._connection
        async with self._connecting:
            if self._connection is not None and self._connection.usable:
                return self._connection
            self.servers.check_pause()
            began_at = trio.current_time()
            try:
                connection = await self.servers.connect()
                await self._welcome(connection)
            except Unavailable as error:
                self.servers.failed(error, began_at)
                raise
            self.servers.connected()
            self._connection = connection
            return connection

    async def _welcome(self, connection: BaseConnection) -> None:
        if self._greet is None:
            return
        greeter = Link(self.servers)
        greeter._connection = connection
        try:
            await self._greet(greeter)
        except BaseException:
            connection.invalidate()
            raise

    def drop(self) -> None:
        """Close the connection; calls that are under way fail."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    def ask(self, *command: Any) -> Asked | None:
        """Send a command without waiting for the answer; None without a connection."""
        connection = self._connection
        if connection is None or not connection.usable:
            return None
        try:
            request = connection.create_request(*command, raise_exceptions=False, decode=False)
        except LOST:  # a call would connect anew, and tell if that fails
            return None
        return Asked(connection, request, self.servers.address)

    async def call(self, *command: Any) -> Any:
        """One command and its answer. Raises `Unavailable`, `Full` or `JournalUnusable`."""
        [answer] = await self.calls([command])
        return answer

    async def function(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library."""
        return await self.call(*self.function_command(name, *arguments))

    def function_command(self, name: str, *arguments: Any) -> Command:
        """The command that calls a function of the library."""
        return (b"FCALL", library.function(name), 1, self.servers.key, *arguments)

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """As `calls`, for commands that read a key of one stream or session each.

        The answer for a key of another type is None, as if it were absent.
        """
        return await self._follow(commands, is_lenient=True)

    async def if_allowed(self, *command: Any) -> Any:
        """The answer to one command; None if the store refuses it."""
        try:
            [answer] = await self._calls([command])
        except JournalUnusable:
            return None
        return answer

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        """Commands in one write, and their answers. One error fails all."""
        return await self._follow(commands, is_lenient=False)

    async def _follow(self, commands: Sequence[Command], *, is_lenient: bool) -> list[Any]:
        """Call where the keys and functions are now."""
        for _ in range(MOVES_MAX):
            try:
                return await self._calls(commands, is_lenient=is_lenient)
            except JournalUnusable as error:
                raise self.servers.refused(error) from error
            except Moved as moved:
                self.servers.moved(moved.host)
                self.drop()
                if moved.host is None:
                    raise StoreAway(
                        f"{self.servers.address} is a replica of the store now, and takes no writes"
                    ) from None
            except NoFunction:
                await self.load()
        raise StoreAway(f"{self.servers.address}: the keys move, or the functions get lost")

    async def load(self) -> None:
        """Load the library. Other replicas may do so at the same time."""
        try:
            await self._calls([(b"FUNCTION", b"LOAD", library.CODE)])
        except JournalUnusable as error:
            if "already exists" not in str(error):
                raise self.servers.refused(error) from error
        except Moved as moved:
            self.servers.moved(moved.host)
            self.drop()
            raise StoreAway(f"{self.servers.address} takes no writes now") from None

    async def _calls(self, commands: Sequence[Command], *, is_lenient: bool = False) -> list[Any]:
        connection = await self.connection()
        answers: list[Any] = []
        try:
            # Queued without a checkpoint between them: nothing comes between on this connection.
            requests = [
                connection.create_request(*command, raise_exceptions=False, decode=False)
                for command in commands
            ]
            for request in requests:
                answers.append(answer := await request)
                if isinstance(answer, BaseException) and not isinstance(answer, ResponseError):
                    # The others are not waited for: each would have a timeout of its own.
                    connection.invalidate()  # what comes later is not for the next call
                    raise meaning(answer, self.servers.address) from answer
        except LOST as error:  # the connection was lost before all were queued
            raise meaning(error, self.servers.address) from error
        for number, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                if isinstance(answer, WrongTypeError):
                    key = text_of(commands[number][1])
                    if not is_lenient:
                        raise _damaged(f"{key}: {answer}", self.servers.address) from answer
                    self.servers.complaints.ignored(key, answer)
                    answers[number] = None
                    continue
                raise meaning(answer, self.servers.address) from answer
        return answers
