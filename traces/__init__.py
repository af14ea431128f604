"""What happens: requests, sessions, arrivals, training jobs and their text.

`serving/` has requests and where they come from, `training/` jobs, recipes and text to train on.
`importing` makes a normalised trace of a file, `store` keeps it on disk, `import_cache` makes none
twice, and the other modules read files. `samples/` ships with the project. The package may import
nothing else of ours, and never torch; `tokenizers`, `transformers` and `datasets` only where an
import needs them.
"""
