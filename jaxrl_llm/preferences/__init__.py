"""Losses of preferences: a better and a worse response to one prompt.

===  ==============================================================================================
dpo  the chosen response is likelier than the rejected one, against a reference
bco  the chosen response is good and the rejected one bad, one by one
mpo  both, and the likelihood of the chosen response
===  ==============================================================================================
"""

from jaxrl_llm.preferences.pairwise import bco, dpo, mpo

__all__ = ["bco", "dpo", "mpo"]
