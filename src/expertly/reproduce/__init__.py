"""The papers' experiments on traces: what they show beside what is found here. Imported by `cli` alone."""
