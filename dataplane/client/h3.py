"""The client library's HTTP/3 side: what `connect(..., protocol="h3")` gives.

Over HTTP/3 a daemon takes text as well as ids, and tells `pickup` among its times. The rules are
those of `dataplane.client`, and:

- A request goes out whole at once; an answer that is no good ends its own stream.
- Text is streamed: what `texts()` gives is there as soon as the daemon has sent it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from dataplane import __version__
from dataplane.client.answer import BaseAnswer
from dataplane.client.h3_link import Http3Link
from dataplane.client.http import (
    Body,
    End,
    Head,
    ReasonBody,
    body_of,
    parameter_fields,
    read_head,
    request_head,
    text_body,
)
from dataplane.client.keys import key_fields
from dataplane.client.wire import encode_ids
from dataplane.errors import DataplaneError, Status, UnavailableError
from dataplane.http3_fields import Fields, Pair
from dataplane.http_names import BINARY, EVENTS, GENERATE, JSON
from dataplane.prompt1 import ProtocolError, Request

_USER_AGENT = (b"user-agent", f"dataplane/{__version__}".encode())
_LONGEST_PAGE = 256 << 20


# ---------------------------------------------------------------- answers


class HttpAnswer(BaseAnswer):
    """An answer over HTTP/3; see `BaseAnswer`. Iterate `texts()` for its text as it comes."""

    def __init__(self, link: Http3Link, pairs: list[Pair], body: bytes) -> None:
        super().__init__(link)
        self._head: Head | None = None
        self._body: Body | None = None
        self._refusal = ReasonBody()
        self._ended: End | None = None
        self._pieces: list[str] = []
        self._has_text = False
        self._stream_id = link.request(pairs, body, self)

    @property
    def status(self) -> int | None:
        return self._head.status if self._head else None

    @property
    def slot(self) -> int | None:
        return self._head.slot if self._head else None

    @property
    def request_id(self) -> str | None:
        """The daemon's, 16 hexadecimal digits, or the one that was asked for."""
        return self._head.request_id if self._head else None

    @property
    def reason(self) -> str:
        return "" if self.status in (None, Status.OK) else self._refusal.reason

    @property
    def retry_after_ms(self) -> int | None:
        return self._head.retry_after_ms if self._head else None

    @property
    def finish_reason(self) -> str | None:
        return self._ended.finish_reason if self._ended else None

    @property
    def usage(self) -> dict[str, int] | None:
        return self._ended.usage if self._ended else None

    @property
    def timings_us(self) -> dict[str, int | None]:
        """Where the time went; None for what is not known. `pickup` comes with streamed text."""
        head = self._head
        return {
            "queue": head.queue_us if head else None,
            "ingress": head.ingress_us if head else None,
            "pickup": self._ended.timings_us.get("pickup") if self._ended else None,
            "first_token": self._since_sent(self._first_at),
            "total": self._since_sent(self._end_at),
        }

    @property
    def text(self) -> str | None:
        return "".join(self._pieces) if self._has_text else None

    async def texts(self) -> AsyncIterator[str]:
        """Give the text piece by piece, as it comes.

        Raises:
            DataplaneError: The answer broke off.
        """
        read = 0
        while True:
            while read < len(self._pieces):
                read += 1
                if self._pieces[read - 1]:
                    yield self._pieces[read - 1]
            self._raise_error()
            if self._over:
                return
            await self._change()

    # -------------------------------------------------------- what the link tells

    def on_head(self, fields: Fields) -> None:
        head = read_head(fields)
        if head.status == Status.OK:
            self._body = body_of(head)
        self._head = head
        self._verdict_at = self._loop.time()
        self._wake()

    def on_body(self, data: bytes) -> None:
        if self._body is None:
            self._refusal.feed(data)
            return
        ids, pieces = self._body.feed(data)
        self._took(ids, self._loop.time())
        if pieces:
            self._has_text = True
            self._pieces += pieces
        self._wake()

    def on_end(self) -> None:
        if self._body is not None:
            self._ended = self._body.end()
        self._end_at = self._loop.time()
        self._end(None)

    def on_error(self, error: DataplaneError) -> None:
        self._break(error)


class Page(NamedTuple):
    """A page of the daemon."""

    status: int
    content_type: str
    body: bytes


