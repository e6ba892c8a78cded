"""Workers that measure jaxrl_llm itself."""
