"""The daemon's certificate: made once, kept well, remade when due, and given ones checked."""

import datetime
import ipaddress
import os
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.x509 import verification

from dataplane.errors import UsageError
from dataplane.identity import VALID, Identity, load_identity, make_state_dir

NOW = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
FILES = ("ca.key", "ca.pem", "server.key", "server.pem")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def certificate(path: Path | None) -> x509.Certificate:
    assert path is not None
    return x509.load_pem_x509_certificate(path.read_bytes())


def verify(identity: Identity, host: str, now: datetime.datetime = NOW) -> None:
    """Verify as a strict client does: chain, name, times, usages, key identifiers."""
    subject: x509.DNSName | x509.IPAddress
    try:
        subject = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    store = verification.Store([certificate(identity.ca)])
    verifier = verification.PolicyBuilder().store(store).time(now).build_server_verifier(subject)
    verifier.verify(certificate(identity.cert), [])


def refusal(directory: Path, cert: Path, key: Path, now: datetime.datetime = NOW) -> str:
    with pytest.raises(UsageError) as caught:
        load_identity(directory, "localhost", cert, key, now)
    return str(caught.value)


# ---------------------------------------------------------------- own ones


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "inference.example", "10.1.2.3"])
def test_a_strict_client_takes_the_certificate_for_every_name(tmp_path: Path, host: str) -> None:
    identity = load_identity(tmp_path, host, now=NOW)
    for name in {"localhost", "127.0.0.1", "::1", host}:
        verify(identity, name)
    with pytest.raises(verification.VerificationError):
        verify(identity, "elsewhere.example")


def test_it_is_short_lived_and_for_servers_only(tmp_path: Path) -> None:
    identity = load_identity(tmp_path, "localhost", now=NOW)
    cert, ca = certificate(identity.cert), certificate(identity.ca)
    for each in (cert, ca):
        assert each.not_valid_after_utc - each.not_valid_before_utc <= datetime.timedelta(days=398)
    assert isinstance(cert.public_key(), ec.EllipticCurvePublicKey)
    usage = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_only_the_owner_reads_keys_and_nothing_else_is_left(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "state"
    before = os.umask(0)
    try:
        load_identity(directory, "localhost", now=NOW)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_a_key_is_private_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = {}
    rename = os.replace

    def watch(source: Path, target: Path) -> None:
        modes[target.name] = stat.S_IMODE(source.stat().st_mode)
        rename(source, target)

    monkeypatch.setattr(os, "replace", watch)
    load_identity(tmp_path, "localhost", now=NOW)
    assert {modes["ca.key"], modes["server.key"]} == {0o600}


def test_it_is_made_once(tmp_path: Path) -> None:
    load_identity(tmp_path, "localhost", now=NOW)
    before = contents(tmp_path)
    load_identity(tmp_path, "127.0.0.1", now=NOW + 300 * DAY)
    load_identity(tmp_path, "0.0.0.0", now=NOW)  # every address: no name that a client would use
    assert contents(tmp_path) == before


def test_another_host_is_added_over_the_same_key_and_authority(tmp_path: Path) -> None:
    load_identity(tmp_path, "one.example", now=NOW)
    before = contents(tmp_path)
    identity = load_identity(tmp_path, "two.example", now=NOW + DAY)
    changed = {name for name, content in contents(tmp_path).items() if content != before[name]}
    assert changed == {"server.pem"}
    for host in ("one.example", "two.example", "localhost"):
        verify(identity, host, NOW + DAY)


def test_the_hosts_do_not_grow_without_end(tmp_path: Path) -> None:
    for number in range(20):
        identity = load_identity(tmp_path, f"host{number}.example", now=NOW)
    cert = certificate(identity.cert)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert len(list(names)) == 3 + 16
    verify(identity, "host19.example")


def test_it_is_remade_within_a_week_of_its_end(tmp_path: Path) -> None:
    load_identity(tmp_path, "localhost", now=NOW)
    before = contents(tmp_path)
    load_identity(tmp_path, "localhost", now=NOW + VALID - 8 * DAY)
    assert contents(tmp_path) == before
    late = NOW + VALID - 6 * DAY
    identity = load_identity(tmp_path, "localhost", now=late)
    assert all(content != before[name] for name, content in contents(tmp_path).items())
    verify(identity, "localhost", late)


def test_it_is_remade_when_the_clock_was_wrong(tmp_path: Path) -> None:
    load_identity(tmp_path, "localhost", now=NOW + 100 * DAY)
    verify(load_identity(tmp_path, "localhost", now=NOW), "localhost")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["lost", "empty", "garbled", "foreign", "open"])
