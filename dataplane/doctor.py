"""`dataplane doctor`: what this machine has of what the daemon and its runtimes use, what it lacks,
and what helps.

It asks and tries; it changes nothing, the devices' settings least of all. What is not there is
`missing` where the daemon cannot do without, and `absent` where it only does without something.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dataplane import __version__, fatbin, gpus, kernels
from dataplane._native import ffi, lib
from dataplane.errors import DataplaneError
from dataplane.installing import pip_install

OK, ABSENT, MISSING = "ok", "absent", "missing"

# The socket module does not know these: linux/udp.h, asm-generic/socket.h.
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO, _SO_TIMESTAMPNS = 17, 103, 104, 35
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_NEW_KERNEL = "run a newer kernel: Linux 5.4 or later has all of it"
_SOME_MEMORY = 64 << 20
"""Bytes of a region of moderate size: 32 slots of 128 Ki ids take 16 MiB, so this leaves room."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: `ok`, `absent` (the daemon does without) or `missing` (it cannot run).
        remedy: What to do about it, where something can be done.
    """

    group: str
    name: str
    found: str
    state: str = OK
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found."""

    findings: tuple[Finding, ...]
    devices: gpus.Gpus

    @property
    def can_run(self) -> bool:
        """Whether nothing lacks that the daemon cannot do without."""
        return all(finding.state != MISSING for finding in self.findings)

    def __str__(self) -> str:
        lines = []
        group = ""
        for finding in self.findings:
            head = finding.group if finding.group != group else ""
            group = finding.group
            state = "" if finding.state == OK else f"{finding.state.upper()}: "
            lines.append(f"{head:<11}{finding.name:<15}{state}{finding.found}")
            if finding.remedy:
                lines.append(f"{'':<26}-> {finding.remedy}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(
            {
                "dataplane": __version__,
                "can_run": self.can_run,
                "findings": [asdict(finding) for finding in self.findings],
                "gpu": {
                    **asdict(self.devices),
                    "mig_most_instances": gpus.MIG_MOST,
                },
            }
        )


def examine(look: Callable[[], gpus.Gpus] = gpus.look) -> Report:
    """Look at everything."""
    devices = look()
    findings = [
        *_processor(),
        *_kernel(),
        *_cryptography(),
        *_memory(),
        *_runtimes(),
        *_gpu(devices),
    ]
    return Report(tuple(findings), devices)


# ---------------------------------------------------------------- the processor


def _processor() -> Iterator[Finding]:
    cores = os.sched_getaffinity(0)
    found = f"{len(cores)} of {os.cpu_count()} ({ranges(cores)})"
    if len(cores) > 1:
        yield Finding("processor", "cores", found)
    else:
        remedy = "give the daemon two: --busy-poll shares its core otherwise, and so does a runtime"
        yield Finding("processor", "cores", found, ABSENT, remedy)
    quota = read_quota(_CPU_QUOTA)
    if quota is not None:
        yield Finding("processor", "quota", f"{quota:g} cores' time, by the control group")


def ranges(numbers: set[int]) -> str:
    """Numbers as the kernel lists them: `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def read_quota(path: Path) -> float | None:
    """How many cores' time a control group may use; None where it has no limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # `max`, and no control groups of the second version
        return None


# ---------------------------------------------------------------- the kernel


def _kernel() -> Iterator[Finding]:
    yield Finding("kernel", "Linux", os.uname().release)
    yield _tried("memfd", "sealed shared memory", _make_memfd, MISSING)
    yield _tried("eventfd", "wake-ups", lambda: os.close(os.eventfd(0)), MISSING)
    yield _tried(
        "SO_TIMESTAMPNS",
        "receive times",
        lambda: _set_option(socket.SOL_SOCKET, _SO_TIMESTAMPNS),
        MISSING,
    )
    yield _tried("UDP GRO", "many datagrams a read", lambda: _set_option(_SOL_UDP, _UDP_GRO))
    yield _tried("UDP GSO", "many datagrams a write", _get_segment)


def _tried(name: str, what: str, attempt: Callable[[], object], lack: str = ABSENT) -> Finding:
    try:
        attempt()
    except OSError as error:
        return Finding("kernel", name, f"{what}: {error.strerror or error}", lack, _NEW_KERNEL)
    return Finding("kernel", name, what)


