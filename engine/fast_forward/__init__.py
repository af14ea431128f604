"""Plan reuse: which questions the policy is spared, and how many steps are issued at once.

The loop knows the base class PlanReuse and the class FastForward; policies know their Traits.
Results are those of asking at each step (law 15). The folder imports contract, memory, results and
loop.
"""
