"""What a sweep imports beforehand, once for all of its points."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.compose import composed
from tandem.sweeps import workers
from tandem.sweeps.workers import import_files

TRAINS = ("trace=none", "policy=train_on_device", "training=text")


def test_a_text_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "some.txt"
    text.write_text("some words to train on\n" * 50)
    words = (*TRAINS, f"training.data.path={text}", f"cache={tmp_path / 'cache'}")
    points = [composed([*words, f"training.sequence_tokens={n}"]) for n in (8, 16)]
    asked = []
    monkeypatch.setattr(workers, "import_text", _counted(workers.import_text, asked))
    import_files(points)
    assert len(asked) == 1, "both points have one text"
    kept = sorted((tmp_path / "cache").rglob("*.parquet"))
    assert len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    import_files(points)
    assert kept[0].stat().st_mtime_ns == before


def test_a_text_that_is_not_there_is_for_its_points_to_say(tmp_path: Path) -> None:
    words = (*TRAINS, f"training.data.path={tmp_path / 'none.txt'}", f"cache={tmp_path}")
    import_files([composed(words)])
    assert not [*tmp_path.iterdir()]


def test_what_is_drawn_is_not_imported(tmp_path: Path) -> None:
    import_files([composed(["trace=none", "training=random", f"cache={tmp_path}"])])
    import_files([composed(["trace=random", "trace.input_tokens=8", f"cache={tmp_path}"])])
    assert not [*tmp_path.iterdir()]


def _counted(call, asked):  # type: ignore[no-untyped-def]
    def counting(point):  # type: ignore[no-untyped-def]
        asked.append(point)
        call(point)

    return counting
