"""Which prompts are rolled out: what is believed of them, scores, draws, and their weights."""
