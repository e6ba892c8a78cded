"""Benchmarks: each is a module to run, prints one JSON line last, and measures peers in turn."""
