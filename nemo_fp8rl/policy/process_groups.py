"""Process groups of a trainer: start gloo, on GPUs with NCCL, make Megatron's, and say where in them this rank is."""

import socket
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_fp8rl.config.schema import MegatronConfig
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.policy.weights.layout import Axis, Layout, expert_tensor_size
from nemo_fp8rl.workers.network import address_towards, gloo_listens_on

PATIENCE = timedelta(minutes=30)
"""Time for the slowest rank, to start and before the first collective of each group; torch gives all others as much."""


def join(rank: int, world_size: int, rendezvous: tuple[str, int] | None, listener: socket.socket | None) -> None:
    """Start the groups. One rank needs no socket; an engine in this process may share its group."""
    if not dist.is_initialized():
        store: dist.Store = dist.HashStore()
        if rendezvous is not None:
            host, port = rendezvous
            gloo_listens_on(address_towards(host))
            descriptor = listener.detach() if listener else None  # the store closes it
            store = dist.TCPStore(
                *(host, port),
                world_size=world_size,
                is_master=rank == 0,
                master_listen_fd=descriptor,
                use_libuv=False,
                timeout=PATIENCE,
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)


def split_model(hf: HfConfig, parallel: MegatronConfig) -> Layout:
    """Make Megatron's groups and say where in them this rank is."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_size(hf, parallel),
        )

    def axis(group: dist.ProcessGroup) -> Axis:
        return Axis(group.rank(), group.size())

    return Layout(
        hf,
        tensor=axis(parallel_state.get_tensor_model_parallel_group()),
        pipeline=axis(parallel_state.get_pipeline_model_parallel_group()),
        expert=axis(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=axis(parallel_state.get_expert_tensor_parallel_group()),
        context=axis(parallel_state.get_context_parallel_group()),
        data=axis(parallel_state.get_data_parallel_group()),
        expert_data=axis(parallel_state.get_expert_data_parallel_group()),
        first_stage_layers=parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=parallel.num_layers_in_last_pipeline_stage,
        grouped_experts=hf.family.experts and torch.cuda.is_available(),
    )


def leave() -> None:
    """Give up Megatron's groups with their threads and connections, some sixty of them, so that others can be made.

    Megatron forgets its groups and leaves them open, and in a process that splits models again and again they pile up.
    """
    if parallel_state.model_parallel_is_initialized():
        made = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        for group in made:
            if isinstance(group, dist.ProcessGroup):
                with suppress(ValueError):  # one that went with another of the list
                    dist.destroy_process_group(group)
