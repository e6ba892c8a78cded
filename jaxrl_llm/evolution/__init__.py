"""Evolution strategies over pytrees: noise from keys, shaped fitness, a gradient for optax.

A population is N members, by default pairs ``2k, 2k+1`` that move the parameters in opposite
directions. A member's noise is never stored: it is drawn again from the run's key, the path of the
leaf, the epoch and the id. An update is four steps::

    classes = jr.evolution.leaf_classes(params)                       # once
    delta = jr.evolution.model_delta(params, classes, key, epoch, members, sigma=1e-3)
    fitness = jr.evolution.zscore(scores)                             # of what the members did
    grads = jr.evolution.eggroll_grad(params, classes, key, epoch, fitness, sigma=1e-3)

====================================  ==============================================================
leaf_classes, leaf_table, moving      the noise class of each leaf, as a table, as a mask
leaf_key, antithetic                  the keys of the noise, and the sides of a pair
lowrank_noise, full_noise             the noise of some members for one leaf
eggroll_matmul, eggroll_embed         a layer and a table with a member's noise
perturb, model_delta                  a tree of one member; a population as a model's delta
graded, best_of                       scores: the ones that count; the best of several tries
zscore, mean_fitness,                 fitness: standardized, in groups, over questions
question_fitness
centered_ranks                        fitness: ranks from -1/2 to 1/2
pair_sign, pair_fitness               fitness: which side of a pair is better
eggroll_grad                          the update of low-rank noise, also by signs
baseline_fitness                      variant: against the unperturbed model
sparse_noise, sparse_matmul,          variant: noise at a few entries
sparse_grad
open_es_grad, es_qiu_grad, full_rank  evolution strategies of full rank
int8_table, int8_noise                integers: noise as slices of a table
egg_matmul, egg_embed, egg_vector,    integers: the layers of a network, with noise
egg_norm, egg_gru, saturate
egg_log_likelihood                    integers: the score of a token
egg_init, egg_noise, egg_scores,      integers: a recurrent language model
egg_evolve
egg_update, egg_step, egg_threshold,  integers: votes of pairs, and entries that move by 1
egg_alpha
pack_ternary, unpack_ternary          integers: votes as bytes
quantize_int8, quantized_step,        int8 weights of a float model
apply_quantized,
distillation_fitness
====================================  ==============================================================

Arguments that the functions share, and what they raise:

===========================  =======================================================================
``params``                   pytree of arrays, or of their shapes
``classes``                  pytree of class names in the form of ``params``, by `leaf_classes`
``key``                      a typed key: of the run, or (`leaf_key`) of the leaf of a function that
                             takes a ``shape``
``epoch``                    int ``[]``, updates made so far
``members``, ``member``      int ``[...]``, ids from 0
``fitness``                  shaped, floating point and finite: ``[N]``, or ``[P, G]``, groups of
                             members in order
``shape``                    of the leaf, ``[a, b]`` of a matrix, ``[E, a, b]`` of a stack of them
``sigma``                    scale of the noise: 0 for the plain model, above 0 in an update
``rank``                     r of the noise of matrices, at most the smaller side of each
``dtype``                    of the noise. It changes the draws, not only their storage
``noise_reuse``              epochs that share a draw: 1 for a new draw per epoch, 0 for one draw
``pairs``                    whether members 2k and 2k+1 share draw k, with opposite signs
``baseline``                 number of first members without noise; even with pairs
``draws``                    int, the draw of each pair (of each member without pairs); None for
                             0, 1, 2, ...
``where``                    bool of the shape of ``fitness``, the members that were graded, by
                             `graded`; the others have weight 0 and are no part of N. None for all
``chunk``                    number of draws in memory at a time; it does not change the result
``x``                        activations ``[..., T, in]``, axes of members in front: ``[N, T, in]``
``tokens``                   int ``[..., T]``, axes of members in front
``perturbation``             the noise of ``w`` of the shape of ``w``; None for the plain layer
``table``                    integers: int8 ``[size]``, by `int8_table`
``signs``                    integers: int ``[N / 2]``, which side of each pair was better, by
                             `pair_sign`
``threshold``                integers: int ``[]``, by `egg_threshold`
``shift``                    integers: the noise has scale ``2^-shift``
===========================  =======================================================================

An update draws the noise again, so ``sigma``, ``rank``, ``dtype``, ``noise_reuse``, ``pairs`` and
``shift`` must be the same as for the members. Every function raises TypeError for a wrong dtype, a
``key`` that is not one typed key, and a count that is not an integer; ValueError for shapes that
disagree, ``classes`` of another form, an odd number of members with ``pairs``, and an option that
is unknown or out of its range. Its ``Raises`` lists only further errors.
"""

from jaxrl_llm.evolution.fitness import (
    best_of,
    centered_ranks,
    graded,
    mean_fitness,
    pair_fitness,
    pair_sign,
    question_fitness,
    zscore,
)
from jaxrl_llm.evolution.forward import eggroll_embed, eggroll_matmul, model_delta, perturb
from jaxrl_llm.evolution.gradient import eggroll_grad
from jaxrl_llm.evolution.integer.layers import (
    egg_embed,
    egg_gru,
    egg_log_likelihood,
    egg_matmul,
    egg_norm,
    egg_vector,
    int8_noise,
    int8_table,
    saturate,
)
from jaxrl_llm.evolution.integer.model import egg_evolve, egg_init, egg_noise, egg_scores
from jaxrl_llm.evolution.integer.update import (
    egg_alpha,
    egg_step,
    egg_threshold,
    egg_update,
    pack_ternary,
    unpack_ternary,
)
from jaxrl_llm.evolution.leaves import leaf_classes, leaf_table, moving
from jaxrl_llm.evolution.noise import (
    Full,
    LowRank,
    antithetic,
    full_noise,
    leaf_key,
    lowrank_noise,
)
from jaxrl_llm.evolution.quantized import (
    apply_quantized,
    distillation_fitness,
    quantize_int8,
    quantized_step,
)
from jaxrl_llm.evolution.reference import es_qiu_grad, full_rank, open_es_grad
from jaxrl_llm.evolution.variants import (
    Sparse,
    baseline_fitness,
    sparse_grad,
    sparse_matmul,
    sparse_noise,
)

__all__ = [
    "Full",
    "LowRank",
    "Sparse",
    "antithetic",
    "apply_quantized",
    "baseline_fitness",
    "best_of",
    "centered_ranks",
    "distillation_fitness",
    "egg_alpha",
    "egg_embed",
    "egg_evolve",
    "egg_gru",
    "egg_init",
    "egg_log_likelihood",
    "egg_matmul",
    "egg_noise",
    "egg_norm",
    "egg_scores",
    "egg_step",
    "egg_threshold",
    "egg_update",
    "egg_vector",
    "eggroll_embed",
    "eggroll_grad",
    "eggroll_matmul",
    "es_qiu_grad",
    "full_noise",
    "full_rank",
    "graded",
    "int8_noise",
    "int8_table",
    "leaf_classes",
    "leaf_key",
    "leaf_table",
    "lowrank_noise",
    "mean_fitness",
    "model_delta",
    "moving",
    "open_es_grad",
    "pack_ternary",
    "pair_fitness",
    "pair_sign",
    "perturb",
    "quantize_int8",
    "quantized_step",
    "question_fitness",
    "saturate",
    "sparse_grad",
    "sparse_matmul",
    "sparse_noise",
    "unpack_ternary",
    "zscore",
]
