"""Claims that need a GPU, each named gpu_*; without one a script prints so and ends with 0.

May import every package of Tandem.
"""
