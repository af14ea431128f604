"""The research: scheduling and memory policies. Pure Python: no torch, no simpy, no clock."""
