"""An OpenAI-compatible server over one loaded model. Needs the extra `serve`."""
