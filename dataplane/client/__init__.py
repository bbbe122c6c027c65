"""The client as a library: ask a daemon over QUIC, many requests on a connection.

```python
from dataplane.client import connect

async with connect("localhost:4433") as client:
    answer = await client.submit([1, 2, 3], max_output=16)
    async for ids in answer:
        print(ids)
```
"""

from dataplane.client.answer import ResetError
from dataplane.client.api import Answer, Client, connect, read_ca
from dataplane.client.h3 import Http3Client

__all__ = ["Answer", "Client", "Http3Client", "ResetError", "connect", "read_ca"]
