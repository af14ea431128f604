"""`tandem run` composes once, to what Hydra's own app makes of the words, and keeps what it was."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from tandem.cli.__main__ import main
from tandem.cli.catalog import options
from tandem.cli.errors import Usage
from tandem.config import composed_config
from tandem.config.check import settings
from tandem.config.compose import composed_run, default_config
from tandem.config.composed_config import keep, recalled

SMALL = ["model=micro_llama", "limit=2", "arrival=all_at_once"]
FOR_THE_APP = "hydra.verbose=false"  # changes nothing, but a word for Hydra


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    composed_config._sources.cache_clear()


def test_settings_are_what_the_default_configuration_holds() -> None:
    assert set(settings()) == set(default_config())


def test_a_run_is_composed_once_and_is_that_of_hydras_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, composed = ConfigLoaderImpl.load_configuration, list[Any]()

    def counted(*given: Any, **named: Any) -> Any:
        composed.append(named)
        return load(*given, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    folders = []
    for words in ([], [FOR_THE_APP]):
        assert main(["run", *SMALL, "sampling.top_p=0.5", *words]) == 0
        folders += sorted({path.parent for path in tmp_path.rglob("status.json")} - {*folders})
    assert len(composed) == 1 + 2, "the app composes a first time to look for its mode"
    ours, theirs = folders
    for path in ours.iterdir():
        other = theirs / path.name
        if path.suffix != ".json":
            assert path.read_bytes() == other.read_bytes()
    assert ours.parent == theirs.parent, "a folder by date"


@pytest.mark.broad(4)
@pytest.mark.parametrize(
    "words",
    [
        ["arrival.rate=2,4"],
        ["seed=range(3)"],
        ["seed"],
        ["seed=[1"],
        ["polic=x"],
        ["+seed=1"],
        ["~nothing"],
        ["policy=chunked_restrat"],
        ["policy@here=orca"],
        ["depth=0"],
        ["+mine=1"],
        ["trace=file"],
        ["profile=${nowhere}"],
    ],
)
def test_mistakes_are_told_as_hydras_app_has_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for more in ([], [FOR_THE_APP]):
        assert main(["run", *words, *more]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and len(told[0].splitlines()) == 1


GROUPS = ("policy", "trace", "arrival", "model", "slo", "backend", "experiment", "training")


def files_kept(words: Sequence[str]) -> list[Path]:
    """Composes the words and keeps them; what the default cache then holds."""
    composed, _, unresolved = composed_run(words)
    keep(words, composed, unresolved)
    return sorted(Path("outputs/cache/composed").glob("*"))


@pytest.mark.ci
@pytest.mark.parametrize("group", GROUPS)
def test_every_option_comes_back_as_it_was_composed(group: str) -> None:
    for name in options(group):
        words = [f"{group}={name}", "arrival=trace", "+slo.mine_s=1e-3", "eos_ids=[1,2]"]
        try:
            composed, _, unresolved = composed_run(words)
        except Usage:  # trace=file wants a path
            continue
        keep(words, composed, unresolved)
        if (found := recalled(words)) is not None:
            assert repr(found) == repr(composed)  # 1 is not 1.0 here
        else:
            assert "oc.env" in str(unresolved), words


def test_the_folder_is_named_anew() -> None:
    words = ["limit=3"]
    assert len(files_kept(words)) == 1
    known = recalled(words)
    assert known is not None
    first, second = known.new_folder(), known.new_folder()
    assert first != second and first.startswith("outputs/") and "$" not in first
    assert len(first) == len(composed_run(words)[1])


def test_runs_with_folders_of_their_own_share_what_is_kept() -> None:
    assert len(files_kept(["limit=3", "hydra.run.dir=one"])) == 1
    known = recalled(["limit=3", "hydra.run.dir=/a/two-2"])
    assert known is not None and known.new_folder() == "/a/two-2"
    assert recalled(["limit=3"]) is None
    assert composed_run(["limit=3", "hydra.run.dir=/a/two-2"])[:2] == (known, "/a/two-2")


@pytest.mark.parametrize(
    "words",
    [
        ["trace.path=${oc.env:HOME}/a.parquet"],
        ["profile=${now:%S}"],
        ["experiment=fidelity_chunked"],  # reads the environment
        ["hydra.run.dir='a b'"],
        ["hydra.run.dir=${hydra.job.name}"],
        ["hydra.run.dir=true"],
        ["cache='outputs/cache'"],
        ["+slo.mine_s=nan"],
    ],
)
def test_what_may_change_is_not_kept(words: list[str]) -> None:
    assert not files_kept(words) and recalled(words) is None


def test_no_word_and_no_yaml_is_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_kept(["limit=3", "seed=1"])
    assert recalled(["seed=1", "limit=3"]) is None
    assert recalled(["limit=3"]) is None
    ours = tmp_path / "conf"
    shutil.copytree(str(files("conf")), ours, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(
        composed_config, "files", lambda name: ours if name == "conf" else files(name), raising=True
    )
    composed_config._sources.cache_clear()
    assert recalled(["limit=3", "seed=1"]) is not None
    with (ours / "slo" / "none.yaml").open("a") as file:
        file.write("# another\n")
    composed_config._sources.cache_clear()
    assert recalled(["limit=3", "seed=1"]) is None


def test_another_installation_composes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    files_kept(["limit=3"])
    monkeypatch.setattr(composed_config, "_place", lambda name: f"/elsewhere/{name}")
    assert recalled(["limit=3"]) is None


@pytest.mark.parametrize("damage", [b"", b"\xff", b"{}", b"0\n{}", None])
def test_a_damaged_file_is_composed_anew(damage: bytes | None) -> None:
    [path] = files_kept(["limit=3"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if damage is None else damage)
    assert recalled(["limit=3"]) is None
    assert files_kept(["limit=3"]) == [path] and path.read_bytes() == whole


def test_a_full_folder_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed_config, "MOST", 2)
    counts = [len(files_kept([f"seed={seed}"])) for seed in range(4)]
    assert counts == [1, 2, 1, 2]


def test_a_cache_that_cannot_be_written_is_no_error() -> None:
    Path("outputs").write_text("a file")
    assert not files_kept(["limit=3"]) and recalled(["limit=3"]) is None


def test_a_second_run_takes_no_hydra(tmp_path: Path) -> None:
    """And its folder tells what the first one's tells."""
    code = "import sys; from tandem.cli.__main__ import main; assert main(sys.argv[1:]) == 0"
    for name, end in (("one", "in"), ("two", "not in")):
        words = ["run", "limit=3", "seed=7", f"hydra.run.dir={name}"]
        asked = f"{code}; assert 'hydra' {end} sys.modules and 'omegaconf' {end} sys.modules"
        subprocess.run([sys.executable, "-c", asked, *words], check=True, stdout=subprocess.PIPE)
    for name in ("config.yaml", "metrics.json", "requests.parquet"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_a_run_that_is_refused_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "limit=0"]) == 2
    assert not Path("outputs").exists()
