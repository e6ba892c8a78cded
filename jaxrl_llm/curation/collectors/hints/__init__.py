"""``hinted``: samples groups again with help, and the policies that decide how."""
