"""Prompts as tensors over the memory that they lie in: the CPU's view, and a GPU's.

Neither copies. A GPU reads the region, which is pinned and mapped into it, across the bus through a
pointer of its own, which need not equal the host's.
"""

import ctypes

import torch
from torch import Tensor

from dataplane._native import ffi
from dataplane.errors import DataplaneError
from dataplane.region import Region

_ID_BYTES = 4


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


class RegionPrompts:
    """The prompts of a region that a GPU sees at `pointer` (`dataplane.runtime.cuda` maps it).

    The region has to stay mapped as long as a tensor of this is in use.
    """

    def __init__(self, region: Region, pointer: int, device: torch.device) -> None:
        self._base = int(ffi.cast("uintptr_t", region.native.base))
        described = _Described(pointer, region.bytes // _ID_BYTES, region)
        self._ids = torch.as_tensor(described, device=device)
        if self._ids.data_ptr() != pointer:
            raise PromptError("PyTorch copied the region instead of looking at it")

    def ids(self, address: int, count: int) -> Tensor:
        """`count` ids at a host address inside the region, as the device sees them."""
        first = (address - self._base) // _ID_BYTES
        return self._ids[first : first + count]
