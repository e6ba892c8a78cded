"""Entries of a batch other than its tokens: rewards, fields of rows and episodes, stored data."""
