"""What no pipeline runs is refused, with the reason; what its processes do not agree on ends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from afina.config import ParallelSettings, TrainSettings
from afina.errors import AfinaError, ConfigError, RunError
from afina.models.forward import packing
from afina.parallel.beside import refuse_techniques
from afina.parallel.plan import Plan
from afina.parallel.processes import Processes
from afina.table import apply
from afina.techniques.lora import LoRA
from afina.train.ahead import made
from afina.train.fit import refuse_in_stages, refuse_several
from afina.train.loop import backward
from afina.tree import Seams
from tests.parallel.parity import Case, edited, work_of
from tests.parallel.pool import Pool
from tests.tiny import tiny_llama
from tests.train.kit import ragged_rows

pytestmark = pytest.mark.dist

FOUR = (("num_hidden_layers", 4),)


def refused(changes: dict[str, Any], settings: ParallelSettings) -> str:
    """What is said of a model that cannot be shared out."""
    mesh = Processes(settings)
    mesh.begin()
    model = tiny_llama(**changes)
    try:
        mesh.hold(model, {})
    except AfinaError as error:
        return str(error)
    finally:
        mesh.end()
    return ""


def test_more_stages_than_blocks(pool: Pool) -> None:
    settings = ParallelSettings(pipeline=2, schedule="interleaved")
    for said in pool.run(2, refused, {"num_hidden_layers": 3}, settings):
        assert "4 stages, 3 blocks" in said


def test_a_split_of_other_blocks(pool: Pool) -> None:
    settings = ParallelSettings(pipeline=2, split=(2, 1))
    for said in pool.run(2, refused, {"num_hidden_layers": 4}, settings):
        assert "4 blocks in 2 stages" in said


def still(schedule: str) -> str:
    """What is said where only the upper blocks train."""
    mesh = Processes(ParallelSettings.model_validate({"pipeline": 2, "schedule": schedule}))
    edit = apply(tiny_llama(num_hidden_layers=4), [LoRA(rank=2, target=("model.layers.3.mlp.*",))])
    mesh.begin()
    try:
        mesh.hold(edit.model, edit.trainable())
    except ConfigError as error:
        return str(error)
    finally:
        mesh.end()
    return ""


def test_a_split_backward_pass_needs_gradients_at_every_border(pool: Pool) -> None:
    """torch's split pass gives nothing a gradient in a stage into which none flows."""
    for said in pool.run(2, still, "zero_bubble"):
        assert "nothing trains before stage 1 of 2" in said
    assert pool.run(2, still, "1f1b") == ["", ""]


def different_rows() -> str:
    """What is said where the processes of one pipeline have different rows."""
    mesh = Processes(ParallelSettings(pipeline=2))
    edit = edited(Case(model=FOUR))
    work = work_of(Case(rows_each=1), mesh, edit)
    with packing(edit.model, True), pytest.raises(RunError) as caught:
        backward(work, made(work, ragged_rows(4 + mesh.rank)), 0)
    mesh.end()
    return str(caught.value)


def test_a_message_of_another_shape_is_not_waited_for(pool: Pool) -> None:
    for said in pool.run(2, different_rows):
        assert "different micro-batches" in said


def changed_shape() -> str:
    """What is said where a block changes the shape of the states: torch's buffers would take any."""
    mesh = Processes(ParallelSettings(pipeline=2, timeout_s=5))
    edit = edited(Case(model=FOUR))
    work = work_of(Case(rows_each=1), mesh, edit)
    if mesh.rank == 0:
        block = edit.model.get_submodule("model.layers.1")
        block.register_forward_hook(lambda module, args, out: out[:, :-1])
    said = ""
    try:
        with packing(edit.model, True):
            backward(work, made(work, ragged_rows(4)), 0)
    except RuntimeError as error:
        said = str(error)
    except AfinaError as error:
        said = str(error)
    mesh.end()
    return said


def test_a_stage_sends_no_other_shape(pool: Pool) -> None:
    assert "changed their shape" in pool.run(2, changed_shape)[0]


@pytest.mark.parametrize(
    ("train", "schedule"),
    [({"compile": True}, "zero_bubble"), ({"recompute": "selective"}, "zero_bubble")],
)
def test_what_serves_one_backward_pass(train: dict[str, Any], schedule: Any) -> None:
    settings = TrainSettings(**train)
    with pytest.raises(ConfigError, match="one backward pass"):
        refuse_several(Plan(pipeline=2, schedule=schedule), settings, [])
    refuse_several(Plan(pipeline=2), settings, [])


@pytest.mark.parametrize("key", ["adalora", "reversible", "token_pruning"])
def test_techniques_that_see_all_blocks(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} does not go with parallel.pipeline"):
        refuse_techniques(Plan(pipeline=2), [key])
    refuse_techniques(Plan(shard=2), [key])


def test_penalties_and_answers_are_of_the_whole_model() -> None:
    def penalty(step: int) -> torch.Tensor:
        return torch.zeros(())

    with pytest.raises(ConfigError, match="penalty"):
        refuse_in_stages(Plan(pipeline=2), Seams(penalty=(penalty,)), scores=False)
    with pytest.raises(ConfigError, match="generated"):
        refuse_in_stages(Plan(pipeline=2), Seams(), scores=True)
    refuse_in_stages(Plan(shard=2), Seams(penalty=(penalty,)), scores=True)
