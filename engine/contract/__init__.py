"""What a policy author reads: View, Plan, Policy with its Traits, Job, Layout, and their rules.

Here are also the seams that a backend fills (Executor, Store, Meter), the names of memory regions,
the footprint of a training launch, and the checks of a plan before it is booked. May import models
and traces; memory, loop and the other folders of engine import it.
"""
