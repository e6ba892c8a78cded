"""Selection of prompts: beliefs about success rates, scores, draws, and weights."""
