"""Collectors: which prompts a batch asks for, how often, and which groups it is made of."""
