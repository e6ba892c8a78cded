"""Trees of latents: trajectories of a flow policy that share their first steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core import checks


class FlowTree(NamedTuple):
    """The latents of one prompt as a tree, in order of depth; NumPy, since it is static.

    Attributes:
      parents: ``[N]`` int32; -1 for the root.
      depth: ``[N]`` int32, how many steps led to a node; 0 for the root.
    """

    parents: np.ndarray
    depth: np.ndarray


def flow_tree(steps: int, splits: Sequence[int], *, children: int = 2) -> FlowTree:
    """A tree of latents that share their first steps and split at some later steps.

    At a step in ``splits`` every latent has several successors, stored next to each other; at other
    steps it has one. With a single split at step 0 it is a group of independent trajectories.

    Args:
      steps: How many steps of denoising, at least 1.
      splits: Steps at which latents split, each from 0 to ``steps - 1``, ascending.
      children: Successors of each latent at a split, at least 2.

    Returns:
      A :class:`FlowTree`; its last ``children ** len(splits)`` nodes are the samples.

    Raises:
      ValueError: If a count is no integer above 0, or ``splits`` is out of range or order.

    Example:
      >>> import jaxrl_llm as jr
      >>> tree = jr.diffusion.flow_tree(2, (0,))
      >>> tree.parents.tolist(), tree.depth.tolist()
      ([-1, 0, 0, 1, 2], [0, 1, 1, 2, 2])

    References:
      Li et al., BranchGRPO (arXiv:2509.06040): 20 steps, splits at 0, 3, 6 and 9.
    """
    function = "flow_tree"
    checks.check_count(function, steps=steps, children=children)
    if children < 2:
        raise ValueError(f"{function}: children must be at least 2; got {children}.")
    splits = tuple(splits)
    if list(splits) != sorted(set(splits)) or any(not 0 <= s < steps for s in splits):
        raise ValueError(
            f"{function}: splits must be ascending steps from 0 to {steps - 1}; got {splits}."
        )
    parents, depth, level = [np.array([-1])], [np.array([0])], np.array([0])
    for step in range(steps):
        above = np.repeat(level, children if step in splits else 1)
        level = level[-1] + 1 + np.arange(len(above))
        parents.append(above)
        depth.append(np.full(len(above), step + 1))
    return FlowTree(*(np.concatenate(x).astype(np.int32) for x in (parents, depth)))
