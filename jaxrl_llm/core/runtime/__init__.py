"""Interfaces to the machine: processes, interrupts, the heap, and lazy imports."""
