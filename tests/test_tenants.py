"""`--tenants FILE`: what it may hold, and whom a key lets in."""

from hashlib import sha256
from pathlib import Path

import pytest

from dataplane.errors import Refusal, Status, UsageError
from dataplane.ingress import Ingress
from dataplane.stats import Stats
from dataplane.tenants import KeyedRoutes, read

ALPHA, BETA = (sha256(key).hexdigest() for key in (b"alpha", b"beta"))


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return path


def test_each_key_has_its_tenants_partition(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        f'[acme]\npartition = "a"\nkey_sha256 = "{ALPHA.upper()}"\n'
        f'[zeta]\npartition = "b"\nkey_sha256 = ["{BETA}", "{"0" * 64}"]\n',
    )
    assert read(path, ["a", "b"]) == {
        bytes.fromhex(ALPHA): "a",
        bytes.fromhex(BETA): "b",
        bytes(32): "b",
    }


def test_where_there_is_one_partition_it_need_not_be_named(tmp_path: Path) -> None:
    path = file(tmp_path, f'[acme]\nkey_sha256 = "{ALPHA}"\n')
    assert read(path, ["default"]) == {bytes.fromhex(ALPHA): "default"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no tenant in it, so nobody could ask"),
        ("[acme", "it is no TOML"),
        ("\xff", "it is no TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "it is no TOML"),
        (f'[x]\nkey_sha256 = "{sha256(b"").hexdigest()}"\npartition = "a"', "an empty key"),
        ("acme = 1", "[acme]: it is a value"),
        ('[acme]\npartition = "a"', "[acme]: key_sha256 must be the SHA-256 of a key"),
        ('[acme]\npartition = "a"\nkey_sha256 = "alpha"', "64 hexadecimal digits"),
        ('[acme]\npartition = "a"\nkey_sha256 = []', "64 hexadecimal digits"),
        (f'[acme]\npartition = "a"\nkey_sha256 = ["{ALPHA}", 3]', "64 hexadecimal digits"),
        (f'[acme]\nkey_sha256 = "{ALPHA}"', "[acme]: partition is needed, one of a, b"),
        (f'[acme]\npartition = "c"\nkey_sha256 = "{ALPHA}"', "no partition 'c', only a, b"),
        (f'[acme]\npartition = []\nkey_sha256 = "{ALPHA}"', "no partition [], only a, b"),
        (f'[acme]\npartition = "a"\nkey = "{ALPHA}"', "there is no setting 'key'"),
        (
            f'[x]\npartition = "a"\nkey_sha256 = "{ALPHA}"\n'
            f'[y]\npartition = "b"\nkey_sha256 = "{ALPHA.upper()}"',
            "[y]: a key_sha256 of it is x's already",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as caught:
        read(path, ["a", "b"])
    assert str(caught.value).startswith(f"--tenants {path}: ")
    assert why in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it cannot be read: No such file"):
        read(tmp_path / "nowhere", ["a"])


def test_a_key_lets_in_to_one_partition_alone() -> None:
    stats = Stats()
    ingresses = {name: Ingress(stats, 5.0, name=name) for name in ("a", "b")}
    routes = KeyedRoutes(ingresses, {bytes.fromhex(ALPHA): "a", bytes.fromhex(BETA): "b"})
    assert routes.of(b"alpha") is ingresses["a"]
    assert routes.of(b"beta") is ingresses["b"]
    assert routes.sole is None
    for key in (None, b"", b"gamma", b"alpha ", ALPHA.encode()):
        refusal = routes.of(key)
        assert isinstance(refusal, Refusal)
        assert refusal.status == Status.UNAUTHORIZED
        assert ("needed" in refusal.reason) is (not key)


def test_an_ingress_by_itself_asks_nobody_for_a_key() -> None:
    ingress = Ingress(Stats(), 5.0)
    assert ingress.of(None) is ingress.of(b"anything") is ingress.sole is ingress.home is ingress
