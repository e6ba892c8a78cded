"""Models beside the policy, and how each scores a batch."""
