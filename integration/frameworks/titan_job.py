"""A job of torchtitan's `Trainer`, under torchrun: `titan_job.py FOLDER OUT PER_RANK ...`.

torchtitan is for accelerators only; the job tells it that the CPU is one.
"""

import argparse
import dataclasses
import functools
import json
import os
from pathlib import Path

import jobs
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

# before the modules that read them are imported
utils.device_type, utils.device_module = "cpu", torch.cpu
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import (  # noqa: E402
    BaseDataLoader,
    ParallelAwareDataloader,
)
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.config.configs import DebugConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from dcp_checkfreq.data import ResumableLoader  # noqa: E402
from dcp_checkfreq.integrations.torchtitan import CheckFreqManager  # noqa: E402

SAMPLES, STEPS, LENGTH, BATCH = 64, 16, 8, 8
_STATS = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise AssertionError("the job has numbers")

    decode = get_vocab_size = encode


def sample(index):
    generator = torch.Generator().manual_seed(index)
    rest = torch.randint(SAMPLES, 2 * SAMPLES, (LENGTH,), generator=generator)
    ids = torch.cat([torch.tensor([index]), rest])
    return {"input": ids[:-1]}, ids[1:]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


class ByPosition(BaseDataLoader):
    """A `ResumableLoader` as torchtitan wants it."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, **others):
        self.loader = ResumableLoader(
            Samples(), global_batch=BATCH, seed=1, rank=dp_rank, world_size=dp_world_size
        )

    def __iter__(self):
        while True:
            yield from self.loader

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world, self.at = rank, world, 0

    def __iter__(self):
        while True:
            index = (self.at * self.world + self.rank) % SAMPLES
            self.at += 1
            yield sample(index)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Streamed(ParallelAwareDataloader):
    """A loader as torchtitan's own are."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **others):
        numbers = Numbers(dp_rank, dp_world_size)
        super().__init__(numbers, dp_rank, dp_world_size, batch_size=local_batch_size)


class CpuMonitor:
    device_name = "CPU"

    def get_peak_stats(self):
        return _STATS

    def reset_peak_stats(self):
        pass


class Watched(Trainer):
    """Writes down what it trains on, and dies when it is told to."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    job = None

    def train_step(self, data_iterator):
        if self.step == self.job.kill:
            jobs.die(self.job.folder / "root", 2)
        super().train_step(data_iterator)
        if self.step == self.job.fail:
            raise ArithmeticError("as a check of the loss would")

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        samples = input_dict["input"][:, 0].tolist()
        loss = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        line = {"step": self.step, "samples": samples, "pid": os.getpid(), "loss": loss.item()}
        rank = torch.distributed.get_rank()
        with open(self.job.out / f"rank{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return loss


def parallelize(model, **others):
    model = llama3.parallelize_llama(model, **others)
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.set_force_sum_reduction_for_comms(True)  # gloo has no sum of multiples
    return model


def model_spec():
    dim, heads = 32, 2
    part = functools.partial(RMSNorm.Config, normalized_shape=dim, param_init=llama3._NORM_INIT)
    layers = llama3._build_llama3_layers(
        n_layers=2, dim=dim, n_heads=heads, hidden_dim=64, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=10000.0),
    )  # fmt: skip
    for layer in layers:  # the others are for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=dim, vocab_size=2 * SAMPLES, norm=part(), layers=layers,
        tok_embeddings=Embedding.Config(
            num_embeddings=2 * SAMPLES, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=dim, out_features=2 * SAMPLES,
            param_init=llama3._output_linear_init(dim),
        ),
    )  # fmt: skip
    return dataclasses.replace(
        llama3.model_registry("debugmodel"), model=config, parallelize_fn=parallelize
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("per_rank", type=int)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--fail", type=int, default=0)
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--export", action="store_true", help="the model alone at the end, too")
    job = Watched.job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    metrics.build_device_memory_monitor = CpuMonitor
    distributed.set_pg_timeouts = lambda **_: None  # has a barrier of device numbers
    data = Streamed.Config() if job.streamed else ByPosition.Config()
    checkpoint = CheckFreqManager.Config(
        enable=True, folder="root", interval=3, exclude_from_loading=job.exclude,
        last_save_model_only=job.export,
    )  # fmt: skip
    config = Watched.Config(
        model_spec=model_spec(), dump_folder=str(job.folder), tokenizer=NoTokenizer.Config(),
        dataloader=data, checkpoint=checkpoint, loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-2, fused=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=job.per_rank, seq_len=LENGTH, steps=STEPS,
            disable_cuda_graphs=True, mixed_precision_param="float32",
        ),
        debug=DebugConfig(seed=3), parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )  # fmt: skip
    config.optimizer.implementation = "for-loop"
    trainer = None
    try:  # as torchtitan.train has it
        trainer = config.build()
        trainer.train()
    except Exception:
        if trainer:
            trainer.close()
        raise
    trainer.close()
    state = trainer.model_parts[0].state_dict()
    full = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state.items()}
    if torch.distributed.get_rank() == 0:
        torch.save({"losses": [], "model": full}, job.out / "end.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
