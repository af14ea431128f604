"""Time by model: virtual executor, devices, cost models and their fitting. Never imports torch."""
