"""Write the seeds that the fuzz targets start from: `python tests/fuzz_seeds.py`.

Each is a whole input, small, and made here by name, so that a reader can tell what it holds. The
committed files must be what this writes; `test_fuzz_corpus.py` compares. Further files, such as
inputs that once failed, may lie beside them.
"""

from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "fuzz" / "corpus"
VARINT_MAX = 2**62 - 1


def varint(value: int, size: int | None = None) -> bytes:
    """A number as RFC 9000 section 16 writes it: as short as can be, or in `size` bytes."""
    if size is None:
        size = next(size for size in (1, 2, 4, 8) if value < 1 << (size * 8 - 2))
    return (value | (size.bit_length() - 1) << (size * 8 - 2)).to_bytes(size)


def frame(kind: int, *fields: int, data: bytes = b"") -> bytes:
    return varint(kind) + b"".join(varint(field) for field in fields) + data


def ack(kind: int, first: int, *rest: int) -> bytes:
    """`rest`: delay, first range, then gaps and lengths; counts of an ACK_ECN are given as data."""
    delay, length, *ranges = rest
    return frame(kind, first, delay, len(ranges) // 2, length, *ranges)


def frames() -> dict[str, bytes]:
    """Payloads of 1-RTT packets."""
    body = bytes(range(40))
    single = {
        "padding": bytes(20),
        "ping": frame(0x01),
        "ack": ack(0x02, 1000, 25, 10),
        "ack-ranges": ack(0x02, 70000, 25, 3, 0, 5, 10, 100, 2, 60000),
        "ack-to-zero": ack(0x02, 10, 0, 2, 1, 3, 0, 0),
        "ack-below-zero": ack(0x02, 10, 0, 2, 1, 3, 1, 0),
        "ack-first-below-zero": ack(0x02, 10, 0, 11),
        "ack-many": ack(0x02, 500, 0, 0, *([0, 1] * 100)),
        "ack-greatest": ack(0x02, VARINT_MAX, VARINT_MAX, VARINT_MAX),
        "ack-count-lies": frame(0x02, 1000, 0, VARINT_MAX, 0, 0, 0),
        "ack-ecn": ack(0x03, 1000, 25, 10, 2, 4) + varint(9) + varint(0) + varint(70000),
        "reset-stream": frame(0x04, 4, 256, 70000),
        "stop-sending": frame(0x05, 5, VARINT_MAX),
        "crypto": frame(0x06, 0, len(body), data=body),
        "crypto-too-far": frame(0x06, VARINT_MAX, 1, data=b"x"),
        "new-token": frame(0x07, len(body), data=body),
        "new-token-empty": frame(0x07, 0),
        "stream-too-far": frame(0x0F, 0, VARINT_MAX, 1, data=b"x"),
        "stream-empty-fin": frame(0x0B, 8, 0),
        "stream-cut": frame(0x0A, 8, 41, data=body),
        "max-data": frame(0x10, 1 << 20),
        "max-stream-data": frame(0x11, 4, 1 << 30),
        "max-streams-bidi": frame(0x12, 100),
        "max-streams-uni": frame(0x13, 1 << 60),
        "max-streams-too-many": frame(0x12, (1 << 60) + 1),
        "data-blocked": frame(0x14, 0),
        "stream-data-blocked": frame(0x15, 4, 16384),
        "streams-blocked-bidi": frame(0x16, 1 << 60),
        "streams-blocked-too-many": frame(0x17, VARINT_MAX),
        "new-connection-id": frame(0x18, 7, 3, data=bytes([8]) + body[:24]),
        "new-connection-id-longest": frame(0x18, 7, 7, data=bytes([20]) + body[:36]),
        "new-connection-id-retires-more": frame(0x18, 3, 7, data=bytes([8]) + body[:24]),
        "retire-connection-id": frame(0x19, 3),
        "path-challenge": frame(0x1A, data=body[:8]),
        "path-response": frame(0x1B, data=body[:8]),
        "connection-close": frame(0x1C, 7, 6, 4, data=b"oops"),
        "connection-close-app": frame(0x1D, 256, 0),
        "handshake-done": frame(0x1E),
        "unknown": frame(0x1F),
        "datagram": frame(0x30, data=body),
        "datagram-length": frame(0x31, len(body), data=body) + frame(0x01),
        "type-too-long": varint(0x01, 2),
        "type-long": varint(0x1234),
        "lengths-too-long": b"\x0f" + varint(4, 8) + varint(1, 4) + varint(2, 2) + b"ab",
    }
    for bits in range(8):
        fields = [4, *([1 << 20] if bits & 4 else []), *([len(body)] if bits & 2 else [])]
        single[f"stream-{bits}"] = frame(0x08 | bits, *fields, data=body)
    mixed = {
        "answers": single["ack"] + frame(0x0E, 4, 64, 8, data=body[:8]) * 3 + single["padding"],
        "credit": single["max-data"] + single["max-stream-data"] + single["max-streams-bidi"],
        "handed-up": single["handshake-done"] + single["new-token"] + single["new-connection-id"],
        "open-at-the-end": single["ping"] + single["ack-ecn"] + single["stream-1"],
        "wrong-at-the-end": single["stream-3"] + single["unknown"],
    }
    return single | mixed


def packet(payload: bytes, kind: int = 0) -> bytes:
    """A record of the target `packets`: how it is sent, its length, its payload."""
    return bytes([kind]) + len(payload).to_bytes(2, "little") + payload


def stream(number: int, offset: int, data: bytes, fin: bool = False) -> bytes:
    return frame(0x0E | fin, number, offset, len(data), data=data)


def packets() -> dict[str, bytes]:
    """Rows of packets to one connection."""
    body = bytes(range(256))
    jumped, given, forged, repeated, updated = range(1, 6)
    placed = packet(stream(0, 0, b"HEAD"))
    one_by_one = {name: packet(payload) for name, payload in frames().items() if len(payload) < 100}
    rows = {
        "whole": packet(stream(0, 0, b"HEAD" + body, fin=True)),
        "in-order": placed + packet(stream(0, 4, body)) + packet(stream(0, 260, body, fin=True)),
        "out-of-order": placed
        + packet(stream(0, 260, body, fin=True))
        + packet(stream(0, 4, body)),
        "overlapping": placed
        + b"".join(packet(stream(0, 4 + i * 40, body)) for i in (3, 1, 0, 2, 4)),
        "forged-into-place": placed
        + packet(stream(0, 4, body), forged)
        + packet(stream(0, 4, body[::-1]))
        + packet(stream(0, 4, body), forged),
        "repeated": placed + packet(stream(0, 4, body)) + packet(b"", repeated) * 2,
        "beyond-the-place": placed + packet(stream(0, 4, body * 2 + b"more", fin=True)),
        "over-the-window": placed + packet(stream(0, 2048, b"x")),
        "final-size": packet(stream(0, 0, b"12345678", fin=True)) + packet(stream(0, 8, b"9")),
        "reset-in-place": placed + packet(frame(0x04, 0, 9, 300)) + packet(stream(0, 4, body)),
        "stopped": placed + packet(frame(0x05, 0, 9)) + packet(stream(0, 4, body, fin=True)),
        "many-streams": b"".join(packet(stream(4 * i, 0, b"abcd", fin=True)) for i in range(8)),
        "too-many-streams": packet(stream(4 * 8, 0, b"abcd")),
        "opens-lower": packet(stream(4 * 7, 0, b"abcd")) + packet(stream(4, 0, b"abcd", fin=True)),
        "updated": placed + packet(stream(0, 4, body), updated) + packet(stream(0, 260, b"x")),
        "jumps": placed + packet(b"\x01", jumped + 6 * 40) * 6,
        "given": packet(body, given) + packet(b"", given),
        "acks-the-unsent": packet(ack(0x02, 1000, 0, 0)),
        "acks-all": packet(ack(0x02, 0, 0, 0)) + packet(stream(1, 0, b"answer", fin=True)),
        "gaps": placed + b"".join(packet(stream(0, 5 + 2 * i, b"x")) for i in range(60)),
        "reserved": packet(b""),
    }
    return {f"frame-{name}": row for name, row in one_by_one.items()} | rows


SEEDS = {"frames": frames, "packets": packets}


def main() -> None:
    for target, make in SEEDS.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, seed in make().items():
            (folder / name).write_bytes(seed)


if __name__ == "__main__":
    main()
