"""Can a newcomer guess the file? Thirty questions, answered from folder and file names alone.

`python -m benchmarks.room_test --ask` prints the questions and the tree of production files, to be
answered by a reader that has seen neither code nor key.
`python -m benchmarks.room_test --score ANSWERS` reads a file of lines `number path` and tells how
many are right: only the count, so that the answers teach nothing for the next time.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = Path(__file__).with_name("room_questions.csv")
PACKAGES = ("traces", "models", "engine", "policies", "sim", "runtime", "tandem", "analysis")
BAR = 27


def question_rows() -> list[tuple[str, tuple[str, ...]]]:
    """Each question, and the files of which any is a right answer."""
    with QUESTIONS.open(encoding="utf-8", newline="") as file:
        return [(row["question"], tuple(row["files"].split())) for row in csv.DictReader(file)]


def tree() -> list[str]:
    """The production files, by path."""
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in paths if path.stem != "__init__"]


def num_right(answers: dict[int, str]) -> int:
    """How many answers, by the number of their question from 1 on, name a right file."""
    return sum(
        answers.get(number, "") in files for number, (_, files) in enumerate(question_rows(), 1)
    )


def read_answers(path: Path) -> dict[int, str]:
    """Answers out of lines `number path`. ValueError for a line that is none."""
    found = dict[int, str]()
    for line in filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())):
        number, _, file = line.partition(" ")
        if not number.rstrip(".").isdigit() or not file:
            raise ValueError(f"{path}: {line!r} is no line `number path`")
        found[int(number.rstrip("."))] = file.strip()
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--ask", action="store_true", help="print the questions and the tree")
    chosen.add_argument("--score", type=Path, help="a file of answers")
    given = parser.parse_args(words)
    if given.ask:
        print("Answer each question with one path of the tree: a line `number path` for each.\n")
        print("\n".join(tree()), end="\n\n")
        for number, (question, _) in enumerate(question_rows(), 1):
            print(f"{number}. {question}")
        return 0
    right, all_of_them = num_right(read_answers(given.score)), len(question_rows())
    is_met = right >= BAR
    print(f"rooms_found_of_{all_of_them} {right} files {BAR} {'pass' if is_met else 'fail'}")
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
