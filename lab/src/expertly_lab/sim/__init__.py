"""The simulator: the engine's control plane on a virtual clock. Imports trace and what is below it, never torch."""
