"""Packs the responses of a batch into shared rows where that removes enough padding."""

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.packing import plan_packing
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch

PACKING = ("auto", "always", "never")

# Packed rows are used if they have at most this share of the cells and save at least so many, since
# another shape has to be compiled.
_MAX_SHARE, _MIN_SAVED = 0.8, 4096


def pack_batch(batch: Batch, packing: str, *, model: Model) -> tuple[Batch, dict[str, float]]:
    """The batch in as few rows as its responses need, if that saves enough.

    The choice depends on the lengths alone, so a resumed run packs as before.

    Args:
      batch: On the host, not sharded.
      packing: "auto" packs where at most 0.8 of the cells remain, at least 4,096 cells are saved,
        and the model can tell the responses of a row apart; "always" whatever is saved; "never"
        leaves one row for each response.
      model: The model that is trained.

    Returns:
      The batch with its ``packing``, or unchanged; and, by the names of metrics.jsonl,

      - ``padding``: share of the cells of responses that hold no token.
      - ``packed``: number of cells relative to one row for each response; 1 without packing.

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
    largest = min(_MAX_SHARE, 1 - _MIN_SAVED / mask.size) if model.reads_segments else 0.0
    most = {"auto": largest, "always": 1.0, "never": 0.0}[packing]
    plan = plan_packing(mask, most=most) if most > 0 else None
    cells = mask.size if plan is None else plan.members.size
    # Up to the last token of the mask: cells in between are read.
    tokens = np.maximum.accumulate(mask[..., ::-1], axis=-1).sum()
    numbers = {"padding": float(1 - tokens / cells), "packed": cells / mask.size}
    return batch.replace(packing=plan), numbers


def check_reads_segments(function: str, model: Model) -> None:
    """Raises ValueError unless a model can tell the responses of a row apart."""
    if not model.reads_segments:
        raise ValueError(
            f'{function}: packing "always" needs a model whose reads_segments is True.'
        )
