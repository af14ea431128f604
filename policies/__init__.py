"""The research: policies that schedule, place and move what the engine runs.

A policy is a pure function of what it is shown: no torch, no simpy, no clock, no configuration
keys. `composed` joins a scheduling and a memory policy into one. The folders hold the schedulings
of serving (`scheduling`), memory policies for KV (`kv`), offloading of training (`training`), its
layouts (`planners`), routers between replicas (`routing`), and serving and training at once
(`sharing`). Policies may import engine.contract, models, traces and, each in one module,
engine.memory.dry_run (`composed`) and engine.results.plan_log (`recorded`); never the loop.
"""
