"""Workers that run in the Python of `--peer-python`; nothing here imports jaxrl_llm."""
