"""HTTP/3: `POST /v1/generate` and the read-only pages (contract 4).

A slot is claimed when the request's header is complete; a binary body goes into it as it arrives, a
JSON body is gathered, read at its end and then written. One bad request ends its stream with a
problem document, never the connection.

`Generate` is the front of the listener and writes the answers of published requests; what comes in
goes to the connection's `Session` (`dataplane.fronts.session`).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from dataplane.errors import Refusal, ResetCode, Status
from dataplane.exchange import Asked, Exchange
from dataplane.fronts.parameters import Body, pack_ids
from dataplane.fronts.session import Session
from dataplane.fronts.stream_states import exchange_of
from dataplane.http3 import data_frame_header
from dataplane.http3_fields import Code
from dataplane.ingress import Ingress, Routes
from dataplane.pages import Pages
from dataplane.text import TextError, Tokenizer, TokenizerError

_INTERNAL_ERROR = int(Code.INTERNAL_ERROR)
_OK = int(Status.OK)
_BUILDING_RETRY_MS = 1000
_log = logging.getLogger("dataplane.generate")


def _nothing() -> None:
    """Where there is no listener to finish a pass."""


class TextModel(NamedTuple):
    """What the attached runtime knows of text."""

    tokenizer: Tokenizer | None
    chat_template: str | None
    building: bool = False  # the tokeniser comes, and is not there yet

    def encode(self, body: Body, context: int) -> bytes | Refusal:
        """Return a body's prompt as ids, u32 LE, of which `context` are plainly enough."""
        if body.token_ids is not None:
            return pack_ids(body.token_ids)
        tokenizer, template, building = self
        if building:
            # Not 501: that says never, and a second try will do.
            reason = "the runtime's tokeniser is being read: try again, or send token_ids"
            return Refusal(Status.UNAVAILABLE, reason, _BUILDING_RETRY_MS)
        if tokenizer is None:
            return Refusal(
                Status.NO_TOKENIZER, "the runtime has no tokeniser: send token_ids instead"
            )
        try:
            if body.prompt is not None:
                return pack_ids(tokenizer.encode(body.prompt, context))
            if template is None:
                return Refusal(
                    Status.NO_TOKENIZER, "the runtime has no chat template: send prompt instead"
                )
            messages = [
                {"role": message.role, "content": message.content}
                for message in body.messages or ()
            ]
            return pack_ids(tokenizer.encode_chat(messages, template, context))
        except TextError as error:
            return Refusal(Status.BAD_REQUEST, str(error))
        except TokenizerError as error:
            return Refusal(Status.NO_TOKENIZER, str(error))


NO_TEXT = TextModel(None, None)


def _build(document: bytes, template: str | None) -> TextModel:
    """Read a tokeniser; one of no use is said and left out."""
    try:
        return TextModel(Tokenizer(document), template)
    except Exception as error:
        _log.warning("text requests will get 501: %s", error)
        return TextModel(None, template)


