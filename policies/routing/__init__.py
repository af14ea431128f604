"""Routers: which replica serves a request.

One file per named router. They may import engine.contract, and what other routers share.
"""
