"""The process groups of a trainer: torch's (gloo, on GPUs with NCCL), Megatron's, and this rank's place in them."""

import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.policy_schema import MegatronConfig
from nemo_fp8rl.hf.adapters import Adapters
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.policy.weights.layout import Axis, Layout, expert_tensor_size
from nemo_fp8rl.workers.network import GLOO, address_towards, check_interfaces, set_gloo_interface

GROUP_TIMEOUT = timedelta(minutes=30)
"""Timeout for the slowest rank to start, and for the first collective of each group.

torch has the same timeout for all other collectives.
"""


def start_process_groups(
    rank: int, world_size: int, rendezvous: tuple[str, int] | None, listener: socket.socket | None
) -> None:
    """Start torch's process group, unless an engine in this process has started it.

    rendezvous:  (host, port) at which the ranks meet; None for a single rank
    listener:    the listening socket of rank 0
    Raises:      UserError if the machine's network cannot be used
    """
    check_interfaces()
    if not dist.is_initialized():
        store: dist.Store = dist.HashStore()
        if rendezvous is not None:
            host, port = rendezvous
            set_gloo_interface(address_towards(host))
            descriptor = listener.detach() if listener else None  # the store closes the descriptor
            store = dist.TCPStore(
                *(host, port),
                world_size=world_size,
                is_master=rank == 0,
                master_listen_fd=descriptor,
                use_libuv=False,
                timeout=GROUP_TIMEOUT,
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            interface = os.environ.get(GLOO)
            chosen = f"{GLOO}={interface}" if interface else f"{GLOO} is not set"
            raise UserError(
                f"gloo, by which ranks talk, cannot use this machine's network ({chosen}): "
                f"{single_line(error)[:200]}; bring the interface up (loopback: ip link set lo up), or set {GLOO} to "
                "one that is up"
            ) from None


def make_layout(hf: HfConfig, parallel: MegatronConfig, adapters: Adapters, grouped_experts: bool = False) -> Layout:
    """Create Megatron's groups and return this rank's place in them; adapters, grouped_experts: see `Layout`."""
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
        grouped_experts=hf.family.experts and grouped_experts,
        adapters=adapters,
    )


def destroy_process_groups() -> None:
    """Destroy Megatron's groups, about sixty, with their threads and connections, so that new groups can be made.

    Megatron only forgets its groups and leaves them open; in a process that builds many models they would accumulate.
    """
    if parallel_state.model_parallel_is_initialized():
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                with suppress(ValueError):  # already destroyed with another group of the list
                    dist.destroy_process_group(group)
