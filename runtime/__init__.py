"""Time by machine: the real work of a plan in torch, and the executors that measure it.

serving/ and training/ hold the machines that compute, kernels/ the Triton kernels of serving,
executors/ what runs and times launches, measure/ the meters, probes and calibration, client/ the
replay against a foreign server. May import engine.contract, models, traces and, for calibration,
engine.results; never the loop, sim, policies, analysis or tandem.
"""
