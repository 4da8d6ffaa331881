"""Choosing a system for one model, machine and workload: searched in the simulator, verified on the engine. Imports
both; `engine` reads what was chosen through `choices`. Only `cli` imports it.
"""