class _PageAnswer:
    """A page under way."""

    def __init__(self) -> None:
        self.page: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self._head: Head | None = None
        self._data = bytearray()

    def on_head(self, fields: Fields) -> None:
        self._head = read_head(fields)

    def on_body(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > _LONGEST_PAGE:
            raise ProtocolError(f"the page is over {_LONGEST_PAGE} bytes")

    def on_end(self) -> None:
        assert self._head is not None
        content_type = self._head.content_type.decode("latin-1")
        if not self.page.done():
            self.page.set_result(Page(self._head.status, content_type, bytes(self._data)))

    def on_error(self, error: DataplaneError) -> None:
        if not self.page.done():
            self.page.set_exception(error)

    def on_lost(self, why: str) -> None:
        self.on_error(UnavailableError(f"the connection was lost: {why}"))


# ---------------------------------------------------------------- the client


class Http3Client:
    """A connection to a daemon, over HTTP/3. Its methods may be called from any number of tasks."""

    def __init__(self, link: Http3Link, authority: str) -> None:
        self._link = link
        self._authority = authority

    @property
    def lost(self) -> str | None:
        """Why the connection is over, or None while it is not."""
        return self._link.lost

    async def submit(
        self,
        ids: Iterable[int],
        *,
        max_output: int = 0,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        affinity: int = 0,
        strict: bool = False,
        deadline_ms: int = 0,
        request_id: str | None = None,
        api_key: str | bytes | None = None,
        width: int = 4,
    ) -> HttpAnswer:
        """Send a prompt of token ids and wait for the verdict on it; see `Client.submit`.

        Args:
            request_id: 1 to 64 visible ASCII characters; None leaves it to the daemon.
            api_key: Who asks, for a daemon with tenants.

        Raises:
            UsageError: A value does not fit the wire.
            UnavailableError: The connection is lost.
        """
        body = encode_ids(ids, width)
        request = Request(
            0, width, max_output, 0, affinity, strict, temperature, top_p, top_k, seed, deadline_ms
        )
        kind = BINARY if width == 4 else BINARY + b"; width=2"
        fields = key_fields(api_key) + parameter_fields(request, request_id)
        return await self._post(kind, BINARY, body, fields)

    async def ask(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_output: int = 0,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        affinity: int = 0,
        strict: bool = False,
        deadline_ms: int = 0,
        request_id: str | None = None,
        api_key: str | bytes | None = None,
    ) -> HttpAnswer:
        """Send text, which the daemon turns into ids, and wait for the verdict on it.

        Args:
            prompt: Text as it is, or messages: `[{"role": "user", "content": "..."}]`.
            api_key: Who asks, for a daemon with tenants.

        Raises:
            UsageError: A value does not fit the wire.
            UnavailableError: The connection is lost.
        """
        request = Request(
            0, 4, max_output, 0, affinity, strict, temperature, top_p, top_k, seed, deadline_ms
        )
        fields = key_fields(api_key) + parameter_fields(request, request_id)
        return await self._post(JSON, EVENTS, text_body(prompt), fields)

    async def _post(
        self, kind: bytes, accept: bytes, body: bytes, parameters: list[Pair]
    ) -> HttpAnswer:
        fields = [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(body)),
            (b"accept", accept),
            _USER_AGENT,
            *parameters,
        ]
        pairs = request_head(self._authority, b"POST", GENERATE, fields)
        answer = HttpAnswer(self._link, pairs, body)
        try:
            return await answer.opened()
        except BaseException:  # whoever waited is gone, and so must the request be
            answer.cancel()
            raise

    async def get(self, path: str, *, api_key: str | bytes | None = None) -> Page:
        """Fetch a page: `/health`, `/slots`, `/props`, `/tokenizer.json`.

        Args:
            path: The page's.
            api_key: Who asks, for a daemon with tenants: all but `/health` are each tenant's own.

        Raises:
            UsageError: The key does not fit the wire.
            UnavailableError: The connection is lost.
        """
        fields = [_USER_AGENT, *key_fields(api_key)]
        pairs = request_head(self._authority, b"GET", path.encode(), fields)
        answer = _PageAnswer()
        stream_id = self._link.request(pairs, b"", answer)
        try:
            return await answer.page
        except BaseException:
            self._link.abandon(stream_id)
            raise

    def close(self) -> None:
        """Close the connection; what is under way ends with `UnavailableError`."""
        self._link.shut()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
