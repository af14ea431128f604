"""README, DESIGN.md, guides and decisions: short, with files that exist and verdicts that hold."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks.claims import scripts
from tests.laws.house import EVERYWHERE, ROOT, tree

WORDS_OF_README = 1200
LINES_OF_DESIGN = 200
LINES_OF_A_DECISION = 40
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9][0-9]-*.md"))
TOP = "|".join((*EVERYWHERE, "docs", "examples"))
NAMED = re.compile(rf"(?<![\w/.-])(?:{TOP})/[\w./-]*\.(?:py|md|csv|txt|yaml)\b")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)")  # to a file of this repository
FIRST_SCREEN = 30  # lines
TITLE = re.compile(r"# (\d+)\. .+\n")


def number_of(path: Path) -> int:
    return int(path.name[:2])


def missing_files(text: str, root: Path = ROOT) -> list[str]:
    """The files of this repository that a text names and that are not there."""
    return [name for name in NAMED.findall(text) if not (root / name).is_file()]


def wrong_form(text: str, number: int) -> list[str]:
    """What a decision's page lacks."""
    wrong = [f"no {part}" for part in ("Context", "Choice") if f"\n**{part}.** " not in text]
    title = TITLE.match(text)
    if title is None or int(title[1]) != number:
        wrong.append("another title")
    if len(text.splitlines()) > LINES_OF_A_DECISION:
        wrong.append("too long")
    return wrong


def cited(text: str) -> set[int]:
    """The numbers of decisions that a text names, also over the end of a line."""
    return {int(n) for n in re.findall(r"\bdecision[\s#]+(\d+)\b", text)}


def verdicts(table: str) -> dict[str, str]:
    """The verdict of each row of a table of README: `| claim | what | verdict |`."""
    rows = re.findall(r"^\| ([\w.]+) \| [^|]+ \| (\w+) \|$", table, re.M)
    return {claim: verdict for claim, verdict in rows if claim != "claim"}


def disagreements(told: dict[str, str], judged: dict[str, str]) -> list[str]:
    """Where README's table of claims tells another verdict than CLAIMS, or leaves a failure out."""
    wrong = [
        f"{claim}: {verdict}, CLAIMS has {judged.get(claim, 'no such row')}"
        for claim, verdict in told.items()
        if judged.get(claim) != verdict
    ]
    missing = [
        claim for claim, verdict in judged.items() if verdict != "pass" and claim not in told
    ]
    return [*wrong, *(f"{claim}: {judged[claim]}, README leaves it out" for claim in missing)]


def test_readme_names_the_claims_that_have_no_row() -> None:
    with (ROOT / "benchmarks/CLAIMS.csv").open(newline="", encoding="utf-8") as file:
        judged = {row["script"] for row in csv.DictReader(file)}
    told = (ROOT / "README.md").read_text("utf-8").partition("Not measured yet:")[2]
    named = re.findall(r"`(\w+)`", told.partition("\n\n")[0])
    assert sorted(named) == [script.stem for script in scripts() if script.stem not in judged]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= WORDS_OF_README


def test_readme_says_in_the_first_screen_that_nothing_ran_on_a_gpu() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert "Nothing here has run on a GPU yet" in "\n".join(lines[:FIRST_SCREEN])


def test_readme_and_claims_agree() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    told = verdicts(
        readme.partition("\n| claim | what | verdict |\n")[2].partition("\n\n")[0] + "\n"
    )
    with (ROOT / "benchmarks/CLAIMS.csv").open(newline="") as file:
        judged = {row["script"]: row["verdict"] for row in csv.DictReader(file)}
    assert len(told) > 10
    assert disagreements(told, judged) == []


def test_the_page_of_claims_shows_the_table_of_claims() -> None:
    shown = re.search(r'"benchmarks/CLAIMS.md:(\d+)"', (ROOT / "docs/claims.md").read_text("utf-8"))
    lines = (ROOT / "benchmarks/CLAIMS.md").read_text("utf-8").splitlines()
    assert shown is not None and lines[int(shown[1]) - 1].startswith("| script | name |")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("| theory | a | pass |\n| speed.compiled | b | fail |\n", []),
        (
            "| theory | a | fail |\n| speed.compiled | b | fail |\n",
            ["theory: fail, CLAIMS has pass"],
        ),
        ("| theory | a | pass |\n", ["speed.compiled: fail, README leaves it out"]),
        (
            "| speed.compiled | b | fail |\n| new | c | pass |\n",
            ["new: pass, CLAIMS has no such row"],
        ),
    ],
)
def test_another_verdict_is_seen(table: str, told: list[str]) -> None:
    assert disagreements(verdicts(table), {"theory": "pass", "speed.compiled": "fail"}) == told


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md", "CHANGELOG.md"])
def test_links_lead_to_files(name: str) -> None:
    links = LINK.findall((ROOT / name).read_text("utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_in_the_list_of_the_site() -> None:
    listed = re.findall(
        r": ([\w/-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M
    )
    pages = [path for kind in ("md", "ipynb") for path in (ROOT / "docs").rglob(f"*.{kind}")]
    names = {path.relative_to(ROOT / "docs").as_posix() for path in pages if path not in DECISIONS}
    assert names == {*listed}


def test_design_is_short() -> None:
    assert len((ROOT / "DESIGN.md").read_text("utf-8").splitlines()) <= LINES_OF_DESIGN


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_form(path: Path) -> None:
    assert wrong_form(path.read_text("utf-8"), number_of(path)) == []


def test_decisions_are_numbered_and_listed_in_order() -> None:
    assert [number_of(path) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    assert re.findall(r"\((\d\d-[\w-]+\.md)\)", index) == [path.name for path in DECISIONS]


def test_every_decision_that_is_cited_is_there() -> None:
    found = {number_of(path) for path in DECISIONS}
    texts = {**tree(*EVERYWHERE), "DESIGN.md": (ROOT / "DESIGN.md").read_text("utf-8")}
    texts |= {str(path): path.read_text("utf-8") for path in DECISIONS}
    own = "tests/laws/test_docs.py"
    assert {path: cited(text) - found for path, text in texts.items() if path != own} == {
        path: set() for path in texts if path != own
    }


@pytest.mark.parametrize(
    "path", [ROOT / "DESIGN.md", ROOT / "docs/guide/gpu.md", *DECISIONS], ids=lambda path: path.stem
)
def test_files_that_are_named_are_there(path: Path) -> None:
    assert missing_files(path.read_text("utf-8")) == []


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim/a.py").touch()
    text = "See sim/a.py, `sim/b.py` (tests/sim/test_c.py), http://x/sim/d.py and other/e.py."
    assert missing_files(text, tmp_path) == ["sim/b.py", "tests/sim/test_c.py"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# 3. A title\n\n**Context.** a\n\n**Choice.** b\n", []),
        ("# 3. A title\n\n**Context.** a\n", ["no Choice"]),
        ("# 4. A title\n\n**Context.** a\n\n**Choice.** b\n", ["another title"]),
        ("# 3. A title\n\n**Context.** a\n\n**Choice.** b\n" + "\n" * 36, ["too long"]),
    ],
)
def test_a_page_of_another_form_is_seen(text: str, told: list[str]) -> None:
    assert wrong_form(text, 3) == told


def test_a_citation_is_found_over_the_end_of_a_line() -> None:
    assert cited("see decision 25, and decision\n7; decisions 3") == {7, 25}
