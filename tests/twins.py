"""Both engines in memory, under one clock, told the same: what differs is a mistake in one of
them.
"""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hand import Frame
from paired_servers import SLOTS, Pumped, Server

_QUOTED = re.compile(rb"begins with [0-9a-f]+")
_TICK = 1e-6
_STEPS_MAX = 10_000


def _without_moment(got: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an answer means, however much had come when it was made: without the bytes quoted."""
    verdict, rest, *others = got
    return verdict, _QUOTED.sub(b"begins with ...", rest), *others


class Twins:
    """The two engines, and the clock.

    Args:
        seed: Decides which of the servers' packets are lost, `loss` how many.
        lazy: See `Server`.
        max_writing: Slots that the connection may hold in WRITING. It is Python that tells of a
            cap: with the pump the rest of the packet may have come by then, and be over.
        keyed: See `Server`.
    """

    def __init__(
        self,
        state_dir: Path,
        seed: int = 1,
        loss: float = 0.0,
        lazy: bool = False,
        max_writing: int = SLOTS + 1,
        keyed: bool = False,
    ) -> None:
        start = 1000.0
        self.servers: tuple[Server, Server] = (
            Server(state_dir, start, max_writing, lazy, keyed),
            Pumped(state_dir, start, max_writing, lazy, keyed),
        )
        self.now = max(server.now for server in self.servers)
        self.loss = loss
        self.keyed = keyed
        self.ids: set[int] = set()
        self.said: dict[int, list[tuple[float, str]]] = {}
        self.ends: dict[int, int] = {}
        self.passes = 0
        self._gave_up: dict[int, set[int]] = {}  # codes with which the client stopped a stream
        self._over: dict[int, int] = {}  # in which pass the client's end of a stream came
        self._chances = [random.Random(f"{seed} {i}") for i in range(2)]
        self.next_stream = 0
        self.next_uni = 2
        self.run_for(1.0)

    def close(self) -> None:
        """Detach the regions before anything is freed."""
        for server in self.servers:
            server.close()

    def open(self) -> int:
        stream = self.next_stream
        self.next_stream += 4
        return stream

    def has_room(self, streams: int) -> bool:
        """Whether both allow so many streams more."""
        last = self.next_stream // 4 + streams
        return all(last <= server.hand.streams_allowed for server in self.servers)

    def _id(self, number: int) -> object:
        return number if number in self.ids or not number else "chosen"

    # Passes.

    def _exchange(
        self, index: int, payloads: Sequence[bytes], order: Sequence[int], puppet: Any
    ) -> None:
        """Deliver packets to one of the servers, and what it answers to its client."""
        server, chance = self.servers[index], self._chances[index].random
        server.now = self.now
        server.hand.passes = self.passes
        packets = [server.hand.packet(payload) for payload in payloads]
        server.serve([packets[at] for at in order], lambda: puppet(server) if puppet else None)
        self._answer(index, chance)

    def _answer(self, index: int, chance: Callable[[], float]) -> None:
        server = self.servers[index]
        for _ in range(100):
            out, server.out = server.out, []
            came = [data for data in out if self.loss == 0.0 or chance() >= self.loss]
            if [data for data in came if server.hand.receive(data)]:
                server.serve([server.hand.packet(server.hand.acknowledgement())])
                continue
            server.serve()  # what a pass leaves to the next
            if not server.out:
                return
        raise AssertionError("they answer each other for ever")

    def deliver(
        self,
        packets: Sequence[Sequence[Frame]],
        order: Sequence[int] | None = None,
        puppet: Callable[[Server], object] | None = None,
    ) -> None:
        """One pass of each with these packets, in this order (some perhaps twice or never)."""
        payloads = [b"".join(frame.encode() for frame in packet) for packet in packets]
        which = list(range(len(packets))) if order is None else order
        self.passes += 1
        for at in which:
            for frame in packets[at]:
                self._note(frame)
        for index in range(2):
            self._exchange(index, payloads, which, puppet)
        self.check()

    def run_for(self, seconds: float) -> None:
        """Let the clock run, and each do what is due."""
        end = self.now + seconds
        for index, server in enumerate(self.servers):
            for _ in range(_STEPS_MAX):
                at = server.next_at()
                if at is None or at > end:
                    break
                server.now = max(server.now + _TICK, at)
                server.serve()
                self._answer(index, self._chances[index].random)
            else:
                raise AssertionError("a timer fires without end")
            server.now = end
            server.serve()
            self._answer(index, self._chances[index].random)
        self.now = end
        self.check()

    def _note(self, frame: Frame) -> None:
        stops = frame.offset + len(frame.data)
        text = f"{frame.kind} {frame.offset}-{stops}" + " fin" * frame.fin
        self.said.setdefault(frame.stream, []).append((round(self.now, 3), text))
        self.ends[frame.stream] = max(self.ends.get(frame.stream, 0), stops)
        if frame.kind == "stop":
            self._gave_up.setdefault(frame.stream, set()).add(frame.code)
        if frame.kind == "reset" or frame.fin:
            self._over.setdefault(frame.stream, self.passes)

    def is_over(self, stream: int) -> bool:
        """Whether the client's half of a stream is over."""
        return stream in self._over

    # The comparison.

    def _recent(self) -> str:
        last = list(self.said.items())[-8:]
        states = " against ".join(str(server.states()) for server in self.servers)
        return "\n".join([f"{states} after", *(f"{stream}: {said}" for stream, said in last)])

    def check(self) -> None:
        """Both have the same in their slots and gave the puppet the same."""
        one, other = self.servers
        assert one.states() == other.states(), self._recent()
        assert [job.record(self._id) for job in one.taken] == [
            job.record(self._id) for job in other.taken
        ], self._recent()
        assert [job.cancelled for job in one.taken] == [job.cancelled for job in other.taken]
        assert (one.hand.closed, other.hand.closed) == (None, None)

    def check_answers(self, streams: Sequence[int]) -> None:
        """Both answered these streams alike."""
        for stream in streams:
            one, other = (server.hand.of(stream).meaning(self._id) for server in self.servers)
            one, other = _without_moment(one), _without_moment(other)
            codes = self._gave_up.get(stream)
            if (
                codes
                and one[-1] != other[-1]
                and (other[-1] is None or (self.loss and one[-1] is None))
            ):
                continue  # of the one the answer was on its way (aioquic paces), or lost
            if codes and {one[-1], other[-1]} <= {0, *codes}:
                # It broke off and stopped in one packet: which is answered, nobody says.
                one, other = one[:-1], other[:-1]
            said = f"stream {stream}, {self.said.get(stream)}"
            if one[0] and other[0] and abs(one[0][4] - other[0][4]) <= 1 + one[0][4] // 100:
                # Times of their own clocks, rounded: when to come again may be a little off.
                other = (other[0][:4] + one[0][4:5] + other[0][5:], *other[1:])
            assert one == other, f"{said}: {one} != {other}"
            self._check_stops(stream, said)

    def _check_stops(self, stream: int, said: str) -> None:
        """A STOP_SENDING may be left out where the client's end comes in the pass that asks for it:
        the pump leaves it out, aioquic does not."""
        one, other = (server.hand.of(stream) for server in self.servers)
        if one.stopped == other.stopped:
            return
        over = self._over.get(stream)
        assert over is not None, f"{said}: stopped {one.stopped} and {other.stopped}"
        assert one.stopped is not None, f"{said}: stopped by the pump alone"
        assert other.stopped is None
        assert over <= one.stopped_in or self.loss, f"{said}: not stopped by the pump"

    def check_counts(self) -> None:
        one, other = (server.counts() for server in self.servers)
        assert one._replace(datagrams_dropped=0) == other._replace(datagrams_dropped=0)

    def forget(self, streams: Sequence[int]) -> None:
        """Drop what was compared."""
        for server in self.servers:
            for stream in streams:
                server.hand.got.pop(stream, None)
                self.said.pop(stream, None)
            server.taken = [job for job in server.taken if not job.over]
