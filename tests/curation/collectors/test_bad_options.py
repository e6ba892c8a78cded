"""Options that no collector can have raise one sentence that names function and argument."""

import jax
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm.curation.collectors.protocol import sized
from jaxrl_llm.preferences import degrade_mask

NAMES = {
    **{name: getattr(curation, name) for name in curation.__all__},
    "jr": jr,
    "sized": sized,
    "degrade_mask": degrade_mask,
    "KEY": jax.random.key(0),
    "SIZES": {"group_size": 6, "max_new_tokens": 8},
    "TIERS": jr.bind(curation.tier_messages, template="{question}: {hint}"),
    "HINTS": curation.hint_levels(curation.tier_messages),
}
BAD = r"""
ValueError:
branched().observe((), Collection(1, 4))  # !.*needs the sizes of a run
branched(branches=1)  # branches must be at least 2
branched(branches=None)  # branches=None takes a number of splits
branched(splits=(2, 4), segment=3)  # segment=3 has no effect with the places of the splits
branched(splits=(3, 3))  # splits must rise
branched(splits=2, branches=(2, 2, 2))  # branches must have one number for each split
budgeted(())  # must ascend from at least 1; got \(\)
budgeted((0, 2))  # must ascend from at least 1
budgeted((1,), source=HINTS)  # sends messages of its own, which those of budgeted would replace
budgeted((1,), template="{prompt}")  # must have {prompt}
budgeted((4, 2))  # must ascend from at least 1
degraded_pairs(degrade_mask, degrees=1)  # degrees must be at least 2; got 1
demonstrations(least_sampled=0)  # least_sampled must be
demonstrations(probe="answer")  # probe='answer' has no effect
demonstrations(when="failed", least_sampled=2)  # least_sampled=2 has no effect with when='failed'
downsampled(len, oversample=0)  # oversample must be an integer above 0; got 0
entropy_branched().observe((), Collection(1, 4))  # !.*needs the sizes of a run
examples_in_prompt(count=0)  # count must be an integer above 0
experienced(capacity=0)  # capacity
experienced(length=0)  # length
experienced(limit=0)  # limit
experienced(source=HINTS)  # which those of experienced would replace
few_shot_pairs(user="chosen")  # columns must have names that differ
forked(segment_forks, rounds=2, segment=(3,))  # segment must have 2 rising lengths, one a round
forked(segment_forks, rounds=2, segment=2, branches=(3,))  # branches must be one number, or 2
forked(top_entropy_forks, branches=0)  # branches must be above 0
hint_levels(TIERS, low=0.5)  # low must not be above high
hint_share(low=0.9, high=0.1)  # low must not be above high
judged(judges=0.5, refines=0.5)  # judges \+ refines must be below 1; got 0.5 \+ 0.5
judged(judges=1 - 0.9, refines=0.9)  # judges [+] refines must be below 1; got 0.1 [+] 0.9
ladder(TIERS, plain=-1)  # plain
lookahead(ages=())  # ages must name at least one
lookahead(ages=(0,))  # ages.0. must be above 0
lookahead(max_distance=None)  # one of the three rules must be on
lookahead(max_gap=2.0)  # max_gap must be in \[0, 1\]
lookahead(starts=(0, 5))  # !tree_rollouts: starts must rise and match shares
mixed((in_order(), 0))  # share
mixed()  # at least one part
offline_lists(1)  # size must be at least 2; got 1
offline_pairs(chosen="text", rejected="text")  # columns must have names that differ
paraphrased().check_data([{"text": "q"}])  # !.*prompt 'q' has None in its column 'paraphrases'
paraphrased(source=HINTS)  # source hint_levels\(
parse_operations("a", {}, limit=0)  # limit
pooled(capacity=0)  # capacity
pooled(low=0)  # low
pooled(low=3, high=2)  # high must not be below low; got 2 and 3
pooled(max_accuracy=0.0)  # max_accuracy
pooled(threshold=0.0)  # threshold
quality_survivors(share=0.0)  # share
refill(informative_groups, source=experienced())  # source must ask for each group once
refill(informative_groups, source=pooled())  # source must ask for each group once
replayed(capacity=0, share=0.5)  # capacity must be an integer above 0; got 0\.
replayed(capacity=2, share=0.5, start=2, until=1)  # until must be above start 2; got 1
replayed(capacity=4)  # give one of share and replace; got None and None\.
replayed(capacity=4, replace=len, draw="each")  # draw has no effect with replace\.
replayed(capacity=4, share=0.5).init(10)  # !.*unknown before for_run
replayed(capacity=4, share=0.5, evict="lowest")  # evict='lowest' needs a score\.
replayed(capacity=4, share=0.5, until=0)  # until must be above 0
replayed(capacity=4, share=1.0)  # share must be above 0 and below 1; got 1\.0\.
rollout_gdro_memory(arms=(4, 2))  # arms must be integers above 0 in ascending order
scaffold(TIERS, after="hints")  # after
seeded_message(threshold=2)  # threshold must be in \[-1, 1\]; got 2
self_hints(question="{question} {solution} {x}")  # may have the fields
self_hints(template="{question}")  # has no {hint}
shared_folder("x", node="")  # node must have 1 to 64 letters
shared_folder("x", node="a", keep=0)  # keep
shared_folder("x", node="a.b")  # node must have 1 to 64 letters
shared_folder("x", node="a/b")  # node must have 1 to 64 letters
shared_folder("x", node=3)  # node must have 1 to 64 letters
sized(branched(splits=4), **SIZES)  # !branched.*a tree has 16 leaves, more than a group of 6
sized(branched(splits=9), group_size=4096, max_new_tokens=8)  # !branched.*8 tokens cannot split
sized(entropy_branched(first=7), **SIZES)  # !entropy_branched.*first must be at most a group of 6
sized(entropy_branched(segment=8), **SIZES)  # !entropy_branched.*segment must be below the 8 tokens
sized(forked(top_entropy_forks), group_size=4, max_new_tokens=8)  # !forked.*a tree has 5 leaves
sized(pooled(low=7), **SIZES)  # !pooled.*low is above the 6 rollouts of a group
sized(pruned(len, limit=8), **SIZES)  # !pruned.*limit must be below the 8 tokens of a response
staged(())  # !stage_mask: boundaries must be increasing
targeted(every=0)  # every
targeted(references=0)  # references
targeted(target=1.5)  # target
targeted(temperature=0.0)  # temperature
valued(line_starts, rollouts=0)  # rollouts must be above 0
valued(line_starts, source=judged())  # source must ask for each group once
TypeError:
budgeted((1.5,))  # budgets must be integers
degraded_pairs(0.5)  # remove must be a function
downsampled(3)  # rule must be a function; got 3
downsampled(first_rollouts, regrade=3)  # regrade must be a function; got 3
experienced(message=3)  # message must be a function
experienced(review=3)  # review must be a function
few_shot_pairs(shots=1.5)  # shots must be an integer
forked(3)  # rule must be a function; got 3
forked(top_entropy_forks, forks=1.5)  # forks must be an integer; got 1.5
hinted(informative_groups)  # policy must be a policy
inpainted(0.5, jr.diffusion.igpo_replace)  # hold must be a function
judged(judge="x")  # judge must be a function; got 'x'
ladder("hints")  # messages must be a function
lookahead(segment=1.5)  # segment must be an integer; got 1.5
mixed(in_order())  # a collector and its share
offline_lists(2.5)  # size must be an integer
paraphrased(source="x")  # source must be a collector
predicted(len, len, gate=3)  # gate must be a function; got 3
pruned(3)  # rule must be a function or a SurvivalRule; got 3
replayed(capacity=4, share=0.5, store=3)  # store must be a function; got 3
shared("here")  # swarm must have put and get; got 'here'
shared_folder(3, node="a")  # path must be a string
targeted(embed=3)  # embed must be a function
targeted(predict=3)  # predict must be a function
valued(3)  # rule must be a function
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_options(error, call, message):
    raises(error, call, message, NAMES)
