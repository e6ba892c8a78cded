"""Adapters of other packages' environments; each loads its package where it is used."""
