"""A job of Hugging Face's `Trainer`, alone or under torchrun.

`hf_job.py FOLDER OUT SAMPLES_PER_RANK [--kill STEP] ...`: OUT gets what was
trained on; FOLDER has the root.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import jobs
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dcp_checkfreq.integrations.transformers import enable

SAMPLES, EPOCHS, LENGTH = 64, 2, 8


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if not 0 <= index < SAMPLES:
            raise IndexError(index)  # or who looks at all of them finds no end
        generator = torch.Generator().manual_seed(index)
        rest = torch.randint(SAMPLES, 2 * SAMPLES, (LENGTH - 1,), generator=generator)
        ids = torch.cat([torch.tensor([index]), rest])
        return {"input_ids": ids, "labels": ids.clone()}


class Watched(Trainer):
    """Writes down what it trains on, and dies when it is told to."""

    job = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        step = self.state.global_step + 1
        if step == self.job.sigterm_at and self.args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if step >= self.job.sigterm_at > 0:
            time.sleep(0.2)  # a step as of a larger model: ranks take 0.1 s to agree
        if step == self.job.kill:
            jobs.die(self.job.folder / "root", 2)
        loss = super().training_step(model, inputs, num_items_in_batch)
        samples = inputs["input_ids"][:, 0].tolist()
        line = {"step": step, "samples": samples, "pid": os.getpid()}
        with open(self.job.out / f"rank{self.args.process_index}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("per_rank", type=int)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--sigterm-at", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--order", default="random", help="which sampler chooses")
    parser.add_argument("--drawn", action="store_true", help="it draws from the global numbers")
    parser.add_argument("--plain", action="store_true")
    job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=2 * SAMPLES, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1,
        tie_word_embeddings=True,
    )  # fmt: skip
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}} if job.fsdp else {}
    args = TrainingArguments(
        str(job.folder / "hf"), use_cpu=True, per_device_train_batch_size=job.per_rank,
        gradient_accumulation_steps=job.accumulate, num_train_epochs=EPOCHS, logging_steps=3,
        save_strategy="no", learning_rate=1e-2, report_to=[], disable_tqdm=True, seed=7,
        train_sampling_strategy=job.order,
        accelerator_config={"use_seedable_sampler": not job.drawn}, **fsdp,
    )  # fmt: skip
    if job.fsdp:
        # accelerate shards on GPUs only, although torch does it with gloo as well
        assert args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    model = LlamaForCausalLM(config)
    trainer = Watched(model, args, train_dataset=Numbered())
    Watched.job = job
    if not job.plain:
        enable(trainer, job.folder / "root", every=3)
    trainer.train()
    losses = [(one["step"], one["loss"]) for one in trainer.state.log_history if "loss" in one]
    state = trainer.model.state_dict()
    if job.fsdp:
        assert any(isinstance(one, DTensor) for one in state.values())
    full = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state.items()}
    if trainer.args.process_index == 0:
        torch.save({"losses": losses, "model": full}, job.out / "end.pt")
    trainer.accelerator.end_training()  # ends the process group: torch asks for it


if __name__ == "__main__":
    main()
