"""The update of a batch: its step, and the parts that methods add to it."""
