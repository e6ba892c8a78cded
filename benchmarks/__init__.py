"""Benchmarks: each is a module to run, prints one JSON line last, and measures each peer in turn with ours."""
