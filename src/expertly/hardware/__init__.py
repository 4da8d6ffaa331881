"""What `expertly doctor` measures of a machine, by the engine's own readers; imports `engine` and below."""
