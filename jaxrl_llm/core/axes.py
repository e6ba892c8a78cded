"""The axis alphabet, written once; every docstring uses these letters.

======  ==========================================================================
P       prompts; the axis a batch is sharded over
G       rollouts of one prompt (a group); always the last axis of ``rewards``
T       response tokens; always the last axis of token arrays
Lp      prompt tokens
V       vocabulary
D       width of the model
======  ==========================================================================

Leading axes are free: ``[..., G]`` means "groups along the last axis, with any leading axes".
Masks are bool and True means keep. A float array of a mask's shape is called a weight, never a
mask.
"""

from typing import Any

import jax

Array = jax.Array
ArrayTree = Any
