"""Traces, replays, faults and stand-ins that several tests use. Holds no test."""