class Generate:
    """The HTTP/3 front of one listener.

    Attributes:
        routes: Who admits a request.
        finish_pass: Sends what a thread's end has led to; set by who owns the listener.
    """

    NO_ERROR = int(Code.NO_ERROR)

    def __init__(self, routes: Routes, pages: Pages) -> None:
        self.routes = routes
        self.pages = pages
        self._models: dict[Ingress, TextModel] = {}
        self.answers = routes.stats.answers
        self.finish_pass: Callable[[], None] = _nothing

    def model_of(self, ingress: Ingress) -> TextModel:
        """Return the tokeniser and the template of the runtime that serves these slots."""
        return self._models.get(ingress, NO_TEXT)

    def use_text(
        self,
        ingress: Ingress,
        document: bytes | None,
        template: str | None,
        done: Callable[[], None],
    ) -> None:
        """Read an attached runtime's tokeniser in a thread; `done` is called when text is served.

        It takes a third of a second, in which ids are served and text is 503.
        """
        building = self._models[ingress] = TextModel(None, template, document is not None)
        if document is None:
            done()
            return

        def built(future: asyncio.Future[TextModel]) -> None:
            if future.cancelled() or self._models[ingress] is not building:
                return
            failed = future.exception() is not None
            self._models[ingress] = TextModel(None, template) if failed else future.result()
            done()

        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, _build, document, template).add_done_callback(built)

    # What the peer did.

    def opened(self, connection: Any) -> None:
        """Start HTTP/3: SETTINGS on a control stream of our own, and the QPACK streams."""
        session = connection.extra = Session(self, connection)
        session.open()

    def stream_data(
        self, connection: Any, stream_id: int, data: bytes, fin: bool, at_ns: int
    ) -> None:
        """Hand in-order bytes of a stream to the framing."""
        session = connection.extra
        if fin and session.take_whole(stream_id, data, 0, len(data), at_ns):
            return
        session.at_ns = at_ns
        session.fin = fin
        session.http3.receive(stream_id, data, fin, session)
        if not fin or session.headers:
            session.watch_header(stream_id)

    def stream_reset(self, connection: Any, stream_id: int) -> None:
        """The peer gave up sending: an unfinished request is over."""
        connection.extra.peer_reset(stream_id)

    def stop_sending(self, connection: Any, stream_id: int) -> bool:
        """The peer wants no answer; False when nothing of this stream is known."""
        known: bool = connection.extra.peer_stopped(stream_id)
        return known

    def unread(self, connection: Any, stream_id: int) -> None:
        """Nobody reads this answer: it is broken off, and its slot goes back."""
        if stream_id & 1:
            return  # One of our own streams, which are not to be reset.
        state = connection.streams.pop(stream_id, None)
        if state is not None:
            self.leave(state)
        connection.reset(stream_id, _INTERNAL_ERROR)

    def left(self, connection: Any) -> None:
        """The connection is over."""
        for state in connection.streams.values():
            self.leave(state)
        connection.streams.clear()
        connection.extra.forget_headers()

    def drain(self, connection: Any) -> None:
        """Tell the peer that new requests are not taken any more (RFC 9114 section 5.2)."""
        connection.extra.drain()

    def leave(self, state: Any) -> None:
        """Give back what a stream holds or waits for."""
        if state.__class__ is Asked:
            state.ingress.asking.forget(state)
            return
        exchange = exchange_of(state)
        if exchange.live:
            exchange.ingress.leave(exchange)

    # What is answered.

    def decided(self, asked: Asked, outcome: Exchange | Refusal) -> None:
        """See `dataplane.exchange.Front`."""
        asked.connection.extra.decided(asked, outcome)

    def answer(self, exchange: Exchange, ids: bytes, finish: int) -> None:
        """See `dataplane.exchange.Front`: header and body that are there go in one write."""
        reply = exchange.extra
        connection = exchange.connection
        stream_id = exchange.stream_id
        if exchange.answered:
            body = reply.body(exchange, ids, finish)
            out = data_frame_header(len(body)) + body if body else b""
        else:
            exchange.answered = True
            self.answers[_OK] += 1
            out = reply.begin(exchange, ids, finish, exchange.ingress.slots)
        if finish:
            exchange.extra = None
            del connection.streams[stream_id]
            connection.send(stream_id, out, True)
        elif out:
            connection.send(stream_id, out, False)

    def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """See `dataplane.exchange.Front`; a `complete_ns` says that the request's end had come."""
        session = exchange.connection.extra
        session.refuse_held(exchange, refusal, exchange.complete_ns != 0)

    def fail(self, exchange: Exchange, code: ResetCode) -> None:
        """See `dataplane.exchange.Front`; HTTP/3 has one code for all of them."""
        exchange.extra = None
        exchange.connection.streams.pop(exchange.stream_id, None)
        exchange.connection.reset(exchange.stream_id, _INTERNAL_ERROR)
