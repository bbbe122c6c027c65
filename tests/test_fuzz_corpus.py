"""The fuzz targets without clang: the corpus, each cut of it, and seeded mutations, sanitized."""

import os
import shutil
from pathlib import Path

import fuzz_targets
import native_programs
import pytest
from fuzz_seeds import SEEDS, varint
from fuzz_targets import FUZZ, TARGETS, build_replay, replay, seeds

needs_compiler = pytest.mark.skipif(
    shutil.which(native_programs.compiler()) is None, reason="no C compiler here"
)

QUICK = 5_000
LONG = 1_000_000

each_target = pytest.mark.parametrize("name", TARGETS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    return {name: build_replay(name, folder, native_programs.compiler()) for name in TARGETS}


def _replay(binary: Path, name: str, mutations: int, seed: int) -> None:
    done = replay(binary, seeds(name), mutations, seed)
    assert done.returncode == 0, done.stderr
    assert f"{len(seeds(name))} files with all their cuts, {mutations} mutations" in done.stdout


@needs_compiler
@each_target
def test_target_holds_over_its_corpus_and_mutations(built: dict[str, Path], name: str) -> None:
    _replay(built[name], name, QUICK, seed=1)


@pytest.mark.slow
@needs_compiler
@each_target
@pytest.mark.parametrize("part", range(4))
def test_target_holds_over_a_million_mutations(
    built: dict[str, Path], name: str, part: int
) -> None:
    _replay(built[name], name, LONG // 4, seed=100 + part)


@needs_compiler
def test_a_failure_tells_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One that reads a byte behind an input that begins with "bug".
    (tmp_path / "faulty.c").write_text(
        "#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);\n"
        "volatile uint8_t kept;\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n"
        '    if (size > 3 && memcmp(data, "bug", 3) == 0)\n        kept = data[size];\n'
        "    return 0;\n}\n"
    )
    monkeypatch.setitem(TARGETS, "faulty", fuzz_targets.Target(()))
    main = FUZZ / "replay" / "main.c"
    monkeypatch.setattr(fuzz_targets, "FUZZ", tmp_path)
    flags = ("-fsanitize=address,undefined",)
    binary = fuzz_targets.build(
        "faulty", tmp_path / "faulty", native_programs.compiler(), flags, main
    )
    (tmp_path / "seed").write_bytes(b"bugs")
    done = replay(binary, [tmp_path / "seed"], 0, 1)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "the input was: 62 75 67 73" in done.stderr
    assert replay(binary, [FUZZ / "frames.c"], 0, 1).returncode == 1  # larger than a packet


@each_target
def test_the_corpus_is_what_the_script_writes(name: str) -> None:
    committed = {path.name: path.read_bytes() for path in seeds(name)}
    made = SEEDS[name]()
    stale = [seed for seed, data in made.items() if committed.get(seed) != data]
    assert not stale, "run: python tests/fuzz_seeds.py"
    assert sum(map(len, committed.values())) < 100_000


def test_every_target_is_in_the_table() -> None:
    assert sorted(path.stem for path in FUZZ.glob("*.c")) == sorted(TARGETS)
    assert sorted(path.name for path in (FUZZ / "corpus").iterdir()) == sorted(TARGETS)
    assert SEEDS.keys() == TARGETS.keys()


def test_varints_are_as_the_rfc_shows_them() -> None:
    # RFC 9000 appendix A.1.
    assert varint(151288809941952652) == bytes.fromhex("c2197c5eff14e88c")
    assert varint(494878333) == bytes.fromhex("9d7f3e7d")
    assert varint(15293) == bytes.fromhex("7bbd")
    assert varint(37) == b"\x25"
    assert varint(37, 2) == b"\x40\x25"


def test_make_fuzz_says_how_to_get_clang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "CLANG", "no-such-clang")
    assert fuzz_targets.main() == 1
    assert "apt-get install clang" in capsys.readouterr().out
