"""Build `dataplane._native`: the C sources of this folder behind cffi in API mode.

The headers are the declarations: `declarations()` hands them to cffi with their preprocessor lines
taken out, so nothing is declared twice. Numeric `#define`s stay, because cffi reads those.
"""

import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# In the order in which each may use those before it.
HEADERS = (
    "slots.h", "region.h", "tokens.h", "udp.h", "attach.h", "latency.h", "keys.h", "http3.h",
    "whole.h", "gpu/ring.h",
    "gpu/commands.h", "gpu/device.h", "gpu/turn.h", "gpu/driver.h", "gpu/admission_loop.h",
    "quic/hand_over.h",
    "pump/pump.h", "pump/loop.h", "pump/prompt1.h", "pump/raw.h", "pump/load.h",
)  # fmt: skip
FOLDERS = ("", "gpu/", "quic/", "pump/")


def _files(pattern: str) -> list[str]:
    return [
        f"native/{folder}{path.name}"
        for folder in FOLDERS
        for path in sorted((HERE / folder).glob(pattern))
    ]


SOURCES = _files("*.c")
DEPENDS = _files("*.h")

_CONSTANT = re.compile(r"#define\s+DP_\w+\s+(0x[0-9A-Fa-f]+|\d+)\b")


def declarations() -> str:
    """Return the headers as one text that cffi's parser takes."""
    lines = []
    for name in HEADERS:
        for line in (HERE / name).read_text(encoding="utf-8").splitlines():
            constant = _CONSTANT.match(line)
            if constant:
                lines.append(constant.group(0))
            elif not line.startswith("#"):
                lines.append(line)
    return "\n".join(lines)


def builder() -> FFI:
    """Return the FFI whose extension setuptools builds (`cffi_modules` in setup.py).

    Paths are relative to the project's root, as setuptools asks.
    """
    ffi = FFI()
    ffi.cdef(declarations())
    ffi.set_source(
        "dataplane._native",
        "\n".join(f'#include "{name}"' for name in HEADERS),
        sources=SOURCES,
        depends=DEPENDS,
        include_dirs=["native"],
        extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
        libraries=["crypto", "pthread"],
        py_limited_api=True,
    )
    return ffi


ffibuilder = builder()
