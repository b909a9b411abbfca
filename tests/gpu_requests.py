"""The requests of a deploy file to Ray's scheduler, one entry for each process."""

from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.deployment.file import Deployment
from quartet.security.keys.folder import Keys
from services.critic.config import CriticConfig

DEPLOY = Path(__file__).parents[1] / "deploy"


def written(name: str, folder: Path, **changes: str) -> Deployment:
    """The file of this name with texts replaced: in its facts, if the changes are to a value that they share out."""
    shared = any(old.startswith(("&", "#")) for old in changes)
    text = ((DEPLOY / "facts" if shared else DEPLOY) / f"{name}.yaml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    place = folder / "changed"
    place.mkdir(exist_ok=True)
    (place / f"{name}.yaml").write_text(text)
    return load(place / f"{name}.yaml", folder)


@dataclass(frozen=True, slots=True)
class Request:
    """One replica or rank."""

    role: str
    """An application's name, or policy."""
    gpus: float
    resources: dict[str, float] = field(default_factory=dict)
    """Custom ones."""


def load(file: Path, folder: Path) -> Deployment:
    """Loads it with `folder` in place of its model folders, which the schemas look for, and with keys made here."""
    for model in (folder, folder / "reward"):
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
    text = placed(file.read_text(), folder, folder / "reward")
    if "keys/policy.yaml" in text:
        Keys(folder / "keys", days=1).make(["10.0.0.5"], {"run-a": "trainer"}, tokens=False)
        text = text.replace("keys/policy.yaml", str(folder / "keys/policy.yaml"))
    copy = folder / file.name
    copy.write_text(text)
    return Deployment.load(copy, check_services=True)


def placed(text: str, policy: Path, reward: Path) -> str:
    """The text of a deploy file with other folders of its models."""
    for place in ("/models", "models/reviews", "models/addition"):
        text = text.replace(f" {place}/policy", f" {policy}").replace(f" {place}/reward", f" {reward}")
    return text


def gpu_requests(deployment: Deployment) -> list[Request]:
    """Replicas first, in the file's order, then the critic's ranks if they are processes, then the policy's."""
    requests = []
    for application in deployment.raw["applications"]:
        for entry in application["deployments"]:
            options = entry["ray_actor_options"]
            one = Request(application["name"], options.get("num_gpus", 0), options.get("resources", {}))
            requests += [one] * entry.get("autoscaling_config", {"max_replicas": 1})["max_replicas"]
    critic, policy = deployment.services["critic"], deployment.orchestrator.policy
    assert isinstance(critic, CriticConfig)
    if critic.ranks > 1:
        requests += [Request("critic", critic.num_gpus, critic.resources)] * critic.ranks
    return requests + [Request("policy", policy.num_gpus, policy.resources)] * policy.ranks
