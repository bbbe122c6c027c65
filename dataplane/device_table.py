"""The `device` slot table: its words lie in the device, and the admission kernel swaps them.

Each verb is a command in this listener's ring in the region (`native/gpu/commands.h`). What is only
read, output, states, requests, lies in the region as with the host table, so all of that is
`HostTable`'s.
"""

from collections.abc import Callable

from dataplane._native import ffi, lib
from dataplane.prompt1 import Request
from dataplane.region import Region
from dataplane.slots import UNANSWERED
from dataplane.table import HostTable

SPIN_US = 20
"""How long a verdict is looked for before the listener sleeps: a kernel on the device answers in a
few microseconds, a launch takes longer."""
ANSWER_MS = 900
"""After so long without a verdict the device is given up, so that the 503 is out within 1 s."""

_admit, _submit = lib.dp_commands_admit, lib.dp_commands_submit


class DeviceTable(HostTable):
    """The slots of one region whose words lie in a device (`SlotTable` says what each verb means).

    A device that leaves a command unanswered is given up: `admit` says UNANSWERED from then on, at
    once. What was told to it and not waited for happens if it ever wakes up, the claim that it did
    not answer included, which it takes back itself.

    Attributes:
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
        self._dead = False
        self.on_dead: Callable[[str], None] = lambda why: None

    def give_up(self) -> None:
        """Ask the device nothing more; the first time, whoever can end the attachment is told."""
        if self._dead:
            return
        self._dead = True
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


def table_of(region: Region, owner: int = 1) -> HostTable:
    """Return the table that a region asks for."""
    if region.native.geometry.table == lib.DP_TABLE_DEVICE:
        return DeviceTable(region, owner)
    return HostTable(region, owner)
