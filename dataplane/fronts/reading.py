"""GET and HEAD over HTTP/3: the read-only pages, each tenant's own (contract 4).

What is about a partition is shown to whose it is; what is about the daemon is shown to everybody.
"""

from typing import TYPE_CHECKING

from dataplane.errors import Refusal, Status
from dataplane.fronts import replies
from dataplane.fronts.parameters import given_id, key_of
from dataplane.http3_fields import Fields, Pair
from dataplane.ingress import Ingress

if TYPE_CHECKING:
    from dataplane.fronts.session import Session

_METHODS = (b"GET", b"HEAD")
_LARGE_PAGE = 64 << 10
_UNREAD_RETRY_MS = 1000


def answer(session: "Session", stream_id: int, fields: Fields, target: str) -> bool:
    """Answer a request for a page, or for what names no path; what comes of it is not read."""
    pages = session.front.pages
    if fields[b":method"] not in _METHODS and pages.has(target, probes=False):
        return refuse_method(session, stream_id, fields, b"GET, HEAD")
    request_id = given_id(fields) or replies.new_request_id()
    ingress = _reader(session, fields, target)
    if isinstance(ingress, Refusal):
        return session.refuse_new(stream_id, ingress, request_id)
    page = pages.get(target, False, request_id.decode(), None if ingress is None else ingress.name)
    is_head = fields[b":method"] == b"HEAD"
    if len(page.body) > _LARGE_PAGE and not is_head and session.connection.overfull():
        reason = "too much waits on this connection to be read: read it, then ask again"
        refusal = Refusal(Status.UNAVAILABLE, reason, _UNREAD_RETRY_MS)
        return session.refuse_new(stream_id, refusal, request_id)
    headers = [
        (b":status", b"%d" % page.status),
        (b"content-type", page.content_type.encode()),
        (b"content-length", b"%d" % len(page.body)),
        *replies.common_fields(request_id, 0, session.limits(page.status, ingress)),
    ]
    if page.status == Status.UNAVAILABLE:
        asked = ingress or session.front.routes.home
        headers += replies.retry_fields(asked.retry_after_ms())
    _send(session, stream_id, fields, page.status, headers, page.body)
    return False


def refuse_method(session: "Session", stream_id: int, fields: Fields, allow: bytes) -> bool:
    """Refuse what is asked for with another method."""
    reason = f"the method is not allowed here, only {allow.decode()}"
    refusal = Refusal(Status.METHOD_NOT_ALLOWED, reason)
    request_id = given_id(fields) or replies.new_request_id()
    headers, body = replies.problem(refusal, request_id, 0, session.limits(refusal.status))
    headers.append((b"allow", allow))
    _send(session, stream_id, fields, refusal.status, headers, body)
    return False


def _reader(session: "Session", fields: Fields, target: str) -> Ingress | Refusal | None:
    """Return whose pages a request may read; None: what it asks for shows nobody's."""
    routes = session.front.routes
    if routes.sole is not None or not session.front.pages.is_about_a_partition(target):
        return routes.sole
    return routes.of(key_of(fields))


def _send(
    session: "Session",
    stream_id: int,
    fields: Fields,
    status: int,
    headers: list[Pair],
    body: bytes,
) -> None:
    """Answer a request that may be a HEAD, whose answer has no body."""
    if fields[b":method"] == b"HEAD":
        body = b""
    session.send_whole(stream_id, status, headers, body, session.fin)
