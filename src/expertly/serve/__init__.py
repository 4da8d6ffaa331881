"""An OpenAI-compatible server over one loaded model. Only the command line imports it."""
