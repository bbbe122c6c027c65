"""One request as its client saw it: when it was due, sent, decided and answered, and its end."""

from enum import StrEnum


class End(StrEnum):
    """What became of a request."""

    ANSWERED = "answered"
    """A whole answer, all of its tokens."""
    REFUSED = "refused"
    """A status that is not 200."""
    GAVE_UP = "gave_up"
    """No first token within the client's patience: the client left."""
    BROKEN = "broken"
    """The answer broke off, or was none."""


class Exchange:
    """A request; times are monotonic nanoseconds, 0 for what has not happened.

    Attributes:
        number: Its place in the run, from 0.
        payload: Its bytes on the wire.
        due_ns: When it was to be sent, from which its times count.
        sent_ns: When it was sent: the last attempt.
        verdict_ns: When the server's decision was here: the verdict or the status line.
        first_ns, end_ns: When the first token and the end were.
        attempts: How often it was sent.
        status: The server's, 0 before it is there.
        retry_after_ms: What came with a refusal; 0 if nothing.
        says_us: What the server said of its times.
        tokens: How many came.
        reason: Of a refusal or a break.
    """

    __slots__ = (
        "attempts", "due_ns", "end", "end_ns", "expected", "first_ns", "number", "payload",
        "reason", "retry_after_ms", "says_us", "sent_ns", "status", "tokens", "verdict_ns",
    )  # fmt: skip

    def __init__(self, number: int, payload: bytes, expected: int, due_ns: int) -> None:
        self.number = number
        self.payload = payload
        self.expected = expected
        self.due_ns = due_ns
        self.attempts = 0
        self.end: End | None = None
        self.end_ns = self.first_ns = self.sent_ns = self.verdict_ns = 0
        self.status = 0
        self.retry_after_ms = 0
        self.reason = ""
        self.says_us: dict[str, int] = {}
        self.tokens = 0

    def begin(self, now_ns: int) -> None:
        """It is being sent, for the first time or again."""
        self.attempts += 1
        self.sent_ns = now_ns
        self.end = None
        self.verdict_ns = self.status = self.retry_after_ms = 0

    def decide(self, status: int, read_ns: int) -> None:
        """The server's decision is here."""
        if not self.verdict_ns:
            self.verdict_ns = read_ns
            self.status = status

    def take(self, tokens: int, read_ns: int) -> None:
        """So many more tokens are here."""
        if tokens and not self.first_ns:
            self.first_ns = read_ns
        self.tokens += tokens

    def complete(self, read_ns: int) -> None:
        """The server said that this is all."""
        self.end_ns = read_ns
        if self.status != 200:
            self.end = End.REFUSED
        elif self.tokens == self.expected:
            self.end = End.ANSWERED
        else:
            self.break_off(f"{self.tokens} tokens came instead of {self.expected}", read_ns)

    def break_off(self, why: str, now_ns: int) -> None:
        """It ended otherwise than by a whole answer."""
        self.end = End.BROKEN
        self.reason = why
        self.end_ns = now_ns
