"""Claims that predictions equal measurements: of serving, training, memory, and other engines.

`cases` and `training_cases` are shared by the scripts. May import every package of Tandem.
"""
