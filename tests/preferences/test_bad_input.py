"""Bad options and arrays raise one sentence that names function and argument."""

import jax
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import preferences

# Four rows of three pairs, scores with labels, and log-probabilities with their mask.
ROWS, S, Y = np.zeros((4, 3)), np.array([0.2, 0.4, 0.1]), np.array([1.0, 0.0, 0.5])
LOGP, MASK, STEPS = -np.ones((3, 4)), np.ones((3, 4), bool), np.zeros((3, 4), int)
GOOD = S > 0
# Two groups of two responses with three tokens.
X, V, K = -np.ones((2, 2, 3)), np.ones((2, 2)), np.ones((2, 2, 3), bool)
PAIRED, KEY = {"ref_logp": X}, jax.random.key(0)
NAMES = vars(preferences) | {"np": np} | globals()
BAD = r"""
ValueError:
dpo(ROWS[0], np.zeros(2), ROWS[0], ROWS[0])  # these must have the same
dpo(*ROWS, robust=True)  # robust=True has no effect with label_smoothing
dpo(*ROWS, likelihood=1.0)  # a mean over tokens needs chosen_lengths
dpo(*ROWS, likelihood=-1.0)  # likelihood must not be negative
dpo(*ROWS, label_smoothing=0.5)  # label_smoothing must be below 0.5
dpo(*ROWS, divergence="jsd")  # divergence must be one of .* Did you mean
dpo(*ROWS, margin=np.zeros(2))  # margin must have shape
ipo(*ROWS, alpha=0.5)  # alpha=0.5 has no effect with divergence='rever
ipo(*ROWS, per_token=True)  # a mean over tokens needs chosen_lengths
exo_pair(*ROWS, label_smoothing=0.0)  # label_smoothing must be above 0
discopop(*ROWS, tau=2.0)  # tau must be in \(0, 1\]; got 2
bco(*ROWS, beta=0.0)  # beta must be above 0; got 0
mpo(*ROWS, chosen_lengths=np.ones(2))  # chosen_lengths must have sh
mpo(*ROWS, chosen_lengths=np.ones(3), quality=-1.0)  # quality must not be negative; got -1
slic(*ROWS[:2], target_lengths=np.ones(3))  # target_lengths=.* has no effect without target_logp
lipo_lambda(S, Y[:2])  # these must have the same
pair_logistic(S, Y, reduce="men")  # reduce must be one of.*Did you mean 'mean'
pair_hinge(S, Y, margin=-1)  # margin must not be neg
plackett_luce(S, Y, top_m=0)  # top_m must be an integer
brain(S, S, S, Y, temperature=0)  # temperature must be above 0
bradley_terry(S, Y[:2])  # these must have the same shape
bradley_terry(S, Y, margin=-0.1)  # margin must not be negative
bradley_terry(S, Y, margin=Y[:2])  # margin must have shape
bradley_terry(S, Y, label_smoothing=0.5)  # label_smoothing must be below 0.5; got 0.5
desensitized_logp(LOGP, MASK, np.zeros(3), alpha=1.5)  # alpha must be
desensitized_logp(LOGP, MASK, np.zeros(2), alpha=0.5)  # other_lengths must have shape
alignment_weights(LOGP, LOGP[:2], MASK)  # 
kto(S, S, GOOD[:2], kl=0.0)  # these must have the same shape
kto(S, S, GOOD, kl=np.zeros(3))  # kl must have 0 axes
bco_unpaired(S, S, GOOD, desirable_weight=-1.0)  # desirable_weight must not be negative
p3o(S, S, Y, clip="v1")  # clip must be one of 'separate', 'joint'
p3o(S, S, Y, pairs="every")  # pairs must be one of
p3o(S, S, Y, eps=0.0)  # eps must be above 0
p3o(S, S, Y, max_ratio=0.5)  # max_ratio must be at least 1; got 0.5
p3o(S, S, Y, kl_coef=0.1)  # kl_coef=0.1 needs ref_logp; got None
paired(X, None, V, K, **PAIRED, loss=dpo, center=0.1)  # !.*center has no effect on dpo
paired(X, None, V, K, **PAIRED, loss=ipo, gold=True)  # !.*gold has no effect on ipo
paired(X, None, V, K, **PAIRED, loss=ipo, margins=np.zeros(2))  # !.*margins has no effect on ipo
paired(X, None, V, K, **PAIRED, max_alignment=1.0)  # !.*max_alignment=1.0 has no effect without al
paired(X, None, V, K, **PAIRED, alignment=V, max_alignment=0.0)  # !.*max_alignment must be above 0
paired(X, None, V, K, **PAIRED, excess=2.0)  # !.*excess must be in
paired(X, None, V[0], K, **PAIRED)  # advantages
running_center(beta=0.0)  # beta
inpo(*ROWS, S, S, eta=0.0)  # eta must be above 0
inpo(*ROWS, S, S[:2])  # rejected_previous_logp \(2,\)
inpo(*ROWS, S, S, preference=S[:2])  # preference must have shape \(3,\)
seppo_sign(S, S[:2])  # chosen_logp \(3,\)
mnpo(*ROWS, ROWS.T[:, :2], ROWS.T[:, :2], ratio=2.0)  # ratio must be in \[0, 1\]; got 2
mnpo(*ROWS, ROWS.T[:, :2], ROWS.T[:, :1])  # rejected_history_logp must have shape
sample_reference(KEY, 0)  # !.*count must be above 0
mixture_win_rates(np.eye(3), S, S, mixture=1.5)  # mixture must be
mixture_win_rates(np.eye(3)[:2], S, S)  # !.*probabilities must have shape
degree_logits(LOGP, classes=(4, 0))  # !.*classes must be below the 4 tokens
degree_logits(LOGP, classes=(-1, 0))  # !.*classes must be below the 4 tokens
degree_logits(LOGP, classes=(1, 1))  # !.*2 or more different tokens
degree_loss(np.zeros((3, 4)))  # logits must have shape
TypeError:
list_softmax(GOOD, Y)  # scores must be floating point
snis_weights(S, where=np.ones(3))  # where must be bool
soft_bradley_terry(S, Y, np.ones(3, int))  # probabilities must be floating point
process_reward(S, Y, Y)  # (marks|mask) must be bool
step_marks(Y, GOOD)  # step_ids must hold integers
kto(S, S, np.ones(3), kl=0.0)  # desirable must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
