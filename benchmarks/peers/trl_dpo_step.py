"""One step of TRL's DPOTrainer: its collator, loss and backward pass, clipping and AdamW."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from benchmarks.worker import Measured, cpu_name, serve


def setup(workload: dict) -> Measured:
    """Make a trainer on pairs of token ids; its texts and tokenizer are not used."""
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(workload["folder"], dtype=torch.float32)
    folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm-benchmark-")
    accumulation = workload["accumulation"]
    config = DPOConfig(
        output_dir=folder.name,
        beta=workload["beta"],
        learning_rate=workload["learning_rate"],
        weight_decay=workload["weight_decay"],
        per_device_train_batch_size=workload["pairs"] // accumulation,
        gradient_accumulation_steps=accumulation,
        precompute_ref_log_probs=workload["precomputed"],
        max_length=None,
        bf16=False,
        use_cpu=not cuda,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    text = [{"prompt": "a", "chosen": "a", "rejected": "a"}]
    trainer = DPOTrainer(
        model, args=config, train_dataset=Dataset.from_list(text), processing_class=tokenizer
    )
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.create_optimizer()
    examples = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for prompt, (chosen, rejected) in zip(
            workload["prompt_ids"], workload["response_ids"], strict=True
        )
    ]
    size = len(examples) // accumulation
    batches = [trainer.data_collator(examples[i : i + size]) for i in range(0, len(examples), size)]
    batches = [{k: v.to(trainer.args.device) for k, v in batch.items()} for batch in batches]
    if workload["precomputed"]:
        for batch in batches:
            both = trainer.compute_ref_log_probs(trainer.model, batch)
            batch["ref_chosen_logps"], batch["ref_rejected_logps"] = both
    norms: list[float] = []

    def run(seed: int) -> None:
        del seed
        for batch in batches:
            trainer.training_step(trainer.model, dict(batch))
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), config.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        norms.append(float(norm))

    name = torch.cuda.get_device_name() if cuda else cpu_name()
    memory = torch.cuda.max_memory_allocated if cuda else lambda: None
    return Measured(run, lambda: norms[:1], name, ("torch", "transformers", "trl"), memory)


if __name__ == "__main__":
    serve(setup)
