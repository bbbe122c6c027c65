"""A client that takes every slot of a daemon and keeps it: `python -m bench.holder`.

By headers without bodies, which leaves the slots in WRITING, or with `--whole` by complete requests
for a runtime that ends none.
"""

import argparse
import asyncio
import contextlib

from dataplane.client import connect
from dataplane.prompt1 import Request, encode_request

_EACH = 100
"""Streams on one connection."""
_SETTLE_S = 0.5
_LONGEST_S = 3600.0


async def hold(port: int, ca: str, slots: int, whole: bool) -> None:
    """Say `held` once all are taken."""
    request = encode_request(Request(1, max_output=1)) + (b"\0\0\0\0" if whole else b"")
    async with contextlib.AsyncExitStack() as stack:
        for start in range(0, slots, _EACH):
            client = await stack.enter_async_context(connect(f"localhost:{port}", ca))
            for _ in range(min(_EACH, slots - start)):
                await client.raw(request, fin=whole)
        await asyncio.sleep(_SETTLE_S)
        print("held", flush=True)
        await asyncio.sleep(_LONGEST_S)


def main() -> None:
    """Hold until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ca", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    asyncio.run(hold(options.port, options.ca, options.slots, options.whole))


if __name__ == "__main__":
    main()
