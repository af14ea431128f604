"""`tandem run` composes once, to what Hydra's own app makes of the words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from tandem.cli.__main__ import main
from tandem.config.check import settings
from tandem.config.compose import default_config

SMALL = ["model=micro_llama", "limit=2", "arrival=all_at_once"]
FOR_THE_APP = "hydra.verbose=false"  # changes nothing, but a word for Hydra


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


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
