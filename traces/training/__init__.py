"""Training jobs: the recipe, the text, and the tokens of each microbatch.

`job` is what a configuration names, `recipe` says how a job learns, `texts` reads and
tokenises documents, `text_store` keeps them, and `batches` packs them into sequences. May import
the modules of `traces` and `traces.serving`; no other package of ours.
"""
