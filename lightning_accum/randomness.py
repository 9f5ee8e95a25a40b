"""Makes random numbers comparable between batches of different sizes: dropout is off, and other noise belongs to rows."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_accum.exact import exact_dtype

_NAMES_WITH_P = ("drop", "stochasticdepth")
"""Parts of the names of classes whose probability is ``p``."""


def switch_off_dropout(module: nn.Module) -> list[tuple[str, MutableMapping[str, Any], str, float]]:
    """Set the probabilities of dropout in ``module`` to 0. Returns their paths, holders, names in these, and former values.

    These are ``p`` of dropout layers, and numbers in attributes, in Hugging Face configurations and in ``hparams`` with "drop" in
    their name: ``attention_dropout``, ``resid_pdrop``, ``drop_path_rate``, ``layerdrop``.
    """
    found, seen = [], set()
    for path, layer in module.named_modules():
        has_p = any(name in type(layer).__name__.lower() for name in _NAMES_WITH_P)
        for prefix, holder in _holders(layer):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for name, value in holder.items():
                is_named = isinstance(name, str) and ("drop" in name.lower() or (has_p and name == "p"))
                if is_named and isinstance(value, float) and 0 < value <= 1:
                    found.append((".".join(part for part in (path, prefix, name) if part), holder, name, value))
    for _, holder, name, _ in found:
        holder[name] = 0.0
    return found


@contextmanager
def dropout_switched_off(module: nn.Module) -> Iterator[None]:
    """Inside, the probabilities of dropout in ``module`` are 0, see :func:`switch_off_dropout`."""
    before = switch_off_dropout(module)
    try:
        yield
    finally:
        for _, holder, name, probability in before:
            holder[name] = probability


def _holders(layer: nn.Module) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """The mappings in which a layer stores numbers."""
    yield "", vars(layer)
    config = getattr(layer, "config", None)
    if hasattr(config, "to_dict") and hasattr(config, "__dict__"):
        yield "config", vars(config)
    hparams = vars(layer).get("_hparams")
    if isinstance(hparams, MutableMapping):
        yield "hparams", hparams


def seed_everything(seed: int) -> None:
    """Seed the global random generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


class RandomState(AbstractContextManager["RandomState"]):
    """The state of the global random generators: torch's on the CPU and on ``device``, Python's and numpy's.

    ``of_torch_alone`` leaves out Python's and numpy's, which take longer to read. As a context, it restores the state at the end.
    """

    def __init__(self, device: torch.device, of_torch_alone: bool = False) -> None:
        generators = [*_generators_of_torch(device), *(() if of_torch_alone else _generators_of_others())]
        self._states = [(get, set_to, get()) for get, set_to in generators]

    def restore(self) -> None:
        """Restore all states, as often as needed."""
        for _, set_to, state in self._states:
            set_to(state)

    @override
    def __exit__(self, *error: object) -> None:
        self.restore()

    def has_drawn(self) -> bool:
        """Whether a generator has drawn since this state was read."""
        return not all(_is_same(get(), state) for get, _, state in self._states)


