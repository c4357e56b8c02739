"""The trainer `pretrain`: next-token prediction, validation, checkpoints."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from chunked_loss import global_denominator
from fsdp_ep import set_requires_gradient_sync
from moe_core import update_router_bias
from moe_core.plugins import Batch, LossOutput, Run
from nemotron_nano.train.components import PretrainConfig
from nemotron_nano.train.launch import check_checkpoints
from nemotron_nano.train.measure import Totals, Utilisation, peak_memory_bytes, sum_over_ranks

_LISTENERS = ("mesh", "model", "loss", "optimizer", "scheduler", "clipper", "data", "checkpointer")


class TrainingError(RuntimeError):
    """Training can't go on; raised on all ranks alike."""


@attrs.frozen
class Pretrain:
    """`kinds.Trainer`: drives a run from its first, or its resumed, step to `run.steps`."""

    config: PretrainConfig

    def __call__(self, run: Run) -> int:
        steps, tflops = run.config.run.steps, self.config.tflops
        utilisation = None if tflops is None else Utilisation(run.model, tflops)
        start = _restore(run)
        if start > steps:
            raise TrainingError(f"the checkpoint stands after step {start}, beyond run.steps = {steps}")
        emit(run, "run_start", run=run, first_step=start, steps=steps, description=run.data.describe())
        for step in range(start, steps):
            emit(run, "step_end", step=step + 1, steps=steps, metrics=self._step(run, step, utilisation))
            done = step + 1
            if _due(done, self.config.evaluate_every, steps):
                emit(run, "evaluated", step=done, metrics=evaluate(run))
            if _due(done, self.config.checkpoint_every, steps):
                path = run.checkpointer.save(run, done, {})
                emit(run, "checkpoint_saved", step=done, path=path)
        emit(run, "run_end", status=0)
        return 0

    def _step(self, run: Run, step: int, utilisation: Utilisation | None = None) -> Mapping[str, Any]:
        """One optimizer step, and what there is to report of it."""
        begin = time.perf_counter()
        run.model.train()
        batches = run.data.train_batches(step)
        waited = time.perf_counter() - begin
        outputs = accumulate_gradients(run, batches)
        norm = run.clipper(run.model.parameters())
        lr = run.scheduler.get_last_lr()[0]
        # the norm is the same on all ranks, so all of them stop here or none
        if not math.isfinite(grad_norm := norm.item()):
            raise TrainingError(f"step {step + 1}: the gradient norm is {grad_norm}; the weights are left as they were")
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.scheduler.step()
        rate, rule = self.config.router_bias_rate, self.config.router_bias_rule
        load = update_router_bias(run.model, run.sub_mesh("dp"), rate=rate, rule=rule)
        totals = sum_over_ranks(outputs, run.sub_mesh("dp"), peak_memory_bytes(run.device_type))
        seconds = time.perf_counter() - begin
        return {
            "loss": totals.mean("cross_entropy"),
            **{name: totals.mean(name) for name in totals.parts if name != "cross_entropy"},
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": totals.tokens,
            "seconds": seconds,
            "data_seconds": waited,
            "tokens_per_second": totals.tokens / seconds,
            **({} if utilisation is None else {"mfu": utilisation.of_step(batches, seconds)}),
            "peak_memory_bytes": totals.peak_memory_bytes,
            "expert_load": {name: counts.tolist() for name, counts in load.items()},
        }


def build_pretrain(config: PretrainConfig, run: Run) -> Pretrain:
    return Pretrain(config)


def accumulate_gradients(run: Run, batches: Sequence[Batch]) -> list[LossOutput]:
    """Forward and backward of all microbatches; gradients are reduced in the last one only.

    Dividing by the valid tokens of the whole step makes the gradient that of the mean over all of them,
    however they are spread over ranks and microbatches.
    """
    denominator = global_denominator([batch.labels for batch in batches], run.sub_mesh("dp"))
    outputs = []
    for position, batch in enumerate(batches, start=1):
        set_requires_gradient_sync(run.model, position == len(batches))
        output = run.loss(run.model, batch)
        auxiliary = _auxiliary_losses(run)
        (sum(auxiliary.values(), output.sum) / denominator).backward()
        parts = {**output.parts, **{name: loss.detach() for name, loss in auxiliary.items()}}
        outputs.append(LossOutput(output.sum.detach(), output.tokens, parts))
    return outputs


def _auxiliary_losses(run: Run) -> dict[str, Tensor]:
    """What the model adds to the loss of its last forward pass, by name; sums over tokens, as the loss is."""
    take = getattr(run.model, "auxiliary_losses", None)
    return take() if callable(take) else {}


@torch.no_grad()
def evaluate(run: Run) -> Mapping[str, float]:
    """Mean loss over the validation rows of all ranks; also in bits, per byte if the data says how many.

    Raises:
        TrainingError: on all ranks before their first forward pass, if they have different numbers of batches.
    """
    run.model.eval()
    batches = as_many_on_every_rank(run.data.validation_batches(), run.sub_mesh("dp"), "data.validation_batches()")
    outputs = [run.loss(run.model, batch) for batch in batches]
    totals: Totals = sum_over_ranks(outputs, run.sub_mesh("dp"), 0)
    loss = totals.mean("cross_entropy")
    metrics = {"loss": loss, "bits_per_token": loss / math.log(2)}
    description = run.data.describe()
    if "bytes_per_token" in description:
        metrics["bits_per_byte"] = metrics["bits_per_token"] / description["bytes_per_token"]
        metrics["byte_entropy_bits"] = description["byte_entropy_bits"]
    return metrics


def as_many_on_every_rank(batches: Sequence[Batch], dp_mesh: DeviceMesh, source: str) -> Sequence[Batch]:
    """The batches, once all ranks of `dp_mesh` have said how many they have; one collective and one host sync.

    Each batch is a collective pass through the model, and one more on some ranks would hang.

    Args:
        source: what gave the batches, for the message.

    Raises:
        TrainingError: on all ranks, if they have different numbers of batches, or none.
    """
    mine = torch.tensor([len(batches)], device=dp_mesh.device_type)
    by_rank = [torch.empty_like(mine) for _ in range(dp_mesh.size())]
    dist.all_gather(by_rank, mine, group=dp_mesh.get_group())
    counts = torch.cat(by_rank).tolist()
    if len(set(counts)) > 1 or counts[0] == 0:
        raise TrainingError(
            f"{source} gave ranks {counts} batches: must be as many on every rank, and at least one; pad the short "
            "ranks with batches whose labels are all ignored"
        )
    return batches


def _restore(run: Run) -> int:
    """The step to begin with: that of the checkpoint, which is loaded, if the run resumes; else 0."""
    # all ranks look before any of them can write
    check_checkpoints(run.checkpointer, run.config, resume=run.resume)
    if not run.resume:
        return 0
    state = run.checkpointer.load(run)
    assert state is not None
    return int(state["step"])


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def emit(run: Run, event: str, /, **info: Any) -> None:
    """Call `event` on every component of the run that has a method of that name, the trackers last."""
    listeners = [getattr(run, part) for part in _LISTENERS] + list(run.trackers)
    for listener in listeners:
        method = getattr(listener, event, None)
        if callable(method):
            method(**info)
