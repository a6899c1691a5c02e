"""What the processes of the pool need, imported once before they are forked."""

import torch
import torch.distributed  # noqa: TID251
import torch.distributed.checkpoint  # noqa: TID251
import torch.distributed.fsdp  # noqa: TID251
import torch.distributed.pipelining  # noqa: TID251

import tests.parallel.parity  # noqa: F401

torch.set_num_threads(1)
