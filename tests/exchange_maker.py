"""What a raw client may say, and a runtime do: exchanges made of a seed's numbers, for `twins`."""

import random
import struct
from collections.abc import Sequence
from typing import Any

from hand import PACKET_ROOM, Frame
from paired_servers import CONTEXT, KEYS, MAX_OUTPUT, VOCAB, Server
from twins import Twins

from dataplane.prompt1 import Request, encode_request

STOP, LENGTH, ERROR = 1, 2, 4


def body_of(ids: Sequence[int], width: int) -> bytes:
    return struct.pack(f"<{len(ids)}{'H' if width == 2 else 'I'}", *ids)


class Maker:
    """Makes exchanges out of a seed's numbers."""

    def __init__(self, seed: object, twins: Twins, alone: bool = False) -> None:
        self.random = random.Random(f"exchange {seed}")
        self.twins = twins
        self.alone = alone  # one frame a packet

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def request(self) -> tuple[bytes, bool]:
        """The bytes of a stream, in order or not, and whether its end is to come."""
        kind = self.random.choices(
            ["good", "header", "token", "long", "short", "cut", "noise", "nothing"],
            [10, 2, 2, 2, 2, 1, 1, 1],
        )[0]
        if kind == "nothing":
            return b"", True
        if kind == "noise":
            return self.random.randbytes(self.random.randint(1, 200)), self.chance(0.7)
        width = self.random.choice([2, 4])
        count = self.random.choice([1, 2, 3, 7, self.random.randint(1, 700), CONTEXT])
        fields = self._fields()
        header = encode_request(Request(count, width, **fields))
        if self.twins.keyed:
            header = self._with_keys(header)
        elif self.chance(0.2):
            header = self._extended(header)
        ids = [self.random.randrange(min(VOCAB, 65536)) for _ in range(count)]
        if kind == "token":
            ids[self.random.randrange(count)] = self.random.choice([VOCAB, 65535])
        body = body_of(ids, width)
        if kind == "header":
            header = self._spoilt(header)
        elif kind == "long":
            body += self.random.randbytes(self.random.choice([1, 2, 3, 4, 900]))
        elif kind == "short":
            body = body[: self.random.randrange(len(body))]
        elif kind == "cut":
            return header[: self.random.randrange(len(header))], self.chance(0.7)
        return header + body, self.chance(0.85)

    def _fields(self) -> dict[str, Any]:
        choose = self.random.choice
        fields: dict[str, Any] = {"request_id": self.random.getrandbits(63) | 1}
        if self.chance(0.1):
            fields["request_id"] = 0
        self.twins.ids.add(fields["request_id"])
        if self.chance(0.3):
            fields |= {
                "max_output": choose([1, 5, MAX_OUTPUT]), "temperature": choose([0.5, 100.0]),
                "top_p": choose([0.25, 1.0]), "top_k": choose([1, 40]), "seed": choose([9, 2**31]),
            }  # fmt: skip
        if self.chance(0.2):
            fields |= {"affinity": self.random.randint(1, 9), "strict": self.chance(0.5)}
        if self.chance(0.2):
            fields["deadline_ms"] = choose([11, 37, 913, 60_000])
        return fields

    def _extended(self, header: bytes) -> bytes:
        value = self.random.randbytes(self.random.choice([0, 1, 16, 2000]))
        kind = self.random.choice([1, 2, 9])
        extension = struct.pack("<HH", kind, len(value)) + value
        return header[:4] + struct.pack("<H", 48 + len(extension)) + header[6:] + extension

    def _with_keys(self, header: bytes) -> bytes:
        """A header with a key, mostly one that is known; some have others, or more than one, or are
        not in order behind it."""
        kinds = ["known", "unknown", "none", "several", "spoilt"]
        kind = self.random.choices(kinds, [14, 2, 2, 4, 2])[0]
        keys = [*KEYS]
        if kind == "none":
            extensions = self.random.choice([[], [(1, b"")], [(2, b"alpha")], [(257, b"beta")]])
        elif kind == "unknown":
            unknown = [b"gamma", b"alpha\0", b"alph", b"x" * 4000, b"\0"]
            extensions = [(1, self.random.choice(unknown))]
        elif kind == "several":
            others = [(1, b"gamma"), (1, b""), (2, b"beta"), (0xFFFF, b"x" * 300)]
            known = [(1, key) for key in keys if len(key) < 100]
            extensions = self.random.sample(others + known, self.random.randint(2, 4))
        else:
            extensions = [(1, self.random.choice(keys))]
        tail = b"".join(struct.pack("<HH", kind, len(value)) + value for kind, value in extensions)
        if kind == "spoilt":
            tail = self.random.choice([tail[:-1], tail + b"\1\0\5", tail[:5], tail[:4]])
            tail = tail[: 4096 - 48]
        return header[:4] + struct.pack("<H", 48 + len(tail)) + header[6:] + tail

    def _spoilt(self, header: bytes) -> bytes:
        """A header with one mistake in it."""
        at, value = self.random.choice([
            (0, b"GET "), (3, b"2"), (4, b"\x2f\0"), (4, b"\xff\xff"), (4, b"\x32\0"), (6, b"\3"),
            (7, b"\2"), (8, b"\0\0\0\0"), (8, struct.pack("<I", CONTEXT + 1)), (8, b"\xff" * 4),
            (12, struct.pack("<I", MAX_OUTPUT + 1)), (28, struct.pack("<f", -1.0)),
            (28, struct.pack("<f", float("nan"))), (28, struct.pack("<f", 100.5)),
            (32, struct.pack("<f", 1.5)), (32, struct.pack("<f", float("inf"))),
        ])  # fmt: skip
        return header[:at] + value + header[at + len(value) :]

    def pieces(self, data: bytes) -> list[tuple[int, bytes]]:
        """Cut a stream's bytes."""
        mode = self.random.choice(["whole", "halves", "small", "sizes"])
        at, cut = 0, []
        while at < len(data):
            size = {
                "whole": PACKET_ROOM - 60,
                "halves": self.random.choice([48, 52, len(data) // 2 + 1]),
                "small": self.random.randint(1, 7) if len(data) < 200 else 130,
                "sizes": self.random.randint(1, PACKET_ROOM - 60),
            }[mode]
            size = min(size, PACKET_ROOM - 60)
            cut.append((at, data[at : at + size]))
            at += size
        return cut

    def frames(self, stream: int) -> list[Frame]:
        """What a client says on a stream, from its beginning to wherever it stops."""
        data, ends = self.request()
        cut = self.pieces(data)
        found = [Frame("stream", stream, at, part) for at, part in cut]
        if ends and found and self.chance(0.6):
            found[-1] = found[-1]._replace(fin=True)
        elif ends:
            found.append(Frame("stream", stream, len(data), fin=True))
        if self.chance(0.2):
            at = self.random.randint(0, len(found))
            size = max([frame.offset + len(frame.data) for frame in found[:at]], default=0)
            if not (ends and at == len(found)):
                found = [*found[:at], Frame("reset", stream, size, code=self.random.choice([0, 7]))]
            elif self.chance(0.5):
                found.append(Frame("reset", stream, size, code=7))
        if self.chance(0.2):
            at = self.random.randint(0, len(found))
            found.insert(at, Frame("stop", stream, code=self.random.choice([0, 5])))
        return found

    def packets(self, streams: list[list[Frame]]) -> list[list[Frame]]:
        """Interleave streams over packets; some are lost, and come again cut otherwise."""
        left = [list(frames) for frames in streams if frames]
        packets: list[list[Frame]] = []
        while left:
            frames = self.random.choice(left) if self.chance(0.7) else left[0]
            frame = frames.pop(0)
            size = sum(len(one.data) + 30 for one in packets[-1]) if packets else PACKET_ROOM
            if self.alone or size + len(frame.data) + 30 > PACKET_ROOM or self.chance(0.5):
                packets.append([])
            packets[-1].append(frame)
            left = [frames for frames in left if frames]
        return self._mistreat(packets)

    def _mistreat(self, packets: list[list[Frame]]) -> list[list[Frame]]:
        loss = self.random.choice([0.0, 0.0, 0.1, 0.4])
        setback = self.random.choice([0, 0, 3])
        timed: list[tuple[float, int, list[Frame]]] = []
        for at, packet in enumerate(packets):
            if self.chance(loss):
                # A part may have come all the same: what overlaps is the same bytes.
                again = [part for frame in packet for part in self._again(frame)]
                timed.append((at + self.random.uniform(1, 6), at, again[: len(again) // 2 or 1]))
                timed.append((at + self.random.uniform(2, 9), at, again))
                if self.chance(0.3):
                    timed.append((at, at, packet))
            else:
                timed.append((at + self.random.uniform(0, setback), at, packet))
        timed.sort(key=lambda entry: entry[:2])
        if self.alone:
            return [[frame] for _, _, packet in timed for frame in packet]
        return [packet for _, _, packet in timed]

    def _again(self, frame: Frame) -> list[Frame]:
        if frame.kind != "stream" or len(frame.data) < 2:
            return [frame]
        at = self.random.randrange(1, len(frame.data))
        return [
            frame._replace(data=frame.data[:at], fin=False),
            frame._replace(offset=frame.offset + at, data=frame.data[at:]),
        ]

    def puppet(self) -> Any:
        """A runtime's step, the same on both sides."""
        seed = self.random.random()
        takes = self.chance(0.6)

        def step(server: Server) -> None:
            rest = random.Random(seed)
            if takes:
                server.take()
            for job in server.taken:
                if job.over:
                    continue
                count = min(rest.choice([0, 0, 1, 3, 30]), job.room)
                if count and not job.cancelled:
                    assert job.emit([rest.randrange(VOCAB) for _ in range(count)]) == 0
                if rest.random() < (0.8 if job.cancelled else 0.3):
                    job.finish(rest.choice([STOP, STOP, LENGTH, ERROR]))

        return step
