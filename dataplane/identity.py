"""The daemon's certificate and key: made once in the state directory, or checked as given.

Why a certification authority and not one self-signed certificate: a client is told to trust
`ca.pem` once, and the daemon's own certificate can be made anew for another host without telling it
again. The rules that hold here:

- A private key is readable by its owner only from the moment that its file exists, and is never
  written over: a new file is made aside and renamed.
- Everything is read and made under a lock on the directory itself, so that daemons that start
  together agree, and no lock file is left to go stale.
- Another host means a new certificate over the *same* key. So whoever reads certificate and key one
  after the other, without the lock, has a pair that fits.
- What is found is not trusted to be whole: a set that does not fit together is made anew.
"""

import datetime
import ipaddress
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dataplane.errors import UsageError
from dataplane.locks import locked

CA_CERT = "ca.pem"
CA_KEY = "ca.key"
SERVER_CERT = "server.pem"
SERVER_KEY = "server.key"

ALWAYS = ("localhost", "127.0.0.1", "::1")
# Browsers take at most 398 days; what is counted from both ends stays below.
VALID = datetime.timedelta(days=397)
CLOCK_SKEW = datetime.timedelta(hours=1)
RENEW_BEFORE = datetime.timedelta(days=7)
# A certificate keeps the hosts that earlier daemons listened on, up to so many.
MOST_HOSTS = 16

_WILDCARDS = ("0.0.0.0", "::")
_ServerKey = (
    ec.EllipticCurvePrivateKey
    | rsa.RSAPrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The files to serve with. `ca` is what clients verify against."""

    cert: Path
    key: Path
    ca: Path | None


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key, in memory."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def load_identity(
    state_dir: Path,
    listen_host: str,
    cert: Path | None = None,
    key: Path | None = None,
    now: datetime.datetime | None = None,
) -> Identity:
    """Find the certificate and key to serve with; make them where none are given.

    Args:
        state_dir: Where own ones are kept; made if it is not there.
        listen_host: What a client will call this daemon, besides localhost.
        cert: A given certificate chain, with `key`, or None.
        key: The key of `cert`.
        now: The time; the clock's if None.

    Raises:
        UsageError: What was given cannot be used, or the directory cannot.
    """
    moment = now or datetime.datetime.now(datetime.UTC)
    if cert is not None and key is not None:
        _check_given(cert, key, moment)
        return Identity(cert, key, cert)
    try:
        make_state_dir(state_dir)
        with locked(state_dir):
            _ensure(state_dir, _host_name(listen_host), moment)
    except OSError as error:
        raise UsageError(
            f"--state-dir {state_dir}: certificates cannot be kept there: {error.strerror or error}"
        ) from error
    return Identity(state_dir / SERVER_CERT, state_dir / SERVER_KEY, state_dir / CA_CERT)


# ---------------------------------------------------------------- the directory


def make_state_dir(path: Path) -> None:
    """Make the directory, for its owner only, unless it is there.

    Raises:
        UsageError: Others may write in it, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        mode = status.st_mode
    except OSError as error:
        reason = "it is no directory" if path.is_file() else error.strerror or str(error)
        raise UsageError(f"--state-dir {path}: it cannot be made: {reason}") from error
    if status.st_uid != os.geteuid():
        raise UsageError(f"--state-dir {path}: it belongs to user {status.st_uid}, not to this one")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"--state-dir {path}: others may write there and so replace keys; run: chmod 700 {path}"
        )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Make the file aside and rename it. Under the lock, so a leftover is a crashed daemon's."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(aside, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


# ---------------------------------------------------------------- own certificates


def _ensure(directory: Path, host: str | None, now: datetime.datetime) -> None:
    """Leave a fitting set in the directory, changing as little as that takes."""
    authority = _read_pair(directory / CA_CERT, directory / CA_KEY)
    server = _read_pair(directory / SERVER_CERT, directory / SERVER_KEY)
    whole = (
        authority is not None
        and server is not None
        and _is_current(authority.cert, now)
        and _is_current(server.cert, now)
        and _issued(authority, server)
    )
    if not whole or authority is None or server is None:
        authority = _make_authority(now)
        server = _make_server(authority, ec.generate_private_key(ec.SECP256R1()), [host], now)
        # A crash in between leaves a set that does not fit, which the next start sees.
        _write(directory / CA_KEY, _key_pem(authority.key), 0o600)
        _write(directory / SERVER_KEY, _key_pem(server.key), 0o600)
        _write(directory / CA_CERT, _cert_pem(authority.cert), 0o644)
        _write(directory / SERVER_CERT, _cert_pem(server.cert), 0o644)
        return
    known = _hosts_of(server.cert)
    if host is not None and host not in known:
        hosts = [name for name in known if name not in ALWAYS][-MOST_HOSTS + 1 :]
        server = _make_server(authority, server.key, [*hosts, host], now)
        _write(directory / SERVER_CERT, _cert_pem(server.cert), 0o644)


