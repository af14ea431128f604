"""Ways to lie to the engine: one change to a legal plan or to the view each, by topic.

`FAULTS` has all of them once this package is imported.
"""

from tests.support.faults import answers, jobs, kv, places, training
from tests.support.faults.lying import FAULTS, Fault, Liar, fault

__all__ = ["FAULTS", "Fault", "Liar", "answers", "fault", "jobs", "kv", "places", "training"]
