"""The books: which bytes each place holds, which pages are free, and what an operation waits for.

The ledger books whole plans in issue order over a page pool and a scoreboard. A dry run tries a
plan without booking it, for the ledger itself and for the plan builder that memory policies write
with. May import contract, results and traces.
"""
