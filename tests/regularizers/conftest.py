"""Tests of this folder call the library as a step does."""

from cheap import one_program_a_call  # noqa: F401
