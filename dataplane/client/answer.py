"""What an answer is to whoever asked, whichever protocol carries it.

A `BaseAnswer` knows how to wait and how an answer may end; what its bytes mean is the business of
its two kinds, `client.Answer` and `client_h3.HttpAnswer`. The rules that hold here:

- A refusal is an answer, not an exception.
- Whoever waits hears of the end, whichever it is; each gets an exception of its own.
- What has come so far stays, also when the answer breaks off.
- `first_token` and `total` are measured from the moment that the whole request was handed to QUIC.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

from dataplane.client.link import Link
from dataplane.errors import DataplaneError, Status, UnavailableError


class ResetError(DataplaneError):
    """The daemon admitted the request, but gave its answer up with `code`."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"the answer was broken off: {words}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. `finish_reason` and `usage` are None for a refusal and after `cancel`."""

    status: int
    slot: int | None
    request_id: int | str
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    usage: dict[str, int] | None
    timings_us: dict[str, int | None]
    reason: str


class BaseAnswer(ABC):
    """One request's answer, from the moment that its stream is open.

    Iterate for the ids as they come, or await `result()` for all of them. What has come so far
    stays in `token_ids`, also when the answer breaks off.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []
        self._read = 0
        self._over = False
        self._error: DataplaneError | None = None
        self._stream_id = -1
        self._sent_at = self._loop.time()
        self._verdict_at: float | None = None
        self._first_at: float | None = None
        self._end_at: float | None = None
        self.token_ids: list[int] = []

    # -------------------------------------------------------- what is known of it

    @property
    @abstractmethod
    def status(self) -> int | None:
        """200 or why not, or None before the verdict."""

    @property
    @abstractmethod
    def slot(self) -> int | None:
        """The slot that was held."""

    @property
    @abstractmethod
    def request_id(self) -> int | str | None:
        """The daemon's, or the one that was asked for."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """The text of a refusal; empty otherwise."""

    @property
    @abstractmethod
    def retry_after_ms(self) -> int | None:
        """When to try again, where a refusal says so."""

    @property
    @abstractmethod
    def finish_reason(self) -> str | None:
        """`stop`, `length` or `deadline` once the answer is whole."""

    @property
    @abstractmethod
    def usage(self) -> dict[str, int] | None:
        """Prompt and output tokens, once the answer is whole."""

    @property
    @abstractmethod
    def timings_us(self) -> dict[str, int | None]:
        """Where the time went; None for what is not known."""

    @property
    def text(self) -> str | None:
        """The answer's text so far, where the daemon makes it."""
        return None

    @property
    def verdict_us(self) -> int | None:
        """From the request handed to QUIC to the verdict here."""
        return self._since_sent(self._verdict_at)

    def _since_sent(self, moment: float | None) -> int | None:
        return None if moment is None else round((moment - self._sent_at) * 1e6)

    # -------------------------------------------------------- waiting for it

    async def opened(self) -> Self:
        """Wait for the verdict, and for the reason as well where it is a refusal.

        Raises:
            DataplaneError: It cannot come any more.
        """
        while True:
            status = self.status
            if status is not None and (status == Status.OK or self._over):
                return self
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
        await self.opened()
        while not self._over:
            await self._change()
        self._raise_error()
        status, request_id = self.status, self.request_id
        assert status is not None
        assert request_id is not None
        return Result(
            status=status,
            slot=self.slot,
            request_id=request_id,
            token_ids=self.token_ids,
            text=self.text,
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

    async def _change(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _raise_error(self) -> None:
        if self._error is not None:
            # A fresh traceback for each who asks.
            raise self._error.with_traceback(None)

    # -------------------------------------------------------- what the link tells

    def on_lost(self, why: str) -> None:
        """The connection is over."""
        self._break(UnavailableError(f"the connection was lost: {why}"))

    def _took(self, ids: list[int], now: float) -> None:
        """Ids came."""
        if ids:
            if self._first_at is None:
                self._first_at = now
            self.token_ids += ids

    def _give_up(self, error: DataplaneError) -> None:
        """What comes is no answer."""
        self._link.abandon(self._stream_id)
        self._end(error)

    def _break(self, error: DataplaneError) -> None:
        # A refusal is told by its status, whatever became of its reason.
        refused = self.status is not None and self.status != Status.OK
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