def test_a_harmed_set_is_remade(tmp_path: Path, name: str, harm: str) -> None:
    load_identity(tmp_path / "state", "localhost", now=NOW)
    load_identity(tmp_path / "other", "localhost", now=NOW)
    file = tmp_path / "state" / name
    if harm == "lost":
        file.unlink()
    elif harm == "empty":
        file.write_bytes(b"")
    elif harm == "garbled":
        file.write_bytes(file.read_bytes()[:-90] + b"\n")
    elif harm == "foreign":
        file.write_bytes((tmp_path / "other" / name).read_bytes())
    else:
        file.chmod(0o644)
    identity = load_identity(tmp_path / "state", "localhost", now=NOW)
    verify(identity, "localhost")
    key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
    assert certificate(identity.cert).public_key() == key.public_key()
    for key_name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / "state" / key_name).stat().st_mode) == 0o600


def test_what_a_crash_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".ca.key.new").write_text("half")
    (tmp_path / ".server.key.new").symlink_to(tmp_path / "target")
    verify(load_identity(tmp_path, "localhost", now=NOW), "localhost")
    assert sorted(contents(tmp_path)) == sorted(FILES)


def test_daemons_that_start_together_agree(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    hosts = [f"host{number}.example" for number in range(8)]
    barrier = threading.Barrier(len(hosts))
    seen: list[Identity | Exception] = []

    def start(host: str) -> None:
        barrier.wait()
        try:
            seen.append(load_identity(directory, host, now=NOW))
        except Exception as error:
            seen.append(error)

    threads = [threading.Thread(target=start, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = Identity(directory / "server.pem", directory / "server.key", directory / "ca.pem")
    assert seen == [first] * len(hosts)
    for host in hosts:
        verify(first, host)
    assert sorted(contents(directory)) == sorted(FILES)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    with pytest.raises(UsageError, match="chmod 700"):
        load_identity(shared, "localhost", now=NOW)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="it is no directory"):
        load_identity(file, "localhost", now=NOW)
    with pytest.raises(UsageError, match="cannot be made"):
        make_state_dir(file / "below")


def test_a_host_that_no_certificate_can_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no host name"):
        load_identity(tmp_path, "x" * 64 + ".example", now=NOW)


# ---------------------------------------------------------------- given ones


@pytest.fixture
def given(tmp_path: Path) -> Identity:
    """A pair of files as another authority may have made it."""
    return load_identity(tmp_path / "given", "localhost", now=NOW)


def test_a_given_pair_is_served_and_trusted(tmp_path: Path, given: Identity) -> None:
    state = tmp_path / "state"
    found = load_identity(state, "localhost", given.cert, given.key, NOW)
    assert found == Identity(given.cert, given.key, given.cert)
    assert not state.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, given: Identity, mode: int) -> None:
    given.key.chmod(mode)
    assert f"run: chmod 600 {given.key}" in refusal(tmp_path, given.cert, given.key)


def test_what_is_no_certificate_or_key_is_refused(tmp_path: Path, given: Identity) -> None:
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    rubbish.chmod(0o600)
    missing = tmp_path / "missing"
    assert "no usable certificate" in refusal(tmp_path, rubbish, given.key)
    assert "no usable certificate" in refusal(tmp_path, given.key, given.key)
    assert "no private key" in refusal(tmp_path, given.cert, rubbish)
    assert f"--cert {missing}: it cannot be read: No such" in refusal(tmp_path, missing, given.key)
    assert f"--key {missing}: it cannot be read: No such" in refusal(tmp_path, given.cert, missing)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path, given: Identity) -> None:
    other = load_identity(tmp_path / "other", "localhost", now=NOW)
    assert "is not the key of the certificate" in refusal(tmp_path, given.cert, other.key)


def test_a_certificate_out_of_its_time_is_refused(tmp_path: Path, given: Identity) -> None:
    assert "expired at 2027-" in refusal(tmp_path, given.cert, given.key, NOW + 400 * DAY)
    assert "not valid before 2026-" in refusal(tmp_path, given.cert, given.key, NOW - DAY)


def test_a_key_that_no_daemon_can_use_is_refused(tmp_path: Path, given: Identity) -> None:
    key = tmp_path / "key"

    def write(private: ec.EllipticCurvePrivateKey | x25519.X25519PrivateKey, phrase: bytes) -> None:
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if phrase:
            encryption = serialization.BestAvailableEncryption(phrase)
        pem = serialization.Encoding.PEM
        key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
        key.chmod(0o600)

    write(ec.generate_private_key(ec.SECP256R1()), b"secret")
    assert "it is encrypted" in refusal(tmp_path, given.cert, key)
    write(x25519.X25519PrivateKey.generate(), b"")
    assert "not for TLS 1.3" in refusal(tmp_path, given.cert, key)


def test_a_self_signed_certificate_is_its_own_authority(tmp_path: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mine")])
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + DAY)
        .sign(private, hashes.SHA256())
    )
    cert_path, key_path = tmp_path / "c.pem", tmp_path / "k.pem"
    cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    key_path.chmod(0o600)
    assert load_identity(tmp_path, "localhost", cert_path, key_path, NOW).ca == cert_path
