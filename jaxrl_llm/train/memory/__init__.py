"""Bytes of a run on each device, before anything is allocated."""
