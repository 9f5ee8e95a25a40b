"""Private names of torch and torchmetrics that are used.

There is no public way to what ``fully_shard`` has accumulated and not reduced, nor to what a node of an autograd graph has saved
(``tools/autograd/derivatives.yaml`` in torch says what each saves).
"""

from __future__ import annotations

from lightning_accum.seams.seam import table

READ = "torch 2.6.0, 2.13.0 and 2.15.0, torchmetrics 1.5.0 and 1.9.0"
"""The versions that fingerprints are of."""

# As in ``lightning.py``; "-" is for what has no source in Python.
TORCH = table(
    "",
    """
torch
    _foreach_add_ _foreach_mul_ _foreach_norm | - | many tensors in few kernels | -
torch._C._functions.NllLossBackward0
    _saved_reduction _saved_total_weight _saved_weight | - | what a cross entropy was divided by | -
    _saved_ignore_index _saved_self _saved_target | - | what a cross entropy was computed from | -
torch._C._functions.NllLoss2DBackward0
    _saved_reduction _saved_total_weight _saved_weight | - | what a cross entropy was divided by | -
    _saved_ignore_index _saved_self _saved_target | - | what a cross entropy was computed from | -
torch._C._functions.MseLossBackward0
    _saved_reduction _saved_self | - | the elements of a mean | -
torch._C._functions.SmoothL1LossBackward0
    _saved_reduction _saved_self | - | the elements of a mean | -
torch._C._functions.HuberLossBackward0
    _saved_reduction _saved_self | - | the elements of a mean | -
torch._C._functions.SoftMarginLossBackward0
    _saved_reduction _saved_self | - | the elements of a mean | -
torch._C._functions.BinaryCrossEntropyBackward0
    _saved_reduction _saved_self | - | the elements of a mean | -
torch._C._functions.BinaryCrossEntropyWithLogitsBackward0
    _saved_reduction _saved_self | - | the elements of a mean | -
torch._C._functions.MultiMarginLossBackward0
    _saved_reduction _saved_self | - | the rows of a mean | -
torch._C._functions.MultilabelMarginLossBackward0
    _saved_reduction _saved_self | - | the rows of a mean | -
torch._C._functions.MeanBackward0
    _saved_self_sym_numel _saved_self_sym_sizes | - | the elements of a mean | -
torch._C._functions.MeanBackward1
    _saved_dim _saved_self_sym_numel _saved_self_sym_sizes | - | the elements of a mean | -
torch._C._functions.SumBackward0
    _saved_self_sym_sizes | - | a sum of one number | -
torch._C._functions.SumBackward1
    _saved_self_sym_sizes | - | a sum of one number | -
torch._C._functions.DivBackward0
    _saved_other _saved_self | - | what a sum was divided by | -
torch._C._functions.MulBackward0
    _saved_other _saved_self | - | what a term is multiplied by | -
torch._C._functions.WhereBackward0
    _saved_condition | - | whether one of two losses is chosen | -
torch._C._functions.AddBackward0
    _saved_alpha | - | a factor of a term | -
torch._C._functions.SubBackward0
    _saved_alpha | - | a factor of a term | -
torch._C._functions.SqrtBackward0
    _saved_result | - | a function of a mean | -
torch._C._functions.LogBackward0
    _saved_self | - | a function of a mean | -
torch._C._functions.PowBackward0
    _saved_exponent _saved_self | - | a function of a mean | -
torch._C._functions.ClampBackward1
    _saved_max _saved_min _saved_self | - | a function of a mean | -
torch.autograd.graph.Node
    _input_metadata | - | the types and shapes that a node computes in | -
torch.autograd
    _engine_run_backward | - | what torch.autograd.backward ends with | 222a2c57 e21e4ead
    _is_checkpoint_valid | - | whether a backward is one of all leaves | b6cbe8c7
torch.Tensor
    _backward_hooks _post_accumulate_grad_hooks | - | the hooks of a tensor | -
    _base | - | what a tensor is a view of | -
    _values | - | the elements of a sparse tensor that are kept | -
    _version | - | the changes that a tensor has seen | -
torch.UntypedStorage
    _cdata | - | whether two storages are one | -
torch._ops.OpOverload
    _schema | - | the types of an operator's arguments | -
torch.nn.Module
    _buffers _modules _parameters | - | what a module holds by itself, without its children | -
    _call_impl | - | runs forward and its hooks | cb6bd5a4 14366ab7 f34c9a23
    _compiled_call_impl | - | runs in place of _call_impl, where there is one | -
torch.nn.utils.parametrize
    _cache_enabled | - | whether parametrizations are kept: not while there is no graph | -
torch.nn.modules.batchnorm
    _BatchNorm | - | is the base of all BatchNorm layers | -
torch.nn.parallel.distributed
    _DDPSink | - | the node through which a loss leaves DistributedDataParallel | -
torch.nn.parallel.distributed.DistributedDataParallel
    _comm_hooks | - | whether gradients are reduced in another way | -
    _static_graph_delay_allreduce_enqueued | - | a static graph was recorded | -
    _sync_buffers | - | sends the buffers of a rank to all | efe1e833 3e2f65f8
    will_sync_module_buffers | - | whether it does so in the next forward | 53930c47 3ee8dcb1
torch.distributed.Reducer
    _check_reducer_finalized | - | raises where a backward did not reach a parameter | -
    _rebuild_buckets | - | sends the order of gradients to all ranks | -
torch.distributed.distributed_c10d
    _get_default_store | - | where a rank leaves what it failed with | aa26792a
torch.utils._python_dispatch
    TorchDispatchMode | - | sees every operation | -
    is_traceable_wrapper_subclass | - | a tensor is made of others | 1bffef6b 8b14a077
torch.utils._pytree
    tree_leaves | - | the tensors of what a module returned | 0978baac
torch.optim.AdamW
    _step_supports_amp_scaling | - | since 1.13: a fused optimizer unscales the gradients by itself | -
torchmetrics.Metric
    _computed | - | what compute returned last | -
    _forward_cache | - | the value of a step | -
    _reduce_states | - | merges states that are given into its own | 8dadb454 d329bcb0
    _reductions | - | how states of two parts are merged | -
    _to_sync | - | whether compute waits for other ranks | -
    _update_count | - | how often update was called | -
""",
)
FSDP2 = table(
    "torch.distributed.fsdp._fully_shard.",
    """
_fully_shard.FSDPModule
    _get_fsdp_state | - | leads to all others | 6a3848f1
_fsdp_state.FSDPState
    _fsdp_param_group | - | where it is: the parameters of a module | -
    _fsdp_param_groups | - | where it is: there may be several groups | -
    _is_root | - | None before its first forward | -
    _register_root_post_backward_final_callback | - | reduces what was accumulated, at the end of a backward | daf2b8e7 db468f59
_fsdp_param_group.FSDPParamGroup
    all_reduce_grads | - | whether a backward reduces gradients over replicas | -
    fsdp_params | - | the parameters of a module | -
    post_backward | ReachedParameters | all parameters of a group are reduced, where any has a gradient | -
    reduce_grads | - | whether a backward reduces gradients | -
    mesh_info | - | over which ranks gradients are averaged | -
    gradient_divide_factor | - | where it is: somebody divides gradients by a number of their own | -
    mp_policy | - | where it is: the type that gradients are added up in | -
    post_forward_mesh_info | - | whether a module stays gathered from its forward to its backward | -
    reshard_after_backward | - | whether it stays gathered after that | -
_fsdp_param.FSDPParam
    _unsharded_param | - | its grad is what was accumulated; there from the first forward on | -
    mp_policy | - | where it is: the type that gradients are added up in | -
    sharded_param | - | which parameters are sharded, and so reduced over the ranks | -
    unsharded_accumulated_grad | - | what was accumulated, in the type of the reduction; in 2.15 the grad of _unsharded_param | -
""",
)
HYBRID = table(
    "torch.distributed.fsdp._fully_shard.",
    """
_fsdp_param_group.FSDPParamGroup
    _is_hsdp | - | whether there are replicas of the shards | -
    _partial_reduce_output | - | what was scattered, and not all-reduced yet | -
""",
)
"""Only for ``sync="shard"``."""
COMPILED = table("torch._dynamo.eval_frame.", "OptimizedModule\n    _orig_mod | - | the module that was compiled | -")
"""Not looked at before training: to import it takes seconds."""
