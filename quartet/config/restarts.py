"""Changes of an application's section for which Serve replaces its replicas, as told from the sections alone.

Serve replaces them when the hash of the application's code changes, or what its processes start with. Which keys
these hold is known from Serve's source (`get_app_code_version` and `DeploymentVersion` in Ray 2.60); a test compares
each key of the schema with Serve's own decision.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ray.serve.schema import ServeApplicationSchema

_CODE = ("import_path", "runtime_env", "args", "autoscaling_policy")
"""Keys of an application that count as its code."""
_CODE_OF_DEPLOYMENT = ("request_router_config", "deployment_actors")
"""Keys of a deployment that count as the code of the whole application, if they are given."""
_PLACE = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "max_replicas_per_node",
    "gang_scheduling_config",
)
"""Keys of a deployment that decide where its processes run."""
_ABSENT = object()


def restarting(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys, such as `args.max_length`, whose change from one section to the other makes Serve replace replicas.

    Empty if all replicas keep running. Both sections have to be valid for Serve's schema.
    """
    old, new = ServeApplicationSchema.model_validate(before), ServeApplicationSchema.model_validate(after)
    keys = [key for name in _CODE for key in _changed(getattr(old, name), getattr(new, name), name)]
    had, has = _deployments(old), _deployments(new)
    for name in dict.fromkeys([*had, *has]):
        where = f"deployments.{name}"
        first, second = had.get(name, {}), has.get(name, {})
        keys += _changed(_policy(first), _policy(second), f"{where}.autoscaling_config")
        for key in (*_CODE_OF_DEPLOYMENT, *_PLACE):
            keys += _changed(first.get(key), second.get(key), f"{where}.{key}")
    return keys


def moved(keys: Iterable[str]) -> list[str]:
    """The deployments whose replicas alone are replaced because of these keys, which are those of their places; none
    if all of the application's are."""
    paths = [key.split(".") for key in keys]
    places = [path[1] for path in paths if path[0] == "deployments" and path[2] in _PLACE]
    return list(dict.fromkeys(places)) if len(places) == len(paths) else []


def _deployments(application: ServeApplicationSchema) -> dict[str, dict[str, Any]]:
    """Name of each deployment that the section lists -> what it sets there."""
    return {
        entry.name: {key: value for key, value in entry.model_dump(exclude_unset=True).items() if value is not None}
        for entry in application.deployments
    }


def _policy(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of an `autoscaling_config` that counts as code: its presence, and its policy."""
    scaling = entry.get("autoscaling_config")
    return None if scaling is None else {"policy": scaling.get("policy")}


def _changed(before: Any, after: Any, where: str) -> Iterator[str]:
    """`where`, or the keys in it that differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _changed(before.get(key, _ABSENT), after.get(key, _ABSENT), f"{where}.{key}")
    elif _written(before) != _written(after):
        yield where


def _written(value: Any) -> str:
    """The value as Serve hashes it: 1 and 1.0 are two."""
    return json.dumps(value, sort_keys=True, default=str)
