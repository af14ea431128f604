"""Claims that results are right: by theory, golden counts, `generate`, faults and flipped bits.

May import every package of Tandem and tests.support.
"""
