"""The engine: many requests through a fixed number of slots."""
