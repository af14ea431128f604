"""Time by machine: the real work of a plan in torch, and the executors that measure it.

serving/ and training/ hold the machines that compute, kernels/ the Triton kernels of serving,
executors/ what runs and times launches, measure/ the meters, probes and calibration, client/ the
replay against a foreign server. Imports engine, models and traces; never sim, policies, analysis
or tandem.
"""
