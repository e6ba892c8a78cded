"""Collectors that continue beginnings of responses: some fork, and some end early."""
