"""Tests of runtime: executors, serving on torch, the meter, and the client of servers."""
