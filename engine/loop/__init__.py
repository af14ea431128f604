"""The one loop of a run: admission, asking the policy, issuing its plans, completions.

The Engine wires the parts; each part takes the EngineState and callbacks. The folder imports
contract, memory and results, `laws.check_replay` for watched runs, and of fast-forward one module,
`fast_forward.fast_forward`.
"""
