"""What `expertly doctor` measures of a machine."""
