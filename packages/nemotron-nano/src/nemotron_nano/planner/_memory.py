"""The most memory that a rank holds in a step: what FSDP2 gathers, keeps and frees, followed through the step.

The order of events is that of the host, in which a caching allocator hands out memory as well.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import attrs

from ep_mesh import MeshConfig
from nemotron_nano.planner._collectives import rows_received, rows_sent
from nemotron_nano.planner._footprint import Footprint
from nemotron_nano.planner._inputs import Workload
from nemotron_nano.planner._units import Unit

Kind = Literal["parameters", "gradients", "optimizer", "gather_buffers", "all_to_all_buffers", "activations"]
KINDS: tuple[Kind, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "gather_buffers",
    "all_to_all_buffers",
    "activations",
)

_STORED = 4
"""Bytes of a parameter, a gradient and each moment as they are kept: fp32."""


@attrs.frozen
class Memory:
    """Bytes on the rank that holds most."""

    peak: int
    moment: str
    """When that is."""
    at_peak: dict[Kind, int]
    """By kind; adds up to the peak. Optimizer: the moments, and what its step needs besides. Gather buffers: whatever
    FSDP holds besides the shards. All-to-all buffers: the rows of one exchange, on both sides. Activations: with the
    gradients of weights that are not reduced yet."""
    largest: dict[Kind, int]
    """The most of each kind at any moment."""


def memory_of_a_step(
    work: Workload, mesh: MeshConfig, units: Sequence[Unit], layers: Sequence[Footprint], loss: Footprint
) -> Memory:
    return _Step(work, mesh, units, layers, loss).run()


class _Step:
    """Bytes alive, by kind, while a step is followed; remembers the worst moment."""

    def __init__(
        self, work: Workload, mesh: MeshConfig, units: Sequence[Unit], layers: Sequence[Footprint], loss: Footprint
    ) -> None:
        self.work, self.layers, self.loss = work, layers, loss
        named = {unit.name: unit for unit in units if unit.block is None}
        self.root, self.fp32 = named.get("root"), named.get("fp32")
        self.embedding, self.head = named.get("embedding"), named.get("head")
        self.blocks = {unit.block: unit for unit in units if unit.name == "block"}
        self.experts = {unit.block: unit for unit in units if unit.name == "experts"}
        self.units = units
        self.of_root = 0
        """Bytes of gradients that the root reduces at the end."""
        rows = work.rows_per_rank(mesh.world_size) * work.sequence_length
        self.hidden = rows * work.model.hidden_size * work.param_bytes
        self.exchange = (rows_sent(work, mesh) + rows_received(work, mesh)) * work.model.hidden_size * work.param_bytes
        self.exchange *= mesh.ep > 1
        stored = _STORED * sum(unit.sharded for unit in units)
        routers = work.model.pattern.count("E") * work.model.num_experts * (4 + 8)  # bias and counts
        batches = 2 * 8 * rows * work.microbatches  # tokens and labels
        self.live: Counter[Kind] = Counter(
            {"parameters": stored + routers, "optimizer": 2 * stored, "activations": batches}
        )
        self.largest: Counter[Kind] = Counter(self.live)
        self.peak, self.moment, self.at_peak = 0, "", Counter(self.live)
        self.held = 0
        """A buffer that forward keeps until the next one is gathered."""
        self.reducing = 0
        """The input of the last reduce-scatter, kept until the next one."""
        self.ahead: dict[int, int] = {}
        """Buffers of units that are gathered before they are needed, by the unit's identity."""

    def run(self) -> Memory:
        for microbatch in range(self.work.microbatches):
            self._forward(microbatch)
            self._loss(microbatch)
            self._backward(microbatch)
        self._optimizer()
        return Memory(
            self.peak, self.moment, {kind: self.at_peak[kind] for kind in KINDS}, {k: self.largest[k] for k in KINDS}
        )

    def _add(self, kind: Kind, size: int) -> None:
        self.live[kind] += size
        self.largest[kind] = max(self.largest[kind], self.live[kind])

    def _look(self, moment: str, transient: int = 0, exchanged: int = 0) -> None:
        """A moment at which `transient` bytes of activations are there as well, `exchanged` of them travelling."""
        now = Counter(self.live)
        now["activations"] += transient - exchanged
        now["all_to_all_buffers"] += exchanged
        for kind, size in now.items():
            self.largest[kind] = max(self.largest[kind], size)
        if (total := sum(now.values())) > self.peak:
            self.peak, self.moment, self.at_peak = total, moment, now

    # what FSDP does

    def _gather(self, unit: Unit | None, *, forward: bool) -> None:
        if unit is None:
            return
        size = unit.gathered * unit.element
        if unit.shard > 1:
            if self.ahead.pop(id(unit), None) is None:
                self._add("gather_buffers", size)
            self._look("a gather", unit.sharded * unit.element if unit.element != _STORED else 0)
        if forward:
            self._add("gather_buffers", -self.held)
            self.held = 0
        self._add("gather_buffers", size)
        self._look("a gather")
        if unit.shard > 1:
            if forward:
                self.held = size
            else:
                self._add("gather_buffers", -size)

    def _gather_ahead(self, *units: Unit | None) -> None:
        for unit in units:
            if unit is not None and unit.shard > 1:
                self.ahead[id(unit)] = unit.gathered * unit.element
                self._add("gather_buffers", self.ahead[id(unit)])

    def _free(self, unit: Unit | None) -> None:
        if unit is not None:
            self._add("gather_buffers", -unit.gathered * unit.element)

    def _free_held(self) -> None:
        self._add("gather_buffers", -self.held)
        self.held = 0

    def _reduce(self, unit: Unit | None, gradients: int, microbatch: int, residue: int, moment: str) -> None:
        """`gradients`, bytes of activations until here, become the unit's shard; or stay whole, before the last
        microbatch. `residue` is what else is there of activations.
        """
        if unit is None:
            self._add("activations", -gradients)
            self._add("gradients", gradients)
            return
        whole = unit.numel * unit.reduced_element
        if microbatch < self.work.microbatches - 1:
            self._add("activations", -gradients)
            if microbatch == 0:
                self._add("gradients", whole)
                self._look(moment, residue)
            return
        self._add("gather_buffers", -self.reducing)
        self.reducing = unit.gathered * unit.reduced_element
        self._add("gather_buffers", self.reducing)
        self._look(moment, residue)
        self._add("activations", -gradients)
        if microbatch:
            self._add("gradients", -whole)
        self._add("gradients", unit.sharded * _STORED)
        self._look(moment, residue + (unit.sharded * unit.reduced_element if unit.reduced_element != _STORED else 0))

    # what the step does

    def _forward(self, microbatch: int) -> None:
        for unit in (self.root, self.fp32, self.embedding):
            self._gather(unit, forward=True)
        if self.experts:
            self._gather_ahead(self.blocks.get(0), self.experts.get(0))
        self._add("activations", self.hidden)
        self._look("forward of the embedding")
        if self.work.reshard_after_forward:
            self._free(self.embedding)
        for i, layer in enumerate(self.layers):
            moment = f"forward of layer {i} ({self.work.model.pattern[i]})"
            experts = self.experts.get(i)
            self._gather(self.blocks.get(i), forward=True)
            if self.experts:
                self._gather_ahead(self.blocks.get(i + 1), self.experts.get(i + 1))
            self._gather(experts, forward=True)
            self._look(moment, layer.forward_peak, self._exchanged(i))
            if self.work.reshard_after_forward:
                self._free(experts)
                self._free(self.blocks.get(i))
            # the input is among what is kept, or is no more
            self._add("activations", layer.kept)
            self._look(moment)
        self._free_held()

    def _exchanged(self, block: int) -> int:
        return self.exchange if self.work.model.pattern[block] == "E" else 0

    def _loss(self, microbatch: int) -> None:
        work = self.work
        if not (microbatch and self.head is not None and self.head.gathers_once):
            self._gather(self.head, forward=True)
        self._look("forward of the loss", self.loss.forward_peak)
        self._free_held()
        # the embedding's output was counted once for all layers, which count their inputs themselves
        self._add("activations", self.loss.kept - self.hidden)
        last = microbatch == work.microbatches - 1
        self._look("backward of the loss", self._backward_peak(self.loss, [self.head or self.root], microbatch))
        self._add("activations", self.loss.gradients - self.loss.kept)
        if self.head is None:
            self.of_root = self.loss.gradients
            return
        self.of_root = 0
        if not (self.head.gathers_once and not last):
            self._free(self.head)
        self._reduce(self.head, self.loss.gradients, microbatch, self.hidden, "reduction of the head")

    def _backward_peak(self, layer: Footprint, units: Sequence[Unit | None], microbatch: int) -> int:
        """Gradients are added up one parameter at a time where they come in the dtype that they are added up in."""
        sizes = [self._largest(unit) for unit in units if unit is not None and unit.element == unit.reduced_element]
        if microbatch == 0 or not sizes:
            return layer.backward_peak
        return layer.backward_peak - layer.gradients + max(sizes)

    def _largest(self, unit: Unit) -> int:
        return max(attrs.evolve(unit, shapes=(shape,)).numel for shape in unit.shapes) * unit.element

    def _backward(self, microbatch: int) -> None:
        last_block = len(self.layers) - 1
        self._gather_ahead_backward(last_block)
        for i in range(last_block, -1, -1):
            self._backward_of_layer(i, microbatch)
        gradient = 0
        if self.embedding is not None:
            if self.work.reshard_after_forward:
                self._gather(self.embedding, forward=False)
            gradient = self.embedding.numel * self.embedding.element
            self._add("activations", gradient)
            self._look("backward of the embedding", self.hidden)
            self._free(self.embedding)
            self._reduce(self.embedding, gradient, microbatch, 0, "reduction of the embedding")
        elif self.root is not None or not self.units:
            size = self.work.model.vocab_size * self.work.model.hidden_size * self.work.param_bytes
            self._add("activations", size)
            self._look("backward of the embedding", self.hidden)
            self.of_root += size
        self._free(self.fp32)
        self._free(self.root)
        self._free_held()
        if self.root is not None:
            self._reduce(self.root, self.of_root, microbatch, 0, "reduction of what is in no other unit")
        if self.fp32 is not None:
            self._reduce(self.fp32, 0, microbatch, 0, "reduction of fp32 modules")
        self._add("gather_buffers", -self.reducing)
        self.reducing = 0

    def _gather_ahead_backward(self, block: int) -> None:
        """What is gathered while the part before is computed: with expert units a layer whole, else the next unit."""
        if not self.work.reshard_after_forward:
            return  # all of it is still there
        if block < 0:
            self._gather_ahead(self.embedding)
        else:
            self._gather_ahead(self.blocks.get(block), self.experts.get(block))

    def _backward_of_layer(self, i: int, microbatch: int) -> None:
        layer, block, experts = self.layers[i], self.blocks.get(i), self.experts.get(i)
        letter = self.work.model.pattern[i]
        if self.work.reshard_after_forward:
            self._gather(block, forward=False)
        self._gather_ahead_backward(i - 1)
        if self.work.reshard_after_forward:
            # a recomputation is a forward pass to FSDP, and the buffer stays until the next one
            self._gather(experts, forward=self.work.is_checkpointed(i))
        peak = self._backward_peak(layer, [block, experts], microbatch)
        of_experts = 0 if experts is None else experts.numel * experts.element
        of_block = layer.gradients - of_experts
        self._look(f"backward of layer {i} ({letter})", peak, self._exchanged(i))
        if experts is not None:
            self._free(experts)
            self._add("activations", of_experts)
            residue = layer.after_experts - of_experts
            self._reduce(experts, of_experts, microbatch, residue, f"reduction of the experts of layer {i}")
        self._free(block)
        self._add("activations", of_block - layer.kept)
        self._reduce(block, of_block, microbatch, self.hidden, f"reduction of layer {i} ({letter})")

    def _optimizer(self) -> None:
        sizes = [attrs.evolve(unit, shapes=(shape,)).sharded for unit in self.units for shape in unit.shapes]
        # AdamW's root of the second moments: on accelerators of all parameters together, else one by one and twice
        self._add("optimizer", (2 * max(sizes) if self.work.on_cpu else sum(sizes)) * _STORED)
        self._look("optimizer step")
