"""The client library: prompts out, ids back, many at once on one connection.

```python
async with connect("localhost:4433", ca="ca.pem") as client:
    answer = await client.submit([1, 2, 3], max_output=16)
    async for ids in answer:
        print(ids)
    print(answer.finish_reason, answer.timings_us)
```

`connect(..., protocol="h3")` gives a client that speaks HTTP/3 instead (`dataplane.client.h3`): its
answers look the same, and it can ask with text. The rules that hold here:

- A refusal is an answer, not an exception: its `status` says so, `reason` says why.
- What raises is an answer that did not come to its end: `UnavailableError` when the connection is
  lost, `ResetError` when the daemon gave the answer up, `ProtocolError` when it is no answer.
- An answer that nobody waits for any more is given up on the wire, so that its slot is free again.
- All times are microseconds. `queue` and `ingress` are the daemon's own; `first_token` and `total`
  are measured here, from the moment that the whole request was handed to QUIC.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, overload

from cryptography import x509

from dataplane.client.answer import BaseAnswer, ResetError, Result
from dataplane.client.h3 import Http3Client
from dataplane.client.h3_link import Http3Link
from dataplane.client.keys import encode_key
from dataplane.client.link import AnyLink, Link, open_link
from dataplane.client.wire import (
    AnswerReader,
    encode_ids,
    encode_prompt,
    reset_words,
)
from dataplane.config import state_dir_of
from dataplane.errors import DataplaneError, Status, UnavailableError, UsageError
from dataplane.http_names import ALPN as H3_ALPN
from dataplane.http_names import FINISH_WORDS
from dataplane.identity import CA_CERT
from dataplane.kinds import parse_address
from dataplane.prompt1 import ALPN, Request, Verdict

__all__ = ["Answer", "Client", "Http3Client", "ResetError", "Result", "connect", "read_ca"]

DEFAULT_SERVER = "localhost:4433"
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 30.0


class Answer(BaseAnswer):
    """An answer over `prompt/1`; see `BaseAnswer`."""

    def __init__(self, link: Link, data: bytes, fin: bool) -> None:
        super().__init__(link)
        self._reader = AnswerReader()
        self._stream_id = link.open(self, data, fin)

    @property
    def verdict(self) -> Verdict | None:
        """The daemon's verdict, or None before it is there."""
        return self._reader.verdict

    @property
    def status(self) -> int | None:
        return self.verdict.status if self.verdict else None

    @property
    def slot(self) -> int | None:
        return self.verdict.slot if self.verdict else None

    @property
    def request_id(self) -> int | None:
        return self.verdict.request_id if self.verdict else None

    @property
    def reason(self) -> str:
        return self._reader.reason

    @property
    def retry_after_ms(self) -> int | None:
        return (self.verdict.retry_after_ms or None) if self.verdict else None

    @property
    def finish_reason(self) -> str | None:
        trailer = self._reader.trailer
        return FINISH_WORDS[trailer.finish_reason] if trailer and self._reader.whole else None

    @property
    def usage(self) -> dict[str, int] | None:
        trailer = self._reader.trailer
        if trailer is None or not self._reader.whole:
            return None
        return {"prompt_tokens": trailer.prompt_tokens, "output_tokens": trailer.output_tokens}

    @property
    def timings_us(self) -> dict[str, int | None]:
        """Where the time went; None for what is not known. `pickup` is not on the raw wire."""
        admitted = self.verdict is not None and self.verdict.status == Status.OK
        return {
            "queue": self.verdict.queue_us if self.verdict else None,
            "ingress": self.verdict.ingress_us if self.verdict and admitted else None,
            "pickup": None,
            "first_token": self._since_sent(self._first_at),
            "total": self._since_sent(self._end_at),
        }

    def send(self, data: bytes, fin: bool = False) -> bool:
        """Send more of a `raw` request; False if the daemon does not read on."""
        sent = self._link.send(self._stream_id, data, fin)
        self._sent_at = self._loop.time()
        return sent

    # -------------------------------------------------------- what the link calls

    def on_data(self, data: bytes, fin: bool) -> None:
        """The stream's next bytes."""
        now = self._loop.time()
        try:
            ids = self._reader.feed(data, fin)
        except DataplaneError as error:
            self._give_up(error)
            return
        if self._verdict_at is None and self._reader.verdict is not None:
            self._verdict_at = now
        self._took(ids, now)
        if fin:
            self._end_at = now
            self._over = True
        self._wake()

    def on_reset(self, code: int) -> None:
        """The daemon gave the answer up."""
        self._break(ResetError(code, f"{reset_words(code)} (code {code})"))


