"""Writes estimators/trl_preferences.*: TRL's losses of preferences.

The losses are methods of trainers, which run on an object that was never initialized. Of DPO and
KTO a model returns the log-probabilities of the case; of CPO, ORPO and TPO it returns logits of two
tokens, of which the first has them, so that the trainers make their own sums and means.
"""

import functools
from collections import defaultdict
from types import SimpleNamespace

import torch
from estimator_cases import written
from preference_cases import pair_cases, response_cases
from torch_arrays import array
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.experimental.tpo import TPOTrainer
from trl_peer import ACCELERATOR, VERSIONS

DPO = {
    "aux_loss_enabled": False,
    "ld_alpha": None,
    "precompute_ref_logps": True,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "loss_weights": [1.0],
    "beta": 0.3,
    "label_smoothing": 0.0,
    "use_weighting": False,
}
KTO = {
    "aux_loss_enabled": False,
    "precompute_ref_logps": True,
    "loss_type": "kto",
    "calculate_KL": True,
    "beta": 0.3,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}
FREE = {
    "aux_loss_enabled": False,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
    "padding_value": 0,
    "alpha": 0.0,
    "cpo_alpha": 1.0,
    "loss_type": "sigmoid",
    "simpo_gamma": 0.5,
    "beta": 0.3,
    "label_smoothing": 0.0,
    "tpo_alpha": 1.0,
    "tpo_l_gamma": 0.5,
}


def trainer(kind, **options):
    made = object.__new__(kind)
    vars(made).update(options)
    made.accelerator = ACCELERATOR
    made.model = SimpleNamespace(training=True)
    made._metrics = {"train": defaultdict(list)}
    made._total_train_tokens, made._tp_size = 0, 1
    return made


def flat(x):
    """Token arrays, the chosen first, as rows."""
    return torch.from_numpy(x.reshape(-1, x.shape[-1]))


def outputs_of(logp, log_sum_sq=None):
    one = torch.ones_like(logp)
    outputs = SimpleNamespace(log_probs=logp, entropy=one, mean_logits=one, is_top1=one.bool())
    outputs.log_sum_sq_probs = log_sum_sq
    return outputs


def with_prompt(mask):
    """A mask with a token of a prompt before it."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], dim=1)


def result(loss, logp, a):
    (gradient,) = torch.autograd.grad(loss, [logp])
    return {"loss": array(loss), "gradient": array(gradient).reshape(a["logp"].shape)}


def dpo(loss_type, tau=0.05, **options):
    loss_types = [loss_type] if isinstance(loss_type, str) else loss_type

    def compute(case, a):
        made = trainer(DPOTrainer, loss_types=loss_types, **(DPO | options))
        made.args = SimpleNamespace(discopop_tau=tau, gradient_checkpointing_kwargs=None)
        made.args.gradient_checkpointing, made.model.is_gradient_checkpointing = False, False
        mask = flat(a["mask"])
        logp = flat(a["logp"]).requires_grad_()
        ref = (flat(a["ref_logp"]) * mask).sum(1)
        chosen, rejected = ref.chunk(2)
        if options.get("ld_alpha") is not None:
            # Its sums are made where the reference is scored, and not of those that are known.
            refs = lambda **kwargs: outputs_of(flat(a["ref_logp"]) * mask)  # noqa: E731
            made.precompute_ref_logps, made.ref_model = False, refs
        # The reference's numbers stand for the logs of the sums of squares.
        log_sum_sq = flat(a["ref_logp"])
        ids = torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "attention_mask": ids,
            "completion_mask": with_prompt(mask),
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        }
        model = lambda **kwargs: outputs_of(logp * mask, log_sum_sq)  # noqa: E731
        return result(made._compute_loss(model, inputs, False), logp, a)

    return compute


def kto(**options):
    def compute(case, a):
        made = trainer(KTOTrainer, **(KTO | options))
        mask = flat(a["mask"])
        logp = flat(a["logp"]).requires_grad_()
        ids = torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long)
        batch = {"label": torch.from_numpy(a["desirable"])}
        for prefix, value in (("", 1), ("KL_", 2)):
            batch[prefix + "input_ids"] = value * ids
            batch[prefix + "attention_mask"] = ids
            batch[prefix + "completion_mask"] = with_prompt(mask)
        batch["ref_logps"] = (flat(a["ref_logp"]) * mask).sum(1)
        batch["ref_KL_logps"] = (flat(a["kl_ref_logp"]) * mask).sum(1)

        def model(input_ids, **kwargs):
            mismatched = int(input_ids[0, 0]) == 2
            return outputs_of((flat(a["kl_logp"]) if mismatched else logp) * mask)

        return result(made._compute_loss(model, batch, False), logp, a)

    return compute


def logits_of(logp, mask):
    """Logits ``[row, prompt and tokens, 2]`` of which token 0 has the log-probability."""
    logp = torch.where(mask, logp, torch.full_like(logp, -1.0))
    logits = torch.stack([logp, torch.log1p(-torch.exp(logp))], dim=-1)
    return torch.cat([logits, torch.zeros(len(logp), 1, 2)], dim=1)


def free(kind, **options):
    """CPO, SimPO and ORPO, whose batch has both sides by name."""

    def compute(case, a):
        made = trainer(kind, **(FREE | options))
        mask = flat(a["mask"])
        logp = flat(a["logp"]).requires_grad_()
        attention = torch.cat([torch.ones(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
        labels = torch.where(with_prompt(mask) == 1, 0, -100)
        batch = {}
        for name, rows in (("chosen", slice(0, 5)), ("rejected", slice(5, 10))):
            batch[f"{name}_input_ids"] = torch.zeros_like(attention[rows])
            batch[f"{name}_attention_mask"] = attention[rows]
            batch[f"{name}_labels"] = labels[rows]
        model = lambda *args, **kwargs: SimpleNamespace(logits=logits_of(logp, mask))  # noqa: E731
        loss, _ = made.get_batch_loss_metrics(model, batch)
        return result(loss, logp, a)

    return compute


def tpo(**options):
    """The gold response of a pair is the chosen one of the reference's arrays."""

    def compute(case, a):
        made = trainer(TPOTrainer, **(FREE | options))
        mask = torch.cat([flat(a["mask"]), torch.from_numpy(a["mask"][0])])
        logp = flat(a["logp"]).requires_grad_()
        every = torch.cat([logp, torch.from_numpy(a["ref_logp"][0])])
        # What TPO sums is not masked by it.
        every = torch.where(mask, every, torch.zeros_like(every))
        ids = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": with_prompt(mask)}
        model = lambda **kwargs: SimpleNamespace(logits=logits_of(every, mask))  # noqa: E731
        return result(made._compute_loss(model, inputs, False), logp, a)

    return compute


@written("trl_preferences", "trl", VERSIONS)
def main(writer):
    writer.inputs("pairs", pair_cases())
    writer.inputs("responses", response_cases())
    writer.each("DPOTrainer._compute_loss", dpo)
    writer.each("KTOTrainer._compute_loss", kto)
    writer.each("TPOTrainer._compute_loss", tpo)
    for kind in (CPOTrainer, ORPOTrainer):
        name = f"{kind.__name__}.get_batch_loss_metrics"
        writer.each(name, functools.partial(free, kind))