def _make_memfd() -> None:
    fd = os.memfd_create("dataplane-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(fd)


def _set_option(level: int, option: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(level, option, 1)


def _get_segment() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.getsockopt(_SOL_UDP, _UDP_SEGMENT)


# ---------------------------------------------------------------- what packets are sealed with


def _cryptography() -> Iterator[Finding]:
    library = str(ffi.string(lib.dp_pump_libcrypto()), "ascii")
    yield Finding("packets", "libcrypto", library)
    if ffi.string(lib.dp_pump_aead()) == b"ipsec-mb":
        yield Finding("packets", "AES-GCM", "by ipsec-mb: half of libcrypto's time a packet")
    else:
        yield Finding(
            "packets",
            "AES-GCM",
            "by libcrypto, not by ipsec-mb",
            ABSENT,
            "for half the time a packet, on an x86 processor with wide AES (VAES, AVX-512):"
            " apt-get install libipsec-mb1 libipsec-mb-dev, then build again",
        )


# ---------------------------------------------------------------- memory


def _memory() -> Iterator[Finding]:
    yield memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def memlock(limit: int) -> Finding:
    """Judge a limit of locked memory, in bytes."""
    if limit == resource.RLIM_INFINITY:
        return Finding("memory", "locked", "no limit")
    found = f"at most {limit >> 10} KiB"
    if limit >= _SOME_MEMORY:
        return Finding("memory", "locked", found)
    return Finding(
        "memory",
        "locked",
        f"{found}, which a runtime on a GPU may exceed: it pins its whole region",
        ABSENT,
        "ulimit -l unlimited; in a container --ulimit memlock=-1; in a unit LimitMEMLOCK=infinity",
    )


# ---------------------------------------------------------------- what runtimes use


def _runtimes() -> Iterator[Finding]:
    yield _small_model()
    yield _torch()
    cupy = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    remedy = f"{pip_install('cuda13')}, or [cuda12] for an older driver"
    yield _package("CuPy", cupy, "runtimes on CUDA", remedy)
    yield _kernels(_kernels_file())


def _small_model() -> Finding:
    from dataplane import model

    try:
        files = model.locate()
    except model.ModelError as error:
        return Finding("runtimes", "smollm2", str(error).split(";")[0], ABSENT, model.REMEDY)
    return Finding("runtimes", "smollm2", str(files.gguf))


def _torch() -> Finding:
    """What smollm2-torch needs: PyTorch, what reads the weights for it, and these."""
    from dataplane import model

    remedy = model.TORCH_REMEDY
    found = _package("torch", ("torch",), "smollm2-torch", remedy)
    if found.state != OK:
        return found
    reader = _package("torch", ("gguf",), "smollm2-torch", remedy)
    if reader.state != OK:
        return replace(reader, found=f"{found.found}, but gguf is not installed")
    try:
        model.locate_weights()
    except model.ModelError as error:
        lack = f"{found.found}, but {str(error).split(';')[0]}"
        return Finding("runtimes", "torch", lack, ABSENT, model.REMEDY)
    return found


def _package(name: str, packages: tuple[str, ...], for_what: str, remedy: str) -> Finding:
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Finding(
                "runtimes", name, f"{importlib.metadata.version(package)}, for {for_what}"
            )
    return Finding("runtimes", name, f"not installed; it is for {for_what}", ABSENT, remedy)


def _kernels_file() -> Path:
    from dataplane.runtime.cuda import KERNELS

    return KERNELS


def _kernels(path: Path) -> Finding:
    """What the built kernels are for, and whether they can be built."""
    nvcc = shutil.which("nvcc")
    if not path.is_file():
        if nvcc and (kernels.SOURCES / "gpu/kernels.cu").is_file():
            remedy = f"make kernels (nvcc is {nvcc})"
        else:
            remedy = "make kernels, in a source tree on a machine with nvcc (the CUDA toolkit)"
        return Finding("runtimes", "kernels", "not built", ABSENT, remedy)
    try:
        targets = fatbin.targets_of(path.read_bytes(), str(path))
    except (OSError, fatbin.FatbinError) as error:
        return Finding("runtimes", "kernels", str(error), ABSENT, "make kernels")
    return Finding("runtimes", "kernels", ", ".join(map(fatbin.say_target, targets)))


# ---------------------------------------------------------------- devices


def _gpu(found: gpus.Gpus) -> Iterator[Finding]:
    if found.missing:
        yield Finding("gpu", "driver", found.missing, ABSENT, found.remedy)
        return
    driver = f"{found.driver}, " if found.driver else ""
    yield Finding("gpu", "driver", f"{driver}up to CUDA {found.cuda}")
    if not found.devices:
        remedy = "see `nvidia-smi -L`; in a container, pass the devices to it (--gpus all)"
        yield Finding("gpu", "devices", "the driver lists none", ABSENT, remedy)
    for device in found.devices:
        yield _device(device)
        for instance in device.instances:
            text = f"{instance.uuid}  {instance.name}, {_gib(instance.memory_bytes)}"
            yield Finding("gpu", f"  instance {instance.index}", text)
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None and found.devices:
        yield _visible(found, names)


def _device(device: gpus.Device) -> Finding:
    text = (
        f"{device.uuid}  {device.name}, {device.architecture}, {_gib(device.memory_bytes)}"
        f", {say_mig(device)}"
    )
    remedy = None
    if device.mig == "on" and not device.instances:
        remedy = (
            "it is in MIG mode without an instance, so nothing can run on it: make some with"
            " `nvidia-smi mig`"
        )
        return Finding("gpu", f"device {device.index}", text, ABSENT, remedy)
    return Finding("gpu", f"device {device.index}", text)


def say_mig(device: gpus.Device) -> str:
    """Whether a card is split, in words."""
    if device.mig == "none":
        return "cannot be split (no MIG)"
    if device.mig == "off":
        return f"MIG off (it could be split into at most {device.mig_most} instances)"
    return f"MIG on: {len(device.instances)} of at most {device.mig_most} instances"


def _visible(found: gpus.Gpus, names: str) -> Finding:
    try:
        devices = gpus.visible(found, os.environ)
    except DataplaneError as error:
        remedy = "unset CUDA_VISIBLE_DEVICES, or name one of the above"
        return Finding("gpu", "visible", str(error).split(":")[0], ABSENT, remedy)
    which = ", ".join(f"{device.index}" for device in devices)
    return Finding("gpu", "visible", f"CUDA_VISIBLE_DEVICES={names!r}: device {which}")


def _gib(count: int | None) -> str:
    if count is None:
        return "memory not told to this user or container"
    return f"{count / 2**30:.1f} GiB" if count else "the processor's memory"
