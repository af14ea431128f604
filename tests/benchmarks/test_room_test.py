"""The questions of the room test have answers, and its score counts only right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.room_test import BAR, main, num_right, question_rows, tree


def test_there_are_thirty_questions_and_each_right_answer_is_a_file() -> None:
    assert len(question_rows()) == 30 and BAR == 27
    files = set(tree())
    assert [name for _, names in question_rows() for name in names if name not in files] == []


def test_no_question_names_its_answer() -> None:
    for question, files in question_rows():
        assert not any(Path(name).stem in question.split() for name in files), question


def test_only_right_answers_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = {number: files[0] for number, (_, files) in enumerate(question_rows(), 1)}
    assert num_right(right) == 30 and num_right({}) == 0
    answers = tmp_path / "answers.txt"
    wrong = right | {1: "engine/loop/engine.py", 2: "nowhere.py"}
    answers.write_text("".join(f"{number} {name}\n" for number, name in wrong.items()))
    assert main(["--score", str(answers)]) == 0
    assert capsys.readouterr().out == "rooms_found_of_30 28 files 27 pass\n"
    answers.write_text("".join(f"{n}. {name}\n" for n, name in right.items() if n < 27))
    assert main(["--score", str(answers)]) == 1


def test_a_line_that_is_no_answer_is_told(tmp_path: Path) -> None:
    (tmp_path / "answers.txt").write_text("engine/loop/engine.py\n")
    with pytest.raises(ValueError, match="is no line `number path`"):
        main(["--score", str(tmp_path / "answers.txt")])
