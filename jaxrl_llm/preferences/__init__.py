"""Losses of preferences: a better and a worse response to one prompt.

==============  ===================================================================================
dpo             the chosen response is likelier than the rejected one, against a reference
bco             the chosen response is good and the rejected one bad, one by one
mpo             both, and the likelihood of the chosen response
paired          any of them as a surrogate: of each group, the best rollouts against the worst
running_center  the mean implicit reward of all pairs so far
==============  ===================================================================================
"""

from jaxrl_llm.preferences.groups import RunningCenter, paired, running_center
from jaxrl_llm.preferences.pairwise import bco, dpo, mpo

__all__ = ["RunningCenter", "bco", "dpo", "mpo", "paired", "running_center"]
