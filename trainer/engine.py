"""The training engine on DeepSpeed: forward passes, backward passes, a step, and what a checkpoint holds.

trainer/ds_config.py has the settings, and the reason for each. What this module does beside DeepSpeed, and why:
- Losses are multiplied by the world size, which undoes DeepSpeed's mean over ranks. Our losses are already divided by
  the global batch's counts, so gradients must be summed.
- At stage 0 DeepSpeed reports no gradient norm, so this module clips and knows the norm.
- A step with a gradient that is not finite is skipped: at stage 0 by this module, and from stage 1 on by DeepSpeed.
- At stage 3, rank 0's weights are divided among the ranks one parameter at a time, so the other ranks need no whole
  model (`loads_weights`). DeepSpeed alone would divide them only after every rank has all of them on its device.
- The values of a checkpoint are handed out as fragments: ranges of a parameter's elements, named by parameter and
  range. They do not depend on the ZeRO stage, the precision or the number of ranks, so any engine can load what any
  other saved, and no rank needs more than its part. DeepSpeed's own files are not used, because it reads them by
  unrestricted pickle.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.ds_config import clipping, full_ds_config, has_bf16_weights, zero_stage
from trainer.optim import optimizer_of

_PART = 1 << 22  # elements that are compared at a time

# The kinds of values of a trained parameter: its own, and those that AdamW or Muon keeps beside it.
MASTER, MOMENTS, MOMENTUM = "master", ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of a flattened parameter: the float32 values, or what the optimizer keeps beside them."""

    kind: str  # master | exp_avg | exp_avg_sq | momentum_buffer
    name: str
    start: int
    stop: int


