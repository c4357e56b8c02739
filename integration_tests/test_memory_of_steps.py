"""What a training step makes is gone after it, and what a run makes after the run."""

from typing import Any

WORDS = [
    "tracker=[]",
    "data.sequence_length=6",
    "data.global_batch_size=4",
    "data.microbatches=2",
    "model.pattern=ME*E",
]
EP = '{type="expert_parallelized"}'
VARIANTS = [
    [f'transform=[{EP}, {{type="fsdp", separate_lm_head=true}}]', "loss.chunk_tokens=5"],
    [
        f'transform=[{EP}, {{type="activation_checkpointed", mode="full"}}, {{type="fsdp", separate_lm_head=true}}]',
        "loss.keep_head_unsharded=true",
        "model.aux_loss_coefficient=0.01",
    ],
    [
        f'transform=[{EP}, {{type="activation_checkpointed", mode="selective"}}, {{type="fsdp"}}]',
        'loss.type="clm_cross_entropy"',
        "model.z_loss_coefficient=0.01",
    ],
]


def left_alive(variants: list[list[str]], device_type: str) -> list[tuple[list[int], bool]]:
    """Per variant: how many of each step's tensors are alive after it, and whether the model is after the run."""
    import gc
    import weakref
    from typing import Any

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from moe_core import load_config
    from nemotron_nano.train.assemble import assemble
    from nemotron_nano.train.pretrain import evaluate

    class Results(TorchDispatchMode):
        """A weak reference to each tensor that an operator makes; one that only a graph holds counts as alive."""

        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref[torch.Tensor]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.made += [weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            return out

    def of_a_run(words: list[str]) -> tuple[list[int], bool]:
        run = assemble(load_config((), words), device_type=device_type)
        trainer = run.config["trainer"].build(run)
        results, alive = Results(), []
        trainer._step(run, 0)  # makes what stays: the optimizer's state, FSDP's buffers
        for step in (1, 2):
            with results:
                trainer._step(run, step)
            gc.collect()
            assert results.made
            # in-place operators give what was there before: each tensor once
            alive.append(len({id(tensor) for made in results.made if (tensor := made()) is not None}))
        evaluate(run)
        model = weakref.ref(run.model)
        del run, trainer
        gc.collect()
        return alive, model() is not None

    return [of_a_run(words) for words in variants]


def test_steps_leave_nothing_behind(on_ranks: Any, device_type: str) -> None:
    variants = [[*WORDS, "mesh.ep=2", *words] for words in VARIANTS]
    for of_rank in on_ranks(left_alive, 2, variants, device_type):
        for words, (alive, model_is_left) in zip(variants, of_rank, strict=True):
            assert len(set(alive)) == 1, (words, alive)
            assert not model_is_left, words
