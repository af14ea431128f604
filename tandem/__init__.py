"""The front door: command line, experiment wiring, sweeps. Alone imports both sim and runtime."""
