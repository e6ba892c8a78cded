"""``hinted``: groups that are asked for again with help, and the policies that say which."""
