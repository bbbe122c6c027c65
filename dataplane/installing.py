"""How errors say what to install: into the environment that runs, and from this folder, since the
package index has another project of this name.
"""

import os
import sys


def pip_install(extras: str) -> str:
    """Return the command that installs these extras, as `cuda13,gpu`."""
    python = sys.executable
    beside = os.path.relpath(python)
    if not beside.startswith(os.pardir):
        python = beside
    return f"{python} -m pip install -e '.[{extras}]'"
