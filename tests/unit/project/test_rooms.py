"""The contract that a room's docstring names what it imports and what imports it."""

import pytest
from grimp import ImportGraph

from tests.rooms import complaints, name_beside

ROOM = "orchestrator.push"
EDGES = {
    "orchestrator.push.pusher": ["orchestrator.config.run", "services.rollout.client", "protos.rollout_pb2"],
    "orchestrator.loop.trainer": ["orchestrator.push.pusher"],
    "orchestrator.cli": ["orchestrator.push"],
}


def graph(edges: dict[str, list[str]]) -> ImportGraph:
    """A graph of these imports, from importer to imported, with all packages around them."""
    made = ImportGraph()
    for importer, imported in edges.items():
        for each in (importer, *imported):
            parts = each.split(".")
            for count in range(1, len(parts) + 1):
                made.add_module(".".join(parts[:count]))
            if each != importer:
                made.add_import(importer=importer, imported=each)
    made.add_module("torch", is_squashed=True)
    made.add_import(importer="orchestrator.push.pusher", imported="torch")
    return made


@pytest.mark.parametrize(
    ("docstring", "told"),
    [
        ("Pushes.\n\nMay import config and\nservices. All but config import it.\n", []),
        ("May import services. cli and loop import it.", ["orchestrator.push imports config"]),
        (
            "May import config, data and services. cli imports it.",
            ["orchestrator.push imports data (not needed)", "orchestrator.push is imported by loop"],
        ),
        (
            "May import all but config. All but cli import it.",
            [f"{ROOM} imports config", f"{ROOM} is imported by cli", f"{ROOM} is imported by config (not needed)"],
        ),
        ("Pushes.", [f"{ROOM}: its docstring does not end with `May import ... . ... import it.`"]),
    ],
)
def test_a_docstring_is_compared_with_the_imports(docstring: str, told: list[str]) -> None:
    assert complaints(graph(EDGES), ROOM, docstring) == told


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("quartet.serving.admission", "admission"),
        ("quartet.security.gate", "security"),
        ("services.critic.replica", "services"),
        ("orchestrator.loop.trainer", "orchestrator"),
    ],
)
def test_names_are_those_beside_the_room_or_beside_its_parents(module: str, name: str) -> None:
    assert name_beside("quartet.serving.door", module) == name
