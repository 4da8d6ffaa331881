"""An OpenAI-compatible server over one loaded model. Only the command line imports it; torch is used by `sampling` and
what loads the model, FastAPI and uvicorn by `app` and `server`.
"""