_Generator: TypeAlias = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that read and set the state of a random generator."""


def _generators_of_torch(device: torch.device) -> Iterator[_Generator]:
    yield torch.get_rng_state, torch.set_rng_state
    if device.type in ("cuda", "xpu"):
        backend = getattr(torch, device.type)
        yield partial(backend.get_rng_state, device), partial(backend.set_rng_state, device=device)
    elif device.type == "mps":
        yield torch.mps.get_rng_state, torch.mps.set_rng_state


def _generators_of_others() -> Iterator[_Generator]:
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield partial(numpy.random.get_state, legacy=False), numpy.random.set_state


def _is_same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):  # numpy's state, which holds an array
        return all(_is_same(value, other[name]) for name, value in state.items())
    is_same = state == other
    return is_same if isinstance(is_same, bool) else bool(is_same.all())


class NoiseOfRows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Inside, random numbers belong to rows: a row gets the same numbers in the whole batch and in a part.

    Examples are the noise of an autoencoder and the time steps of a diffusion model. Each draw depends on the number of draws since
    :meth:`restart`; the state of the random generators does not change. If the rows are unknown, or several numbers are drawn for
    each row, all entries of dimension 0 get the same numbers. Other draws (a permutation, draws without replacement, Python's own
    numbers) stay random. If contexts are nested, only the outer one has an effect.
    """

    _depth = 0
    supports_higher_order_operators = True  # such as torch.cond, and flex_attention on a GPU

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_inside = False
        self._draws = 0
        self._rows: tuple[int, ...] | None = None
        self._total = 0
        self._whole: dict[int, tuple[int, ...]] = {}
        self.seed, self.found = 0, set[str]()  # the operations that drew, by name
        self.is_unlike = False  # a part drew numbers whose shapes do not match its rows in the whole
        self.draws_shared = False  # the whole drew numbers that all rows share

    def __enter__(self) -> Self:
        self._is_inside = NoiseOfRows._depth > 0
        NoiseOfRows._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        NoiseOfRows._depth -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def restart(self, rows: Sequence[int] | None = None, total: int = 0) -> None:
        """Restart the count of draws, for these of the ``total`` rows of a whole batch that ran before; None: unknown rows."""
        self._draws, self._rows, self._total = self.seed << 12, None if rows is None else tuple(rows), total
        if rows is None or self._rows == tuple(range(total)):
            self.is_unlike = False

    @contextmanager
    def of_call(self, number: int, rows: Sequence[int], total: int) -> Iterator[None]:
        """Inside, call ``number`` of a submodule, with some of ``total`` rows, draws the numbers of a call with all rows."""
        before = self._draws, self._rows, self._total
        self._draws, self._rows, self._total = number << 20, tuple(rows), total
        try:
            yield
        finally:
            self._draws, self._rows, self._total = before

    def sample(self, shape: Sequence[int], draw: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """The numbers of ``draw`` for a shape, for the current rows."""
        shape = tuple(shape)
        if self._rows is None or not shape:
            return draw(shape[1:]).expand(shape).clone()
        rows, number, total = self._rows, len(self._rows), self._total
        is_whole = rows == tuple(range(total))
        if is_whole:
            self._whole[self._draws] = shape
        whole = self._whole.get(self._draws, ())
        others = [dim for dim, size in enumerate(whole) if len(whole) == len(shape) and size != shape[dim]]
        repeats = len(whole) > 0 and whole[0] > total and whole[0] % total == 0
        if whole == shape or (len(others) == 1 and whole[others[0]] * number == shape[others[0]] * total):
            drawn = draw(whole[1:]).expand(whole) if repeats else draw(whole)
            if is_whole:
                return drawn.clone()
            dim = others[0] if others else next((dim for dim, size in enumerate(whole) if size == total == number), None)
            if dim is not None and whole[dim] == total:
                return drawn.index_select(dim, torch.tensor(rows, device=drawn.device))
            if dim is None:  # all rows share the numbers
                return drawn.clone()
            if dim == 0:
                return drawn[:1].expand(shape).clone()
        self.is_unlike = True
        return draw(shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "overloadpacket", func).__name__
        draw = None if self._is_inside else _WAYS.get(name)
        if draw is None or torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*with_tensors(func, args), **kwargs)
        self._draws += 1
        dims = [value.dim() for value in args if isinstance(value, Tensor)]
        with _seeded(self._draws, _device_of(args, kwargs)):
            is_number = bool(dims) and max(dims) == 0  # it has no rows
            result = func(*args, **kwargs) if is_number else draw(self.sample, func, args, kwargs)
        if result is None:
            return func(*args, **kwargs)
        self.found.add(name.rstrip("_"))
        if isinstance(result, Tensor) and self._rows == tuple(range(self._total)):
            self.draws_shared |= all(size % max(1, self._total) for size in result.shape)
        return result


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """The device on which an operation draws."""
    on = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device"))
    return torch.device("cpu" if on is None else on)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators of the CPU and of ``device`` are seeded. Generators of other devices are neither read nor set."""
    with RandomState(device, of_torch_alone=True):
        torch.default_generator.manual_seed(seed)
        if device.type in ("cuda", "xpu"):
            backend = getattr(torch, device.type)
            backend.default_generators[backend.current_device() if device.index is None else device.index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        yield


_Sample: TypeAlias = "Callable[[Sequence[int], Callable[[Sequence[int]], Tensor]], Tensor]"


def _uniform(sample: _Sample, tensor: Tensor) -> Tensor:
    return sample(tensor.shape, lambda shape: torch.rand(shape, dtype=exact_dtype(tensor.device), device=tensor.device))


def _widest(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type to draw in, so that a module draws the same numbers in any floating-point type."""
    return exact_dtype(device) if dtype.is_floating_point else dtype


