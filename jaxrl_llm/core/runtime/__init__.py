"""What touches the machine: processes of a run, interrupts, and imports made late."""
