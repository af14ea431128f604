"""One hash for what lies at a path: read once, and again when the file has changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from traces import store as fingerprint
from traces.store import content_hash


def test_a_files_hash_is_that_of_its_bytes_also_after_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for text in (b"one", b"three"):
        path.write_bytes(text)
        assert content_hash(path) == hashlib.sha256(text).hexdigest()


def test_a_change_of_equal_length_shows_by_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("one")
    before = content_hash(path)
    path.write_text("two")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert content_hash(path) != before


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("one")
    before = content_hash(tmp_path)
    monkeypatch.setattr(fingerprint, "sha256_of", lambda path: pytest.fail(f"{path} read again"))
    assert content_hash(tmp_path) == before


def test_a_folder_changes_with_its_files_their_names_and_their_number(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("one")
    seen = [content_hash(folder)]
    (folder / "b").write_text("two")
    seen.append(content_hash(folder))
    (folder / "b").rename(folder / "c")
    seen.append(content_hash(folder))
    assert len(set(seen)) == 3
    assert content_hash(tmp_path / "nothing") == "missing"
