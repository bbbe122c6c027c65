"""HTTP/3: `POST /v1/generate` and the read-only pages (contract 4).

A slot is claimed when the request's header is complete; a binary body goes into it as it arrives, a
JSON body is gathered, read at its end and then written. One bad request ends its stream with a
problem document, never the connection.

`Generate` is the front of the listener; each connection has a `Session`, which is what the framing
reports to.
"""

import re
import secrets
from typing import Any, NamedTuple

from dataplane.admin import Page, Pages
from dataplane.errors import Refusal, ResetCode, Status
from dataplane.exchange import Exchange
from dataplane.fronts import replies
from dataplane.fronts.parameters import (
    BINARY,
    EVENTS,
    JSON,
    Body,
    apply_sampling,
    json_limit,
    pack_ids,
    preferred_form,
    read_binary,
    read_header_parameters,
    read_json,
    split_media_type,
)
from dataplane.http3 import Http3, data_frame_header
from dataplane.http3_fields import Code, Data, Fields
from dataplane.ingress import Ingress
from dataplane.prompt1 import Request
from dataplane.text import TextError, Tokenizer, TokenizerError

ALPN = "h3"
GENERATE = b"/v1/generate"
_GET_METHODS = (b"GET", b"HEAD")
_VISIBLE_ID = re.compile(rb"[\x21-\x7e]{1,64}")
_NO_ERROR = int(Code.NO_ERROR)
_INTERNAL_ERROR = int(Code.INTERNAL_ERROR)
_REQUEST_CANCELLED = int(Code.REQUEST_CANCELLED)
_OK = int(Status.OK)


class TextModel(NamedTuple):
    """What the attached runtime knows of text."""

    tokenizer: Tokenizer | None
    chat_template: str | None


