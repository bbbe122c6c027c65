"""HTTP/3 on one connection of a client: requests in, refusals and pages out (contract 4).

A `Session` is what the framing reports to. It routes a request when its header is complete, claims
its slot, feeds its body there and publishes it. Answers to published requests are the front's
(`dataplane.fronts.generate`). Rules that hold here:

- One bad request ends its stream with a problem document, never the connection.
- What is refused early gets its whole answer at once. STOP_SENDING follows only where the request's
  end has not come.
- `connection.streams` has an entry for a stream exactly while it holds a slot, waits for a device's
  answer, or is answered.
"""

import math
from typing import TYPE_CHECKING, Any

from dataplane.errors import Refusal, Status
from dataplane.exchange import Asked, Exchange
from dataplane.fronts import reading, replies, texts
from dataplane.fronts.parameters import (
    Body,
    apply_sampling,
    given_id,
    json_limit,
    key_of,
    preferred_form,
    read_binary,
    read_header_parameters,
    read_json,
    split_media_type,
)
from dataplane.fronts.stream_states import Gathering, Wanted, exchange_of, is_whole
from dataplane.http3 import Http3, data_frame_header
from dataplane.http3_fields import Code, Data, Fields, Pair
from dataplane.http_names import BINARY, EVENTS, GENERATE, JSON
from dataplane.ingress import Ingress
from dataplane.prompt1 import Request
from dataplane.table import UNREAD

if TYPE_CHECKING:
    from dataplane.fronts.generate import Generate

_INLINE_TEXT = 2 << 10
"""Bytes of a JSON body whose text is tokenised in the packet loop: there a thread costs more."""
_NO_ERROR = int(Code.NO_ERROR)
_REQUEST_CANCELLED = int(Code.REQUEST_CANCELLED)


class _Header:
    """The beginning of a request whose header is not whole."""

    __slots__ = ("session", "stream_id")

    def __init__(self, session: "Session", stream_id: int) -> None:
        self.session = session
        self.stream_id = stream_id

    def expire(self) -> None:
        self.session.expire_header(self.stream_id)


