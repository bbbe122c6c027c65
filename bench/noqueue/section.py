"""The published method of the "no queue" claim: `python -m bench.noqueue`.

Three groups behind which one scripted engine runs: this daemon, an asyncio queue with a batching
front end, and a front end shaped like vLLM (an HTTP process, ZMQ, an engine process). The same
requests at the same moments for each. The rules that hold here:

- The first token counts from the moment that its request was due, in an open loop.
- What a server says of its queue stands beside what a client can bound without believing it.
- The daemon refuses where the others let wait, so its first tokens are of fewer requests: how many
  were refused stands beside them, and a fourth row has clients that try again, whose first token
  counts from when the request was first due.
"""

from typing import Any

from bench.noqueue import vllm
from bench.noqueue.engine import Costs
from bench.noqueue.groups import measure
from bench.noqueue.shape import shape_of
from bench.noqueue.systems import Starter, dataplane, queue_front, vllm_shaped
from bench.results import Form, Progress

GROUPS: tuple[tuple[Starter, bool], ...] = (
    (dataplane, False),
    (dataplane, True),
    (queue_front(), False),
    (vllm_shaped, False),
)


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure every group, one after the other."""
    shape, costs = shape_of(form), Costs()
    minutes = shape.requests / shape.rate / 60 * len(GROUPS)
    progress(f"{len(GROUPS)} groups, about {max(1, round(minutes))} min")
    groups = [measure(starter, shape, costs, progress, retries) for starter, retries in GROUPS]
    capacity = shape.capacity(costs)
    return {
        "form": str(form),
        "command": "python -m bench.noqueue" + " --full" * (form is Form.FULL),
        "shape": shape.described(),
        "engine": {
            "slots": costs.slots,
            "prefill_us_per_token": costs.prefill_us,
            "step_ms": costs.step_ms,
        },
        "capacity_per_s": round(capacity, 3),
        "offered_per_s": round(shape.rate, 3),
        "load": round(shape.rate / capacity, 3),
        "groups": groups,
        "vllm": vllm.run(form, shape, progress),
    }
