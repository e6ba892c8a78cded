"""Collectors that go on from beginnings of responses: some fork, and some end early."""
