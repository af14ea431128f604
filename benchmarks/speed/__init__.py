"""Claims on CPU time: of the simulator, the runtime, training, sweeps and the checks of plans.

May import every package of Tandem and tests.support.
"""
