"""The public API by which any engine attaches to the daemon.

```python
from dataplane.runtime import Finish, Manifest, attach

with attach("runtime.sock", Manifest(model="mine", slots=4, context=1024, max_output=256,
vocab_size=32000)) as runtime:
    runtime.ready()
    while True:
        for request in runtime.take():
            request.emit(my_model(request.tokens))
            request.finish(Finish.STOP)
        runtime.step()
```
"""

from dataplane.errors import AttachError, DetachedError
from dataplane.manifest import Manifest
from dataplane.runtime.api import Runtime, Taken, attach
from dataplane.slots import Finish

__all__ = ["AttachError", "DetachedError", "Finish", "Manifest", "Runtime", "Taken", "attach"]
