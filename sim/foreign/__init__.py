"""Cost models on tables of other projects: Vidur, AIConfigurator and LLMServingSim.

May import engine.contract, models, sim.cost and sim.devices; never torch.
"""
