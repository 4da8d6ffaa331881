"""Choosing a system for one model, machine and workload: searched in the simulator, verified on the engine."""
