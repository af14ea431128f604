"""The laws of a replay as checkers that any test or run may call.

`check_replay` judges what was issued and when it ran; `check_policy` runs a policy through small
replays. The folder imports contract, memory and results, and `check_policy` the loop.
"""
