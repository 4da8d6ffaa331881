"""transformers models whose experts live elsewhere. The only user of transformers; imports store and core."""
