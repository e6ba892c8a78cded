"""Writes estimators/brain.*: the weights of gauravpandeyamu/BRAIn_experiments."""

import numpy as np
from paper_code import passage, peer

PATH = "gradient_estimators.py"


@peer("brain", "BRAIn", "gauravpandeyamu/BRAIn_experiments")
def main(root, writer):
    rng = np.random.default_rng(81)
    rows = {}
    for name, spread in (("near", 0.3), ("far", 3.0)):
        logp, ref, behavior = (-6.0 + spread * rng.normal(size=(3, 4, 5))).astype(np.float32)
        rewards = rng.normal(size=(4, 5)).astype(np.float32)
        rows[name] = {"logp": logp, "ref_logp": ref, "behavior_logp": behavior, "rewards": rewards}
    writer.inputs("samples", rows)

    def run(case, a):
        weights, posterior = [], []
        for logp, ref, behavior, r in zip(*(np.float64(x) for x in a.values()), strict=True):
            made = passage(
                root / PATH,
                "alpha = p_x / proposal_x",
                "grad = compute_gradients",
                after="def estimator_brain",
                p_x=np.exp(ref + r / 0.5),
                q_theta_x=np.exp(logp),
                proposal_x=np.exp(behavior),
            )
            weights.append(made["weights"])
            posterior.append(made["alpha_hat"])
        return {"weights": np.stack(weights), "posterior": np.stack(posterior)}

    writer.add("weights", run)
