"""The C test programs, quickly and without sanitizers; `make tsan` runs them under those."""

import shutil
from pathlib import Path

import native_programs
import pytest
from native_programs import MUTANTS, PROGRAMS, QUICK, Run, build, build_all, run

pytestmark = pytest.mark.skipif(
    shutil.which(native_programs.compiler()) is None, reason="no C compiler here"
)

RUNS = (
    Run("races", 1_500),
    Run("wakes", 1_000),
    Run("traffic", 3_000),
    Run("writers", 100),
    Run("handshake", 2),
    Run("frames", 1_000),
    Run("http3", 20_000),
    Run("protect", 50),
    Run("key_updates", 50),
    Run("ranges", 2_000),
    Run("recovery", 1),
    Run("congestion", 1),
    Run("recovery_link", 20_000),
    Run("clock", 20_000),
    Run("conn", 60),
    Run("probes", 30),
    Run("sending", 20),
    Run("load", 100),
    Run("load_h3", 5_000),
    Run("pump", 100),
    Run("pump_loop", 100),
    Run("routes", 5_000),
    Run("raw_in", 100),
    Run("raw_refused", 1),
    Run("raw_ends", 1),
    Run("raw_out", 10),
    Run("raw_device", 1),
    Run("raw_keys", 1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs are built, for each to take the others' objects."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, Path]:
    programs = [quick.program for quick in RUNS]
    binaries = build_all([(program, QUICK, None) for program in programs], folder)
    return dict(zip(programs, binaries, strict=True))


@pytest.mark.parametrize("quick", RUNS, ids=[one.program for one in RUNS])
def test_program_sees_only_what_is_allowed(quick: Run, built: dict[str, Path]) -> None:
    done = run(built[quick.program], quick, seed=11)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_program_notices_a_mistake(folder: Path) -> None:
    torn = next(mutant for mutant in MUTANTS if mutant.name == "TORN_CLAIM")
    done = run(build("races", QUICK, folder, torn.name), torn.run)
    assert done.returncode == 1
    assert "FAILED: claim/claim, one slot: round" in done.stderr


def test_every_mutant_of_the_source_is_hunted() -> None:
    source = (PROGRAMS / "mutants.c").read_text(encoding="utf-8")
    sown = [word.removeprefix("MUTANT_") for word in source.split() if word.startswith("MUTANT_")]
    assert sorted(sown) == sorted(mutant.name for mutant in MUTANTS)
