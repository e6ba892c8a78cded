"""What the library holds, as data: it feeds the command line, the README's table and the docs."""

import dataclasses
import inspect
from collections.abc import Callable

from jaxrl_llm.core import checks
from jaxrl_llm.recipes import presets
from jaxrl_llm.recipes.recipe import Recipe

# A preset enters the battery of jaxrl_llm.testing by standing here.
PRESETS: dict[str, Callable[..., Recipe]] = {
    "grpo": presets.grpo,
    "dr_grpo": presets.dr_grpo,
    "rloo": presets.rloo,
    "dapo": presets.dapo,
    "gspo": presets.gspo,
    "sapo": presets.sapo,
    "cispo": presets.cispo,
}


def preset(name: str, *, length: float) -> Recipe:
    """A preset by its name alone, as a command line gives it.

    Args:
      name: Key in ``PRESETS``.
      length: The generation budget in tokens, for the presets that need one (those with a
        parameter of this name); the others have no use for it.

    Returns:
      A Recipe with the preset's defaults.

    Raises:
      ValueError: If there is no such preset, with the nearest one.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.preset("dr_grpo", length=16).weights
      fixed_length(length=16)
    """
    checks.check_option("preset", "name", name, PRESETS)
    make = PRESETS[name]
    return make(length=length) if "length" in inspect.signature(make).parameters else make()


KINDS = ("advantage", "surrogate", "regularizer", "aggregate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the catalog.

    Attributes:
      key: Short key; the public name of the method.
      title: What the paper calls it.
      arxiv: arXiv id, or "" where there is none.
      kind: One of ``KINDS``: the slot it fills.
      functions: Public functions, as paths below ``jaxrl_llm``.
      preset: Key in ``PRESETS``, or None.
      verified_against: What its numbers were compared with.
      confidence: CODE (formula read in released code), PAPER, NOTES or ABSTRACT.
    """

    key: str
    title: str
    arxiv: str
    kind: str
    functions: tuple[str, ...]
    preset: str | None = None
    verified_against: str
    confidence: str = "CODE"


_NUMPY = "own float64 NumPy, worked numbers"

CATALOG: tuple[Method, ...] = (
    Method(
        key="grpo",
        title="Group relative policy optimization",
        arxiv="2402.03300",
        kind="advantage",
        functions=("advantages.grpo",),
        preset="grpo",
        verified_against=_NUMPY,
    ),
    Method(
        key="dr_grpo",
        title="GRPO without its two biased divisions",
        arxiv="2503.20783",
        kind="advantage",
        functions=("advantages.dr_grpo",),
        preset="dr_grpo",
        verified_against=_NUMPY,
    ),
    Method(
        key="rloo",
        title="REINFORCE leave-one-out",
        arxiv="2402.14740",
        kind="advantage",
        functions=("advantages.rloo",),
        preset="rloo",
        verified_against=_NUMPY,
    ),
    Method(
        key="reinforce_pp_baseline",
        title="REINFORCE++ with a group baseline",
        arxiv="2501.03262",
        kind="advantage",
        functions=("advantages.reinforce_pp_baseline",),
        verified_against=_NUMPY,
    ),
    Method(
        key="reinforce",
        title="Policy gradient (REINFORCE)",
        arxiv="",
        kind="surrogate",
        functions=("surrogates.reinforce",),
        verified_against=_NUMPY,
    ),
    Method(
        key="ppo_clip",
        title="PPO's clipped ratio",
        arxiv="1707.06347",
        kind="surrogate",
        functions=("surrogates.ppo_clip",),
        verified_against=_NUMPY,
    ),
    Method(
        key="ppo_dual_clip",
        title="PPO with a bound on the loss (option dual_clip)",
        arxiv="1912.09729",
        kind="surrogate",
        functions=("surrogates.ppo_clip",),
        verified_against=_NUMPY,
    ),
    Method(
        key="dapo_clip",
        title="DAPO, clip higher",
        arxiv="2503.14476",
        kind="surrogate",
        functions=("surrogates.dapo_clip",),
        preset="dapo",
        verified_against=_NUMPY,
    ),
    Method(
        key="gspo",
        title="Group sequence policy optimization",
        arxiv="2507.18071",
        kind="surrogate",
        functions=("surrogates.gspo", "surrogates.sequence_ratio"),
        preset="gspo",
        verified_against=_NUMPY,
    ),
    Method(
        key="gspo_token",
        title="GSPO with token advantages",
        arxiv="2507.18071",
        kind="surrogate",
        functions=("surrogates.gspo_token",),
        verified_against=_NUMPY,
    ),
    Method(
        key="sapo",
        title="Soft adaptive policy optimization (Qwen)",
        arxiv="2511.20347",
        kind="surrogate",
        functions=("surrogates.sapo",),
        preset="sapo",
        verified_against=_NUMPY,
    ),
    Method(
        key="cispo",
        title="Clipped importance-weighted policy gradient (MiniMax-M1)",
        arxiv="2506.13585",
        kind="surrogate",
        functions=("surrogates.cispo", "surrogates.cispo_bounds"),
        preset="cispo",
        verified_against=_NUMPY,
    ),
    Method(
        key="kl_estimators",
        title="KL to a reference: k1, k2, k3, abs, straight-through, ratio-corrected",
        arxiv="",
        kind="regularizer",
        functions=(
            "regularizers.k1",
            "regularizers.k2",
            "regularizers.k3",
            "regularizers.kl_token",
            "regularizers.kl_to_reference",
            "regularizers.kl_unbiased",
        ),
        verified_against=_NUMPY,
    ),
    Method(
        key="entropy_bonus",
        title="Entropy bonus",
        arxiv="",
        kind="regularizer",
        functions=(
            "regularizers.entropy_bonus",
            "regularizers.entropy_controller",
            "regularizers.entropy_from_logits",
        ),
        verified_against=_NUMPY,
    ),
    Method(
        key="aggregate",
        title="Loss aggregation, all modes",
        arxiv="",
        kind="aggregate",
        functions=(
            "aggregate.token_mean",
            "aggregate.sequence_mean",
            "aggregate.sequence_sum",
            "aggregate.sequence_sum_norm",
            "aggregate.fixed_length",
            "aggregate.weighted_sum",
        ),
        verified_against=_NUMPY,
    ),
)


def rows() -> list[dict]:
    """The catalog as plain dictionaries, ready for ``json.dumps``."""
    return [dataclasses.asdict(method) for method in CATALOG]


def as_table(*, style: str = "text") -> str:
    """The catalog as a table for people.

    Args:
      style: "text" for aligned columns, "markdown" for the README.

    Returns:
      Lines without a final newline.

    Raises:
      ValueError: If ``style`` is unknown.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.as_table().splitlines()[1].split()[:4]
      ['grpo', 'advantage', 'grpo', '2402.03300']
    """
    checks.check_option("as_table", "style", style, ("text", "markdown"))
    header = ("method", "kind", "preset", "paper", "verified against", "title")
    lines = [(m.key, m.kind, m.preset or "", m.arxiv, m.verified_against, m.title) for m in CATALOG]
    if style == "markdown":
        table = [header, ("---",) * len(header)]
        for key, kind, preset, arxiv, *rest in lines:
            link = f"[{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""
            table.append((f"`{key}`", kind, f"`{preset}`" if preset else "", link, *rest))
        return "\n".join(f"| {' | '.join(row)} |" for row in table)
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *lines)
    )
