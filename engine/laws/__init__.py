"""The laws of a replay as checkers that any test or run may call.

`check_replay` judges what was issued and when it ran; `check_policy` runs a policy through small
replays. May import contract, memory, results, traces and, in `check_policy`, loop.
"""
