"""Claims on the largest model that trains, on this CPU and in PatrickStar's published tables.

May import every package of Tandem.
"""
