"""The client library: prompts out, ids back, many at once on one connection.

```python
async with connect("localhost:4433", ca="ca.pem") as client:
    answer = await client.submit([1, 2, 3], max_output=16)
    async for ids in answer:
        print(ids)
    print(answer.finish_reason, answer.timings_us)
```

The rules that hold here:

- A refusal is an answer, not an exception: its `status` says so, `reason` says why.
- What raises is an answer that did not come to its end: `UnavailableError` when the connection is
  lost, `ResetError` when the daemon gave the answer up, `ProtocolError` when it is no answer.
- An answer that nobody waits for any more is given up on the wire, so that its slot is free again.
- All times are microseconds. `queue` and `ingress` are the daemon's own; `first_token` and `total`
  are measured here, from the moment that the whole request was handed to QUIC.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cryptography import x509

from dataplane.client_link import Link, open_link
from dataplane.client_wire import (
    FINISH_WORDS,
    AnswerReader,
    encode_ids,
    encode_prompt,
    reset_words,
)
from dataplane.config import parse_address, state_dir_of
from dataplane.errors import DataplaneError, Status, UnavailableError, UsageError
from dataplane.identity import CA_CERT
from dataplane.prompt1 import ALPN, Request, Verdict

DEFAULT_SERVER = "localhost:4433"
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 30.0


class ResetError(DataplaneError):
    """The daemon admitted the request, but gave its answer up; `code` is a `ResetCode`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the answer was broken off: {reset_words(code)} (code {code})")
        self.code = code


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. `finish_reason` and `usage` are None for a refusal and after `cancel`."""

    status: int
    slot: int | None
    request_id: int
    token_ids: list[int]
    finish_reason: str | None
    usage: dict[str, int] | None
    timings_us: dict[str, int | None]
    reason: str


class Answer:
    """One request's answer, from the moment that its stream is open.

    Iterate for the ids as they come, or await `result()` for all of them. What has come so far
    stays in `token_ids`, also when the answer breaks off.
    """

    def __init__(self, link: Link, data: bytes, fin: bool) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._reader = AnswerReader()
        self._waiters: list[asyncio.Future[None]] = []
        self._read = 0
        self._over = False
        self._error: DataplaneError | None = None
        self._verdict_at: float | None = None
        self._first_at: float | None = None
        self._end_at: float | None = None
        self.token_ids: list[int] = []
        self._stream_id = link.open(self, data, fin)
        self._sent_at = self._loop.time()

    # -------------------------------------------------------- what is known of it

    @property
    def verdict(self) -> Verdict | None:
        """The daemon's verdict, or None before it is there."""
        return self._reader.verdict

    @property
    def status(self) -> int | None:
        """200 or why not, or None before the verdict."""
        return self.verdict.status if self.verdict else None

    @property
    def slot(self) -> int | None:
        """The slot that was held."""
        return self.verdict.slot if self.verdict else None

    @property
    def request_id(self) -> int | None:
        """The daemon's, or the one that was asked for."""
        return self.verdict.request_id if self.verdict else None

    @property
    def reason(self) -> str:
        """The text of a refusal; empty otherwise."""
        return self._reader.reason

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `deadline` once the answer is whole."""
        trailer = self._reader.trailer
        return FINISH_WORDS[trailer.finish_reason] if trailer and self._reader.whole else None

    @property
    def usage(self) -> dict[str, int] | None:
        """Prompt and output tokens, once the answer is whole."""
        trailer = self._reader.trailer
        if trailer is None or not self._reader.whole:
            return None
        return {"prompt_tokens": trailer.prompt_tokens, "output_tokens": trailer.output_tokens}

    @property
    def verdict_us(self) -> int | None:
        """From the request handed to QUIC to the verdict here."""
        return self._since_sent(self._verdict_at)

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

    def _since_sent(self, moment: float | None) -> int | None:
        return None if moment is None else round((moment - self._sent_at) * 1e6)

    # -------------------------------------------------------- waiting for it

    async def opened(self) -> Verdict:
        """Wait for the verdict, and for the reason as well where it is a refusal.

        Raises:
            DataplaneError: It cannot come any more.
        """
        while True:
            verdict = self._reader.verdict
            if verdict is not None and (verdict.status == Status.OK or self._over):
                return verdict
            self._raise_error()
            if self._over:
                raise DataplaneError("the request was cancelled")
            await self._change()

    def __aiter__(self) -> AsyncIterator[list[int]]:
        return self

    async def __anext__(self) -> list[int]:
        while True:
            if self._read < len(self.token_ids):
                ids = self.token_ids[self._read :]
                self._read = len(self.token_ids)
                return ids
            self._raise_error()
            if self._over:
                raise StopAsyncIteration
            await self._change()

    async def result(self) -> Result:
        """Wait for the whole answer.

        Raises:
            DataplaneError: It cannot come any more.
        """
        verdict = await self.opened()
        while not self._over:
            await self._change()
        self._raise_error()
        return Result(
            status=verdict.status,
            slot=verdict.slot,
            request_id=verdict.request_id,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            usage=self.usage,
            timings_us=self.timings_us,
            reason=self.reason,
        )

    def cancel(self) -> None:
        """Give the answer up: nothing more will come, and the daemon takes the slot back."""
        if not self._over:
            self._link.abandon(self._stream_id)
            self._end(None)

    def send(self, data: bytes, fin: bool = False) -> bool:
        """Send more of a `raw` request; False if the daemon does not read on."""
        sent = self._link.send(self._stream_id, data, fin)
        self._sent_at = self._loop.time()
        return sent

    async def _change(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _raise_error(self) -> None:
        if self._error is not None:
            # A fresh traceback for each who asks.
            raise self._error.with_traceback(None)

    # -------------------------------------------------------- what the link calls

    def on_data(self, data: bytes, fin: bool) -> None:
        """The stream's next bytes."""
        now = self._loop.time()
        try:
            ids = self._reader.feed(data, fin)
        except DataplaneError as error:
            self._link.abandon(self._stream_id)
            self._end(error)
            return
        if self._verdict_at is None and self._reader.verdict is not None:
            self._verdict_at = now
        if ids:
            if self._first_at is None:
                self._first_at = now
            self.token_ids += ids
        if fin:
            self._end_at = now
            self._over = True
        self._wake()

    def on_reset(self, code: int) -> None:
        """The daemon gave the answer up."""
        self._break(ResetError(code))

    def on_lost(self, why: str) -> None:
        """The connection is over."""
        self._break(UnavailableError(f"the connection was lost: {why}"))

    def _break(self, error: DataplaneError) -> None:
        verdict = self._reader.verdict
        # A refusal is told by its verdict, whatever became of its reason.
        refused = verdict is not None and verdict.status != Status.OK
        self._end(None if refused else error)

    def _end(self, error: DataplaneError | None) -> None:
        self._over = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


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
            api_key: Who asks.
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
            api_key=api_key.encode() if isinstance(api_key, str) else api_key,
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

    async def __aenter__(self) -> "Client":
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


@contextlib.asynccontextmanager
async def connect(
    server: str = DEFAULT_SERVER,
    ca: str | os.PathLike[str] | None = None,
    *,
    timeout: float = CONNECT_TIMEOUT_S,
    idle_timeout: float = IDLE_TIMEOUT_S,
    server_name: str | None = None,
) -> AsyncIterator[Client]:
    """Connect to a daemon; the connection is closed at the end of the `async with`.

    Args:
        server: `HOST:PORT`.
        ca: The file to verify the daemon with; the state directory's if None.
        timeout: Seconds for the connection to stand.
        idle_timeout: Seconds of silence after which it counts as lost.
        server_name: The name in the daemon's certificate, where it is not the host's.

    Raises:
        UsageError: `server` or `ca` cannot be used.
        UnavailableError: There is no connection to be had.
    """
    try:
        address = parse_address(server, lowest_port=1)
    except ValueError as error:
        raise UsageError(f"the server {server!r} is not allowed; it takes {error}") from error
    link = await open_link(
        address,
        read_ca(ca),
        ALPN,
        timeout=timeout,
        idle_timeout=idle_timeout,
        server_name=server_name,
    )
    async with Client(link) as client:
        yield client
