"""What the HTTP/3 side and its clients call things: each name of contract 4 once.

A leaf: server, clients, load generator and admin port all read it.
"""

import re

from dataplane.errors import Status

ALPN = "h3"
GENERATE = b"/v1/generate"

BINARY = b"application/octet-stream"
JSON = b"application/json"
EVENTS = b"text/event-stream"
PROBLEM = b"application/problem+json"

VISIBLE_ID = re.compile(rb"[\x21-\x7e]{1,64}")
"""An identifier of the client's that is repeated to it."""

FINISH_WORDS = {1: "stop", 2: "length", 3: "deadline"}
"""By `dataplane.slots.Finish`."""

TITLES: dict[int, str] = {
    Status.OK: "OK",
    Status.BAD_REQUEST: "Bad Request",
    Status.UNAUTHORIZED: "Unauthorized",
    Status.FORBIDDEN: "Forbidden",
    Status.NOT_FOUND: "Not Found",
    Status.METHOD_NOT_ALLOWED: "Method Not Allowed",
    Status.TIMEOUT: "Request Timeout",
    Status.LENGTH_REQUIRED: "Length Required",
    Status.TOO_LARGE: "Content Too Large",
    Status.MEDIA_TYPE: "Unsupported Media Type",
    Status.BUSY: "Too Many Requests",
    Status.FIELDS_TOO_LARGE: "Request Header Fields Too Large",
    500: "Internal Server Error",  # of pages only
    Status.NO_TOKENIZER: "Not Implemented",
    Status.UNAVAILABLE: "Service Unavailable",
}
