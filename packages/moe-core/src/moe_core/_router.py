"""Which experts a token goes to, and with which weights.

What activation checkpointing must not redo
-------------------------------------------
A recomputed forward pass may break a near-tie between two experts the other way, and then trains another
model than the one whose loss was taken. So the choice is made by one operator, `moe_core::choose_experts`,
and marked for whoever writes the checkpointing policy, by a protocol that needs no import of this package:

    an operator (`torch._ops.OpOverload`) whose attribute `must_save` is True returns a result that has to be
    kept from the forward pass and handed out again in the recomputation:

        def policy(ctx, op, *args, **kwargs):
            return MUST_SAVE if getattr(op, "must_save", False) else PREFER_RECOMPUTE

for `torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)`. Dispatchers mark the host copy of
their split sizes in the same way. The marked results are small: [T, K] int64, and a few numbers per rank.
The counter `tokens_per_expert` needs no policy: it does not count while a backward pass runs, which is when
recomputation happens under every kind of checkpointing.

Modules that must compute in fp32 whatever the rest of the model does carry the class attribute
`keep_in_fp32 = True`: all their parameters and floating-point buffers are fp32, and a mixed-precision policy
has to leave them (and what it casts their parameters to) alone.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core._balance import BalancedRouter
from moe_core._moe_config import Score
from moe_core._numerics import elementwise, linear, local_tensor, without_autocast


class Routing(NamedTuple):
    """Where T tokens go. A masked token has the expert id E in all places, and weight 0."""

    expert_ids: Tensor
    """[T, K] int64, best first; E (the number of experts) sends nothing."""
    expert_weights: Tensor
    """[T, K] fp32, with a graph to the router's weight and the hidden states."""
    tokens_per_expert: Tensor
    """[E] int64: how many of the T*K places fell to each expert."""
    logits: Tensor
    """[T, E] fp32, before any scoring, with a graph."""


