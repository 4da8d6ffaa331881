"""What will be used again soon, learned from a model's own routing while it runs. Pure; may import core."""