def _read_pair(cert_path: Path, key_path: Path) -> _Pair | None:
    """Certificate and key if both are there, fit each other and are kept well; else None."""
    try:
        if key_path.stat().st_mode & 0o077:
            return None
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
        return None
    return _Pair(cert, key)


def _is_current(cert: x509.Certificate, now: datetime.datetime) -> bool:
    return cert.not_valid_before_utc <= now < cert.not_valid_after_utc - RENEW_BEFORE


def _issued(authority: _Pair, server: _Pair) -> bool:
    try:
        server.cert.verify_directly_issued_by(authority.cert)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _host_name(listen_host: str) -> str | None:
    """The name for the certificate; None for one that means every address.

    Raises:
        UsageError: No certificate can carry it.
    """
    try:
        host = str(ipaddress.ip_address(listen_host.partition("%")[0]))
    except ValueError:
        try:
            host = listen_host.rstrip(".").encode("idna").decode("ascii").lower()
        except UnicodeError as error:
            raise UsageError(f"--listen: {listen_host!r} is no host name: {error}") from error
    return None if host in _WILDCARDS else host


def _hosts_of(cert: x509.Certificate) -> list[str]:
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
) -> x509.CertificateBuilder:
    """What both kinds of certificate have in common; the times are the caller's."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _make_authority(now: datetime.datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # The serial keeps two machines' authorities apart in a trust store.
    name = _name(f"dataplane local CA {x509.random_serial_number() & 0xFFFFFFFF:08x}")
    cert = (
        _builder(name, name, key.public_key(), key.public_key())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now - CLOCK_SKEW + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Pair(cert, key)


def _make_server(
    authority: _Pair,
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str | None],
    now: datetime.datetime,
) -> _Pair:
    names = [*ALWAYS, *(host for host in hosts if host is not None and host not in ALWAYS)]
    cert = (
        _builder(
            _name("dataplane"),
            authority.cert.subject,
            key.public_key(),
            authority.key.public_key(),
        )
        .not_valid_before(max(now - CLOCK_SKEW, authority.cert.not_valid_before_utc))
        # It ends with its authority, so that both are renewed together.
        .not_valid_after(authority.cert.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    return _Pair(cert, key)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _cert_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


# ---------------------------------------------------------------- given certificates


def _read_given(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: it cannot be read: {error.strerror or error}") from error


def _check_given(cert_path: Path, key_path: Path, now: datetime.datetime) -> None:
    """Raise `UsageError` with what is wrong with a given pair of files."""
    cert_pem, key_pem = _read_given("--cert", cert_path), _read_given("--key", key_path)
    try:
        cert = x509.load_pem_x509_certificates(cert_pem)[0]
        public_key = cert.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"--cert {cert_path}: it holds no usable certificate in PEM") from error
    if key_path.stat().st_mode & 0o077:
        raise UsageError(
            f"--key {key_path}: others than its owner have access to it; run: chmod 600 {key_path}"
        )
    key = _parse_given_key(key_path, key_pem)
    if public_key != key.public_key():
        raise UsageError(f"--key {key_path}: it is not the key of the certificate in {cert_path}")
    ends, begins = cert.not_valid_after_utc, cert.not_valid_before_utc
    if now >= ends:
        raise UsageError(f"--cert {cert_path}: it expired at {ends:%Y-%m-%d %H:%M} UTC")
    if now < begins:
        raise UsageError(f"--cert {cert_path}: it is not valid before {begins:%Y-%m-%d %H:%M} UTC")


def _parse_given_key(path: Path, pem: bytes) -> _ServerKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise UsageError(
            f"--key {path}: it is encrypted, and a daemon has nobody to ask for the passphrase"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"--key {path}: it holds no private key in PEM") from error
    if not isinstance(key, _ServerKey):
        raise UsageError(f"--key {path}: its kind is not for TLS 1.3; take EC, RSA or Ed25519")
    return key
