"""Long texts are tokenised in a thread: tens of milliseconds that the packet loop has not.

The slot stays in WRITING meanwhile. Whoever ended the request by then finds its stream's state
gone, and the ids go nowhere.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from dataplane.errors import Refusal, Status
from dataplane.fronts.parameters import Body
from dataplane.fronts.stream_states import Gathering

if TYPE_CHECKING:
    from dataplane.fronts.generate import TextModel
    from dataplane.fronts.session import Session

_log = logging.getLogger("dataplane.texts")


def start(session: "Session", state: Gathering, body: Body, model: "TextModel") -> None:
    """Tokenise; `session.tokenised` is called with the ids, on the loop."""
    front, connection = session.front, session.connection

    def done(future: "asyncio.Future[bytes | Refusal]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            ids = future.result()
        else:
            _log.error("the tokeniser failed: %s", error, exc_info=error)
            ids = Refusal(Status.BAD_REQUEST, "the tokeniser failed at this text")
        try:
            wanted = session.tokenised(state, body, ids)
        except Exception as failure:
            connection.broken(failure)
            wanted = True
        if wanted:
            front.finish_pass()

    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, model.encode, body, state.exchange.ingress.context)
    future.add_done_callback(done)
