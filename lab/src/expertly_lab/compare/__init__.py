"""Systems side by side: the engine on this machine's clock, the simulator on its measured speeds, one report."""
