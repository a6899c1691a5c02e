"""The only code that changes a model: match names, attach children, train in place, fold, undo it all.

Nothing is wrapped. A technique's parameters live in a child of the module they change (`q_proj.lora.a`) and act
through a forward hook, so every name of the base model, its ties and its own `save_pretrained` stay as they were.
"""

from afina.tree.around import Around
from afina.tree.edit import Edit
from afina.tree.match import match, matches
from afina.tree.paths import low_rank_path
from afina.tree.standing import edits_on, originals, stands_on
from afina.tree.technique import Delta, Reads, Side, Technique, front_of, seed_of
from afina.tree.timing import Seams

__all__ = [
    "Around",
    "Delta",
    "Edit",
    "Reads",
    "Seams",
    "Side",
    "Technique",
    "front_of",
    "low_rank_path",
    "match",
    "matches",
]
__all__ += ["edits_on", "originals", "seed_of", "stands_on"]
