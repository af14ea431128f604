"""Python of README and of guides runs as it stands; their examples are those of examples/."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from engine.contract.job import Job
from engine.contract.policy import Traits, traits_of
from engine.contract.rules import BrokenLaw, ContractError
from engine.laws.check_policy import check_policy
from engine.loop.asking import MAKERS
from policies.composed import Composed
from policies.scheduling.chunked_prefill import ChunkedPrefill
from tandem.cli.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {  # by the document that shows it
    "README.md": ROOT / "examples/shortest_prompt_first",
    "docs/own-policy.md": ROOT / "examples/keeps_room",
}
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", EXAMPLES)
def test_python_of_a_document_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES[name]))
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert len(blocks) > 1
    for number, block in enumerate(blocks):
        module = ModuleType(f"block_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
        exec(compile(block, name, "exec"), vars(module))


def test_the_guides_policy_is_the_example() -> None:
    text = (ROOT / "docs/own-policy.md").read_text(encoding="utf-8")
    folder = EXAMPLES["docs/own-policy.md"]
    source = (folder / "keeps_room.py").read_text(encoding="utf-8")
    assert f"# keeps_room.py\n{source[source.index('from dataclasses') :]}```" in text
    yaml = (folder / "conf/memory/keeps_room.yaml").read_text(encoding="utf-8")
    assert f"# conf/memory/keeps_room.yaml\n{yaml.partition(chr(10))[2]}```" in text


def test_the_guides_policy_restarts_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide says, by the restarts that it names."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/own-policy.md").read_text(encoding="utf-8")
    commands = re.findall(r"^tandem (run .*)$", text, re.MULTILINE)
    told = []
    for command in commands:
        assert main(command.replace("examples/", f"{ROOT}/examples/").split()) == 0
        told += re.findall(r"(\d+) restarts", capsys.readouterr().out)
    assert f"The first run restarts {told[0]} jobs, the second {told[1]}" in text


def test_a_memory_policy_that_takes_no_pages_is_told_as_in_the_guide() -> None:
    class NoPages:
        def fit(self, batch, view, plan):  # type: ignore[no-untyped-def]
            plan.compute(batch, ())

    with pytest.raises(ContractError) as caught:
        check_policy(Composed(ChunkedPrefill(), NoPages()))
    told = str(caught.value).replace(caught.value.at, "no_pages.py:2")
    for name in EXAMPLES:
        assert f"ContractError: {told}\n" in (ROOT / name).read_text(encoding="utf-8")


def test_check_policy_tells_a_policy_that_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES["docs/own-policy.md"]))
    from keeps_room import KeepsRoom  # type: ignore[import-not-found]

    class Remembers(ChunkedPrefill):
        asked: list[int] = []  # noqa: RUF012 -- it is the fault

        def batch(self, view):  # type: ignore[no-untyped-def]
            self.asked.append(1)
            return super().batch(view)[: 1 + len(self.asked) % 2]

    assert str(traits_of(KeepsRoom())) == "kv_growth=page"
    with pytest.raises(BrokenLaw, match=r"^law 8: policy Remembers .* equal views, other plans"):
        check_policy(Composed(Remembers(), KeepsRoom()))
    sys.modules.pop("keeps_room")


def test_the_guide_has_every_fact_of_a_job() -> None:
    text = (ROOT / "docs/own-policy.md").read_text(encoding="utf-8")
    table = text.partition("## What a job shows")[2].partition("\n## ")[0]
    told = [name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in cell.split(", ")]
    facts = {name for name in dir(Job) if not name.startswith("_")} - {*MAKERS}
    assert sorted(name.strip("`") for name in told) == sorted(facts)


def test_the_guide_has_every_trait() -> None:
    text = (ROOT / "docs/own-policy.md").read_text(encoding="utf-8")
    section = text.partition("## Traits")[2].partition("\n## ")[0]
    promised = section.partition("A scheduling may promise")[2].partition("The docstring of")[0]
    traits = [trait.name for trait in fields(Traits)]
    assert sorted(re.findall(r"`(\w+)`", promised)) == sorted(traits)


@pytest.mark.parametrize("word", ["run-ahead", "watermark", "spare pages", "law"])
def test_the_guide_explains_a_word_where_it_first_stands(word: str) -> None:
    text = (ROOT / "docs/own-policy.md").read_text(encoding="utf-8").lower()
    assert text.index(f"*{word}*") + 1 == re.search(rf"\b{word}\b", text).start()  # type: ignore[union-attr]
