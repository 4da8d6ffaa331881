"""Ids, geometry, plain-data messages and errors. Imports the standard library and NumPy only."""
