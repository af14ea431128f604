"""Training jobs: the recipe, the text, and the tokens of each microbatch.

`job` is what a configuration names, `recipe` says how a job learns, `texts` reads and
tokenises documents, `text_store` keeps them, and `batches` packs them into sequences. This folder
imports the rest of `traces` and no other package of ours.
"""
