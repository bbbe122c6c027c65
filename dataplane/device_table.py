"""The `device` slot table: its words lie in the device, and the admission kernel swaps them.

Each verb is a command in this listener's ring in the region (`native/gpu/commands.h`). What is only
read, output, states, requests, lies in the region as with the host table, so all of that is
`HostTable`'s. A listener has an `AskingTable`, which never waits for the device; tools that have
nothing else to do use `DeviceTable`.
"""

import time
from collections.abc import Callable

from dataplane._native import ffi, lib
from dataplane.prompt1 import Request
from dataplane.region import Region
from dataplane.slots import OVERFLOW, PENDING, UNANSWERED
from dataplane.table import Answer, Asks, HostTable

SPIN_US = 20
"""How long a verdict is looked for before the listener sleeps: a kernel on the device answers in a
few microseconds, a launch takes longer."""
ANSWER_MS = 900
"""After so long without a verdict the device is given up, so that the 503 is out within 1 s."""

_NEVER = 2**63 - 1
_admit, _submit = lib.dp_commands_admit, lib.dp_commands_submit


class DeviceTable(HostTable):
    """The slots of one region whose words lie in a device (`SlotTable` says what each verb means).

    A device that leaves a command unanswered is given up: `admit` says UNANSWERED from then on, at
    once. What was told to it and not waited for happens if it ever wakes up, the claim that it did
    not answer included, which it takes back itself.

    Attributes:
        dead: Whether it was given up.
        on_dead: Called once with why, when the device is given up.
    """

    def __init__(
        self, region: Region, owner: int = 1, spin_us: int = SPIN_US, answer_ms: int = ANSWER_MS
    ) -> None:
        super().__init__(region, owner)
        commands = lib.dp_commands_new(region.native, owner, spin_us, answer_ms)
        if commands == ffi.NULL:
            raise MemoryError("no memory for the commands of a device table")
        self._commands = ffi.gc(commands, lib.dp_commands_free)
        self._answer_ms = answer_ms
        self.dead = False
        self.on_dead: Callable[[str], None] = lambda why: None

    def give_up(self) -> None:
        """Ask the device nothing more; the first time, whoever can end the attachment is told."""
        if self.dead:
            return
        self.dead = True
        lib.dp_commands_give_up(self._commands)
        self.on_dead(
            f"the device left a command unanswered for {self._answer_ms} ms: a kernel is stuck,"
            " or the runtime's process is; look at what it said and at `nvidia-smi`"
        )

    def _answered(self, status: int) -> int:
        if status == UNANSWERED:
            self.give_up()
        return status

    def admit(self, request: Request, request_id: int, max_output: int) -> int:
        """Claim a slot and write into it what the request states: its number, FULL or UNANSWERED.

        Waits for the device's verdict; it swaps a word, or answers that there is none.
        """
        start, probes = self._probe(request)
        claimed = self._claimed
        status: int = _admit(
            self._commands, self.first, self.count, start, probes, request_id, request.n_tokens,
            request.width, max_output, request.temperature, request.top_p, request.top_k,
            request.seed, claimed,
        )  # fmt: skip
        if status < 0:
            return self._answered(status)
        self.generation = claimed.generation
        self.free_left = claimed.free_left
        return claimed.slot  # type: ignore[no-any-return]

    def submit(self, slot: int, generation: int, body: bytes, offset: int, length: int) -> int:
        """Append the last part and publish: when (CLOCK_REALTIME ns), or a negative status."""
        return self._answered(_submit(self._commands, slot, generation, body, offset, length))

    def revoke(self, slot: int, generation: int) -> int:
        """Take a READY slot back; waits for the verdict."""
        return self._answered(lib.dp_commands_revoke(self._commands, slot, generation))

    def cancel(self, slot: int, generation: int) -> int:
        """Ask the runtime to finish a RUNNING slot; waits for the verdict."""
        return self._answered(lib.dp_commands_cancel(self._commands, slot, generation))

    def release(self, slot: int, generation: int) -> int:
        """Free a DONE slot."""
        return self._answered(lib.dp_commands_release(self._commands, slot, generation))

    def let_go(self, slot: int, generation: int) -> int:
        """End the hold whatever the state: the device does what it asks for then."""
        return self._answered(lib.dp_commands_let_go(self._commands, slot, generation))

    def let_go_all(self) -> None:
        """Let go of all that this listener holds, for one that is gone."""
        lib.dp_commands_let_go_all(self._commands)


