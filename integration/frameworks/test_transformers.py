"""Hugging Face's `Trainer` is killed and goes on: same samples, same losses, other ranks."""

import functools
import math
import shutil

import jobs
import pytest
import torch
import transformers

from dcp_checkfreq import (
    Checkpointer,
    export_safetensors,
    find_latest_valid,
    import_files,
    load_part,
)

JOB = "hf_job.py"
LAYOUTS = {
    "alone": (1, 8, ()),
    "ddp": (2, 4, ()),
    "fsdp2": (2, 4, ("--fsdp",)),
    # whose samplers draw the order from the global random numbers
    "by length": (1, 4, ("--order", "group_by_length", "--accumulate", 2)),
    "drawn": (1, 8, ("--drawn",)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return, by layout, the output of a run that nothing interrupts."""

    @functools.cache
    def of(layout):
        folder = tmp_path_factory.mktemp(layout)
        ranks, per_rank, more = LAYOUTS[layout]
        jobs.run(JOB, folder, folder / "out", per_rank, *more, ranks=ranks)
        return folder / "out"

    return of


def killed(folder, layout, step=11):
    ranks, per_rank, more = LAYOUTS[layout]
    jobs.run(JOB, folder, folder / "out", per_rank, *more, "--kill", step, ranks=ranks, dies=True)
    return jobs.saved_before(folder / "root", step)


@pytest.mark.framework("transformers", "killed and resumed")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(tmp_path, whole, layout):
    saved = killed(tmp_path, layout)
    ranks, per_rank, more = LAYOUTS[layout]
    jobs.run(JOB, tmp_path, tmp_path / "out2", per_rank, *more, ranks=ranks)
    again = jobs.trained(tmp_path / "out2")
    assert min(again) == saved + 1
    assert jobs.published(tmp_path / "root")[-1] == 16
    jobs.assert_equal(jobs.end(tmp_path / "out2"), jobs.end(whole(layout)))
    every = jobs.trained(whole(layout))
    jobs.assert_every_sample_once(every)
    assert again == {step: every[step] for step in again}


@pytest.mark.framework("transformers", "other ranks")
@pytest.mark.parametrize(
    ("layout", "ranks", "per_rank", "more"),
    [
        ("ddp", 1, 4, ("--accumulate", 2)),
        ("ddp", 4, 2, ()),
        ("fsdp2", 4, 2, ("--fsdp",)),
        ("fsdp2", 1, 8, ()),
    ],
)
def test_it_goes_on_with_other_ranks_and_every_sample_once(
    tmp_path, whole, layout, ranks, per_rank, more
):
    saved = killed(tmp_path, layout)
    jobs.run(JOB, tmp_path, tmp_path / "out2", per_rank, *more, ranks=ranks)
    before, again = jobs.trained(whole(layout)), jobs.trained(tmp_path / "out2")
    assert min(again) == saved + 1
    assert again == {step: before[step] for step in again}
    jobs.assert_every_sample_once({**before, **again})
    for (_, loss), (_, other) in zip(
        jobs.end(whole(layout))["losses"], jobs.end(tmp_path / "out2")["losses"], strict=True
    ):
        assert math.isclose(loss, other, rel_tol=0.02)  # dropout draws others


def test_a_step_of_other_samples_is_refused(tmp_path):
    killed(tmp_path, "alone")
    with pytest.raises(AssertionError, match="a step was 8 samples when it was saved"):
        jobs.run(JOB, tmp_path, tmp_path / "out2", 4)


def test_a_signal_ends_all_ranks_with_one_more_save(tmp_path, whole):
    ranks, per_rank, _ = LAYOUTS["ddp"]
    said = jobs.run(JOB, tmp_path, tmp_path / "out", per_rank, "--sigterm-at", 5, ranks=ranks)
    assert "as asked by a signal" in said
    stopped = jobs.published(tmp_path / "root")[-1]
    assert max(jobs.trained(tmp_path / "out")) == stopped < 16
    jobs.run(JOB, tmp_path, tmp_path / "out2", per_rank, ranks=ranks)
    jobs.assert_equal(jobs.end(tmp_path / "out2"), jobs.end(whole("ddp")))


def test_a_newest_checkpoint_that_is_damaged_is_passed_over(tmp_path, whole):
    killed(tmp_path, "alone", step=14)
    *_, before, newest = jobs.published(tmp_path / "root")
    for shard in (tmp_path / "root" / f"step_{newest:08d}").glob("*.distcp"):
        kept = bytearray(shard.read_bytes())
        kept[:] = bytes(len(kept))
        shard.write_bytes(kept)
    jobs.run(JOB, tmp_path, tmp_path / "out2", 8)
    assert min(jobs.trained(tmp_path / "out2")) == before + 1
    jobs.assert_equal(jobs.end(tmp_path / "out2"), jobs.end(whole("alone")))


def test_a_job_that_is_done_trains_nothing_more(tmp_path, whole):
    shutil.copytree(whole("alone").parent / "root", tmp_path / "root")
    jobs.run(JOB, tmp_path, tmp_path / "out2", 8)
    assert jobs.trained(tmp_path / "out2") == {}
    at_end = jobs.end(tmp_path / "out2")["model"]
    jobs.assert_equal({"losses": [], "model": at_end}, {**jobs.end(whole("alone")), "losses": []})


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 60_000])
def test_an_exported_model_is_what_from_pretrained_loads(tmp_path, max_file_bytes):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    with Checkpointer(tmp_path / "run", {"model": model}) as ckpt:
        ckpt.save(wait=True)
    folder = tmp_path / "exported"
    config.save_pretrained(folder)
    made = export_safetensors(
        find_latest_valid(tmp_path / "run"), folder, prefix="model.", max_file_bytes=max_file_bytes
    )
    assert (len(made.files) > 1) == (max_file_bytes == 60_000)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values())
    for (name, got), wanted in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    # and back: what `save_pretrained` writes becomes a checkpoint
    loaded.save_pretrained(tmp_path / "theirs")
    import_files(tmp_path / "theirs", tmp_path / "imported" / "step_0")
    fresh = transformers.LlamaForCausalLM(config)
    load_part(find_latest_valid(tmp_path / "imported"), "model", into=fresh)
    assert torch.equal(fresh.lm_head.weight, model.lm_head.weight)
