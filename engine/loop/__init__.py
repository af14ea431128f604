"""The one loop of a run: admission, asking the policy, issuing its plans, completions.

The Engine wires the parts; each part takes the EngineState and callbacks. May import contract,
memory, results and traces; the Engine alone builds the FastForward of `engine.fast_forward`.
"""
