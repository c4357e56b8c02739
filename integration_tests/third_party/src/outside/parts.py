"""The parts themselves."""

import torch.distributed as dist
import torch.nn.functional as F

from moe_core.plugins import LossOutput


def build_smoothed(config, run):
    def loss(model, batch):
        logits = model(batch.tokens, document_ids=batch.document_ids)
        total = F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="sum", label_smoothing=config.smoothing
        )
        return LossOutput(total, (batch.labels != -100).sum(), {"cross_entropy": total.detach()})

    return loss


def build_loop(config, run):
    def train(run):
        for step in range(run.config.run.steps):
            for batch in run.data.train_batches(step):
                output = run.loss(run.model, batch)
                (output.sum / output.tokens).backward()
            norm = run.clipper(run.model.parameters())
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            if dist.get_rank() == 0:
                print(f"{config.log_as} step {step} loss {output.sum / output.tokens:.4f} norm {norm:.4f}")
        return 0

    return train
