"""Claims that predictions equal measurements: of serving, training, memory, and other engines.

`cases` and `training_cases` are shared by the scripts, `conf` holds a model as a user would add it.
May import every package of Tandem.
"""
