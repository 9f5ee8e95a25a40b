"""What the package's own source shows: which private names of other libraries it uses, and which file imports which."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_accum

seams = import_module("lightning_accum.trainer.seams")
ROOT = Path(lightning_accum.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics")
SEAMS = (*seams.LIGHTNING, *seams.FSDP2)
ROWS = {row.name for row in SEAMS} | {part for row in SEAMS for part in row.owner.split(".")}
_NAMES = """
_BatchNorm _DDPSink _DataFetcher _ResultMetric _backward_hooks _base _batches_that_stepped _buffers _build_kwargs _call_impl
_callback_metrics _cdata _check_reducer_finalized _combined_loader _comm_hooks _compiled_call_impl _computed _current_fx
_current_fx_name _data_connector _data_fetcher _data_parallel_size _defaults _device_mesh _engine_run_backward _execution_engine
_first_loop_iter _foreach_mul_ _foreach_norm _forward_cache _fsdp_param_groups _get_default_store _get_sequence_nr _hparams
_input_metadata _is_hsdp _is_root _last_train_dl_reload_epoch _launcher _lightning_optimizers _logged_metrics _logger_connector
_loggers _modules _orig_mod _param_requires_grad_state _parameters _partial_reduce_output _post_accumulate_grad_hooks
_python_dispatch _pytree _rebuild_buckets _reduce_states _reductions _reset_state _restarting _results _resuming_from_checkpoint
_root_device _saved_alpha _saved_condition _saved_dim _saved_exponent _saved_ignore_index _saved_index _saved_max _saved_min
_saved_other _saved_reduction _saved_result _saved_self _saved_self_sym_numel _saved_self_sym_sizes _saved_target
_saved_total_weight _saved_weight _schema _should_unsync _signal_connector _skip_backward _static_graph_delay_allreduce_enqueued
_step_supports_amp_scaling _sync_buffers _tensor_parallel_size _timeout _to_sync _trainer _unsharded_param _update_count
_val_check_time_interval _values _version
"""
PRIVATE = set(_NAMES.split())  # private names of Lightning's and torch's that are only read: what has gone is an AttributeError
OF_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
"""They have an underscore and are in Python's documentation."""
_PARTS = "_fork _spawn _notebook _find_unused_parameters_ _io _thread _C _dynamo _functorch _inductor"
NO_NAMES = set(_PARTS.split())
"""Strings that are parts of a strategy's name, and modules whose objects ``verify`` leaves as they are."""


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def module_of(file: str) -> str:
    return ".".join(["lightning_accum", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def defined_in(tree: ast.AST) -> set[str]:
    """The names that a file gives: to functions, classes, variables, and attributes of ``self``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            names.add(node.attr)
    return names


DEFINED = {name for tree in FILES.values() for name in defined_in(tree)}


def private_names(file: str) -> Iterator[tuple[str, int]]:
    """The private names in a file that the package does not define, with their lines."""
    tree = FILES[file]
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found: list[Any] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, (ast.Attribute, ast.Constant, ast.keyword)) and id(node) not in docstrings:
            found = [getattr(node, {ast.Attribute: "attr", ast.Constant: "value", ast.keyword: "arg"}[type(node)])]
        yield from ((name, node.lineno) for name in found if isinstance(name, str) and is_private(name) and name not in DEFINED)


def test_every_private_name_of_a_library_is_in_the_table() -> None:
    known = ROWS | PRIVATE | OF_PYTHON | NO_NAMES
    used = {f"{name}: {file}, line {line}" for file in FILES for name, line in private_names(file) if name not in known}
    assert used == set(), "\n".join(sorted(used))


BELOW_THE_LINE = ("trainer", "demo", "names", "pytorch_lightning", "ray", "testing", "verification", "__main__")
"""What may import lightning. The package's own ``__init__`` gives out what is below, and is imported by nobody."""
MODULES = {module_of(file): tree for file, tree in FILES.items()}


@cache
def imported_by(module: str) -> set[str]:
    """The whole names that a module imports, wherever in it: ``"lightning_accum.window"``, ``"torch.Tensor"``."""
    names = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    own = {name if name in MODULES else name.rpartition(".")[0] for name in names if name.startswith("lightning_accum")}
    return {name for name in names if not name.startswith("lightning_accum")} | own - {module}


def reached_from(module: str) -> set[str]:
    reached, left = set(), [module]
    while left:
        new = {name for name in imported_by(left.pop()) if name in MODULES} - reached
        reached |= new
        left += new
    return reached


def short(module: str) -> str:
    return module.removeprefix("lightning_accum").removeprefix(".")


def is_below(module: str) -> bool:
    return short(module).partition(".")[0] in ("", *BELOW_THE_LINE)


def test_imports_make_no_circle() -> None:
    assert {short(module) for module in MODULES if module in reached_from(module)} == set()


def test_nothing_above_the_line_imports_lightning_or_what_is_below() -> None:
    above = {
        module: {
            name
            for name in imported_by(module)
            if name.partition(".")[0] in ("lightning", "pytorch_lightning") or (name in MODULES and is_below(name))
        }
        for module in MODULES
        if not is_below(module)
    }
    assert {module: wrong for module, wrong in above.items() if wrong} == {}


ON_THE_HOST = {  # where float64 may be named, beside ``exact.py`` and ``verify``, which runs on the host: Apple's MPS has none
    "demo.py": "the demo trains there",
    "trainer/results.py": "numbers for a logger, the mean of an epoch",
    "trainer/noise.py": "numbers of a checkpoint",
    "parameter_changes.py": "the type of what is there already",
    "testing.py": "a comparison",
    "prove.py": "gradients that were copied there",
    "randomness.py": "a number that an operator takes",
    "trial.py": "a precision",
    "trial_mode.py": "a precision",
    "weighing/functions.py": "a number",
    "window.py": "a comparison",
}


def test_float64_is_asked_for_where_a_device_has_it() -> None:
    names = {
        file: {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"float64", "double"}
        for file, tree in FILES.items()
        if not file.startswith("verification/") and file != "exact.py"
    }
    assert {file for file, found in names.items() if found} == set(ON_THE_HOST)


def test_no_test_file_imports_from_another() -> None:
    files = list(Path(__file__).parents[1].rglob("*.py"))
    names = {file.stem for file in files if file.stem.startswith("test_")}
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not imported & names, file.name
