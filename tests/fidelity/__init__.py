"""Tests of `tandem fidelity`: its protocol, its bars and its command."""