class Client:
    """A connection to a daemon. Its methods may be called at any time, from any number of tasks."""

    def __init__(self, link: Link) -> None:
        self._link = link

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
        request_id: int = 0,
        api_key: str | bytes | None = None,
        width: int = 4,
    ) -> Answer:
        """Send a prompt and wait for the verdict on it.

        Args:
            ids: The prompt's token ids.
            max_output: Most ids of the answer; 0 leaves it to the runtime.
            temperature: 0 is greedy.
            top_p: 0 and 1 are off.
            top_k: 0 is off.
            seed: 0 is a random one.
            affinity: Requests of one number try the same slot first; 0 is none.
            strict: Whether only that slot will do.
            deadline_ms: Milliseconds after which the answer ends; 0 is none.
            request_id: 0 leaves it to the daemon.
            api_key: Who asks, for a daemon with tenants.
            width: Bytes of an id on the wire, 2 or 4.

        Raises:
            UsageError: A value does not fit the wire.
            UnavailableError: The connection is lost.
        """
        encoded = encode_ids(ids, width)
        request = Request(
            n_tokens=len(encoded) // width,
            width=width,
            max_output=max_output,
            request_id=request_id,
            affinity=affinity,
            strict=strict,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            deadline_ms=deadline_ms,
            api_key=None if api_key is None else encode_key(api_key),
        )
        answer = Answer(self._link, encode_prompt(request, encoded), True)
        try:
            await answer.opened()
        except BaseException:  # whoever waited is gone, and so must the request be
            answer.cancel()
            raise
        return answer

    async def raw(self, data: bytes, fin: bool = True) -> Answer:
        """Open a stream with these bytes, whatever they are; does not wait for a verdict.

        Raises:
            UnavailableError: The connection is lost.
        """
        return Answer(self._link, data, fin)

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


def read_ca(ca: str | os.PathLike[str] | None) -> bytes:
    """Return the certificates to verify a daemon with.

    Args:
        ca: The file, or None for the one that a daemon makes in the state directory.

    Raises:
        UsageError: A given file cannot be used.
        UnavailableError: No daemon has made one yet.
    """
    path = Path(ca) if ca is not None else state_dir_of(None, os.environ) / CA_CERT
    try:
        pem = path.read_bytes()
        x509.load_pem_x509_certificates(pem)
    except FileNotFoundError as error:
        hint = "the daemon's `ready` line names its file as ca=..."
        if ca is None:
            raise UnavailableError(
                f"there is no CA file {path} to know the daemon by: `dataplane serve` makes it at "
                f"its first start; for another daemon give its CA: {hint}"
            ) from error
        raise UsageError(f"there is no CA file {path}; {hint}") from error
    except OSError as error:
        raise UsageError(f"the CA file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the CA file {path} holds no certificate in PEM") from error
    return pem


@overload
def connect(
    server: str = ...,
    ca: str | os.PathLike[str] | None = ...,
    *,
    protocol: Literal["raw"] = ...,
    timeout: float = ...,
    idle_timeout: float = ...,
    server_name: str | None = ...,
    pump: bool = ...,
) -> AbstractAsyncContextManager[Client]: ...


@overload
def connect(
    server: str = ...,
    ca: str | os.PathLike[str] | None = ...,
    *,
    protocol: Literal["h3"],
    timeout: float = ...,
    idle_timeout: float = ...,
    server_name: str | None = ...,
    pump: bool = ...,
) -> AbstractAsyncContextManager[Http3Client]: ...


def connect(
    server: str = DEFAULT_SERVER,
    ca: str | os.PathLike[str] | None = None,
    *,
    protocol: Literal["raw", "h3"] = "raw",
    timeout: float = CONNECT_TIMEOUT_S,
    idle_timeout: float = IDLE_TIMEOUT_S,
    server_name: str | None = None,
    pump: bool = True,
) -> AbstractAsyncContextManager[Client] | AbstractAsyncContextManager[Http3Client]:
    """Connect to a daemon; the connection is closed at the end of the `async with`.

    Args:
        server: `HOST:PORT`.
        ca: The file to verify the daemon with; the state directory's if None.
        protocol: `raw` gives a `Client`, which speaks `prompt/1`; `h3` an `Http3Client`.
        timeout: Seconds for the connection to stand.
        idle_timeout: Seconds of silence after which it counts as lost.
        server_name: The name in the daemon's certificate, where it is not the host's.
        pump: Whether the packet pump does the packets; False: aioquic alone.

    Raises:
        UsageError: `server`, `ca` or `protocol` cannot be used.
        UnavailableError: There is no connection to be had.
    """
    how = _How(server, ca, timeout, idle_timeout, server_name, pump)
    if protocol == "raw":
        return _connect_raw(how)
    if protocol == "h3":
        return _connect_h3(how)
    raise UsageError(f"the protocol {protocol!r} is not known; it must be raw or h3")


class _How(NamedTuple):
    server: str
    ca: str | os.PathLike[str] | None
    timeout: float
    idle_timeout: float
    server_name: str | None
    pump: bool

    async def open(self, alpn: str, kind: type[AnyLink]) -> AnyLink:
        try:
            address = parse_address(self.server, lowest_port=1)
        except ValueError as error:
            raise UsageError(
                f"the server {self.server!r} is not allowed; it takes {error}"
            ) from error
        return await open_link(
            address,
            read_ca(self.ca),
            alpn,
            kind,
            timeout=self.timeout,
            idle_timeout=self.idle_timeout,
            server_name=self.server_name,
            pump=self.pump,
        )


@contextlib.asynccontextmanager
async def _connect_raw(how: _How) -> AsyncIterator[Client]:
    async with Client(await how.open(ALPN, Link)) as client:
        yield client


@contextlib.asynccontextmanager
async def _connect_h3(how: _How) -> AsyncIterator[Http3Client]:
    async with Http3Client(await how.open(H3_ALPN, Http3Link), how.server) as client:
        yield client
