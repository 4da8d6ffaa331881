"""Executes the scheduler's plans with threads, files, streams and slots. May import every room below it but `sim`."""
