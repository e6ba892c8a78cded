"""What touches the machine: processes, interrupts, the heap, and imports made late."""