@torch.library.custom_op("moe_core::choose_experts", mutates_args=())
def choose_experts(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """The K best of each row of `choice` [T, E], best first: [T, K] int64. The lower id wins a tie.

    With several groups of consecutive experts only those of the `top_groups` best groups can be chosen; a
    group is worth the sum of its two best (DeepSeek-V3).
    """
    if top_groups < num_groups:
        choice = _keep_best_groups(choice, num_groups, top_groups)
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


@choose_experts.register_fake
def _(choice: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    return choice.new_empty((choice.shape[0], top_k), dtype=torch.int64)


setattr(torch.ops.moe_core.choose_experts.default, "must_save", True)  # noqa: B010 - mypy knows no such attribute


def _keep_best_groups(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    grouped = choice.unflatten(-1, (num_groups, -1))
    worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, :top_groups]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    # a biased score may be negative, so only -inf keeps an expert out for certain
    return torch.where(kept.unsqueeze(-1), grouped, float("-inf")).flatten(1)


class TopKRouter(BalancedRouter):
    """Scores E experts for each token and picks K of them.

    Logits, scores and weights are computed in fp32 (float64 after `.double()`), whatever the dtype of the
    hidden states and of autocast; the parameter and the bias stay fp32 under `.to(torch.bfloat16)`.

    The bias is added to the scores for the choice only, never to the weights, and gets no gradient:
    `update_router_bias` moves it so that the experts' loads even out (auxiliary-loss-free balancing,
    DeepSeek-V3).

    Attributes: `weight` [E, D] parameter; `bias` [E] and `tokens_per_expert` [E], see `BalancedRouter`.
    """

    keep_in_fp32 = True

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "sigmoid",
        num_groups: int = 1,
        top_groups: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        selection_bias: bool = True,
        forced_balance: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            score: "sigmoid"; "softmax" over all experts; "softmax_topk" over the K chosen logits.
            num_groups: groups of consecutive experts; choices come from the `top_groups` best of them.
            normalize: divide a token's K weights by their sum (+ 1e-20).
            scale: factor on the weights, after normalisation.
            selection_bias: have the buffer `bias`.
            forced_balance: give experts out in turn instead of by score, for benchmarks: perfectly even loads.

        Raises:
            ValueError: K, the groups or the score do not fit.

        Warns of a `top_k`, which groups of one expert also force to 1, whose only weight is always `scale`: no loss
        of the model's output then trains the router.
        """
        _check(num_experts, top_k, score, num_groups, top_groups)
        if top_k == 1:
            _warn_if_untrained(num_experts, score, normalize)
        super().__init__(num_experts, selection_bias, device)
        self.dim, self.top_k = dim, top_k
        self.score: Score = score
        self.num_groups, self.top_groups = num_groups, top_groups
        self.normalize, self.scale, self.forced_balance = normalize, scale, forced_balance
        self.weight = nn.Parameter(torch.empty(num_experts, dim, dtype=torch.float32, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.init_weights(std=self.dim**-0.5)

    @torch.no_grad()
    def init_weights(self, std: float, generator: torch.Generator | None = None) -> None:
        """weight ~ N(0, std), bias 0, counts 0. The weight must not be sharded."""
        self.weight.normal_(0.0, std, generator=generator)
        self.reset_balance()

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Routing:
        """hidden [T, D] of any float dtype; padding_mask [T] bool, True where the token is padding.

        A padding token sends nothing, is counted nowhere and gets no gradient.
        """
        with without_autocast(hidden.device.type):
            weight = local_tensor(self.weight)
            logits = linear(hidden.to(weight.dtype), weight)
            scores = self._scores(logits)
            expert_ids = self._choose(scores.detach())
            expert_weights = self._weights(scores.gather(1, expert_ids))
        if padding_mask is not None:
            mask = padding_mask.reshape(-1, 1)
            expert_ids = torch.where(mask, self.num_experts, expert_ids)
            expert_weights = torch.where(mask, 0.0, expert_weights)
        return Routing(expert_ids, expert_weights, self.count_tokens(expert_ids), logits)

    def _scores(self, logits: Tensor) -> Tensor:
        if self.score == "sigmoid":
            return elementwise(torch.sigmoid, logits)
        return logits.softmax(-1) if self.score == "softmax" else logits

    def _choose(self, scores: Tensor) -> Tensor:
        if self.forced_balance:
            places = torch.arange(scores.shape[0] * self.top_k, device=scores.device)
            return (places % self.num_experts).view(-1, self.top_k)
        choice = scores if self.bias is None else scores + self.bias
        return choose_experts(choice, self.top_k, self.num_groups, self.top_groups)

    def _weights(self, chosen: Tensor) -> Tensor:
        if self.score == "softmax_topk":
            chosen = chosen.softmax(-1)
        if self.normalize:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return chosen * self.scale

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # untyped in nn.Module
        def keep_fp32(tensor: Tensor) -> Tensor:
            changed: Tensor = fn(tensor)
            narrowed = changed.is_floating_point() and changed.element_size() < tensor.element_size()
            return tensor.to(changed.device) if narrowed else changed

        return super()._apply(keep_fp32, recurse)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}"


def _check(num_experts: int, top_k: int, score: str, num_groups: int, top_groups: int) -> None:
    if score not in ("sigmoid", "softmax", "softmax_topk"):
        raise ValueError(f"score = {score!r}: must be 'sigmoid', 'softmax' or 'softmax_topk'")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k = {top_k}: must be from 1 to num_experts = {num_experts}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups = {num_groups}: must divide num_experts = {num_experts}")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups = {top_groups}: must be from 1 to num_groups = {num_groups}")
    selectable = num_experts // num_groups * top_groups
    if top_k > selectable:
        raise ValueError(
            f"top_k = {top_k}: must be at most {selectable}, the number of experts in top_groups = {top_groups} "
            f"of num_groups = {num_groups} groups; choose a smaller top_k or more groups"
        )


def _warn_if_untrained(num_experts: int, score: str, normalize: bool) -> None:
    """Of one expert for each token."""
    if normalize:
        reason, fix = "normalize = True", "set normalize=False, so that the chosen score is the weight"
    elif score == "softmax_topk" or (score == "softmax" and num_experts == 1):
        reason, fix = f"score = {score!r} over one expert", "score by 'sigmoid', or by 'softmax' over several experts"
    else:
        return
    warnings.warn(
        f"top_k = 1 with {reason}: a token's only weight is the same whatever the router says, so the router learns "
        f"nothing from the model's loss; {fix}, or choose a top_k of 2 or more",
        stacklevel=3,
    )
