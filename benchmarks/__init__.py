"""Scripts that prove claims: one script per claim, in folders by kind; `claims` runs them all.

`gpu_parts` runs the parts that need a GPU. May import every package of Tandem and tests.support;
no production package imports benchmarks.
"""