class Session:
    """HTTP/3 on one connection: the framing's sink.

    Attributes:
        at_ns, fin: Of the bytes that the framing is going through: when the kernel received them,
            and whether they are the stream's last.
        headers: The requests whose header is not whole, by stream.
    """

    __slots__ = ("_control", "_last", "at_ns", "connection", "fin", "front", "headers", "http3")

    def __init__(self, front: "Generate", connection: Any) -> None:
        self.http3 = Http3(is_client=False)
        self.at_ns = 0
        self.fin = False
        self.headers: dict[int, _Header] = {}
        self.front = front
        self.connection = connection
        self._control = -1
        self._last = -4

    def open(self) -> None:
        """Open the three streams of our own."""
        first = self.connection.next_uni_stream_id()
        ids = (first, first + 4, first + 8)
        self._control = first
        for stream_id, data in self.http3.start(ids):
            self.connection.send(stream_id, data, False)

    def drain(self) -> None:
        """Tell the peer that new requests are not taken any more (RFC 9114 section 5.2)."""
        self.connection.send(self._control, self.http3.goaway(self._last + 4), False)

    def take_whole(self, stream_id: int, data: Any, at: int, size: int, at_ns: int) -> bool:
        """Serve a request that is all of a stream, if nothing in it is out of the ordinary.

        Args:
            data: Bytes, or a buffer of C's, whose [at, at + size) are the stream.

        Returns:
            False: it is for the framing, and nothing has happened.
        """
        http3 = self.http3
        if stream_id in http3.streams or stream_id & 3 or http3.closed:
            return False
        front, connection = self.front, self.connection
        ingress, plain = front.routes.sole, UNREAD
        if ingress is None:
            found = front.routes.of_whole(data, at, size)
            if found is None:
                return False
            ingress, plain = found
        exchange = ingress.publish_whole(front, connection, stream_id, data, at, size, at_ns, plain)
        if exchange is None:
            return False
        if stream_id > self._last:
            self._last = stream_id
        request_id = ingress.given_id
        if isinstance(exchange, Refusal):
            self.fin = True
            self.refuse_new(stream_id, exchange, request_id, ingress.queue_us, ingress)
            return True
        exchange.extra = replies.Binary(request_id) if request_id else replies.PLAIN
        connection.streams[stream_id] = exchange
        ingress.follow(exchange)
        return True

    # Headers that do not come.

    def watch_header(self, stream_id: int) -> None:
        """Bytes of a stream went through the framing: give the rest of its header a time-out."""
        if self.http3.awaits_header(stream_id):
            if stream_id not in self.headers and not self.connection.gone:
                waiting = self.headers[stream_id] = _Header(self, stream_id)
                self.front.routes.home.deadlines.expect_header(waiting)
        else:
            self._drop_header(stream_id)

    def _drop_header(self, stream_id: int) -> None:
        waiting = self.headers.pop(stream_id, None)
        if waiting is not None:
            self.front.routes.home.deadlines.expect_no_header(waiting)

    def forget_headers(self) -> None:
        """The connection is over."""
        for stream_id in list(self.headers):
            self._drop_header(stream_id)

    def expire_header(self, stream_id: int) -> None:
        """A header did not come in time."""
        self._drop_header(stream_id)
        self.fin = False
        self.refuse_new(stream_id, Refusal(Status.TIMEOUT, "the header did not come in time"), b"")
        self.http3.discard(stream_id)

    # The framing's sink (`dataplane.http3.Sink`).

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        """Route a request whose header is complete."""
        if stream_id > self._last:
            self._last = stream_id
        path = fields.get(b":path", b"")
        if path == GENERATE or path.startswith(GENERATE + b"?"):
            if fields[b":method"] == b"POST":
                return self._generate(stream_id, fields, length)
            return reading.refuse_method(self, stream_id, fields, b"POST")
        return reading.answer(self, stream_id, fields, path.decode("ascii", "replace"))

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        """A piece of a body: into the slot, or to what was gathered."""
        state = self.connection.streams.get(stream_id)
        if state.__class__ is Exchange:
            ingress = state.ingress
            if self.fin and end - start == state.body_bytes and end == len(data):
                # The whole body, and the request ends with it: both cost one call.
                refusal = ingress.submit(state, bytes(data), start, end - start, self.at_ns)
            else:
                refusal = ingress.write(state, bytes(data), start, end - start)
            if refusal is None:
                return True
            self.refuse_held(state, refusal, self.fin)
            return False
        if state.__class__ is Gathering:
            state.data += data[start:end]
            return True
        if state.__class__ is Asked:
            state.body += data[start:end]
            return True
        return False

    def on_end(self, stream_id: int) -> None:
        """The request is whole."""
        state = self.connection.streams.get(stream_id)
        if state.__class__ is Exchange:
            if state.writing:
                refusal = state.ingress.submit(state, b"", 0, 0, self.at_ns)
                if refusal is not None:
                    self.refuse_held(state, refusal, True)
        elif state.__class__ is Gathering:
            self._submit_json(state)
        elif state.__class__ is Asked:
            state.ends(self.at_ns)

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        """Nothing in trailers matters here."""

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        """Only a client sees these."""

    def on_goaway(self, last_id: int) -> None:
        """A client's GOAWAY is about pushes, and there are none."""

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
        """A malformed request: its own stream ends."""
        state = self.connection.streams.get(stream_id)
        if status and state is None:
            self.refuse_new(stream_id, Refusal(Status(status), reason), b"")
            return
        if state is not None:
            if state.__class__ is not Asked:
                exchange = exchange_of(state)
                if status and exchange.live and not exchange.answered:
                    refusal = exchange.ingress.give_up(exchange, Refusal(Status(status), reason))
                    self.refuse_held(exchange, refusal, self.fin)
                    return
            self.front.leave(state)
            if status and state.__class__ is Asked:
                request_id = state.extra.request_id
                self.refuse_new(stream_id, Refusal(Status(status), reason), request_id)
                return
            self.connection.streams.pop(stream_id, None)
        self.connection.reset(stream_id, code)
        if not self.fin:
            self.connection.stop(stream_id, code)

    def on_connection_error(self, code: int, reason: str) -> None:
        """The peer broke a rule that ends the connection."""
        self.connection.close(code, reason)

    # Ends from the transport.

    def peer_reset(self, stream_id: int) -> None:
        """The peer gave up sending: an unfinished request is over, and so is its answer.

        The stream's own side ends in any case, since one that stays open counts against the streams
        that the peer may have. What was refused early has its whole answer on the way.
        """
        self._drop_header(stream_id)
        answered = self.http3.is_discarded(stream_id)
        self.http3.reset(stream_id, self)
        state = self.connection.streams.pop(stream_id, None)
        if state is not None:
            self.front.leave(state)
        if not answered and not stream_id & 3:
            self.connection.reset(stream_id, _REQUEST_CANCELLED)

    def peer_stopped(self, stream_id: int) -> bool:
        """The peer wants no answer: its slot goes back, and what it still sends is not read.

        False when nothing of this stream is known.
        """
        self._drop_header(stream_id)
        state = self.connection.streams.pop(stream_id, None)
        if state is not None:
            self.front.leave(state)
            if is_whole(state):
                return True
        if self.http3.discard(stream_id):
            self.connection.stop(stream_id, _NO_ERROR)
            return True
        return state is not None

    # Requests.

    def _generate(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        """Read the header of a `/v1/generate`, claim its slot, make its reply."""
        request_id = given_id(fields)
        if length is None:
            refusal = Refusal(Status.LENGTH_REQUIRED, "content-length is needed")
            return self.refuse_new(stream_id, refusal, request_id)
        kind, parameter = fields.get(b"content-type", b""), b""
        if kind != BINARY:
            kind, parameter = split_media_type(kind)
        if kind == BINARY:
            request = read_binary(fields, parameter, length)
        elif kind == JSON:
            request = read_header_parameters(fields)
        else:
            request = Refusal(
                Status.MEDIA_TYPE,
                f"the content-type must be {BINARY.decode()} or {JSON.decode()}",
            )
        if isinstance(request, Refusal):
            return self.refuse_new(stream_id, request, request_id)
        front, connection = self.front, self.connection
        ingress = front.routes.of(key_of(fields))
        if isinstance(ingress, Refusal):
            return self.refuse_new(stream_id, ingress, request_id)
        too_large = _json_too_large(ingress, length) if kind == JSON else None
        exchange = too_large or ingress.claim(front, connection, stream_id, request, self.at_ns)
        if isinstance(exchange, Refusal):
            queue_us = 0 if too_large else ingress.queue_us
            return self.refuse_new(stream_id, exchange, request_id, queue_us, ingress)
        header = Wanted(kind, request_id, fields.get(b"accept"), length)
        if isinstance(exchange, Asked):
            exchange.extra = header
            connection.streams[stream_id] = exchange
        else:
            self._admitted(exchange, request, header)
        return True

    def _admitted(self, exchange: Exchange, request: Request, header: Wanted) -> None:
        """A request holds a slot: its body is waited for."""
        kind, request_id, accept, length = header
        ingress, stream_id = exchange.ingress, exchange.stream_id
        if kind == JSON:
            request_id = request_id or b"%016x" % exchange.request_id
            state = Gathering(exchange, request, request_id, accept, length)
            self.connection.streams[stream_id] = state
        else:
            form = BINARY if accept is None else preferred_form(accept, BINARY)
            exchange.body_bytes = length
            exchange.extra = self._reply(ingress, form, request_id)
            self.connection.streams[stream_id] = exchange
        if not self.fin:
            ingress.deadlines.expect_body(exchange)

    def decided(self, asked: Asked, outcome: Exchange | Refusal) -> None:
        """The device answered a claim: go on as if what came since had come now."""
        stream_id, ingress, header = asked.stream_id, asked.ingress, asked.extra
        self.fin, self.at_ns = asked.is_whole, asked.whole_ns
        wanted = False
        if isinstance(outcome, Refusal):
            self.refuse_new(stream_id, outcome, header.request_id, ingress.queue_us, ingress)
        else:
            self._admitted(outcome, asked.request, header)
            body = bytes(asked.body)
            wanted = not body or self.on_data(stream_id, body, 0, len(body))
        if not wanted:
            self.http3.discard(stream_id)
        elif asked.is_whole:
            self.on_end(stream_id)

    def _submit_json(self, state: Gathering) -> None:
        """The JSON body is whole: read it, write its ids into the slot, publish."""
        exchange = state.exchange
        ingress = exchange.ingress
        exchange.complete_ns = self.at_ns
        body = read_json(state.data)
        if isinstance(body, Refusal):
            self._settle(exchange, body)
            return
        model = self.front.model_of(ingress)
        if body.token_ids is None and model.tokenizer and len(state.data) > _INLINE_TEXT:
            # The deadline holds also if the body came at once, the body's time-out not any more.
            ingress.deadlines.expect_body(exchange)
            exchange.body_due = math.inf
            texts.start(self, state, body, model)
            return
        ids = model.encode(body, ingress.context)
        self._settle(exchange, self._write_json(state, body, ids))

    def tokenised(self, state: Gathering, body: Body, ids: bytes | Refusal) -> bool:
        """A thread is through with a text; False when nobody waits for it any more."""
        exchange = state.exchange
        if self.connection.gone or self.connection.streams.get(exchange.stream_id) is not state:
            return False
        self._settle(exchange, self._write_json(state, body, ids))
        return True

    def _settle(self, exchange: Exchange, refusal: Refusal | None) -> None:
        """Refuse a whole request if something is wrong with it."""
        if refusal is not None:
            if exchange.live:
                exchange.ingress.give_up(exchange, refusal)
            self.refuse_held(exchange, refusal, True)

    def _write_json(self, state: Gathering, body: Body, ids: bytes | Refusal) -> Refusal | None:
        exchange = state.exchange
        ingress: Ingress = exchange.ingress
        request = apply_sampling(state.request, body.sampling_params)
        if isinstance(request, Refusal):
            return request
        if isinstance(ids, Refusal):
            return ids
        refusal = ingress.revise(exchange, request._replace(n_tokens=len(ids) // 4))
        if refusal is not None:
            return refusal
        form = preferred_form(state.accept, EVENTS if body.stream else JSON)
        exchange.extra = self._reply(ingress, form, state.request_id)
        self.connection.streams[exchange.stream_id] = exchange
        return ingress.submit(exchange, ids, 0, len(ids), exchange.complete_ns)

    def _reply(self, ingress: Ingress, form: bytes, request_id: bytes) -> replies.Reply:
        if form == BINARY:
            return replies.Binary(request_id) if request_id else replies.PLAIN
        tokenizer = self.front.model_of(ingress).tokenizer
        if form == JSON:
            return replies.Json(request_id, tokenizer)
        return replies.Events(request_id, tokenizer)

    # Refusals and pages.

    def refuse_held(self, exchange: Exchange, refusal: Refusal, ended: bool) -> None:
        """Refuse a request that held a slot; the slot has gone back already."""
        stream_id = exchange.stream_id
        state = self.connection.streams.get(stream_id)
        if state.__class__ is Gathering:
            request_id = state.request_id
            if refusal.status == Status.TIMEOUT:
                came = "the deadline passed while its text was turned into ids"
                if not exchange.complete_ns:
                    came = (
                        f"only {len(state.data)} of {state.length} bytes of the body came in time"
                    )
                refusal = refusal._replace(reason=came)
        else:
            request_id = replies.request_id_of(exchange.extra, exchange)
        limits = replies.Limits(exchange.ingress.slots, exchange.free_left)
        headers, body = replies.problem(
            refusal, request_id, exchange.queue_us, limits, exchange.slot
        )
        self.send_whole(stream_id, refusal.status, headers, body, ended)
        if not ended:
            self.http3.discard(stream_id)

    def refuse_new(
        self,
        stream_id: int,
        refusal: Refusal,
        request_id: bytes,
        queue_us: int = 0,
        ingress: Ingress | None = None,
    ) -> bool:
        """Refuse a request that holds no slot, before its body; it is not read any further."""
        limits = self.limits(refusal.status, ingress)
        headers, body = replies.problem(
            refusal, request_id or replies.new_request_id(), queue_us, limits
        )
        self.send_whole(stream_id, refusal.status, headers, body, self.fin)
        return False

    def limits(self, status: int, ingress: Ingress | None = None) -> replies.Limits:
        """Return the slots there are, and those that are left for an answer that held none."""
        ingress = ingress or self.front.routes.sole
        if ingress is None:
            return replies.Limits(0, 0)
        return replies.Limits(ingress.slots, 0 if status == Status.BUSY else ingress.free_slots())

    def send_whole(
        self, stream_id: int, status: int, headers: list[Pair], body: bytes, ended: bool
    ) -> None:
        """Send a whole answer and FIN, then STOP_SENDING if the request's end has not come."""
        self.front.answers[int(status)] += 1
        out = self.http3.encode_headers(stream_id, headers)
        if body:
            out += data_frame_header(len(body)) + body
        connection = self.connection
        connection.streams.pop(stream_id, None)
        connection.send(stream_id, out, True)
        if not ended:
            connection.stop(stream_id, _NO_ERROR)


def _json_too_large(ingress: Ingress, length: int) -> Refusal | None:
    limit = json_limit(ingress.context)
    if length <= limit:
        return None
    return Refusal(Status.TOO_LARGE, f"the JSON body has {length} bytes; at most {limit} are taken")
