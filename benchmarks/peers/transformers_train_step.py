"""One GRPO step as a plain torch loop: forward, token log-probabilities, clipped loss, AdamW."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.worker import Measured, cpu_name, serve


def token_logps(model, tokens: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the responses; logits are made for their positions alone."""
    length = responses.shape[1]
    output = model(tokens, use_cache=False, logits_to_keep=length + 1)
    logits = output.logits[:, :-1].float()
    chosen = logits.gather(-1, responses[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)


def setup(
    workload: dict, dtype: torch.dtype = torch.float32, *, autocast: bool = False
) -> Measured:
    """Load the model for training, with gradient checkpointing where the workload says so.

    Args:
        workload: What is run.
        dtype: Of weights, gradients and the optimizer's state.
        autocast: Whether products are in bfloat16 beside them.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(workload["folder"], dtype=dtype)
    model = model.to(device).train()
    if workload["remat"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=workload["learning_rate"], weight_decay=workload["weight_decay"]
    )
    prompts = torch.tensor(workload["prompt_ids"], device=device)
    prompts = prompts.repeat_interleave(workload["rollouts"], 0)
    responses = torch.tensor(workload["response_ids"], device=device).flatten(0, 1)
    advantages = torch.tensor(workload["advantages"], device=device).flatten()[:, None]
    tokens = torch.cat([prompts, responses], 1)
    norms: list[float] = []

    def run(seed: int) -> None:
        del seed
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            logps = token_logps(model, tokens, responses)
        ratio = torch.exp(logps - logps.detach())
        clipped = torch.clip(ratio, 0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [weight.grad for weight in model.parameters() if weight.grad is not None]
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        norms.append(norm.item())

    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    memory = torch.cuda.max_memory_allocated if device == "cuda" else lambda: None
    return Measured(run, lambda: norms[:1], name, ("torch", "transformers"), memory)


if __name__ == "__main__":
    serve(setup)
