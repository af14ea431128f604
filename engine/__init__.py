"""The shared machine: what simulation and measurement replay a trace with, line for line alike.

`contract` is what a policy author reads; `memory` keeps the books; `loop` asks the policy, books
and issues its plans; `fast_forward` spares questions and issues many steps at once; `results` are
the tables of a run; `laws` check policies and finished replays. The package may import models and
traces; never torch, nor a package above it (policies, sim, runtime, tandem).
"""
