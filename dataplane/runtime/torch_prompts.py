"""Prompts as tensors over the memory that they lie in: the CPU's view, and a GPU's.

Neither copies. On a GPU the region is registered once, pinned and mapped, and the device reads it
across the bus through its own pointer, which need not equal the host's.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from dataplane._native import ffi
from dataplane.errors import DataplaneError
from dataplane.region import Region

_ID_BYTES = 4
_PORTABLE_AND_MAPPED = 3


class PromptError(DataplaneError):
    """The device cannot read the region."""


def on_host(address: int, count: int) -> Tensor:
    """`count` ids at an address of this process. Valid while whoever owns the memory keeps it."""
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)


def copied_to(device: torch.device, address: int, count: int) -> Tensor:
    """The same as a copy on a device: for ids outside the region, as in a warm-up."""
    return on_host(address, count).to(device)


class _Described:
    """Device memory as the CUDA array interface has it; the tensor keeps it, and it the region."""

    def __init__(self, pointer: int, count: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (count,),
            "typestr": "<i4",
            "version": 3,
        }


class MappedRegion:
    """A region that a GPU reads in place; registered until `close`.

    Raises:
        PromptError: The system or the driver refused; the text says what to change.
    """

    def __init__(self, region: Region, device: torch.device) -> None:
        self._base = int(ffi.cast("uintptr_t", region.native.base))
        self._cudart: Any = torch.cuda.cudart()
        code = int(self._cudart.cudaHostRegister(self._base, region.bytes, _PORTABLE_AND_MAPPED))
        if code:
            raise PromptError(
                f"the region of {region.bytes >> 20} MiB cannot be pinned (CUDA error {code}): "
                "raise the limit of locked memory (`ulimit -l`, in a container "
                "--ulimit memlock=-1), or ask for fewer slots or a smaller context"
            )
        try:
            pointer = _device_pointer(self._base)
            described = _Described(pointer, region.bytes // _ID_BYTES, region)
            self._ids = torch.as_tensor(described, device=device)
            if self._ids.data_ptr() != pointer:
                raise PromptError("PyTorch copied the region instead of looking at it")
        except BaseException:
            self.close()
            raise

    def ids(self, address: int, count: int) -> Tensor:
        """`count` ids at a host address inside the region, as the device sees them."""
        first = (address - self._base) // _ID_BYTES
        return self._ids[first : first + count]

    def close(self) -> None:
        self._cudart.cudaHostUnregister(self._base)


def _device_pointer(address: int) -> int:
    """Where the device sees registered memory. PyTorch has no name for it; its libcudart, which is
    loaded already, does."""
    major = str(torch.version.cuda).split(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    pointer = ctypes.c_void_p()
    code = library.cudaHostGetDevicePointer(
        ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)
    )
    if code or pointer.value is None:
        raise PromptError(f"the device has no pointer to the region (CUDA error {code})")
    return pointer.value
