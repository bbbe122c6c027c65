"""A daemon whose packet pump updates its sending keys after every hundred packets.

The AEAD asks for that after millions, which no test sends.
"""

import sys

from dataplane.cli.main import main
from dataplane.pump import Pump

PACKETS = 100
_adopt = Pump.adopt


def adopt(pump: Pump, *arguments: object) -> int:
    """Take a connection over, as the pump does, and have it update its keys often."""
    handle = _adopt(pump, *arguments)  # type: ignore[arg-type]
    if handle:
        pump.update_keys_every(handle, PACKETS)
    return handle


if __name__ == "__main__":
    Pump.adopt = adopt  # type: ignore[method-assign, assignment]
    sys.exit(main())