class _Gathering:
    """A JSON request under way: it holds a slot, and its body is not whole."""

    __slots__ = ("accept", "data", "exchange", "request", "request_id")

    def __init__(
        self, exchange: Exchange, request: Request, request_id: bytes, accept: bytes | None
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.request_id = request_id
        self.accept = accept
        self.data = bytearray()


class Generate:
    """The HTTP/3 front of one listener.

    Attributes:
        model: The attached runtime's tokeniser and template.
    """

    def __init__(self, ingress: Ingress, pages: Pages) -> None:
        self.ingress = ingress
        self.pages = pages
        self.model = TextModel(None, None)
        self.answers = ingress.stats.answers

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
        session.at_ns = at_ns
        session.fin = fin
        session.http3.receive(stream_id, data, fin, session)

    def stream_reset(self, connection: Any, stream_id: int) -> None:
        """The peer gave up sending: an unfinished request is over."""
        connection.extra.peer_reset(stream_id)

    def stop_sending(self, connection: Any, stream_id: int) -> None:
        """The peer wants no answer."""
        connection.extra.peer_stopped(stream_id)

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

    def drain(self, connection: Any) -> None:
        """Tell the peer that new requests are not taken any more (RFC 9114 section 5.2)."""
        connection.extra.drain()

    def leave(self, state: Any) -> None:
        """Give back what a stream holds."""
        exchange = state.exchange if state.__class__ is _Gathering else state
        if exchange.live:
            self.ingress.leave(exchange)

    # What is answered.

    def answer(self, exchange: Exchange, ids: bytes, finish: int) -> None:
        """See `dataplane.exchange.Front`: header and body that are there go in one write."""
        reply = exchange.extra
        connection = exchange.connection
        stream_id = exchange.stream_id
        out = b""
        if not exchange.answered:
            exchange.answered = True
            self.answers[_OK] += 1
            slots = self.ingress.slots
            headers = replies.accepted_headers(reply, exchange, slots)
            out = connection.extra.http3.encode_headers(stream_id, headers)
        body = reply.body(exchange, ids, finish)
        if body:
            out += data_frame_header(len(body)) + body
        if finish:
            exchange.extra = None
            del connection.streams[stream_id]
            connection.send(stream_id, out, True)
        elif out:
            connection.send(stream_id, out, False)

    def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """See `dataplane.exchange.Front`."""
        session = exchange.connection.extra
        state = exchange.connection.streams.get(exchange.stream_id)
        request_id = (
            state.request_id
            if state.__class__ is _Gathering
            else replies.request_id_of(exchange.extra, exchange)
        )
        ended = exchange.complete_ns != 0
        session.refuse(
            exchange.stream_id,
            refusal,
            request_id,
            exchange.queue_us,
            exchange.free_left,
            exchange.slot,
            ended=ended,
        )
        if not ended:
            session.http3.discard(exchange.stream_id)

    def fail(self, exchange: Exchange, code: ResetCode) -> None:
        """See `dataplane.exchange.Front`; HTTP/3 has one code for all of them."""
        exchange.extra = None
        exchange.connection.streams.pop(exchange.stream_id, None)
        exchange.connection.reset(exchange.stream_id, _INTERNAL_ERROR)


class Session:
    """HTTP/3 on one connection: the framing's sink.

    Attributes:
        at_ns, fin: Of the bytes that the framing is going through: when the kernel received them,
        and
            whether they are the stream's last.
    """

    __slots__ = ("_answers", "_connection", "_control", "_front", "_last", "at_ns", "fin", "http3")

    def __init__(self, front: Generate, connection: Any) -> None:
        self.http3 = Http3(is_client=False)
        self.at_ns = 0
        self.fin = False
        self._front = front
        self._connection = connection
        self._answers = front.answers
        self._control = -1
        self._last = -4

    def open(self) -> None:
        """Open the three streams of our own."""
        first = self._connection.next_uni_stream_id()
        ids = (first, first + 4, first + 8)
        self._control = first
        for stream_id, data in self.http3.start(ids):
            self._connection.send(stream_id, data, False)

    def drain(self) -> None:
        self._connection.send(self._control, self.http3.goaway(self._last + 4), False)

    # The framing's sink (`dataplane.http3.Sink`).

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        """Route a request whose header is complete."""
        if stream_id > self._last:
            self._last = stream_id
        path = fields.get(b":path", b"")
        if path == GENERATE or path.startswith(GENERATE + b"?"):
            if fields[b":method"] == b"POST":
                return self._generate(stream_id, fields, length)
            return self._refuse_method(stream_id, b"POST")
        page = self._front.pages.get(path.decode("ascii", "replace"), probes=False)
        if page.status != Status.NOT_FOUND and fields[b":method"] not in _GET_METHODS:
            return self._refuse_method(stream_id, b"GET, HEAD")
        return self._page(stream_id, fields, page)

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        """A piece of a body: into the slot, or to what was gathered."""
        state = self._connection.streams.get(stream_id)
        if state.__class__ is Exchange:
            refusal = self._front.ingress.write(state, bytes(data), start, end - start)
            if refusal is None:
                return True
            self._front.refuse(state, refusal)
            return False
        if state.__class__ is _Gathering:
            state.data += data[start:end]
            return True
        return False

    def on_end(self, stream_id: int) -> None:
        """The request is whole."""
        state = self._connection.streams.get(stream_id)
        if state.__class__ is Exchange:
            refusal = self._front.ingress.submit(state, b"", 0, 0, self.at_ns)
            if refusal is not None:
                self._front.refuse(state, refusal)
        elif state.__class__ is _Gathering:
            self._submit_json(stream_id, state)

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        """Nothing in trailers matters here."""

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        """Only a client sees these."""

    def on_goaway(self, last_id: int) -> None:
        """A client's GOAWAY is about pushes, and there are none."""

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
        """A malformed request: its own stream ends."""
        state = self._connection.streams.get(stream_id)
        if status and state is None:
            refusal = Refusal(Status(status), reason)
            self.refuse(stream_id, refusal, new_request_id(), ended=self.fin)
            return
        if state is not None:
            exchange = state.exchange if state.__class__ is _Gathering else state
            if status and exchange.live and not exchange.answered:
                refusal = Refusal(Status(status), reason)
                self._front.refuse(exchange, self._front.ingress.give_up(exchange, refusal))
                return
            self._front.leave(state)
            self._connection.streams.pop(stream_id, None)
        self._connection.reset(stream_id, code)
        if not self.fin:
            self._connection.stop(stream_id, code)

    def on_connection_error(self, code: int, reason: str) -> None:
        """The peer broke a rule that ends the connection."""
        self._connection.close(code, reason)

    # Ends from the transport.

    def peer_reset(self, stream_id: int) -> None:
        self.http3.reset(stream_id, self)
        state = self._connection.streams.pop(stream_id, None)
        if state is not None:
            self._front.leave(state)
            self._connection.reset(stream_id, _REQUEST_CANCELLED)

    def peer_stopped(self, stream_id: int) -> None:
        state = self._connection.streams.pop(stream_id, None)
        if state is None:
            return
        exchange = state.exchange if state.__class__ is _Gathering else state
        unfinished = exchange.complete_ns == 0
        self._front.leave(state)
        if unfinished:
            self.http3.discard(stream_id)
            self._connection.stop(stream_id, _NO_ERROR)

    # Requests.

    def _generate(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        """Read the header of a `/v1/generate`, claim its slot, make its reply."""
        given = fields.get(b"x-request-id", b"")
        request_id = given if _VISIBLE_ID.fullmatch(given) else b""
        if length is None:
            refusal = Refusal(Status.LENGTH_REQUIRED, "content-length is needed")
            return self._refuse_new(stream_id, refusal, request_id)
        kind, parameter = split_media_type(fields.get(b"content-type", b""))
        if kind == BINARY:
            request = read_binary(fields, parameter, length)
        elif kind == JSON:
            request = self._read_json_header(fields, length)
        else:
            request = Refusal(
                Status.MEDIA_TYPE,
                f"the content-type must be {BINARY.decode()} or {JSON.decode()}",
            )
        if isinstance(request, Refusal):
            return self._refuse_new(stream_id, request, request_id)
        front, connection = self._front, self._connection
        exchange = front.ingress.claim(front, connection, stream_id, request, self.at_ns)
        if isinstance(exchange, Refusal):
            return self._refuse_new(stream_id, exchange, request_id, front.ingress.queue_us)
        accept = fields.get(b"accept")
        if kind == JSON:
            state = _Gathering(
                exchange, request, request_id or b"%016x" % exchange.request_id, accept
            )
            connection.streams[stream_id] = state
        else:
            form = preferred_form(accept, BINARY)
            exchange.extra = self._reply(form, request_id)
            connection.streams[stream_id] = exchange
        if not self.fin:
            front.ingress.expect_body(exchange)
        return True

    def _read_json_header(self, fields: Fields, length: int) -> Request | Refusal:
        limit = json_limit(self._front.ingress.context)
        if length > limit:
            return Refusal(
                Status.TOO_LARGE, f"the JSON body has {length} bytes; at most {limit} are taken"
            )
        return read_header_parameters(fields)

    def _submit_json(self, stream_id: int, state: _Gathering) -> None:
        """The JSON body is whole: read it, write its ids into the slot, publish."""
        exchange, front = state.exchange, self._front
        exchange.complete_ns = self.at_ns
        body = read_json(state.data)
        refusal = body if isinstance(body, Refusal) else self._write_json(state, body)
        if refusal is not None:
            if exchange.live:
                front.ingress.give_up(exchange, refusal)
            front.refuse(exchange, refusal)

    def _write_json(self, state: _Gathering, body: Body) -> Refusal | None:
        exchange, ingress = state.exchange, self._front.ingress
        request = apply_sampling(state.request, body.sampling_params)
        if isinstance(request, Refusal):
            return request
        ids = self._encode(body)
        if isinstance(ids, Refusal):
            return ids
        refusal = ingress.revise(exchange, request._replace(n_tokens=len(ids) // 4))
        if refusal is not None:
            return refusal
        form = preferred_form(state.accept, EVENTS if body.stream else JSON)
        exchange.extra = self._reply(form, state.request_id)
        self._connection.streams[exchange.stream_id] = exchange
        return ingress.submit(exchange, ids, 0, len(ids), self.at_ns)

    def _encode(self, body: Body) -> bytes | Refusal:
        """Return a body's prompt as ids, u32 LE."""
        if body.token_ids is not None:
            return pack_ids(body.token_ids)
        tokenizer, template = self._front.model
        if tokenizer is None:
            return Refusal(
                Status.NO_TOKENIZER, "the runtime has no tokeniser: send token_ids instead"
            )
        try:
            if body.prompt is not None:
                return pack_ids(tokenizer.encode(body.prompt))
            if template is None:
                return Refusal(
                    Status.NO_TOKENIZER, "the runtime has no chat template: send prompt instead"
                )
            messages = [
                {"role": message.role, "content": message.content}
                for message in body.messages or ()
            ]
            return pack_ids(tokenizer.encode_chat(messages, template))
        except TextError as error:
            return Refusal(Status.BAD_REQUEST, str(error))
        except TokenizerError as error:
            return Refusal(Status.NO_TOKENIZER, str(error))

    def _reply(self, form: bytes, request_id: bytes) -> replies.Reply:
        if form == BINARY:
            return replies.Binary(request_id)
        tokenizer = self._front.model.tokenizer
        if form == JSON:
            return replies.Json(request_id, tokenizer)
        return replies.Events(request_id, tokenizer)

    # Answers that hold no slot.

    def _refuse_new(
        self, stream_id: int, refusal: Refusal, request_id: bytes, queue_us: int = 0
    ) -> bool:
        """Refuse a request before its body; it is not read any further."""
        request_id = request_id or new_request_id()
        self.refuse(stream_id, refusal, request_id, queue_us, ended=self.fin)
        return False

    def _refuse_method(self, stream_id: int, allow: bytes) -> bool:
        refusal = Refusal(
            Status.METHOD_NOT_ALLOWED,
            f"the method is not allowed here, only {allow.decode()}",
        )
        self.refuse(stream_id, refusal, new_request_id(), ended=self.fin, allow=allow)
        return False

    def refuse(
        self,
        stream_id: int,
        refusal: Refusal,
        request_id: bytes,
        queue_us: int = 0,
        free_left: int = 0,
        slot: int | None = None,
        *,
        ended: bool,
        allow: bytes = b"",
    ) -> None:
        """Send a whole answer and FIN, then STOP_SENDING if the request's end has not come."""
        self._answers[int(refusal.status)] += 1
        slots = self._front.ingress.slots
        headers, body = replies.problem(
            refusal, request_id, queue_us, slots, free_left, slot, allow
        )
        self._send_whole(stream_id, headers, body, ended)

    def _page(self, stream_id: int, fields: Fields, page: Page) -> bool:
        self._answers[int(page.status)] += 1
        request_id = new_request_id()
        headers = [
            (b":status", b"%d" % page.status),
            (b"content-type", page.content_type.encode()),
            (b"content-length", b"%d" % len(page.body)),
            (b"x-request-id", request_id),
            (b"request-id", request_id),
        ]
        body = b"" if fields[b":method"] == b"HEAD" else page.body
        self._send_whole(stream_id, headers, body, self.fin)
        return False

    def _send_whole(
        self, stream_id: int, headers: list[tuple[bytes, bytes]], body: bytes, ended: bool
    ) -> None:
        out = self.http3.encode_headers(stream_id, headers)
        if body:
            out += data_frame_header(len(body)) + body
        connection = self._connection
        connection.streams.pop(stream_id, None)
        connection.send(stream_id, out, True)
        if not ended:
            connection.stop(stream_id, _NO_ERROR)


def new_request_id() -> bytes:
    """Return an identifier for a request that holds no slot: 16 hexadecimal digits."""
    return secrets.token_hex(8).encode()
