"""How many optimizer steps one batch of rollouts serves, and on which parts of it."""

from typing import NamedTuple

import jax

from jaxrl_llm.core.axes import Array
from jaxrl_llm.train.mesh import check_batch


class Passes(NamedTuple):
    """How one batch of P groups becomes optimizer steps.

    Attributes:
      epochs: Passes over the batch.
      minibatches: Optimizer steps of a pass, on disjoint parts of P / minibatches groups.
      microbatches: Parts of the whole batch that are in memory one after the other.
    """

    epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1

    @property
    def updates(self) -> int:
        """Optimizer steps of a batch."""
        return self.epochs * self.minibatches

    @property
    def accumulated(self) -> int:
        """Microbatches of a minibatch, none larger than those of the whole batch."""
        return -(-self.microbatches // self.minibatches)

    def divides(self, prompts: int, shards: int) -> bool:
        """Whether P groups divide into these minibatches and their microbatches, over the mesh."""
        each, left = divmod(prompts, self.minibatches)
        return not left and each % (self.accumulated * shards) == 0

    def check(self, function: str, prompts: int, shards: int) -> None:
        """Raises ValueError unless P groups divide into these parts and over the mesh."""
        check_batch(function, prompts, self.microbatches, shards)
        if self.minibatches > 1 and prompts % self.minibatches:
            raise ValueError(
                f"{function}: {prompts} prompts do not split into {self.minibatches} minibatches "
                "of whole groups."
            )
        if self.minibatches > 1 and not self.divides(prompts, shards):
            raise ValueError(
                f"{function}: a minibatch of {prompts // self.minibatches} prompts ({prompts} in "
                f"{self.minibatches} minibatches) does not split into {self.accumulated} "
                f"microbatch(es) over {shards} device(s), the mesh axes data x fsdp."
            )

    def order(self, key: Array, prompts: int) -> Array:
        """Which groups each optimizer step takes: int ``[epochs minibatches, P / minibatches]``."""
        keys = jax.random.split(key, self.epochs)
        rows = jax.vmap(lambda k: jax.random.permutation(k, prompts))(keys)
        return rows.reshape(self.updates, -1)