class Engine:
    """A model under DeepSpeed: forward, backward (any number of times), one step.

    ds_config: the recipe's engine configuration, as it was read (`read_ds_config`).
    """

    def __init__(self, module: nn.Module, recipe: Recipe, world: World, ds_config: Mapping[str, Any]) -> None:
        import deepspeed
        from deepspeed.runtime import torch_autocast

        self.world = world
        self.device = world.device
        self.ds_config = full_ds_config(recipe, ds_config)
        self.stage = zero_stage(self.ds_config)
        self._coalesces = bool(self.ds_config["managed_gradient_accumulation"])
        optimizer = optimizer_of(module, recipe.optim)
        by_muon = [p for group in optimizer.param_groups if group.get("use_muon") for p in group["params"]]
        self._skips = False
        self._norm_at_stage_0: float | None = None
        limit = clipping(recipe) or float("inf")

        def before_step(inner: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [p for group in inner.param_groups for p in group["params"]]
            if self.stage == 0:
                self._norm_at_stage_0 = float(nn.utils.clip_grad_norm_(parameters, limit))
                self._skips |= not math.isfinite(self._norm_at_stage_0)
            if self._skips:
                for parameter in parameters:
                    parameter.grad = None  # the optimizer leaves a parameter without gradient, and its state, alone

        optimizer.register_step_pre_hook(before_step)
        self.heartbeat: Callable[[str], None] = lambda phase: None  # called at each pass and step
        originals = self._originals(module)
        for parameter in by_muon:
            parameter.use_muon = True  # type: ignore[attr-defined]  # DeepSpeed's mark
        # An engine under torch_autocast leaves this on for its process, and stages 2 and 3 of a later run would then
        # send gradients in the weights' type, whatever communication_data_type says. Such an engine sets it again.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        # DeepSpeed prints memory tables at start, whatever its log level.
        with contextlib.redirect_stdout(io.StringIO()):
            self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=self.ds_config, dist_init_required=False
            )
        self.module = module
        # Any, because DeepSpeed adds its own attributes to parameters.
        self._trained: dict[str, Any] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        ids = set(map(id, by_muon))
        self._by_muon = {name for name, p in self._trained.items() if id(p) in ids}
        # DeepSpeed has a wrapper of its own for it, whose state is divided as the masters are.
        self._is_stage_1_in_bf16 = hasattr(self.optimizer, "fp32_groups_gradients_flat")
        if by_muon and self.stage > 0 and not self._is_stage_1_in_bf16:
            self._drop_whole_steps()
        # Frozen parameters have no masters. Those that rounding has changed are kept as they were.
        frozen = (id(p) for p in module.parameters() if not p.requires_grad)
        self._frozen = {key: originals[key] for key in frozen if key in originals}
        self._restore_masters(originals)

    def _originals(self, module: nn.Module) -> dict[int, Tensor]:
        """id -> float32 values of parameters that DeepSpeed rounds to bf16; at stage 3 this rank's share of them [n].

        Frozen parameters that lose nothing by it, because their file holds bf16, are left out. Stage 3's parameters are
        rounded and divided here.
        """
        if self.stage == 3:
            return self._divide(module)
        if not has_bf16_weights(self.ds_config):
            return {}
        return {id(p): p.detach().clone() for p in module.parameters() if p.requires_grad or _is_changed_by_bf16(p)}

    def _divide(self, module: nn.Module) -> dict[int, Tensor]:
        """Divide rank 0's parameters among all ranks, one after another. Returns `_originals`.

        A rank holds its shares and one whole parameter at a time, unless it had others before. Parameters and buffers
        on the meta device get values here.
        """
        import deepspeed

        for buffer in module.buffers():
            _place(buffer, self.device)
            dist.broadcast(buffer.data.view(-1).view(torch.uint8), src=0)
        settings = {
            "config_dict_or_path": self.ds_config,
            "zero_quantized_nontrainable_weights": self.ds_config["zero_optimization"].get(
                "zero_quantized_nontrainable_weights", False
            ),
        }
        rounds, divided, originals = has_bf16_weights(self.ds_config), None, {}
        for parameter in cast(Iterator[Any], module.parameters()):
            _place(parameter, self.device)
            whole = parameter.data
            if rounds:
                # DeepSpeed sends rank 0's values, too, but after they are rounded.
                dist.broadcast(whole, src=0)
                parameter.data = whole.bfloat16()
            if divided is None:
                deepspeed.zero.Init(module=nn.ParameterList([parameter]), **settings)
                divided = parameter
            else:
                divided.convert_to_zero_parameters(param_list=[parameter])
            if rounds and (parameter.requires_grad or _is_changed_by_bf16(whole)):
                start, stop = self._held(parameter)
                share = whole.new_zeros(parameter.partition_numel())
                share[: stop - start] = whole.view(-1)[start:stop]
                originals[id(parameter)] = share
        return originals

    def _restore_masters(self, originals: Mapping[int, Tensor]) -> None:
        """Give the float32 masters their full values, because DeepSpeed copies them from weights rounded to bf16."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        set_master = safe_set_local_fp32_param if self.stage == 3 else safe_set_full_fp32_param
        for parameter in self.module.parameters():
            if parameter.requires_grad and id(parameter) in originals:
                set_master(parameter, originals[id(parameter)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.heartbeat("forward")
        return self.deepspeed(*args, **kwargs)

    @contextlib.contextmanager
    def accumulation(self) -> Iterator[None]:
        """A context around all backward calls of a step; gradients are reduced once where the stage allows."""
        with contextlib.ExitStack() as stack:
            if self._coalesces:
                stack.enter_context(self.deepspeed.coalesce_grad_reduction())
            yield
            with self._uncompiled():  # stage 2 takes Muon's steps where it reduces
                stack.close()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the global loss; parts of all ranks are summed."""
        self.heartbeat("backward")
        self.deepspeed.backward(loss * self.world.size, scale_wrt_gas=False)

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which DeepSpeed's Muon is not compiled. Compiling it would take a minute."""
        return torch.compiler.set_stance("force_eager") if self._by_muon else contextlib.nullcontext()

    def learning_rates(self, lr: float) -> dict[str, float]:
        """The rates of a step by their names in metrics.jsonl. lr: AdamW's."""
        rates = {"lr": lr}
        for group in self.optimizer.param_groups:
            if group.get("use_muon"):
                rates["muon_lr"] = lr * group["rate"]
        return rates

    def step(self, lr: float, *, skip: bool = False) -> float:
        """One optimizer step. Returns the gradient's norm before clipping; with Muon, see docs/metrics.md.

        lr: AdamW's learning rate. Muon's is the same share of its own highest one.

        The step is skipped, and weights and moments stay as they were, where `skip` is true or the norm is not finite.
        `skip` must be the same on all ranks.
        """
        self.heartbeat("optimizer step")
        self._skips = skip
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
        if skip and self._by_muon and self._is_stage_1_in_bf16:
            for gradients in self.optimizer.fp32_groups_gradients_flat:
                gradients.fill_(math.nan)  # DeepSpeed then drops the step before Muon's momentum takes them in
        with self._uncompiled():
            self.deepspeed.step()
        norm = self._norm_at_stage_0 if self.stage == 0 else self.deepspeed.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def _drop_whole_steps(self) -> None:
        """Let DeepSpeed drop a step that is skipped, or not finite, before Muon's momentum takes its gradients in.

        For AdamW, which has no part in a step that finds no gradients, the hook before the step is enough.
        """
        found, optimizer = self.optimizer.has_overflow, self.optimizer

        def has_overflow(*args: Any, **kwargs: Any) -> bool:
            return self._skips or found(*args, **kwargs)

        def check(update_scale: bool = True) -> bool:
            optimizer.check_overflow()
            return optimizer.overflow

        optimizer.has_overflow = has_overflow
        if self.stage == 3:  # which otherwise looks for it in fp16 alone
            optimizer._overflow_check_and_loss_scale_update = check
        else:
            optimizer.check_grad_overflow = True

    def train(self, mode: bool = True) -> None:
        self.deepspeed.train(mode)

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's whole float32 value on every rank. All ranks must call it, in the same order."""
        from deepspeed.utils import safe_get_full_fp32_param

        if not parameter.requires_grad:
            return self._frozen_parameter(parameter)
        if self.stage == 0:
            return parameter.detach().float()
        value = safe_get_full_fp32_param(parameter)
        assert value is not None, "DeepSpeed holds no float32 value of a trained parameter"
        return value.detach().float()

    def _frozen_parameter(self, parameter: Any) -> Tensor:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        if (original := self._frozen.get(id(parameter))) is not None:
            if self.stage < 3:
                return original
            shares = [torch.empty_like(original) for _ in range(self.world.size)]
            dist.all_gather(shares, original)
            return torch.cat(shares)[: parameter.ds_numel].view(parameter.ds_shape)
        with GatheredParameters([parameter], enabled=self.stage == 3):
            return parameter.detach().float().clone()

    def shapes(self) -> dict[str, list[int]]:
        """The whole shape of every trained parameter, in the model's order."""
        return {name: list(p.ds_shape if self.stage == 3 else p.shape) for name, p in self._trained.items()}

    def kept_beside(self) -> dict[str, tuple[str, ...]]:
        """The kinds of values that the optimizer keeps of every trained parameter."""
        return {name: MOMENTUM if name in self._by_muon else MOMENTS for name in self._trained}

    def optimizer_steps(self) -> int:
        """Steps that AdamW has taken, for its bias correction; 0 before it has any moments.

        It is the number of Muon's steps, too, because every model has norms or biases, which are AdamW's.
        """
        states = (self._inner.state.get(tensor) for _, tensor in self._stepped())
        counts = {int(state["step"]) for state in states if state and "step" in state}
        assert len(counts) <= 1, f"parameters have taken different numbers of steps: {sorted(counts)}"
        return counts.pop() if counts else 0

    def fragments(self) -> list[Fragment]:
        """The fragments that this rank holds."""
        return self._fragments(lambda parameter, _kind: self._held(parameter), beside=self.optimizer_steps() > 0)

    def _fragments(self, range_of: Callable[[Any, str], tuple[int, int]], *, beside: bool) -> list[Fragment]:
        """range_of: of a parameter and a kind of values. beside: whether the optimizer keeps any."""
        found = []
        for name, kinds in self.kept_beside().items():
            for kind in (MASTER, *kinds) if beside else (MASTER,):
                start, stop = range_of(self._trained[name], kind)
                if start < stop:
                    found.append(Fragment(kind, name, start, stop))
        return found

    def fragments_to_save(self) -> list[Fragment]:
        """This rank's share of the fragments. At stage 0 every rank holds all, and they are dealt out in turn."""
        return self.fragments()[self.world.rank :: self.world.size] if self.stage == 0 else self.fragments()

    def read(self, fragment: Fragment) -> Tensor:
        """The values of a fragment that this rank holds: float32 [stop - start]."""
        if self.stage != 3:
            return self._view(fragment)
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        parameter = self._trained[fragment.name]
        if fragment.kind == MASTER:
            part = safe_get_local_fp32_param(parameter)
        else:
            part = safe_get_local_optimizer_state(parameter, fragment.kind)
        return part.detach()[: fragment.stop - fragment.start]

    def load(self, read: Callable[[Fragment], Tensor], *, optimizer_steps: int) -> None:
        """Take parameters and optimizer state from `read`, which gives this rank's fragments. All ranks call it."""
        for group, tensor in self._stepped():
            self._inner.state.pop(tensor, None)
            if optimizer_steps:
                self._inner.state[tensor] = self._fresh_state(group, tensor, optimizer_steps)
        with torch.no_grad():
            for fragment in self._fragments(self._kept, beside=optimizer_steps > 0):
                self._write(fragment, read(fragment))
        self._refresh_weights()

    def _fresh_state(self, group: Mapping[str, Any], tensor: Tensor, optimizer_steps: int) -> dict[str, Tensor]:
        """What the optimizer keeps beside a tensor that it steps, all of it 0."""
        if not group.get("use_muon"):
            taken = torch.tensor(float(optimizer_steps), dtype=torch.float32, device=tensor.device)
            return {"step": taken, **{kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTS}}
        if not self._keeps_whole_momenta:
            return {kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTUM}
        index = next(i for i, each in enumerate(self._inner.param_groups) if each is group)
        size = sum(p.numel() for p in self.optimizer.params_in_partition[index])
        return {kind: torch.zeros(size, device=tensor.device) for kind in MOMENTUM}

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The optimizer inside DeepSpeed's wrapper; at stage 0 there is no wrapper."""
        return self.optimizer if self.stage == 0 else self.optimizer.optimizer

    @property
    def _keeps_whole_momenta(self) -> bool:
        """Whether a rank that has a part of a matrix keeps Muon's momentum of all of it."""
        return self.stage in (1, 2) and not self._is_stage_1_in_bf16

    def _stepped(self) -> list[tuple[Mapping[str, Any], Tensor]]:
        """The tensors that the optimizer steps on this rank, each with its group.

        They are parameters, or from stage 1 on flat float32 runs of them.
        """
        groups = self._inner.param_groups
        if self.stage == 3:
            flat = self.optimizer.fp32_partitioned_groups_flat
            return [(groups[self.optimizer.sub_group_to_group_id[i]], tensor) for i, tensor in enumerate(flat)]
        return [(group, tensor) for group in groups for tensor in group["params"]]

    def _kept(self, parameter: Any, kind: str) -> tuple[int, int]:
        """The range of a parameter's flattened elements of which this rank keeps values of a kind."""
        start, stop = self._held(parameter)
        whole = kind in MOMENTUM and self._keeps_whole_momenta and start < stop
        return (0, parameter.numel()) if whole else (start, stop)

    def _held(self, parameter: Any) -> tuple[int, int]:
        """The range of a parameter's flattened elements whose optimizer state is this rank's; may be empty."""
        if self.stage == 0:
            return 0, parameter.numel()
        if self.stage == 3:  # equal parts, the last ones cut short or empty
            size = parameter.partition_numel()
            start, stop = (min(rank * size, parameter.ds_numel) for rank in (self.world.rank, self.world.rank + 1))
            return start, stop
        if parameter._hp_mapping is None:
            return 0, 0
        address = parameter._hp_mapping.lp_fragment_address
        return address.start, address.start + address.numel

    def _view(self, fragment: Fragment) -> Tensor:
        """A float32 view [stop - start] of the fragment's values where the engine keeps them. For stages 0 to 2."""
        parameter = self._trained[fragment.name]
        if self.stage == 0:
            whole = parameter if fragment.kind == MASTER else self._inner.state[parameter][fragment.kind]
            return whole.detach().view(-1)
        mapping = parameter._hp_mapping
        _, flat = self._stepped()[mapping.param_group_index]
        if fragment.kind in MOMENTUM and self._keeps_whole_momenta:
            before = itertools.takewhile(
                lambda p: p is not parameter, self.optimizer.params_in_partition[mapping.param_group_index]
            )
            start = sum(p.numel() for p in before) + fragment.start
            return self._inner.state[flat][fragment.kind].narrow(0, start, fragment.stop - fragment.start)
        if fragment.kind != MASTER:
            flat = self._inner.state[flat][fragment.kind]
        address = mapping.get_hp_fragment_address()
        return flat.detach().narrow(0, address.start, address.numel)

    def _write(self, fragment: Fragment, values: Tensor) -> None:
        if self.stage != 3:
            self._view(fragment).copy_(values)
            return
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        parameter = self._trained[fragment.name]
        part = torch.zeros(parameter.partition_numel(), device=values.device)
        part[: values.numel()] = values
        if fragment.kind == MASTER:
            safe_set_local_fp32_param(parameter, part)
            # Also set the weights that forward passes gather, in their own precision.
            parameter.ds_tensor.copy_(part)
        else:
            safe_set_local_optimizer_state(parameter, part, fragment.kind)

    def _refresh_weights(self) -> None:
        """Update the weights of forward passes to the values of the float32 masters."""
        if self.stage in (1, 2):
            self.optimizer.update_lp_params()
        elif self.stage == 3 and (kept_whole := self.optimizer.persistent_parameters):
            kept_whole[0].partition(kept_whole)
            kept_whole[0].all_gather(kept_whole)


def _place(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or a buffer to the device, in place. One on the meta device gets memory, but no values."""
    if tensor.is_meta:
        empty = torch.empty_like(tensor, device=device)
        kind = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        torch.utils.swap_tensors(tensor, kind)
    tensor.data = tensor.data.to(device).contiguous()


def _is_changed_by_bf16(values: Tensor) -> bool:
    """Whether rounding to bf16 changes any of the values. They are read in parts, since copies take memory."""
    parts = values.detach().view(-1).split(_PART)
    return not all(torch.equal(part.bfloat16().to(part.dtype), part) for part in parts)
