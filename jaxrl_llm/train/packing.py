"""Whether the responses of a batch share rows, from the padding that they would leave."""

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.packing import plan_packing
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch

PACKING = ("auto", "always", "never")

# The share of the cells up to which packed rows are surely quicker, and how many must be spared to
# make up for compiling another shape.
_MOST, _LEAST_SAVED = 0.8, 4096


def pack_batch(batch: Batch, packing: str, *, model: Model) -> tuple[Batch, dict[str, float]]:
    """The batch in as few rows as its responses need, if that is worth it.

    It depends on the lengths alone, so that a resumed run packs as it did before.

    Args:
      batch: On the host, whole.
      packing: "auto" packs where at most 0.8 of the cells are left, these are fewer by 4,096 at
        least, and the model can tell the responses of a row apart; "always" whatever is saved;
        "never" leaves a row each.
      model: What is trained.

    Returns:
      The batch with its ``packing``, or as it is; and, by the names of metrics.jsonl,

      - ``padding``: share of the cells of responses, as the models get them, that hold no token.
      - ``packed``: how many cells they are, relative to a row each; 1 where nothing is packed.

    Raises:
      ValueError: If ``packing`` is unknown.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.packing import pack_batch
      >>> mask = np.arange(4) < np.array([[[4], [1], [2], [1]]])
      >>> batch = jr.recipes.Batch(
      ...     tokens=np.ones(mask.shape, int), mask=mask, rewards=np.zeros((1, 4)),
      ...     where=np.ones((1, 4), bool), prompt_tokens=np.ones((1, 2), int),
      ...     prompt_mask=np.ones((1, 2), bool))
      >>> model, _ = jr.testing.tiny_model()
      >>> batch, numbers = pack_batch(batch, "always", model=model)
      >>> batch.packing.members.tolist(), numbers
      ([[[0, 0, 0, 0], [2, 2, 1, 3]]], {'padding': 0.0, 'packed': 0.5})
    """
    checks.check_option("pack_batch", "packing", packing, PACKING)
    mask = np.asarray(batch.mask)
    worth = min(_MOST, 1 - _LEAST_SAVED / mask.size) if model.reads_segments else 0.0
    most = {"auto": worth, "always": 1.0, "never": 0.0}[packing]
    plan = plan_packing(mask, most=most) if most > 0 else None
    cells = mask.size if plan is None else plan.members.size
    # Up to the last kept token: what stands between is read.
    tokens = np.maximum.accumulate(mask[..., ::-1], axis=-1).sum()
    numbers = {"padding": float(1 - tokens / cells), "packed": cells / mask.size}
    return batch.replace(packing=plan), numbers


def check_reads_segments(function: str, model: Model) -> None:
    """Raises ValueError unless a model can tell the responses of a row apart."""
    if not model.reads_segments:
        raise ValueError(
            f'{function}: packing "always" needs a model whose reads_segments is True.'
        )