def _in_place(sample: _Sample, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    if rest and isinstance(rest[0], Tensor):  # bernoulli_(probabilities)
        return tensor.copy_(_uniform(sample, tensor) < rest[0])
    dtype = _widest(tensor.device, tensor.dtype)
    return tensor.copy_(sample(tensor.shape, lambda shape: func(tensor.new_empty(shape, dtype=dtype), *rest, **kwargs)))


def _like(sample: _Sample, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    kwargs = {**kwargs, "memory_format": None} if "memory_format" in kwargs else {**kwargs}
    dtype = kwargs.pop("dtype", None) or tensor.dtype
    empty = partial(tensor.new_empty, dtype=_widest(tensor.device, dtype))
    return sample(tensor.shape, lambda shape: func(empty(shape), *rest, **kwargs)).to(dtype)


def _of_size(sample: _Sample, func: Any, args: Any, kwargs: Any) -> Any:
    place = next((place for place, value in enumerate(args) if isinstance(value, (list, tuple))), None)
    if place is None or not args[place]:
        return None if place is None else func(*args, **kwargs)
    default = torch.get_default_dtype() if func.overloadpacket.__name__ in ("rand", "randn", "normal") else torch.int64
    dtype = kwargs.get("dtype") or default
    kwargs = {**kwargs, "dtype": _widest(_device_of(args, kwargs), dtype)}
    return sample(args[place], lambda shape: func(*args[:place], list(shape), *args[place + 1 :], **kwargs)).to(dtype)


def _bernoulli(sample: _Sample, func: Any, args: Any, kwargs: Any) -> Any:
    probabilities = args[1] if len(args) > 1 else args[0]
    return (_uniform(sample, args[0]) < probabilities).to(args[0].dtype)


def _dropout(sample: _Sample, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, p, is_training = args
    mask = _uniform(sample, tensor) >= p
    return (tensor * mask / (1 - p), mask) if is_training and p < 1 else None


def _normal(sample: _Sample, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not tensors:
        return _of_size(sample, func, args, kwargs)
    total: Tensor = sum(tensors)  # type: ignore[assignment]
    mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    return mean + std * sample(
        total.shape, lambda shape: tensors[0].new_empty(shape, dtype=exact_dtype(total.device)).normal_()
    ).to(total.dtype)


_WAYS = {
    **dict.fromkeys(("normal_", "uniform_", "random_", "bernoulli_"), _in_place),
    **dict.fromkeys(("exponential_", "geometric_", "cauchy_", "log_normal_"), _in_place),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _like),
    **dict.fromkeys(("rand", "randn", "randint"), _of_size),
    "bernoulli": _bernoulli,
    "native_dropout": _dropout,  # functional dropout, on a GPU
    "normal": _normal,
}


@contextmanager
def generators_kept(*loaders: Any) -> Iterator[None]:
    """Inside, drawing from loaders does not change their random generators, nor their samplers' generators."""
    owners = [owner for loader in loaders for owner in (loader, getattr(loader, "batch_sampler", None))]
    owners += [getattr(owner, "sampler", None) for owner in owners]
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [generator for generator in found if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def with_tensors(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of an operator, with the first converted to a tensor if the operator takes one.

    torch passes a dispatch mode a number instead of a tensor that was made from one (the divisor saved by ``loss / 12``), which
    most operators refuse (as of torch 2.13).
    """
    if not args or not isinstance(args[0], (bool, int, float, complex)) or not hasattr(func, "_schema"):
        return args
    if not isinstance(func._schema.arguments[0].type, torch.TensorType):
        return args
    return torch.tensor(args[0], dtype=torch.float64 if isinstance(args[0], float) else None), *args[1:]
