"""Packet protection in C against aioquic's: each opens what the other sealed, in every suite."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import native_programs
import pytest
from aioquic.quic.crypto import CryptoContext, apply_key_phase, next_key_phase
from aioquic.tls import CipherSuite

pytestmark = pytest.mark.skipif(
    shutil.which(native_programs.compiler()) is None, reason="no C compiler here"
)

TAG = 16
PN_BYTES = 4
CID = b"8bytecid"
SUITES = {
    CipherSuite.AES_128_GCM_SHA256: 32,
    CipherSuite.AES_256_GCM_SHA384: 48,
    CipherSuite.CHACHA20_POLY1305_SHA256: 32,
}
VERSIONS = (0x00000001, 0x6B3343CF)


SOURCES = ("protect", "aead", "aead_wide")


class Secret(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("suite", ctypes.c_uint16),
        ("bytes", ctypes.c_uint16),
        ("phase", ctypes.c_uint8),
        ("secret", ctypes.c_uint8 * 48),
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("protect") / "protect.so"
    sources = [native_programs.NATIVE / "quic" / f"{name}.c" for name in SOURCES]
    command = [native_programs.compiler(), "-std=c11", "-O2", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(built), *map(str, sources), "-lcrypto"], check=True)
    return _declared(built)


@pytest.fixture(params=["libcrypto", "ipsec-mb"])
def library(built: ctypes.CDLL, request: pytest.FixtureRequest) -> ctypes.CDLL:
    built.dp_aead_allow_wide(request.param != "libcrypto")
    backend: bytes = built.dp_aead_backend()
    if backend.decode() != request.param:
        pytest.skip(f"{request.param} is not installed, or not for this processor")
    return built


def _declared(built: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(built))
    pointer, number, size, text = (
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_char_p,
    )
    library.dp_aead_allow_wide.argtypes = (ctypes.c_bool,)
    library.dp_aead_backend.restype = text
    for end in ("opener", "sealer"):
        getattr(library, f"dp_{end}_new").restype = pointer
        getattr(library, f"dp_{end}_free").argtypes = (pointer,)
        getattr(library, f"dp_{end}_mask").argtypes = (pointer, text, text)
    library.dp_sealer_seal.argtypes = (pointer, number, text, size, text, size)
    library.dp_sealer_update.argtypes = (pointer,)
    library.dp_opener_begin.argtypes = (pointer, number, ctypes.c_uint8, text, size)
    library.dp_opener_begin.restype = ctypes.c_bool
    library.dp_opener_next.argtypes = (pointer, text, size, text)
    library.dp_opener_end.argtypes = (pointer, number, text, ctypes.POINTER(ctypes.c_bool))
    library.dp_opener_end.restype = ctypes.c_bool
    return library


def _header(phase: int, pn: int) -> bytes:
    return bytes([0x40 | phase << 2 | PN_BYTES - 1]) + CID + pn.to_bytes(PN_BYTES, "big")


def _masked(header: bytes, mask: bytes) -> bytes:
    at = len(header) - PN_BYTES
    number = bytes(a ^ b for a, b in zip(header[at:], mask[1:], strict=True))
    return bytes([header[0] ^ mask[0] & 0x1F]) + header[1:at] + number


def _seal(library: ctypes.CDLL, sealer: int, pn: int, phase: int, plain: bytes) -> bytes:
    header, mask = _header(phase, pn), ctypes.create_string_buffer(5)
    body = ctypes.create_string_buffer(plain, len(plain) + TAG)
    library.dp_sealer_seal(sealer, pn, header, len(header), body, len(plain))
    library.dp_sealer_mask(sealer, body.raw[:16], mask)
    return _masked(header, mask.raw) + body.raw


def _open(library: ctypes.CDLL, opener: int, pn: int, packet: bytes) -> tuple[bytes, bool]:
    at = 1 + len(CID) + PN_BYTES
    mask, updated = ctypes.create_string_buffer(5), ctypes.c_bool()
    library.dp_opener_mask(opener, packet[at : at + 16], mask)
    header = _masked(packet[:at], mask.raw)
    out = ctypes.create_string_buffer(len(packet) - at - TAG)
    assert library.dp_opener_begin(opener, pn, header[0] >> 2 & 1, header, len(header))
    library.dp_opener_next(opener, packet[at:-TAG], len(out), out)
    assert library.dp_opener_end(opener, pn, packet[-TAG:], ctypes.byref(updated))
    return out.raw, updated.value


@pytest.mark.parametrize("version", VERSIONS, ids=["v1", "v2"])
@pytest.mark.parametrize("suite", SUITES, ids=[suite.name for suite in SUITES])
def test_each_opens_what_the_other_sealed(
    library: ctypes.CDLL, suite: CipherSuite, version: int
) -> None:
    chance = random.Random(suite)
    secret = chance.randbytes(SUITES[suite])
    held = Secret(version, suite, len(secret), 0, (ctypes.c_uint8 * 48)(*secret))
    sealer, opener = (
        library.dp_sealer_new(ctypes.byref(held)),
        library.dp_opener_new(ctypes.byref(held)),
    )
    theirs, mirror = CryptoContext(), CryptoContext()
    for context in (theirs, mirror):
        context.setup(cipher_suite=suite, secret=secret, version=version)
    phase = 0
    for pn in range(1, 60):
        plain = chance.randbytes(chance.randrange(4, 1300))
        update = pn % 20 == 0
        if update:
            phase = library.dp_sealer_update(sealer)
            apply_key_phase(theirs, next_key_phase(theirs), "test")
        ours = _seal(library, sealer, pn, phase, plain)
        header, opened, number, updated = mirror.decrypt_packet(ours, 1 + len(CID), pn)
        assert (header, opened, number, updated) == (_header(phase, pn), plain, pn, update)
        if updated:
            apply_key_phase(mirror, next_key_phase(mirror), "test")
        sealed = theirs.encrypt_packet(_header(phase, pn), plain, pn)
        assert sealed == ours
        assert _open(library, opener, pn, sealed) == (plain, update)
    library.dp_sealer_free(sealer)
    library.dp_opener_free(opener)
