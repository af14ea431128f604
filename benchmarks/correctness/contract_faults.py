"""Claim: no plan that breaks a rule passes, and no legal one is refused.

3,000 random small replays have one lie each (scheduling x memory, prefix sharing, swaps, replicas
with routers, serving beside training, training under all policies, groups, plan logs played back;
depths 1 to 3, fast-forward on and off, noise, host time). A lie is a change to the plan or to the
view at a random call of the policy, which breaks one of the rules of engine.contract.rules. Each
lie must end in a ContractError of one line that names policy, step and rule, with the ledger as
before the plan. A change without effect must leave all five tables unchanged. 3,000 legal replays
must all finish; in every second one, fast-forward and step by step must give equal tables. Each
fault of tests/support/broken_books.py must be caught by the check of its law.

`python -m benchmarks.correctness.contract_faults [--quick] [--mutations]`: --mutations runs those
faults alone. Needs no pytest, and gives equal output under `python -O` and compiled.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from engine.contract.rules import BrokenLaw, ContractError, Rule
from tandem.compiled import form
from tests.support.broken_books import FAULTS as BROKEN
from tests.support.fault_cases import (
    KINDS,
    Case,
    Hung,
    Told,
    bounded,
    check_books,
    lie,
    random_case,
    tables,
)
from tests.support.faults import FAULTS, Fault

COUNT, QUICK, EACH = 3000, 300, 100
LIES_A_CASE = 5
TRAINS = ("training", "group", "shared")
WHERE: dict[Rule, tuple[str, ...]] = {  # kinds of replays in which a rule applies
    Rule.SHARE: ("prefix", "prefix", "prefix", "serving"),
    Rule.KV_CONTENTS: ("swap", "prefix", "playback"),
    Rule.COPY: ("swap", "serving", "training"),
    Rule.ADAPTER: ("adapters",),
    Rule.RECORD: ("adapters", "serving"),
    Rule.TIER: ("adapters", "adapters", "swap", "shared", "group"),
    Rule.TRAINING_ORDER: TRAINS,
    Rule.TRAINING_PLACES: TRAINS,
    Rule.TRAINING_CONTENTS: TRAINS,
    Rule.TRAINING_FREED: TRAINS,
    Rule.EXCHANGE: ("group",),
}
BY_RULE: dict[Rule, list[Fault]] = defaultdict(list)
for _fault in FAULTS.values():
    if _fault.rules:
        BY_RULE[_fault.rules[0]].append(_fault)
VERDICTS = ("refused", "by another rule", "meant nothing", "WRONG")


@dataclass
class Sheet:
    """Verdicts on all lies, by the rule that they break."""

    counts: dict[Rule, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[str] = field(default_factory=list)

    def note(self, case: Case, told: Told, honest: dict[str, Any]) -> None:
        """Judges one lie."""
        rule = told.fault.rules[0]
        verdict, why = judged(told, honest)
        self.counts[rule][verdict] += 1
        if verdict == "WRONG":
            self.wrong.append(f"{case}: {told.fault.name}: {why}")

    def done(self, rule: Rule) -> int:
        return self.counts[rule].total()


def judged(told: Told, honest: dict[str, Any]) -> tuple[str, str]:
    """The verdict on a lie, and the reason if it is wrong."""
    error, fault = told.error, told.fault
    if isinstance(error, ContractError):
        text = str(error)
        if not (error.policy and error.step is not None and f"(rule: {error.rule})" in text):
            return "WRONG", f"policy, step or rule is not named: {text}"
        if "\n" in text:
            return "WRONG", f"more than a line: {text}"
        if fault.is_written and "answers.py:" not in text:
            return "WRONG", f"the line that wrote is not named: {text}"
        if told.differs:
            return "WRONG", f"the books differ in {told.differs}: {text}"
        return ("refused" if error.rule in fault.rules else "by another rule"), ""
    if error is None:
        if tables(told.engine) == honest:
            return "meant nothing", ""
        return "WRONG", "accepted, with other tables"
    return "WRONG", f"{type(error).__name__}: {error}"


def lies(count: int, seed: int = 0) -> Sheet:
    """Runs `count` random replays with a lie in each, evenly over the rules."""
    rng, sheet, total = random.Random(seed), Sheet(), 0
    misses: Counter[str] = Counter()
    while total < count and sum(misses.values()) < 40 * count:
        rule = min(BY_RULE, key=lambda r: (sheet.done(r) + misses[r] / 60, rng.random()))
        kind = rng.choice(WHERE.get(rule, KINDS))
        case = random_case(rng.randrange(1 << 30), kind)
        engine = case.engine(case.policy())
        with bounded():
            engine.replay(case.work)
        honest: dict[str, Any] = {}
        for _ in range(LIES_A_CASE):
            fits = [r for r in BY_RULE if kind in WHERE.get(r, KINDS)]
            rule = min(fits, key=lambda r: (sheet.done(r) + misses[r] / 60, rng.random()))
            fault = rng.choice(BY_RULE[rule])
            told = lie(
                case, fault, rng.randrange(max(1, engine.asked * 3 // 4)), rng.getrandbits(30)
            )
            if not told.lies:
                misses[rule] += 1
                continue
            if told.error is None and not honest:
                honest = tables(engine)
            sheet.note(case, told, honest)
            total += 1
            if total == count:
                break
    return sheet


def legal(count: int, seed: int = 1) -> tuple[int, list[str]]:
    """Runs `count` legal replays; returns the number compared with and without fast-forward, and a
    line per failure."""
    rng, wrong, compared = random.Random(seed), list[str](), 0
    for number in range(count):
        case = random_case(rng.getrandbits(30), KINDS[number % len(KINDS)])
        try:
            with bounded():
                one = carried_out(case, None)
                if number % 2:
                    other = carried_out(case, not case.setting["fast_forward"])
                    compared += 1
                    if tables(one) != tables(other):
                        wrong.append(f"{case}: fast-forward gives other tables")
        except (Exception, Hung) as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    return compared, wrong


def carried_out(case: Case, fast_forward: bool | None) -> Any:
    engine = case.engine(case.policy(), fast_forward)
    engine.replay(case.work)
    check_books(engine)
    unfinished = [i for i, o in engine.recorder.outcomes.items() if o.status == "unfinished"]
    if unfinished or engine.state.jobs:
        raise BrokenLaw(f"requests {unfinished} are unfinished")
    return engine


def mutations() -> list[str]:
    """The faults of tests/support/broken_books.py that no check catches."""
    missed = list[str]()
    for name, fault in BROKEN.items():
        try:
            with bounded(60):
                told = fault()
        except (Exception, Hung) as error:
            told = ""
            name = f"{name}: {type(error).__name__}: {error}"
        print(f"  {name}: {told or 'NOT CAUGHT'}"[:160])
        if not told:
            missed.append(name)
    return missed


def table(sheet: Sheet) -> None:
    print(f"{'rule':20}" + "".join(f"{name:>17}" for name in ("lies", *VERDICTS)))
    for rule in Rule:
        counts = sheet.counts[rule]
        row = (counts.total(), *(counts[name] for name in VERDICTS))
        print(f"{rule:20}" + "".join(f"{n:17}" for n in row))


def main() -> int:
    words = sys.argv[1:]
    is_quick = "--quick" in words
    count = QUICK if is_quick else COUNT
    print(f"{form()}, {'without' if not __debug__ else 'with'} assertions")
    missed = mutations()
    if "--mutations" in words:
        share = len(BROKEN) - len(missed)
        print(f"broken_books_caught {share} faults {len(BROKEN)} {'fail' if missed else 'pass'}")
        return int(bool(missed))
    sheet = lies(count)
    table(sheet)
    for line in sheet.wrong[:40]:
        print(line[:400])
    compared, wrong = legal(count)
    print(
        f"{count - len(wrong)} of {count} legal replays finish, "
        f"{compared} with equal tables step by step"
    )
    for line in wrong[:40]:
        print(line[:400])
    few = [str(rule) for rule in Rule if sheet.done(rule) < (5 if is_quick else EACH)]
    if few:
        print(f"too few lies about {', '.join(few)}")
    total = sum(sheet.done(rule) for rule in Rule)
    bad = len(sheet.wrong) + len(wrong) + len(missed) + len(few)
    passed = not bad and total == count
    print(f"contract_faults_wrong {bad} replays 0 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
