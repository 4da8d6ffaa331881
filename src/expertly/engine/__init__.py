"""Executes the control plane's plans with real threads, files, streams and slots. Imports models, control, store."""