class AskingTable(DeviceTable):
    """A device table that never waits: `admit`, `revoke` and `cancel` say PENDING.

    Their answers come in the order of the asking, through `next_answer`; the device rings the
    listener's eventfd for them. Claims for which the ring has no room stand in line here.

    Attributes:
        ticket, pending: See `dataplane.table.Asks`.
    """

    def __init__(
        self,
        region: Region,
        owner: int = 1,
        answer_ms: int = ANSWER_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(region, owner, 0, answer_ms)
        self.ticket = 0
        self.pending = False
        self._clock = clock
        self._answer = ffi.new("struct dp_answer *")
        self._places: dict[int, int] = {}  # in the ring, of the tickets that wait for an answer
        self._in_line: dict[int, tuple[int, int]] = {}  # start and probes of those not posted yet

    @property
    def asks(self) -> Asks | None:
        """Answers come later."""
        return self

    def admit(self, request: Request, request_id: int, max_output: int) -> int:
        """Ask for a slot: PENDING and `ticket`, or UNANSWERED.

        Nothing is written into the slot that is granted: that is `begin`'s.
        """
        ticket = self.ticket + 1
        probe = self._probe(request)
        if self._in_line or not self._post(ticket, *probe):
            if self.dead:
                return UNANSWERED
            self._in_line[ticket] = probe
        self.ticket = ticket
        self.pending = True
        return PENDING

    def _post(self, ticket: int, start: int, probes: int) -> bool:
        """Post a claim; False: there is no room, or the device is given up."""
        place: int = lib.dp_commands_ask_claim(
            self._commands, self.first, self.count, start, probes, ffi.cast("void *", ticket),
            self._now(),
        )  # fmt: skip
        if place >= 0:
            self._places[ticket] = place
        elif place != OVERFLOW:
            self.give_up()
        return place >= 0

    def _now(self) -> int:
        return int(self._clock() * 1e9)

    def _ask(self, kind: int, slot: int, generation: int) -> int:
        status: int = lib.dp_commands_ask(self._commands, kind, slot, generation, self._now())
        if status == PENDING:
            self.pending = True
        return self._answered(status)

    def revoke(self, slot: int, generation: int) -> int:
        """Ask for a READY slot back: PENDING, or what is known without asking."""
        return self._ask(lib.DP_COMMAND_REVOKE, slot, generation)

    def cancel(self, slot: int, generation: int) -> int:
        """Ask the runtime to finish a RUNNING slot: PENDING, or what is known without asking."""
        return self._ask(lib.DP_COMMAND_CANCEL, slot, generation)

    def next_answer(self) -> Answer | None:
        """Take the next answer; None: there is none now.

        Of a claim that was granted, `generation` and `free_left` are set as by `HostTable.admit`.
        """
        answer = self._answer
        if self.dead or not lib.dp_commands_answer(self._commands, answer):
            self._post_line()
            asked_at = lib.dp_commands_asked_at(self._commands)
            self.pending = not self.dead and (asked_at != _NEVER or bool(self._in_line))
            return None
        status = self._answered(answer.status)
        ticket = 0
        if answer.kind == lib.DP_COMMAND_CLAIM:
            ticket = int(ffi.cast("uintptr_t", answer.asker))
            del self._places[ticket]
            self.generation = answer.generation
            self.free_left = self.free()
        is_revoke = answer.kind == lib.DP_COMMAND_REVOKE
        return Answer(ticket, status, answer.slot, answer.generation, is_revoke)

    def _post_line(self) -> None:
        """There may be room in the ring again."""
        while self._in_line:
            ticket, probe = next(iter(self._in_line.items()))
            if not self._post(ticket, *probe):
                return
            del self._in_line[ticket]

    def disown(self, ticket: int) -> None:
        """Nobody waits for this claim any more: what it is granted goes back."""
        place = self._places.pop(ticket, None)
        if place is not None:
            lib.dp_commands_disown(self._commands, place)
        else:
            self._in_line.pop(ticket, None)

    def answer_due(self) -> float | None:
        """Return until when the device has to have answered (by the clock); None: nothing waits."""
        waits = self.pending and not self.dead
        asked_at = lib.dp_commands_asked_at(self._commands) if waits else _NEVER
        return None if asked_at == _NEVER else asked_at / 1e9 + self._answer_ms / 1000

    def sleep(self) -> bool:
        """Say that this listener is about to block; False when something changed meanwhile."""
        may_sleep = super().sleep()
        if self.pending and not self.dead:
            return may_sleep and not lib.dp_commands_is_answered(self._commands)
        return may_sleep


def table_of(region: Region, owner: int = 1) -> HostTable:
    """Return the table that a region asks for."""
    if region.native.geometry.table == lib.DP_TABLE_DEVICE:
        return AskingTable(region, owner)
    return HostTable(region, owner)
