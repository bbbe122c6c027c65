"""The claims of one `Ingress` that a device has not answered: the packet loop does not wait.

What a client sends meanwhile is kept with its request, no more than it declared. Each pass and each
wake-up takes the answers that are there, in the order of the asking. A device that answers nothing
for too long is given up, once: all who wait are refused.
"""

from typing import TYPE_CHECKING

from dataplane import refusals
from dataplane.errors import Refusal
from dataplane.exchange import Asked
from dataplane.slots import UNANSWERED
from dataplane.table import Asks, SlotTable

if TYPE_CHECKING:
    from dataplane.ingress import Ingress


class Asking:
    """Who waits for the device of an attachment, while there is one whose answers come later."""

    def __init__(self, ingress: "Ingress") -> None:
        self._ingress = ingress
        self._asked: dict[int, Asked] = {}

    def add(self, asked: Asked) -> Asked:
        """Keep a request until its claim is answered."""
        self._asked[asked.ticket] = asked
        return asked

    def forget(self, asked: Asked) -> None:
        """The client left: what its claim is granted goes back."""
        if self._asked.pop(asked.ticket, None) is None:
            return
        asks = self._asks()
        if asks is not None:
            asks.disown(asked.ticket)

    def refuse_all(self, refusal: Refusal) -> None:
        """Refuse all that wait; what they are granted goes back."""
        self._ingress.queue_us = 0
        for asked in list(self._asked.values()):
            if asked.ticket in self._asked:  # an earlier one may have ended its connection
                self.forget(asked)
                asked.decided(refusal)

    def _asks(self) -> Asks | None:
        table = self._ingress.table
        return None if table is None else table.asks

    def take_answers(self, table: SlotTable, asks: Asks) -> None:
        """Go on with whatever the device has answered."""
        ingress = self._ingress
        while ingress.table is table and (answer := asks.next_answer()) is not None:
            if answer.status == UNANSWERED:
                asks.give_up()
            elif not answer.ticket:
                ingress.answered(answer)
            elif (asked := self._asked.pop(answer.ticket, None)) is not None:
                slot = answer.status if answer.status < 0 else answer.slot
                asked.decided(ingress.decide(asked, slot))
        if asks.dead:
            self.refuse_all(refusals.stuck())

    def next_due(self) -> float | None:
        """Return until when the device has to have answered (monotonic seconds)."""
        asks = self._asks()
        return None if asks is None else asks.answer_due()

    def on_deadline(self, now: float) -> None:
        """Give the device up if it is overdue."""
        table, asks = self._ingress.table, self._asks()
        if table is None or asks is None or not self._is_overdue(asks, now):
            return
        self.take_answers(table, asks)  # this process may have been the one that was late
        if self._is_overdue(asks, now):
            asks.give_up()
            self.take_answers(table, asks)

    @staticmethod
    def _is_overdue(asks: Asks, now: float) -> bool:
        due = asks.answer_due()
        return due is not None and due <= now
