"""Corrections for data that another policy sampled: a slot of the Recipe, still without members.

A correction compares the proximal policy with what really sampled the tokens, a sampler of other
precision or older weights, and says how much each token counts and which are left out::

    def correction(old_logp, behavior_logp, mask, *, option=...) -> (weights, keep)

``old_logp``, ``behavior_logp`` and ``mask`` are ``[..., T]``. ``weights`` is float32 ``[..., T]``
without a gradient and multiplies the token loss; ``keep`` is bool ``[..., T]`` and narrows the
mask. Cells where ``mask`` is False are never read. With ``old_logp`` equal to ``behavior_logp``
every weight is 1 and ``keep`` equals ``mask``. Options are keyword-only and fixed with
:func:`jaxrl_llm.bind`.
"""

__all__: list[str] = []
